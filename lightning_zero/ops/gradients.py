"""What clipping and loss scaling ask of gradients: their squared norm, and whether any is infinite or NaN."""

from torch import Tensor

from lightning_zero.ops import _fallback
from lightning_zero.ops._native import DTYPE_CODES, TORCH, check_buffer, kernels, native_isa, thread_count

_DTYPES = tuple(DTYPE_CODES)


def sum_of_squares(grad: Tensor, *, num_threads: int | None = None) -> float:
    """Return the sum of squares of a contiguous fp32, bf16 or fp16 CPU tensor, accumulated in double.

    The result does not depend on threads, alignment or instruction set. Squares of these types do not overflow in
    double, so it is finite exactly when every element is: one pass serves both the norm and the overflow check.
    """
    check_buffer("grad", grad, grad.numel(), _DTYPES)
    threads = thread_count(num_threads)
    isa = native_isa()
    if isa == TORCH:
        return _fallback.sum_of_squares(grad)
    return kernels.sum_of_squares(isa, grad.data_ptr(), DTYPE_CODES[grad.dtype], grad.numel(), threads)


def has_nonfinite(grad: Tensor, *, num_threads: int | None = None) -> bool:
    """Return whether a contiguous fp32, bf16 or fp16 CPU tensor holds an infinity or a NaN."""
    check_buffer("grad", grad, grad.numel(), _DTYPES)
    threads = thread_count(num_threads)
    isa = native_isa()
    if isa == TORCH:
        return _fallback.has_nonfinite(grad)
    return kernels.has_nonfinite(isa, grad.data_ptr(), DTYPE_CODES[grad.dtype], grad.numel(), threads)
