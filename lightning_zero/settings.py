"""What users choose about memory, as frozen dataclasses, and its validation. Without torch, which takes seconds to import
and which arithmetic does not need."""

import os
from dataclasses import dataclass
from datetime import timedelta
from types import NoneType
from typing import Any, Literal

# Measured on the GPT of benchmarks/models.py; smaller models get proportionally smaller units.
DEFAULT_UNIT_SIZE_MB = 32.0
# Fewer, larger units than this many per model would make "one unit at a time" mean most of the model.
_MIN_UNITS = 8
_SMALLEST_UNIT_BYTES = 2**20

CHUNK_BYTES = 4 * 2**20
"""In which a step reads and writes files, of fp32 elements. Disks reach their speed with less, and the kernel finds what it
read last in its cache."""
CHUNKS_AHEAD = 2
CHUNKS_AT_ONCE = CHUNKS_AHEAD + 2
"""In memory: those read ahead, the one in use, and one being written."""


@dataclass(frozen=True)
class OffloadConfig:
    """What waits in host memory or in files instead of on the device (ZeRO-Offload, ATC 21; ZeRO-Infinity, SC 21)."""

    optimizer: Literal["cpu", "nvme"] = "cpu"
    """Where master weights and optimizer state rest. The step itself runs on the host either way; from ``"nvme"`` they
    stream through it, 48 MiB at a time with Adam."""
    parameters: Literal["cpu", "nvme"] | None = None
    """Where the shards of stage 3's parameters rest, instead of on the device. ``"cpu"`` changes nothing on a CPU. With
    both in ``"nvme"`` their reduced gradients rest there too."""
    nvme_path: str | None = None
    """Folder for what is ``"nvme"``: on a local disk, the faster the better. Each rank makes a folder of its own in it,
    which is gone when the run ends."""
    checksums: bool = False
    """Whether blocks that are read from files are compared with what was written to them: a disk that gives back other
    bytes ends the run with an error."""
    num_threads: int | None = None
    """Threads of each rank's step; ``None`` shares the host's cores among its ranks."""
    bind_threads: bool = False
    """Let each rank's step run on cores of its own only, where ranks share a host. It was measured to bring nothing on one
    socket; try it where memory is slower from the other one. Torch's threads and data loaders are never bound."""
    early_update: bool = False
    """Update each unit as soon as its gradients are there, beside the rest of backward, as long as that makes steps shorter,
    and take the update back where clipping or a hook then changes them. Adam only; keeps 12 bytes per parameter and N ranks
    to undo it."""
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
        if self.checksums and not self.uses_nvme:
            raise ValueError(
                "OffloadConfig(checksums=True) has nothing to check: set optimizer='nvme' or parameters='nvme'."
            )
        if self.optimizer == "nvme" and self.early_update:
            raise ValueError(
                "OffloadConfig(optimizer='nvme', early_update=True): to take an early update back, its old masters and state"
                " would have to stay in the memory that files are to save. Leave early_update out."
            )
        if self.num_threads is not None and (type(self.num_threads) is not int or self.num_threads < 1):
            raise ValueError(f"OffloadConfig.num_threads must be an integer of at least 1, got {self.num_threads!r}")
        if not isinstance(self.nvme_path, (str, os.PathLike, NoneType)):
            raise TypeError(f"OffloadConfig.nvme_path must be the path of a folder, got {self.nvme_path!r}")
        for name in ("checksums", "early_update", "pin_memory", "bind_threads"):
            if not isinstance(getattr(self, name), (bool, NoneType)):
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


def largest_automatic_unit(total_bytes: int, unit_bytes: int) -> int:
    """Upper bound of an automatic unit, in bytes, for a model of ``total_bytes``."""
    return min(unit_bytes, max(total_bytes // _MIN_UNITS, _SMALLEST_UNIT_BYTES))
