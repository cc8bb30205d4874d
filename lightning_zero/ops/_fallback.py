"""What runs where the kernels were not built: torch's fused optimizers and reductions, on torch's threads.

Results agree with the kernels to rounding. torch treats the last few elements of a tensor by other formulas than the
rest, so here the bits of those depend on how a tensor is cut.
"""

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

BLOCK_NUMEL = 256
_MOST_CODE = 127.0
_LEAST_CODED = _MOST_CODE * torch.finfo(torch.float32).tiny
_CHUNK = 1 << 20  # elements converted to a wider type at a time
_DEVICE_CHUNK = 1 << 24  # the same on a GPU, where each chunk costs a dozen launches


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
        [torch.tensor(float(step - 1), dtype=torch.float32)],  # the function counts this step itself
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


def is_rounded_copy(copy: Tensor, exact: Tensor) -> bool:
    return torch.equal(exact.to(copy.dtype).view(torch.int16), copy.view(torch.int16))


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    grad_scale: Tensor | None,
) -> Tensor:
    """Return the loss of each row and write its gradient, a few rows at a time, by the formula in csrc/kernels.h."""
    classes = logits.shape[1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = logits.new_zeros(len(logits), dtype=dtype)
    if not logits.numel():
        return losses
    on_target, on_each = 1 - label_smoothing, label_smoothing / classes
    each = torch.ones((), dtype=dtype, device=logits.device) if weight is None else weight
    rows = max(1, (_CHUNK if logits.device.type == "cpu" else _DEVICE_CHUNK) // classes)
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        counted = target[part] != ignore_index
        at = target[part].where(counted, 0).unsqueeze(1)
        x = logits[part].to(dtype)
        log_p = x - x.amax(1, keepdim=True)
        log_p -= log_p.exp().sum(1, keepdim=True).log()
        target_weight = on_target * each.expand(classes)[at]
        loss = -target_weight * log_p.gather(1, at)
        mass = target_weight
        if label_smoothing:
            loss -= on_each * (log_p * each).sum(1, keepdim=True)
            mass = mass + on_each * each.expand(classes).sum()
        losses[part] = loss.squeeze(1).masked_fill(~counted, 0)
        if grad is not None:
            g = log_p.exp_().mul_(mass)
            if label_smoothing:
                g -= on_each * each
            g.scatter_(1, at, g.gather(1, at) - target_weight)
            if grad_scale is not None:
                g *= grad_scale
            grad[part] = g.masked_fill_(~counted.unsqueeze(1), 0)
    return losses


def scale_rows_(rows: Tensor, factor: Tensor) -> None:
    if factor.numel() == 1:
        rows.mul_(factor.reshape(()))
        return
    size = max(1, (_CHUNK if rows.device.type == "cpu" else _DEVICE_CHUNK) // max(1, rows.shape[1]))
    for part, factors in zip(rows.split(size), factor.split(size)):
        part.copy_(part * factors.unsqueeze(1))


def encode_blocks_(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Do what ``ops.encode_blocks_`` says, to the bits of the kernels; on any device."""
    blocks = values.view(-1, BLOCK_NUMEL).float()
    most = blocks.abs().amax(1, keepdim=True) if blocks.numel() else blocks.sum(1, keepdim=True)
    coded = (most >= _LEAST_CODED) & most.isfinite()
    # Of two tensors: a number over a tensor is rounded twice, as the reciprocal and as its product.
    inverse = torch.where(coded, torch.full_like(most, _MOST_CODE) / most, 0)
    codes.view(-1, BLOCK_NUMEL).copy_(torch.where(coded, blocks * inverse, 0).round_())
    scale = torch.where(coded, most / _MOST_CODE, 0).where(most.isfinite(), torch.nan)
    scales.copy_(scale.squeeze(1))


def decode_blocks_(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    values.view(-1, BLOCK_NUMEL).copy_(codes.view(-1, BLOCK_NUMEL) * scales.unsqueeze(1))
