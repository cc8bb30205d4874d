"""Softmax and negative log-likelihood in one pass, which leaves the gradient where it read the logits."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_zero.ops import _fallback
from lightning_zero.ops._native import DTYPE_CODES, TORCH, kernels, native_isa, thread_count

REDUCTIONS = ("none", "mean", "sum")
LOGITS = (*DTYPE_CODES, torch.float64)
_PLAIN = (Tensor, nn.Parameter)


@torch.compiler.disable
def fused_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    inplace: bool = False,
    num_threads: int | None = None,
) -> Tensor:
    """Return the cross-entropy of ``logits`` and class indices: ``F.cross_entropy`` in one pass and with one buffer.

    Args:
        logits: ``(..., C)`` in fp32, bf16, fp16 or fp64. The classes are the **last** dimension, whatever comes before;
            for two dimensions, or one, that is torch's own layout.
        target: ``(...)``, int64, each in ``[0, C)`` or ``ignore_index``.
        weight: ``(C,)``, the weight of each class, a constant.
        ignore_index: rows with this target count for nothing and get no gradient.
        reduction: ``"mean"`` (by weight, over what is not ignored; NaN where all is), ``"sum"`` or ``"none"``.
        label_smoothing: the share of each label that is spread evenly over all classes, in ``[0, 1]``.
        inplace: write the gradient over the logits instead of beside them. ``logits`` must be contiguous and the result
            of an operation, and **holds gradients, not logits, afterwards**; if autograd had saved it for some other
            operation, the backward raises, as after any in-place operation. Without gradients it stays as it is.
        num_threads: by default torch's.

    Returns:
        The loss in fp32 (fp64 for fp64), also for 16-bit logits, of shape ``(...)`` for ``"none"`` and ``()`` else.

    The forward forms the gradient in the dtype of the logits, the backward scales it: between the two, one tensor of the
    size of the logits is alive, with ``inplace`` the logits' own. Sums run in fp32 or better. Where no gradient is wanted
    none is formed. 16-bit logits are not widened under autocast. On the CPU the result does not depend on the number of
    threads, and where the kernels run not on the instruction set. GPUs use Triton where it is installed. fp64, other
    devices, and an installation without kernels use torch's operations, a few rows at a time. ``torch.compile`` runs
    this function outside its graph.

    Raises:
        IndexError: a target is neither a class nor ``ignore_index`` (on the CPU; a GPU asserts, as for torch's loss).
        TypeError, ValueError: an argument of the wrong kind, shape, device or value.
        RuntimeError: ``inplace`` on a leaf that requires a gradient; a backward with ``create_graph=True``, since there is
            no second derivative.
    """
    problem = prepare(logits.shape, logits, target, weight, ignore_index, reduction, label_smoothing, num_threads)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        rows = logits.detach().reshape(len(problem.target), problem.classes).contiguous()
        return problem.reduce(problem.losses(rows), target.shape)
    if inplace:
        check_inplace(logits)
    return _FusedCrossEntropy.apply(logits, problem, inplace)


class FusedCrossEntropyLoss(nn.Module):
    """``nn.CrossEntropyLoss`` by ``fused_cross_entropy``, whose arguments it takes: classes in the last dimension."""

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        check_settings(reduction, label_smoothing)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.inplace = inplace

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return fused_cross_entropy(
            logits,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, inplace={self.inplace}"
        )


@dataclass(frozen=True)
class Problem:
    """Everything but the logits, checked: rows of ``classes`` logits, one target each."""

    target: Tensor
    """``(rows,)``."""
    classes: int
    weight: Tensor | None
    """In the dtype of sums."""
    weight_sum: float | Tensor
    total: Tensor
    """The weight of all targets that are not ignored: what a mean divides by."""
    ignore_index: int
    reduction: str
    label_smoothing: float
    num_threads: int
    sums: torch.dtype

    @property
    def mean_scale(self) -> Tensor:
        """What the reduction multiplies the sum of the losses by."""
        return 1 / self.total if self.reduction == "mean" else torch.ones_like(self.total)

    def losses(self, logits: Tensor, grad: Tensor | None = None, scale: Tensor | None = None, start: int = 0) -> Tensor:
        """Return the loss of each row; write ``scale`` times its gradient to ``grad``, which may be ``logits``.

        ``logits`` are the contiguous rows from ``start`` on.
        """
        target = self.target[start : start + len(logits)]
        if not _kernels_can(logits):
            return _elsewhere(logits).cross_entropy_rows(
                logits, target, self.weight, grad, self.ignore_index, self.label_smoothing, scale
            )
        losses = torch.empty(len(logits), dtype=torch.float64)
        kernels.cross_entropy(
            native_isa(),
            len(logits),
            self.classes,
            logits.data_ptr(),
            DTYPE_CODES[logits.dtype],
            0 if grad is None else grad.data_ptr(),
            target.data_ptr(),
            self.ignore_index,
            0 if self.weight is None else self.weight.data_ptr(),
            float(self.weight_sum),
            self.label_smoothing,
            1.0 if scale is None else scale.item(),
            losses.data_ptr(),
            self.num_threads,
        )
        return losses

    def reduce(self, losses: Tensor, shape: torch.Size) -> Tensor:
        if self.reduction == "none":
            return losses.to(self.sums).view(shape)
        return (losses.sum() * self.mean_scale).to(self.sums)

    def scale_rows_(self, grad: Tensor, factor: Tensor) -> None:
        """Multiply rows of a contiguous gradient by one factor, or by one each."""
        if not _kernels_can(grad):
            _elsewhere(grad).scale_rows_(grad, factor)
            return
        if factor.numel() == 1 and factor.item() == 1:
            return
        factors = factor.detach().float().expand(len(grad)).contiguous()
        kernels.scale_rows(
            native_isa(),
            len(grad),
            grad.shape[1],
            grad.data_ptr(),
            DTYPE_CODES[grad.dtype],
            factors.data_ptr(),
            self.num_threads,
        )
        increment_version(grad)

    def kept_scale(self, dtype: torch.dtype) -> Tensor:
        """Return what a gradient is multiplied by so that ``dtype`` can keep it until the backward knows its factor.

        fp16 has no room below for a softmax over many classes: a power of two brings the largest value that there can be
        near the top.
        """
        if dtype != torch.float16:
            return torch.ones_like(self.total)
        largest = torch.ones_like(self.total)
        if self.weight is not None:
            even = self.label_smoothing * self.weight_sum / self.classes
            largest = (1 - self.label_smoothing) * self.weight.abs().amax() + even
        return torch.exp2(torch.floor(torch.log2(32768 / largest)))


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, problem: Problem, inplace: bool) -> Tensor:
        rows = logits.detach().reshape(len(problem.target), problem.classes).contiguous()
        # Rows of other logits are a copy already, and may be written over.
        grad = torch.empty_like(rows) if logits.is_contiguous() and not inplace else rows
        # Where the dtype has room, the mean is taken here: a backward that starts from 1 then has nothing left to do.
        fp16 = logits.dtype == torch.float16
        kept_scale = problem.kept_scale(logits.dtype) if fp16 else problem.mean_scale
        losses = problem.losses(rows, grad, kept_scale)
        if inplace:
            increment_version(logits)
        ctx.save_for_backward(grad)
        ctx.problem = problem
        ctx.shape = logits.shape
        # Infinite where everything is ignored, and would make NaNs of the zeros.
        ctx.left_to_scale = (problem.mean_scale / kept_scale).nan_to_num(posinf=0) if fp16 else 1
        return problem.reduce(losses, logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        check_first_derivative("fused_cross_entropy")
        (grad,) = ctx.saved_tensors
        if graph_is_kept():
            grad = grad.clone()
        ctx.problem.scale_rows_(grad, grad_output.flatten() * ctx.left_to_scale)
        return grad.view(ctx.shape), None, None


def graph_is_kept() -> bool:
    """Whether the backward that runs may run again (``retain_graph``), so that what it needs must not be written over."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else query()


def check_first_derivative(function: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{function} has no second derivative, so create_graph=True would give a gradient that looks like a constant; "
            "use torch.nn.functional.cross_entropy for this loss"
        )


def prepare(
    shape: torch.Size,
    like: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    num_threads: int | None,
) -> Problem:
    """Check everything about a loss of logits of ``shape``, with the dtype and device of ``like``."""
    check_settings(reduction, label_smoothing)
    if like.dtype not in LOGITS:
        raise TypeError(f"logits must be floating-point, fp64 at most, got {like.dtype}")
    if target.dtype != torch.int64:
        raise TypeError(
            f"target must hold class indices in torch.int64, got {target.dtype}; "
            "for class probabilities use torch.nn.functional.cross_entropy"
        )
    if not shape or target.shape != shape[:-1]:
        raise ValueError(
            f"target must have the shape of the logits without their last dimension, the classes: got logits {tuple(shape)} "
            f"and target {tuple(target.shape)}; logits in torch's (N, C, ...) layout need logits.movedim(1, -1)"
        )
    if target.device != like.device:
        raise ValueError(f"target is on {target.device}, the logits are on {like.device}")
    classes = shape[-1]
    sums = torch.promote_types(like.dtype, torch.float32)
    if weight is not None:
        weight = _checked_weight(weight, classes, like.device, sums)
    target = target.detach().flatten().contiguous()
    counted = target != ignore_index
    if like.device.type == "cpu" and type(target) in _PLAIN:
        wrong = counted & ((target < 0) | (target >= classes))
        if wrong.any():
            first = target[wrong][0].item()
            raise IndexError(
                f"target {first} is out of bounds: there are {classes} classes, and {ignore_index} is ignored"
            )
    wide = torch.float64 if like.device.type == "cpu" else sums
    if weight is None or not classes:
        total = counted.sum().to(wide)
    else:
        total = (weight[target.where(counted, 0)].to(wide) * counted).sum()
    weight_sum = float(classes) if weight is None else weight.to(wide).sum()
    return Problem(
        target, classes, weight, weight_sum, total, ignore_index, reduction, label_smoothing,
        thread_count(num_threads), sums,
    )  # fmt: skip


def check_settings(reduction: str, label_smoothing: float) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")


def check_inplace(logits: Tensor) -> None:
    if logits.is_leaf:
        raise RuntimeError(
            "inplace=True would write gradients over a leaf that requires a gradient; it is for logits that a layer has "
            "computed. Use inplace=False"
        )
    if not logits.is_contiguous():
        raise ValueError(
            f"inplace=True needs contiguous logits, got shape {tuple(logits.shape)} with strides {logits.stride()}; shift the "
            "targets instead of slicing the logits (ignore_index for the last), or use inplace=False"
        )


def _checked_weight(weight: Tensor, classes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not weight.is_floating_point():
        raise TypeError(f"class weights must be floating-point, got {weight.dtype}")
    if weight.shape != (classes,):
        raise ValueError(f"class weights must have shape ({classes},), one for each class, got {tuple(weight.shape)}")
    if weight.device != device:
        raise ValueError(f"class weights are on {weight.device}, the logits are on {device}")
    if weight.requires_grad:
        raise ValueError("class weights are constants here, as in torch, but require a gradient; pass weight.detach()")
    return weight.detach().to(dtype).contiguous()


def _elsewhere(rows: Tensor) -> Any:
    """What does rows that the kernels cannot: Triton on GPUs, where it is installed, or torch's own operations."""
    triton = _triton() if rows.device.type in ("cuda", "xpu") else None
    return _fallback if triton is None or type(rows) not in _PLAIN or rows.dtype not in DTYPE_CODES else triton


@functools.cache
def _triton() -> Any:
    try:
        from lightning_zero.ops import _triton
    except ImportError:
        return None
    return _triton


def _kernels_can(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and type(rows) in _PLAIN and rows.dtype in DTYPE_CODES and native_isa() != TORCH
