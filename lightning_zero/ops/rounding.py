"""Whether 16-bit weights are still what their fp32 master weights round to."""

import torch
from torch import Tensor

from lightning_zero.ops import _fallback
from lightning_zero.ops._native import DTYPE_CODES, TORCH, check_buffer, kernels, native_isa, thread_count


def is_rounded_copy(copy: Tensor, exact: Tensor, *, num_threads: int | None = None) -> bool:
    """Return whether ``copy`` (bf16 or fp16) has the bits of ``exact`` (fp32) rounded to its dtype.

    Both are contiguous CPU tensors of one length. One pass, which ends where it finds a difference.
    """
    check_buffer("copy", copy, exact.numel(), (torch.bfloat16, torch.float16))
    check_buffer("exact", exact, exact.numel(), (torch.float32,))
    threads = thread_count(num_threads)
    isa = native_isa()
    if isa == TORCH:
        return _fallback.is_rounded_copy(copy, exact)
    return kernels.is_copy(isa, exact.data_ptr(), copy.data_ptr(), DTYPE_CODES[copy.dtype], exact.numel(), threads)
