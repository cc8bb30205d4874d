"""What the memory monitor reads on one rank, and how the readings of all ranks are combined."""

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_zero.comm import CONTROL_CALLS
from lightning_zero.formulas import HOST_KINDS, KINDS
from lightning_zero.partition.elementwise import state_bytes
from lightning_zero.strategy import ZeroStrategy

BUFFERS = "buffers"
ACTIVATIONS = "activations"
"""Those that are kept in memory of their own."""
BESIDE = (BUFFERS, ACTIVATIONS, *HOST_KINDS)
"""What is counted beside model states."""
OTHER = "other"
"""Whatever else ``memory_stats`` counts."""
STATE_KINDS = (*KINDS, *BESIDE, OTHER)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "activations", CONTROL_CALLS)


class OverRanks(Metric):
    """Maximum, minimum and mean over ranks of a row of numbers, all at once: one gather for the whole row."""

    full_state_update = False

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self._count = count
        # Bytes are counted exactly; not every accelerator knows doubles.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.row: Tensor
        self.add_state("row", torch.zeros(count, dtype=dtype), dist_reduce_fx=None)
        self.to(device)

    def update(self, values: Sequence[float]) -> None:
        self.row = torch.tensor(values, dtype=self.row.dtype, device=self.row.device)

    def compute(self) -> Tensor:
        """Rows: maximum, minimum, mean."""
        by_rank = self.row.reshape(-1, self._count)
        return torch.stack([by_rank.amax(0), by_rank.amin(0), by_rank.mean(0)])


@dataclass(frozen=True)
class Reading:
    """A quantity over all ranks."""

    max: float
    min: float
    mean: float


def combine(values: dict[str, float], device: torch.device) -> dict[str, Reading]:
    """The same quantities, in the same order, from every rank. A collective: all ranks call it at the same point."""
    metric = OverRanks(len(values), device)
    metric.update(list(values.values()))
    highest, lowest, mean = metric.compute().tolist()
    return {name: Reading(*row) for name, row in zip(values, zip(highest, lowest, mean, strict=True), strict=True)}


def model_states(trainer: "pl.Trainer") -> dict[str, float]:
    """Bytes of model states on this rank by kind, and their ``total``; names with ``_peak`` are the most so far.

    The names do not depend on the rank or on the moment.
    """
    if isinstance(trainer.strategy, ZeroStrategy):
        stats = trainer.strategy.memory_stats()
        now, peak, peak_total = stats["now"], stats["peak"], stats["peak_total"]
        on_disk = stats["nvme"]
    else:
        now = _plain_states(trainer)
        peak, peak_total, on_disk = now, sum(now.values()), 0
    values: dict[str, float] = {}
    for suffix, held in (("", now), ("_peak", peak)):
        known = {kind: held.get(kind, 0) for kind in (*KINDS, *BESIDE)}
        values.update({kind + suffix: nbytes for kind, nbytes in known.items()})
        values[OTHER + suffix] = sum(held.values()) - sum(known.values())
    return {**values, "total": sum(now.values()), "total_peak": peak_total, "nvme": on_disk}


def process_memory() -> dict[str, float]:
    """Host memory of this rank's process and of its machine, in bytes."""
    # Linux counts kB, macOS bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    rss = psutil.Process().memory_info().rss
    return {
        "rss": rss,
        # The kernel brings its account of the peak up to date now and then.
        "rss_peak": max(rss, peak),
        "host_available": psutil.virtual_memory().available,
    }


def device_memory(device: torch.device) -> dict[str, float]:
    """Bytes that the allocator of this rank's device has given out and holds; empty for a CPU."""
    if device.type == "cpu" or not torch.accelerator.is_available():
        return {}
    module = torch.get_device_module(device)
    functions = {
        "device_allocated": "memory_allocated",
        "device_reserved": "memory_reserved",
        "device_peak": "max_memory_allocated",
    }
    return {
        name: getattr(module, function)(device) for name, function in functions.items() if hasattr(module, function)
    }


def residual(values: Mapping[str, float], device: Mapping[str, float]) -> dict[str, float]:
    """What the peak holds beside model states: activations and temporary memory, on a CPU the process itself too."""
    peak = device.get("device_peak", values["rss_peak"])
    return {"residual": max(0.0, peak - (values["total_peak"] - values["nvme"]))}


def traffic(trainer: "pl.Trainer") -> dict[str, float]:
    """Bytes that this rank has sent so far, by collective, and ``wait_seconds`` in which it stood still for them; empty
    under strategies that do not count them."""
    if not isinstance(trainer.strategy, ZeroStrategy):
        return {}
    stats = trainer.strategy.comm_stats()
    counted = {f"{name}_bytes": stats[name]["bytes"] if name in stats else 0 for name in COLLECTIVES}
    return {**counted, "wait_seconds": sum(collective["seconds"] for collective in stats.values())}


def pending_update(trainer: "pl.Trainer") -> dict[str, float]:
    """Whether a delayed update is pending; empty unless updates are delayed."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeroStrategy) or strategy.delayed_from is None:
        return {}
    return {"update_pending": float(strategy.has_pending_update)}


def _plain_states(trainer: "pl.Trainer") -> dict[str, int]:
    parameters = list(trainer.lightning_module.parameters())
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(state_bytes(optimizer) for optimizer in trainer.optimizers),
    }
