"""Numbers sent in eight bits: int8 codes with one scale for each block (ZeRO++, arXiv 2306.10209, section 3.1)."""

import torch
from torch import Tensor

from lightning_zero.ops import _fallback
from lightning_zero.ops._native import DTYPE_CODES, TORCH, check_buffer, kernels, native_isa, thread_count

BLOCK_NUMEL = _fallback.BLOCK_NUMEL
"""Elements of a block."""
CODED_DTYPES = tuple(DTYPE_CODES)


def encode_blocks_(codes: Tensor, scales: Tensor, values: Tensor, *, num_threads: int | None = None) -> None:
    """Write ``values`` as codes and scales, by blocks of 256.

    With ``max`` the largest magnitude of a block, ``scale = max / 127`` and ``code = round(value * (127 / max))``, to even
    between two. Zeros stay zero. A block with an infinity or a NaN has the scale NaN, one of nothing above 1.5e-36 is zeros.

    Args:
        codes: int8, of shape ``(n * 256,)``, and written to.
        scales: fp32, of shape ``(n,)``, and written to.
        values: fp32, bf16 or fp16, of shape ``(n * 256,)``. All are contiguous and on one device.
        num_threads: On a CPU; None is torch's.
    """
    if _runs_kernel(codes, scales, values):
        kernels.encode_blocks(
            native_isa(), scales.numel(), values.data_ptr(), DTYPE_CODES[values.dtype], codes.data_ptr(), scales.data_ptr(),
            thread_count(num_threads),
        )  # fmt: skip
    else:
        _fallback.encode_blocks_(codes, scales, values)


def decode_blocks_(values: Tensor, codes: Tensor, scales: Tensor, *, num_threads: int | None = None) -> None:
    """Write ``code * scale``, rounded to the dtype of ``values``. Shapes and dtypes are those of :func:`encode_blocks_`."""
    if _runs_kernel(codes, scales, values):
        kernels.decode_blocks(
            native_isa(), scales.numel(), codes.data_ptr(), scales.data_ptr(), values.data_ptr(), DTYPE_CODES[values.dtype],
            thread_count(num_threads),
        )  # fmt: skip
    else:
        _fallback.decode_blocks_(values, codes, scales)


def _runs_kernel(codes: Tensor, scales: Tensor, values: Tensor) -> bool:
    """Whether the CPU's kernels do it, and not torch's operations; they see addresses only."""
    if values.device.type != "cpu":
        return False
    numel = scales.numel() * BLOCK_NUMEL
    check_buffer("scales", scales, scales.numel(), (torch.float32,))
    check_buffer("codes", codes, numel, (torch.int8,))
    check_buffer("values", values, numel, CODED_DTYPES)
    return native_isa() != TORCH
