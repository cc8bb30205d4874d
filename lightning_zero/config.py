"""What the engine needs to know, as frozen dataclasses: validation only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero.settings import RESIDENCE, OffloadConfig, Residence

__all__ = ["EngineConfig", "OffloadConfig", "ParameterDtypes", "checked_gather_dtype", "checked_reduce_dtype", "checked_unit_policy"]


@dataclass(frozen=True)
class ParameterDtypes:
    """The dtype contract for parameters (docs/precision.md)."""

    compute: Mapping[int, torch.dtype] = field(default_factory=dict)
    """By ``id`` of the parameter: the dtype that steps compute with, where it is not the parameter's own."""
    shows_main: bool = False
    """Outside of a step a parameter that steps cast has its own dtype and shows its master weights (mixed precision)."""

    separate_main: bool = False
    """Trained parameters have master weights even where those are of the same dtype: an update runs beside steps."""

    def is_shown_as_main(self, parameter: torch.nn.Parameter) -> bool:
        return self.shows_main and parameter.dtype != self.compute_dtype(parameter)

    def compute_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        return self.compute.get(id(parameter), parameter.dtype)

    def master_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype | None:
        """dtype of the master weights; None where the parameter is its own master. 16-bit weights need one to be
        trained; a frozen parameter needs one only to come out as it went in."""
        compute = self.compute_dtype(parameter)
        if self.separate_main and parameter.requires_grad and compute.is_floating_point:
            return torch.promote_types(parameter.dtype, torch.float32)
        if not compute.is_floating_point or compute.itemsize >= 4:
            return None
        if parameter.requires_grad or self.is_shown_as_main(parameter):
            return torch.promote_types(parameter.dtype, torch.float32)
        return None


@dataclass(frozen=True)
class EngineConfig:
    """What the engine needs to know."""

    stage: int
    """1: optimizer state is sharded; 2: gradients too; 3: parameters too."""
    unit_bytes: int
    """Upper bound of an automatic unit, in bytes of compute parameters."""
    unit_policy: Any = None
    """Module classes or a callable that choose units; ``None`` chooses automatically."""
    prefetch: int = 1
    """Units unsharded ahead of use."""
    reduce_dtype: torch.dtype | None = None
    """dtype of gradients on the wire; ``None`` is the parameters' own."""
    gather_dtype: torch.dtype | None = None
    """dtype of stage 3's parameters on the wire, int8 for block-quantised codes; ``None`` is what steps compute with."""
    read_timeout: float = 30.0
    """Seconds to wait for the other ranks when a sharded tensor is read outside the step."""
    dtypes: ParameterDtypes = field(default_factory=ParameterDtypes)
    """Which parameters are computed with in another dtype than their own."""
    main_device: torch.device | None = None
    """Where master weights and optimizer state live; ``None`` is the parameters' device."""
    wide_sums: bool = False
    """Keep reduced 16-bit gradients in fp32: micro-batches are summed, or the sums are scaled before the update."""

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in RESIDENCE:
            raise ValueError(f"stage must be 1, 2, 3 or 'auto', got {self.stage!r}")
        if self.unit_bytes <= 0:
            raise ValueError(f"unit_size_mb must be positive, got {self.unit_bytes / 2**20}")
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"prefetch must be a non-negative integer, got {self.prefetch!r}")
        if isinstance(self.read_timeout, bool) or not isinstance(self.read_timeout, (int, float)) or not self.read_timeout > 0:
            raise ValueError(f"read_timeout must be positive seconds, got {self.read_timeout!r}")

    @property
    def residence(self) -> Residence:
        return RESIDENCE[self.stage]

    @property
    def gathers_codes(self) -> bool:
        """Whether steps gather parameters as int8 codes."""
        return self.gather_dtype is not None


def checked_unit_policy(policy: Any) -> Any:
    """The policy, with module classes as a tuple; raises TypeError for what cannot be one."""
    if policy is None or (callable(policy) and not isinstance(policy, type)):
        return policy
    classes = (policy,) if isinstance(policy, type) else policy
    if isinstance(classes, Iterable):
        classes = tuple(classes)
        if all(isinstance(c, type) and issubclass(c, torch.nn.Module) for c in classes):
            return classes
    raise TypeError(f"unit_policy must hold module classes or be a callable, got {policy!r}")


def checked_reduce_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """Accept ``torch.bfloat16``, ``"bfloat16"`` and ``"torch.bfloat16"`` (YAML has strings only)."""
    if value is None:
        return None
    dtype = value if isinstance(value, torch.dtype) else getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"reduce_dtype must be a floating-point dtype or its name such as 'bfloat16', got {value!r}")
    return dtype


def checked_gather_dtype(value: torch.dtype | str | None, stage: Any) -> torch.dtype | None:
    """Accept ``torch.int8``, ``"int8"`` and ``"torch.int8"`` at stage 3."""
    if value is None:
        return None
    if str(value).removeprefix("torch.") != "int8":
        raise ValueError(f"gather_dtype must be None or torch.int8 (in YAML 'int8'), got {value!r}")
    if stage != 3:
        raise ValueError(
            f"gather_dtype={value!r} needs stage=3, got stage={stage!r}: at stages 1 and 2 what ranks send after an update are"
            " the parameters that they keep."
        )
    return torch.int8
