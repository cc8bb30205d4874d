"""Loading the compiled kernels and choosing their instruction set."""

import functools
import os

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

try:
    from lightning_zero.ops import _kernels as kernels
except ImportError as error:
    kernels = None  # type: ignore[assignment]
    _why_missing = str(error)
else:
    _why_missing = ""

ISA_VARIABLE = "LIGHTNING_ZERO_ISA"
TORCH = "torch"
"""The name of the fallback, beside the names of the instruction sets."""

DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets built into the kernels that this processor runs, fastest first; none without them."""
    return () if kernels is None else tuple(kernels.available_isas())


@functools.cache
def native_isa() -> str:
    """Return the instruction set in use: the fastest one, or what ``LIGHTNING_ZERO_ISA`` names.

    ``"torch"`` stands for torch's own fused operations, which run where the kernels were not built. The choice is made
    once, at the first call.
    """
    isas = available_isas()
    requested = os.environ.get(ISA_VARIABLE)
    if requested:
        if requested not in (*isas, TORCH):
            hint = f" (the compiled kernels are missing: {_why_missing})" if kernels is None else ""
            raise ValueError(
                f"{ISA_VARIABLE}={requested!r} is not available here{hint}; choose one of {', '.join((*isas, TORCH))}"
            )
        return requested
    if not isas:
        rank_zero_warn(
            "lightning_zero was installed without its compiled CPU kernels, so torch's fused CPU operations run in their "
            "place: same results to rounding, about half the speed where gradients and parameters are 16-bit. To get the "
            f"kernels, reinstall with a C++17 compiler (GCC or Clang) at hand. The import said: {_why_missing}"
        )
        return TORCH
    return isas[0]


def thread_count(num_threads: int | None) -> int:
    """Return the number of threads asked for, by default torch's."""
    if num_threads is None:
        return torch.get_num_threads()
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    return num_threads


def check_buffer(name: str, tensor: Tensor, numel: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless the kernels can work on the tensor's own memory."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be a dense CPU tensor, got layout {tensor.layout} on device {tensor.device}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must be {expected}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; "
            "a copy is not made, since results would be written to the copy"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements as param has, got {tensor.numel()}")
