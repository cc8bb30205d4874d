"""What runs where the kernels were not built: torch's fused optimizers and reductions, on torch's threads.

Results agree with the kernels to rounding. torch treats the last few elements of a tensor by other formulas than the
rest, so here the bits of those depend on how a tensor is cut.
"""

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

_CHUNK = 1 << 20  # elements converted to double at a time


@torch.no_grad()
def adam_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    max_exp_avg_sq: Tensor | None,
    param_copy: Tensor | None,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    maximize: bool,
) -> None:
    """Do what ``ops.adam_step_`` says, in three passes over memory instead of one."""
    shape = param.shape
    scaled = grad.float() if grad_scale == 1 else grad.float() * grad_scale
    function = adamw if decoupled_weight_decay else adam
    function(
        [param],
        [scaled.view(shape)],
        [exp_avg.view(shape)],
        [exp_avg_sq.view(shape)],
        [] if max_exp_avg_sq is None else [max_exp_avg_sq.view(shape)],
        [torch.tensor(float(step - 1))],  # the function counts this step itself
        fused=True,
        amsgrad=max_exp_avg_sq is not None,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )
    if param_copy is not None:
        param_copy.copy_(param.view(param_copy.shape))


def sum_of_squares(grad: Tensor) -> float:
    chunks = (chunk.double() for chunk in grad.detach().flatten().split(_CHUNK))
    return sum(torch.dot(chunk, chunk).item() for chunk in chunks)


def has_nonfinite(grad: Tensor) -> bool:
    return not bool(torch.isfinite(grad).all())
