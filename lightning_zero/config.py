"""Settings as frozen dataclasses: validation only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch

# Measured on the GPT of benchmarks/step_time.py; smaller models get proportionally smaller units.
DEFAULT_UNIT_SIZE_MB = 32.0


@dataclass(frozen=True)
class OffloadConfig:
    """What waits in host memory or in files instead of on the device (ZeRO-Offload, ATC 21; ZeRO-Infinity, SC 21)."""

    optimizer: Literal["cpu", "nvme"] = "cpu"
    """Where master weights and optimizer state rest. The step itself runs on the host either way; from ``"nvme"`` they
    stream through it, 48 MiB at a time with Adam."""
    parameters: Literal["cpu", "nvme"] | None = None
    """Where the shards of stage 3's parameters rest, instead of on the device. ``"cpu"`` changes nothing on a CPU."""
    nvme_path: str | None = None
    """Folder for what is ``"nvme"``: on a local disk, the faster the better. Each rank makes a folder of its own in it,
    which is gone when the run ends."""
    num_threads: int | None = None
    """Threads of each rank's step; ``None`` shares the host's cores among its ranks."""
    early_update: bool = False
    """Update each unit as soon as its gradients are there, beside the rest of backward, and take the update back where
    clipping or a hook then changes them. Adam only; keeps 12 bytes per parameter and N ranks to undo it."""
    pin_memory: bool | None = None
    """Page-lock the host memory that copies go through; ``None`` where there is a device that can use it."""

    def __post_init__(self) -> None:
        if self.optimizer not in ("cpu", "nvme"):
            raise ValueError(f"OffloadConfig.optimizer must be 'cpu' or 'nvme', got {self.optimizer!r}")
        if self.parameters not in (None, "cpu", "nvme"):
            raise ValueError(f"OffloadConfig.parameters must be None, 'cpu' or 'nvme', got {self.parameters!r}")
        if self.uses_nvme and not self.nvme_path:
            raise ValueError("OffloadConfig with 'nvme' needs nvme_path, a folder on a local disk.")
        if self.nvme_path is not None and not self.uses_nvme:
            raise ValueError(
                f"OffloadConfig(nvme_path={self.nvme_path!r}) has nothing to put there: set optimizer='nvme' or"
                " parameters='nvme'."
            )
        if self.optimizer == "nvme" and self.early_update:
            raise ValueError(
                "OffloadConfig(optimizer='nvme', early_update=True): to take an early update back, its old masters and state"
                " would have to stay in the memory that files are to save. Leave early_update out."
            )
        if self.num_threads is not None and (type(self.num_threads) is not int or self.num_threads < 1):
            raise ValueError(f"OffloadConfig.num_threads must be at least 1, got {self.num_threads!r}")
        for name in ("early_update", "pin_memory"):
            if getattr(self, name) not in (True, False, None):
                raise TypeError(f"OffloadConfig.{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.optimizer, self.parameters)


DELAYED_UPDATE_WARM_UP = 40
"""Optimizer steps before updates are delayed (ZeRO-Offload, section 5.2)."""


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


def checked_unit_bytes(unit_size_mb: Any) -> int:
    """The size in bytes; raises ValueError for what is not a size."""
    if not isinstance(unit_size_mb, (int, float)) or not 0 < unit_size_mb < float("inf"):
        raise ValueError(f"unit_size_mb must be a positive number, got {unit_size_mb!r}")
    return max(1, int(unit_size_mb * 2**20))


def first_delayed_step(delayed_update: bool | int, offload: OffloadConfig | None) -> int | None:
    """The optimizer step from which updates are delayed; None for never."""
    if delayed_update is False:
        return None
    if offload is None:
        raise ValueError(f"delayed_update={delayed_update!r} needs offload=True: it is the step on the host that is delayed")
    if offload.optimizer == "nvme":
        raise ValueError(
            f"delayed_update={delayed_update!r} does not go with OffloadConfig(optimizer='nvme'): new weights wait for the end"
            " of a step, in memory or by a second reading of every master, which is what streaming is to save."
        )
    if delayed_update is True:
        return DELAYED_UPDATE_WARM_UP
    if not isinstance(delayed_update, int) or delayed_update < 0:
        raise ValueError(f"delayed_update must be a bool or the first delayed step (an int >= 0), got {delayed_update!r}")
    return delayed_update


def check_timeout(timeout: Any) -> None:
    """Raise unless ``timeout`` is a time limit of collectives, or None for torch's."""
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}: write timedelta(seconds=...)")
    if timeout <= timedelta():
        raise ValueError(f"timeout must be positive, got {timeout}")


def check_tiers(offload: OffloadConfig | None, stage: Any) -> None:
    """Refuse tiers of parameters where they are not sharded."""
    if offload is not None and offload.parameters is not None and stage != 3:
        raise ValueError(
            f"OffloadConfig(parameters={offload.parameters!r}) needs stage=3, got stage={stage!r}: at stages 1 and 2 every rank"
            " computes with whole parameters that stay on its device."
        )


def checked_reduce_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """Accept ``torch.bfloat16``, ``"bfloat16"`` and ``"torch.bfloat16"`` (YAML has strings only)."""
    if value is None:
        return None
    dtype = value if isinstance(value, torch.dtype) else getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"reduce_dtype must be a floating-point dtype or its name such as 'bfloat16', got {value!r}")
    return dtype
