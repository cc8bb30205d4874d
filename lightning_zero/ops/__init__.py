"""The one door to native code: CPU kernels, and what runs in their place where they were not built."""

from lightning_zero.ops._native import available_isas, native_isa
from lightning_zero.ops.adam import AdamOptions, adam_step_
from lightning_zero.ops.coded_blocks import BLOCK_NUMEL, CODED_DTYPES, decode_blocks_, encode_blocks_
from lightning_zero.ops.cross_entropy import FusedCrossEntropyLoss, fused_cross_entropy
from lightning_zero.ops.files import BLOCK_BYTES, FileQueue, FileTransfer, OpenFile
from lightning_zero.ops.gradients import has_nonfinite, sum_of_squares
from lightning_zero.ops.linear_cross_entropy import fused_linear_cross_entropy
from lightning_zero.ops.neighbours import Address, Neighbours, why_no_neighbours
from lightning_zero.ops.rounding import is_rounded_copy

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_NUMEL",
    "CODED_DTYPES",
    "AdamOptions",
    "Address",
    "FileQueue",
    "FileTransfer",
    "FusedCrossEntropyLoss",
    "Neighbours",
    "OpenFile",
    "adam_step_",
    "available_isas",
    "decode_blocks_",
    "encode_blocks_",
    "fused_cross_entropy",
    "fused_linear_cross_entropy",
    "has_nonfinite",
    "is_rounded_copy",
    "native_isa",
    "sum_of_squares",
    "why_no_neighbours",
]
