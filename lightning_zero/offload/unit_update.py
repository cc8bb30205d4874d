"""The kernel calls that update the shards of one unit."""

import torch
from torch import Tensor

from lightning_zero.offload.runs import AdamRun, Part, distance, range_of, runs_of
from lightning_zero.offload.threads import Threads
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.updater import UpdateItem
from lightning_zero.transfer import HostPool


class UnitUpdate:
    """An update of the shards of one unit by the kernel, and what takes it back."""

    def __init__(self, unit: Unit, parts: list[Part], in_use: bool) -> None:
        self.unit = unit
        self.parts = parts
        updated = sum(item.shard.numel() for _, items in parts for item in items)
        is_all = updated == sum(owned.stop - owned.start for owned in unit.owned)
        self._copy = unit.copy_target(in_use) if is_all else None
        runs = [AdamRun(run, settings) for settings, items in parts for run in runs_of(items)]
        self._ranges = [_Range(run, unit, self._copy) for run in runs]

    def run(self, threads: Threads) -> None:
        for each in self._ranges:
            each.run(threads)
        self.unit.published = self._copy is not None

    def save_to(self, pool: HostPool) -> None:
        """Take the memory in which :meth:`run` keeps what it overwrites, but for the copy, which is rounded from the rest."""
        for each in self._ranges:
            numel = len(each.written) * each.main.numel()
            each.undo = pool.take(numel, each.main.dtype, "undo").view(len(each.written), -1)

    def undo(self) -> None:
        """Put back what :meth:`run` has overwritten."""
        for each in self._ranges:
            each.take_back()
        self.unit.published = False

    def give_back(self, pool: HostPool) -> None:
        """Do without :meth:`undo` from now on."""
        for each in self._ranges:
            if each.undo is not None:
                pool.give(each.undo.view(-1))
            each.undo = None


class _Range:
    """A run whose master and state are in memory."""

    def __init__(self, run: AdamRun, unit: Unit, copy: Tensor | None) -> None:
        self._run = run
        self.main = unit.main.detach()[run.start : run.stop]
        self._states = [_state_range(run.items, name) for name in run.names]
        self._copy = None if copy is None else copy[run.start : run.stop]
        self.written = [self.main, *self._states]
        self.undo: Tensor | None = None
        """A row for each of ``written``."""

    def run(self, threads: Threads) -> None:
        run = self._run
        run.step(run.start, run.stop, self.main, self._states, self._copy, threads, undo=self.undo)
        run.count()

    def take_back(self) -> None:
        if self.undo is None:
            raise AssertionError("an update that kept nothing to take it back")
        for tensor, old in zip(self.written, self.undo, strict=True):
            tensor.copy_(old)
        self._run.count(-1)


def _state_range(run: list[UpdateItem], name: str) -> Tensor:
    """One tensor under the named state of all shards of a run; makes it, or brings loaded state together."""
    first, last = run[0], run[-1]
    numel = last.start + last.shard.numel() - first.start
    present = [item.state[name] for item in run if name in item.state]
    together = len(present) == len(run) and all(
        distance(present[0], state) == item.start - first.start for state, item in zip(present, run, strict=True)
    )
    if together:
        return range_of(present[0], numel)
    flat = torch.zeros(numel, dtype=torch.float32)
    for item in run:
        view = flat[item.start - first.start :][: item.shard.numel()]
        if name in item.state:
            view.copy_(item.state[name])
        item.state[name] = view
    return flat
