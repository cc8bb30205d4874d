"""The last layer and its loss together, some rows at a time, so that the logits are never there as a whole."""

from typing import Any

import torch
from torch import Tensor

from lightning_zero.ops.cross_entropy import Problem, check_first_derivative, graph_is_kept, prepare

_LEAST_ROWS = 256  # below, the products with the weight no longer fill a processor

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of hidden, weight and bias."""


@torch.compiler.disable
def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_rows: int | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Return ``fused_cross_entropy(F.linear(hidden, weight, bias), target, class_weight, ...)`` without the logits.

    Args:
        hidden: ``(..., H)``, what the last layer would be given; fp32, bf16, fp16 or fp64.
        weight: ``(C, H)``, that layer's weight, and its bias ``(C,)``, in the dtype of ``hidden``. Under autocast all are
            cast to its dtype, as ``F.linear`` would.
        target: ``(...)``, int64, each in ``[0, C)`` or ``ignore_index``.
        class_weight: ``(C,)``, the weight of each class, a constant.
        chunk_rows: how many rows have logits at one time; by default as many as take the memory of ``hidden``, 256 at
            least.

    The rest, the result and the errors are those of ``fused_cross_entropy``.

    The forward forms the gradients of ``hidden``, ``weight`` and ``bias``, those that are wanted, and the backward scales
    them. With ``reduction="none"``, and in fp16, they can only be formed once the gradient of the loss is known: there
    the backward computes the logits again. Sums over chunks run in fp32 or better.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    _check_layer(hidden, weight, bias)
    shape = torch.Size((*hidden.shape[:-1], len(weight)))
    problem = prepare(shape, hidden, target, class_weight, ignore_index, reduction, label_smoothing, num_threads)
    rows = hidden.reshape(len(problem.target), hidden.shape[-1])
    if chunk_rows is None:
        chunk_rows = max(_LEAST_ROWS, rows.numel() // max(1, problem.classes))
    elif chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    return _FusedLinearCrossEntropy.apply(rows, weight, bias, problem, chunk_rows).view(
        target.shape if reduction == "none" else ()
    )


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not hidden.dim() or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must have shape (classes, {hidden.shape[-1] if hidden.dim() else 'features'}) for hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias must have shape ({len(weight)},), one for each class, got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (hidden.dtype, hidden.device):
            raise TypeError(
                f"{name} must be {hidden.dtype} on {hidden.device} as hidden is, got {tensor.dtype} on {tensor.device}"
            )


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem, chunk_rows: int
    ) -> Tensor:
        ctx.problem, ctx.chunk_rows = problem, chunk_rows
        # In the forward a gradient can be kept only where what it will be multiplied by is a number, and fits its dtype.
        ctx.formed = problem.reduction != "none" and hidden.dtype != torch.float16
        wanted = ctx.needs_input_grad[:3] if ctx.formed else (False, False, False)
        losses, gradients = _chunked(hidden, weight, bias, problem, chunk_rows, wanted, problem.mean_scale)
        ctx.save_for_backward(*(gradients if ctx.formed else (hidden, weight, bias)))
        return problem.reduce(losses, losses.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("fused_linear_cross_entropy")
        problem: Problem = ctx.problem
        if ctx.formed:
            gradients = ctx.saved_tensors
            if graph_is_kept():
                gradients = tuple(None if grad is None else grad * grad_output for grad in gradients)
            elif grad_output.device.type != "cpu" or grad_output.item() != 1:
                gradients = tuple(None if grad is None else grad.mul_(grad_output) for grad in gradients)
        else:
            factor = grad_output * problem.mean_scale
            hidden, weight, bias = ctx.saved_tensors
            _, gradients = _chunked(hidden, weight, bias, problem, ctx.chunk_rows, ctx.needs_input_grad[:3], factor)
        return *gradients, None, None


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    problem: Problem,
    chunk_rows: int,
    wanted: tuple[bool, ...],
    scale: Tensor,
) -> tuple[Tensor, Gradients]:
    """Return the loss of each row and the gradients that are wanted of ``(scale * losses).sum()``."""
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight, dtype=problem.sums) if wanted[1] else None
    grad_bias = weight.new_zeros(len(weight), dtype=problem.sums) if wanted[2] else None
    kept_scale = problem.kept_scale(hidden.dtype) if scale.dim() else scale
    losses = []
    for start in range(0, len(hidden), chunk_rows):
        part = slice(start, start + chunk_rows)
        logits = torch.nn.functional.linear(hidden[part], weight, bias)
        grad = logits if any(wanted) else None
        losses.append(problem.losses(logits, grad, kept_scale, start))
        if grad is None:
            del logits  # before the next ones are made
            continue
        if scale.dim():
            problem.scale_rows_(grad, scale[part] / kept_scale)
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[part])
        if grad_weight is not None and grad_weight.dtype == grad.dtype:
            grad_weight.addmm_(grad.t(), hidden[part])
        elif grad_weight is not None:
            grad_weight += grad.t() @ hidden[part]
        if grad_bias is not None:
            grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        del logits, grad
    total = torch.cat(losses) if losses else hidden.new_zeros(0, dtype=problem.sums)
    return total, (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(hidden.dtype),
    )
