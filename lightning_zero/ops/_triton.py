"""The fused loss on a GPU: a program for each row, which reads it twice and writes its gradient once.

Imported where Triton is installed (torch for GPUs brings it). The formula is that of csrc/kernels.h, sums are in fp32.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

_LARGEST_BLOCK = 4096
"""Classes that a program looks at at a time."""


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    grad_scale: Tensor | None,
) -> Tensor:
    """Do what ``_fallback.cross_entropy_rows`` does. A target that is no class asserts on the device, as torch's loss does."""
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not logits.numel():
        return losses.zero_()
    torch._assert_async((((target >= 0) & (target < classes)) | (target == ignore_index)).all())
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(classes))
    with _on(logits.device):
        _cross_entropy[(rows,)](
            logits,
            logits if grad is None else grad,
            target,
            logits if weight is None else weight,
            losses if weight is None else weight.sum(),
            losses if grad_scale is None else grad_scale.to(torch.float32),
            losses,
            ignore_index,
            float(1 - label_smoothing),
            float(label_smoothing / classes),
            CLASSES=classes,
            BLOCK=block,
            WEIGHTED=weight is not None,
            SMOOTHED=label_smoothing > 0,
            SCALED=grad_scale is not None,
            WITH_GRADIENT=grad is not None,
            num_warps=max(1, min(16, block // 256)),
        )
    return losses


def scale_rows_(rows: Tensor, factor: Tensor) -> None:
    """Multiply contiguous rows by one factor, or by one each; rows whose factor is 1 are not read."""
    if not rows.numel():
        return
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(rows.shape[1]))
    factor = factor.detach().float().flatten().expand(len(rows))
    with _on(rows.device):
        _scale[(len(rows),)](rows, factor, factor.stride(0), CLASSES=rows.shape[1], BLOCK=block)
    increment_version(rows)


def _on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device, which need not be that of its arguments."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


@triton.jit
def _cross_entropy(
    logits, grad, target, weight, weight_sum, scale, losses, ignore_index, on_target, on_each, CLASSES: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, SCALED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * CLASSES
    grad += row * CLASSES
    at = tl.load(target + row)
    counted = at != ignore_index
    at = tl.where(counted, at, 0)
    columns = tl.arange(0, BLOCK)

    # The largest logit and the sum of exponentials below it, in one pass that corrects the sum when a larger one comes.
    largest = float("-inf")
    total = 0.0
    for start in range(0, CLASSES, BLOCK):
        x = tl.load(logits + start + columns, mask=start + columns < CLASSES, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        # Nothing but -inf so far: any number will do to count from.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = larger
    log_total = tl.log(total)
    target_weight = on_target
    mass = on_target
    if WEIGHTED:
        target_weight = on_target * tl.load(weight + at).to(tl.float32)
        mass = target_weight
    if SMOOTHED:
        if WEIGHTED:
            mass += on_each * tl.load(weight_sum).to(tl.float32)
        else:
            mass += on_each * CLASSES
    factor = 1.0
    if SCALED:
        factor = tl.load(scale)
    loss = -target_weight * (tl.load(logits + at).to(tl.float32) - largest - log_total)
    tl.debug_barrier()  # all threads have read the row before any writes over it

    if WITH_GRADIENT or SMOOTHED:
        spread = 0.0
        for start in range(0, CLASSES, BLOCK):
            column = start + columns
            inside = column < CLASSES
            x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
            log_p = x - largest - log_total
            each = tl.full((BLOCK,), on_each, tl.float32)
            if WEIGHTED:
                each *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            if SMOOTHED:
                spread += tl.sum(tl.where(inside, each * log_p, 0.0), 0)
            if WITH_GRADIENT:
                g = tl.exp(log_p) * mass
                if SMOOTHED:
                    g -= each
                g = (g - tl.where(column == at, target_weight, 0.0)) * factor
                tl.store(grad + column, tl.where(counted, g, 0.0).to(grad.dtype.element_ty), mask=inside)
        loss -= spread
    tl.store(losses + row, tl.where(counted, loss, 0.0))


@triton.jit
def _scale(rows, factor, stride, CLASSES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    by = tl.load(factor + row * stride)
    if by != 1.0:
        columns = tl.arange(0, BLOCK)
        for start in range(0, CLASSES, BLOCK):
            place = rows + row * CLASSES + start + columns
            inside = start + columns < CLASSES
            x = tl.load(place, mask=inside, other=0.0)
            tl.store(place, (x.to(tl.float32) * by).to(rows.dtype.element_ty), mask=inside)
