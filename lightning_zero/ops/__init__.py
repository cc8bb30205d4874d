"""The one door to native code: CPU kernels, and what runs in their place where they were not built."""

from lightning_zero.ops._native import available_isas, native_isa
from lightning_zero.ops.adam import AdamOptions, adam_step_
from lightning_zero.ops.gradients import has_nonfinite, sum_of_squares

__all__ = ["AdamOptions", "adam_step_", "available_isas", "has_nonfinite", "native_isa", "sum_of_squares"]
