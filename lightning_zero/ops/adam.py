"""One step of Adam or AdamW on a contiguous range, in one pass over memory."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_zero.ops import _fallback
from lightning_zero.ops._native import DTYPE_CODES, TORCH, check_buffer, kernels, native_isa, thread_count

_FP32 = (torch.float32,)
_GRADS = tuple(DTYPE_CODES)
_COPIES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdamOptions:
    """The hyper-parameters of a step, under torch's names."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True
    """True is AdamW, False is Adam, whose decay is added to the gradient."""
    maximize: bool = False


def adam_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    options: AdamOptions,
    *,
    step: int,
    max_exp_avg_sq: Tensor | None = None,
    param_copy: Tensor | None = None,
    grad_scale: float = 1.0,
    undo: Tensor | None = None,
    num_threads: int | None = None,
) -> None:
    """Update ``param`` and its state in place; write ``param`` rounded to 16 bits to ``param_copy`` in the same pass.

    All are contiguous CPU tensors of one length: fp32, but for ``grad`` (fp32, bf16 or fp16) and ``param_copy`` (bf16 or
    fp16). ``step`` counts from 1 and includes this one. ``grad_scale`` multiplies the gradient, which stays as it is:
    loss unscaling, averaging and clipping go there. ``max_exp_avg_sq`` makes it amsgrad. ``undo``, fp32 of shape ``(3, numel)``
    or with amsgrad ``(4, numel)``, gets what is overwritten, in the same pass: old parameters and states in the order above.

    The bits are those of torch's fused CPU optimizer on its vector body, and do not depend on how a tensor is cut into
    ranges, on threads, on alignment, or on the instruction set. The version counters of the tensors written are raised,
    as torch's own in-place operations do.
    """
    numel = param.numel()
    check_buffer("param", param, numel, _FP32)
    check_buffer("grad", grad, numel, _GRADS)
    check_buffer("exp_avg", exp_avg, numel, _FP32)
    check_buffer("exp_avg_sq", exp_avg_sq, numel, _FP32)
    written = [param, exp_avg, exp_avg_sq]
    if max_exp_avg_sq is not None:
        check_buffer("max_exp_avg_sq", max_exp_avg_sq, numel, _FP32)
        written.append(max_exp_avg_sq)
    if param_copy is not None:
        check_buffer("param_copy", param_copy, numel, _COPIES)
        written.append(param_copy)
    if undo is not None:
        overwritten = written[: 3 if max_exp_avg_sq is None else 4]
        check_buffer("undo", undo, len(overwritten) * numel, _FP32)
        written.append(undo)
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    threads = thread_count(num_threads)
    isa = native_isa()
    if isa == TORCH:
        if undo is not None:
            for old, kept in zip(overwritten, undo.view(len(overwritten), numel)):
                kept.copy_(old.view(numel))
        _fallback.adam_step_(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            step=step,
            max_exp_avg_sq=max_exp_avg_sq,
            param_copy=param_copy,
            grad_scale=grad_scale,
            **vars(options),
        )
        return
    # Formed in double, and by torch's formulas: the kernel rounds each to float once.
    coupled = options.weight_decay != 0 and not options.decoupled_weight_decay
    bias_correction1 = 1 - options.beta1**step
    bias_correction2 = 1 - options.beta2**step
    kernels.adam_step(
        isa,
        numel,
        param.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        0 if max_exp_avg_sq is None else max_exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        DTYPE_CODES[grad.dtype],
        0 if param_copy is None else param_copy.data_ptr(),
        0 if param_copy is None else DTYPE_CODES[param_copy.dtype],
        0 if undo is None else undo.data_ptr(),
        -grad_scale if options.maximize else grad_scale,
        options.weight_decay if coupled else 1 - options.lr * options.weight_decay,
        coupled,
        1 - options.beta1,
        options.beta2,
        1 - options.beta2,
        math.sqrt(bias_correction2),
        options.eps,
        -(options.lr / bias_correction1),
        threads,
    )
    for tensor in written:
        increment_version(tensor)
