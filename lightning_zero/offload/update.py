"""The optimizer step on the host: the kernel for Adam, the user's own optimizer for others; at once, early or late.

[Note: delayed parameter update]
ZeRO-Offload (ATC 21), section 5.2. From some step on the update for step t's gradients runs on a thread of its own during
step t + 1's forward and backward, and its result is published at the end of that step::

    theta[t + 1] = theta[t] - Adam(g(theta[t - 1]))

The hyper-parameters are those of the step the gradients belong to. The update works on master weights of its own, so
forward and backward never see half of it.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.offload.early import EarlyUpdate, EarlyUpdates
from lightning_zero.offload.runs import by_unit, has_kernel
from lightning_zero.offload.threads import Threads
from lightning_zero.offload.unit_update import UnitUpdate
from lightning_zero.partition.rest import Rested
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.updater import UpdateGroup, stand_in
from lightning_zero.transfer import Account, HostPool, Link, count_nowhere
from lightning_zero.worker import Worker


class HostUpdate:
    """Carries out the updates of the optimizers it is bound to (the engine's ``Updater``).

    ``delays()`` tells whether the update that comes now is to run one step late.
    """

    def __init__(
        self, delays: Callable[[], bool], threads: Threads, link: Link | None = None, early: bool = False,
        account: Account = count_nowhere,
    ) -> None:  # fmt: skip
        self.link = link
        self.has_changed = True  # units are updated in memory, one after the other
        self.is_early = early
        self._delays = delays
        self._threads = threads
        self._worker = Worker("lightning_zero-update", threads.bind)
        self._kept = HostPool(pin_memory=False, account=account)
        self.early = EarlyUpdates(self._worker, self._kept, threads)

    def run(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> Future | None:
        """Update the shards in ``groups``; a future where the update goes on in the background."""
        groups, early = self.early.settle(groups)
        for unit, _ in by_unit(groups):
            unit.hold_main()  # of what was frozen at first it rests with the parameters
        if self._delays():
            return self._run_late(optimizer, groups)
        self._run_now(optimizer, groups, early)
        if self.is_early:
            self.early.trial.step_ended()
        return None

    @torch.no_grad()
    def _run_now(self, optimizer: Optimizer, groups: list[UpdateGroup], early: list[EarlyUpdate]) -> None:
        if has_kernel(optimizer, groups):
            for unit, parts in by_unit(groups):  # one by one: each takes staging memory, and publishing gives it back
                UnitUpdate(unit, parts, in_use=False).run(self._threads)
                unit.publish()  # on its way while the next one is computed
        else:
            stand_in(optimizer, groups).step()
            for unit, _ in by_unit(groups):
                unit.publish()
        # What is done leaves in the order of the next forward; what is not goes on meanwhile, and leaves as it ends.
        done = list(takewhile(lambda each: each.future.done(), early))
        for each in (*reversed(done), *early[len(done) :]):
            each.finish().publish()

    def _run_late(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> Future:
        kept = self._keep_gradients(groups)
        if has_kernel(optimizer, groups):
            updates = [UnitUpdate(unit, parts, in_use=True) for unit, parts in by_unit(groups)]
            future = self._worker.submit(lambda: self._run_all(updates))
        else:
            future = self._worker.submit(stand_in(optimizer, groups).step)
        future.add_done_callback(lambda _: self._give_back(kept))
        return future

    def _run_all(self, updates: list[UnitUpdate]) -> None:
        for update in updates:
            update.run(self._threads)

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

    def run_early(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> None:
        """Begin to update one unit, if that pays. See [Note: early update]."""
        if not self._delays() and has_kernel(optimizer, groups):
            [(unit, parts)] = by_unit(groups)
            self.early.begin(unit, parts)

    def revoke(self) -> None:
        """Undo all early updates."""
        self.early.revoke()

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
