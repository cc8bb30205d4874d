"""Settings as frozen dataclasses: validation only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Residence:
    """What stays resident on each rank between steps (ZeRO, SC 20, figure 1); the rest is sharded."""

    whole_parameters: bool
    """Every rank keeps all compute parameters."""
    whole_gradients: bool
    """Every rank keeps a whole gradient buffer and reduces it only at the accumulation boundary."""


RESIDENCE = {
    1: Residence(whole_parameters=True, whole_gradients=True),
    2: Residence(whole_parameters=True, whole_gradients=False),
    3: Residence(whole_parameters=False, whole_gradients=False),
}


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
    read_timeout: float = 30.0
    """Seconds to wait for the other ranks when a sharded tensor is read outside the step."""
    master_dtype: Callable[[torch.dtype], torch.dtype | None] = lambda dtype: None
    """dtype of the master weights for a parameter dtype; ``None`` where the parameter is its own master."""

    def __post_init__(self) -> None:
        if self.stage not in RESIDENCE:
            raise ValueError(f"stage must be 1, 2 or 3, got {self.stage!r}")
        if self.unit_bytes <= 0:
            raise ValueError(f"unit_size_mb must be positive, got {self.unit_bytes / 2**20}")
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"prefetch must be a non-negative integer, got {self.prefetch!r}")
        if self.read_timeout <= 0:
            raise ValueError(f"read_timeout must be positive seconds, got {self.read_timeout}")

    @property
    def residence(self) -> Residence:
        return RESIDENCE[self.stage]
