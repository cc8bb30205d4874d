"""Updates that begin before the step.

[Note: early update]
A unit's update may begin when its gradients are reduced, while backward goes on with other units. What is decided later
(a factor to clip by, a hook that edits gradients, a step that does not come) may make it wrong, so the kernel keeps the old
bytes in the same pass. The step that comes accepts an early update if it was computed from the very same gradients (the same
memory, unchanged since) and settings; otherwise it puts the old bytes back and computes it again. Either way the result has
the same bits, so the steps that begin early may be chosen by their times (:class:`Trial`).
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.offload.runs import Part, by_unit
from lightning_zero.offload.threads import Threads
from lightning_zero.offload.trial import Trial
from lightning_zero.offload.unit_update import UnitUpdate
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.updater import UpdateGroup
from lightning_zero.transfer import HostPool
from lightning_zero.worker import Worker


class EarlyUpdates:
    """The early updates of a step. See [Note: early update]."""

    def __init__(self, worker: Worker, pool: HostPool, threads: Threads) -> None:
        self.trial = Trial()
        self.accepted = self.taken_back = 0
        """Updates of units so far."""
        self._worker, self._pool, self._threads = worker, pool, threads
        self._under_way: dict[int, EarlyUpdate] = {}

    def begin(self, unit: Unit, parts: list[Part]) -> None:
        """Begin to update one unit, if that has lately made steps shorter."""
        items = [item for _, part in parts for item in part]
        if not self.trial.is_on or unit.index in self._under_way or not all(item.state for item in items):
            return  # a first step also makes state
        update = UnitUpdate(unit, parts, in_use=True)
        update.save_to(self._pool)
        compares = unit.compares_with_master
        unit.begin_update()

        def run() -> None:
            if compares:
                unit.keep_in_master()
            update.run(self._threads)

        sources = [_source(item.grad) for item in items]
        self._under_way[unit.index] = EarlyUpdate(update, sources, self._worker.submit(run), self._pool)

    def settle(self, groups: list[UpdateGroup]) -> "tuple[list[UpdateGroup], list[EarlyUpdate]]":
        """At the step: what is left to do, and the early updates that are right, as they were begun; takes back the others."""
        wanted = {unit.index: parts for unit, parts in by_unit(groups)} if self._under_way else {}
        held = {i: early for i, early in self._under_way.items() if early.holds_for(wanted.get(i, []))}
        self._under_way = {i: early for i, early in self._under_way.items() if i not in held}
        self.accepted += len(held)
        self.revoke()
        if held:
            groups = [UpdateGroup(g.settings, [i for i in g.items if i.unit.index not in held]) for g in groups]
        return groups, list(held.values())

    def revoke(self) -> None:
        """Undo all of them."""
        if not self._under_way:
            return
        self.trial.failed()
        under_way, self._under_way = self._under_way, {}
        for early in under_way.values():
            early.undo()
            self.taken_back += 1


@dataclass
class EarlyUpdate:
    """The update of one unit, under way or done."""

    update: UnitUpdate
    sources: list[tuple]
    """What tells whether the gradients are still the ones that were used."""
    future: Future
    pool: HostPool

    def holds_for(self, parts: list[Part]) -> bool:
        """Whether an update of ``parts`` would do the same now."""
        if self.update.unit.edited_meanwhile or [len(items) for _, items in parts] != [len(items) for _, items in self.update.parts]:
            return False
        return all(
            _same_settings(then, now) for (then, _), (now, _) in zip(self.update.parts, parts, strict=True)
        ) and self.sources == [_source(item.grad) for _, items in parts for item in items]

    def finish(self) -> Unit:
        """Wait for it."""
        self.future.result()
        self.update.give_back(self.pool)
        self.update.unit.end_update()
        return self.update.unit

    def undo(self) -> None:
        self.future.result()
        self.update.undo()
        self.finish().keep_edits()


def _source(grad: Tensor) -> tuple:
    """Changes when the gradient is replaced or written to."""
    return grad.data_ptr(), grad.numel(), grad.dtype, grad._version


def _same_settings(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) and isinstance(b[k], Tensor) else a[k] == b[k] for k in a
    )
