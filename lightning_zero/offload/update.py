"""The optimizer step on the host: the kernel for Adam, the user's own optimizer for others; at once, early or late.

[Note: delayed parameter update]
ZeRO-Offload (ATC 21), section 5.2. From some step on the update for step t's gradients runs on a thread of its own during
step t + 1's forward and backward, and its result is published at the end of that step::

    theta[t + 1] = theta[t] - Adam(g(theta[t - 1]))

The hyper-parameters are those of the step the gradients belong to. The update works on master weights of its own, so
forward and backward never see half of it.

[Note: early update]
A unit's update may begin when its gradients are reduced, while backward goes on with other units. What is decided later
(a factor to clip by, a hook that edits gradients, a step that does not come) may make it wrong, so the old bytes are kept.
The step that comes accepts an early update if it was computed from the very same gradients (the same memory, unchanged
since) and settings; otherwise it puts the old bytes back and computes it again. Either way the result has the same bits.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.offload.runs import AdamRun, Part, by_unit, distance, has_kernel, range_of, runs_of
from lightning_zero.partition.optimizer import UpdateGroup, UpdateItem, stand_in
from lightning_zero.partition.rest import Rested
from lightning_zero.partition.unit import Unit
from lightning_zero.transfer import Account, HostPool, Link, count_nowhere
from lightning_zero.worker import Worker

# Steps without early updates after one that had to take some back; doubled each time in a row, up to the limit.
_FIRST_PAUSE, _LONGEST_PAUSE = 2, 64


class HostUpdate:
    """Carries out the updates of the optimizers it is bound to (the engine's ``Updater``).

    ``delays()`` tells whether the update that comes now is to run one step late.
    """

    def __init__(
        self, delays: Callable[[], bool], num_threads: int | None = None, link: Link | None = None, early: bool = False,
        account: Account = count_nowhere,
    ) -> None:  # fmt: skip
        self.link = link
        self.has_changed = True  # units are updated in memory, one after the other
        self.is_early = early
        self._delays = delays
        self._num_threads = num_threads
        self._worker = Worker("lightning_zero-update")
        self._kept = HostPool(pin_memory=False, account=account)
        self._early: dict[int, _EarlyUpdate] = {}
        self.accepted = self.taken_back = 0
        """Early updates of units so far."""
        self._pause = self._pause_left = 0

    def run(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> Future | None:
        """Update the shards in ``groups``; a future where the update goes on in the background."""
        groups, ready = self._without_early(groups)
        for unit, _ in by_unit(groups):
            unit.hold_main()  # of what was frozen at first it rests with the parameters
        delayed = self._delays()
        kept = self._keep_gradients(groups) if delayed else []
        task: Callable[[], None]
        if has_kernel(optimizer, groups):
            updates: Iterable[UnitUpdate] = (UnitUpdate(unit, parts, in_use=delayed) for unit, parts in by_unit(groups))
            if delayed:
                updates = list(updates)  # else one by one: each takes staging memory, and publishing gives it back
            task = lambda: self._carry_out(updates, publish=not delayed)  # noqa: E731
        else:
            ready += [unit for unit, _ in by_unit(groups)] if not delayed else []
            task = stand_in(optimizer, groups).step
        if delayed:
            future = self._worker.submit(task)
            future.add_done_callback(lambda _: self._give_back(kept))
            return future
        with torch.no_grad():
            task()
        for unit in ready:
            unit.publish()
        return None

    def _carry_out(self, updates: Iterable["UnitUpdate"], publish: bool) -> None:
        for update in updates:
            update.run(self._num_threads)
            if publish:
                update.unit.publish()  # on its way while the next one is computed

    def _keep_gradients(self, groups: list[UpdateGroup]) -> list[Tensor]:
        """Give the items gradients of their own: the next backward writes where these stand."""
        kept: dict[tuple[int, torch.dtype], Tensor] = {}
        for item in (item for group in groups for item in group.items):
            key = item.unit.index, item.grad.dtype
            if key not in kept:
                room = self._kept.take(item.unit.layout.shard_numel, item.grad.dtype, "delayed_gradients")
                kept[key] = item.unit.without_padding(room)  # kernels run over it as well
            item.grad = kept[key][item.start : item.start + item.grad.numel()].copy_(item.grad)
        return list(kept.values())

    def _give_back(self, kept: list[Tensor]) -> None:
        for tensor in kept:
            self._kept.give(tensor)

    # -- early updates -----------------------------------------------------------------------------------------------

    def run_early(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> None:
        """Begin to update one unit. See [Note: early update]."""
        [(unit, parts)] = by_unit(groups)
        items = [item for _, part in parts for item in part]
        if self._pause_left or unit.index in self._early or self._delays():
            return
        if not has_kernel(optimizer, groups) or not all(item.state for item in items):
            return  # a first step also makes state
        update = UnitUpdate(unit, parts, in_use=True)
        saved = [(tensor, self._kept.take(tensor.numel(), tensor.dtype, "undo")) for tensor in update.written()]

        def save_and_run() -> None:
            for tensor, copy in saved:
                copy.copy_(tensor)
            update.run(self._num_threads)

        unit.begin_update()
        sources = [_source(item.grad) for item in items]
        self._early[unit.index] = _EarlyUpdate(update, sources, saved, self._worker.submit(save_and_run))

    def _without_early(self, groups: list[UpdateGroup]) -> tuple[list[UpdateGroup], list[Unit]]:
        """What early updates leave to do, and the units that they have done right; takes back the others."""
        if not self._early:
            self._pause_left = max(0, self._pause_left - 1)
            return groups, []
        wanted = {unit.index: parts for unit, parts in by_unit(groups)}
        done = []
        for index, early in list(self._early.items()):
            if early.holds_for(wanted.get(index, [])):
                done.append(self._forget(index))
                self.accepted += 1
        if self._early:
            self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
            self._pause_left = self._pause
            self.revoke()
        else:
            self._pause = 0
        indices = {unit.index for unit in done}
        rest = [UpdateGroup(g.settings, [i for i in g.items if i.unit.index not in indices]) for g in groups]
        return rest, done

    def revoke(self) -> None:
        """Undo all early updates."""
        for index, early in list(self._early.items()):
            early.future.result()
            early.undo()
            self._forget(index).keep_edits()
            self.taken_back += 1

    def _forget(self, index: int) -> Unit:
        early = self._early.pop(index)
        early.future.result()
        self._give_back([copy for _, copy in early.saved])
        early.update.unit.end_update()
        return early.update.unit

    def prepare(self, optimizers: Iterable[Optimizer], locate: Callable[[Any], Any]) -> None:
        """State comes to memory with the first update."""

    def room(self, optimizer: Optimizer, unit: Unit, index: int, name: str, dtype: torch.dtype) -> Rested | None:
        return None

    def keep(self, optimizer: Optimizer, unit: Unit, index: int, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def put_away(self) -> None:
        """State is in memory."""

    def close(self) -> None:
        self._worker.close()
        self._kept.clear()


class UnitUpdate:
    """The kernel calls that update the shards of one unit."""

    def __init__(self, unit: Unit, parts: list[Part], in_use: bool) -> None:
        self.unit = unit
        self.parts = parts
        updated = sum(item.shard.numel() for _, items in parts for item in items)
        is_all = updated == sum(owned.stop - owned.start for owned in unit.owned)
        self._copy = unit.copy_target(in_use) if is_all else None
        runs = [AdamRun(run, settings) for settings, items in parts for run in runs_of(items)]
        self._ranges = [_Range(run, unit, self._copy) for run in runs]

    def run(self, num_threads: int | None) -> None:
        for each in self._ranges:
            each.run(num_threads)
        self.unit.published = self._copy is not None

    def written(self) -> list[Tensor]:
        """What :meth:`run` overwrites, but for the copy, which is rounded from the rest."""
        return [tensor for each in self._ranges for tensor in (each.main, *each.states, *each.steps)]


class _Range:
    """A run whose master and state are in memory."""

    def __init__(self, run: AdamRun, unit: Unit, copy: Tensor | None) -> None:
        self._run = run
        self.main = unit.main.detach()[run.start : run.stop]
        self.states = [_state_range(run.items, name) for name in run.names]
        self.steps = run.steps
        self._copy = None if copy is None else copy[run.start : run.stop]

    def run(self, num_threads: int | None) -> None:
        self._run.step(self._run.start, self._run.stop, self.main, self.states, self._copy, num_threads)
        self._run.count()


@dataclass
class _EarlyUpdate:
    update: UnitUpdate
    sources: list[tuple]
    """What tells whether the gradients are still the ones that were used."""
    saved: list[tuple[Tensor, Tensor]]
    """What was overwritten, and its old bytes."""
    future: Future

    def holds_for(self, parts: list[Part]) -> bool:
        """Whether an update of ``parts`` would do the same now."""
        if self.update.unit.edited_meanwhile or [len(items) for _, items in parts] != [len(items) for _, items in self.update.parts]:
            return False
        return all(
            _same_settings(then, now) for (then, _), (now, _) in zip(self.update.parts, parts, strict=True)
        ) and self.sources == [_source(item.grad) for _, items in parts for item in items]

    def undo(self) -> None:
        for tensor, copy in self.saved:
            tensor.copy_(copy.view_as(tensor))
        self.update.unit.published = False


def _source(grad: Tensor) -> tuple:
    """Changes when the gradient is replaced or written to."""
    return grad.data_ptr(), grad.numel(), grad.dtype, grad._version


def _same_settings(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) and isinstance(b[k], Tensor) else a[k] == b[k] for k in a
    )


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


def default_threads(ranks_on_host: int, cores: int) -> int:
    """Threads for each rank's updates: ranks share the host's cores and never use more."""
    return max(1, min(torch.get_num_threads(), cores // max(1, ranks_on_host)))

