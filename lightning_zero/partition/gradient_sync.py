"""When which unit's gradients are reduced: the same order on every rank, beside backward, a few at a time."""

import time
from collections.abc import Callable, Sequence

import torch

from lightning_zero.comm import Comm
from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.work import is_over

# Reductions under way before the next one waits for the oldest: bounds the flat buffers in use.
_MAX_IN_FLIGHT = 2
# Reduced shards on their way to the host before the next one waits for the oldest: bounds the memory they come from.
_MAX_LANDING = 2
# Reduced shards on their way to where they rest, in the same sense.
_MAX_LEAVING = 1
# How long the wait for a reduction may last. Ranks that took different branches launch some reductions only when
# backward ends, so waiting for good would be waiting for a rank that waits for us. A backward with a wait in vain halves
# it, one without lets it grow back, so that ranks that differ often soon stop losing time.
_PATIENCE_SECONDS = 0.5
_PATIENCE_GROWTH = 1.01


class GradientSync:
    """Reduces the units' gradients, in one order on every rank.

    A unit is reduced as soon as its last gradient is there and all units before it in the order are on their way. What
    is missing when backward ends (parameters unused on this rank) is then sent as zeros, so that nobody waits.
    """

    def __init__(
        self, gradients: Sequence[UnitGradients], comm: Comm, on_reduced: Callable[[UnitGradients], None] | None
    ) -> None:
        self._on_reduced = on_reduced
        self._gradients = list(gradients)
        self._position = {id(g): i for i, g in enumerate(self._gradients)}
        self._comm = comm
        self._order = list(reversed(range(len(self._gradients))))
        self._order_is_observed = len(self._gradients) < 2
        self._observed: list[int] = []
        self._next = 0
        self._in_flight: list[UnitGradients] = []
        self._landing: list[UnitGradients] = []
        self._leaving: list[UnitGradients] = []
        self._patience = _PATIENCE_SECONDS
        self._out_of_patience = False
        self.enabled = True
        """Off while gradients only accumulate locally (Lightning's ``block_backward_sync``)."""

    def begin_backward(self) -> None:
        self._next = 0
        self._patience = (
            self._patience / 2 if self._out_of_patience else min(_PATIENCE_SECONDS, self._patience * _PATIENCE_GROWTH)
        )
        self._out_of_patience = False
        self._observed = []
        for gradients in self._gradients:
            gradients.begin_backward()

    def arrived(self, gradients: UnitGradients) -> None:
        """Called when a unit is complete."""
        if not self.enabled:
            return
        self._observed.append(self._position[id(gradients)])
        while self._next < len(self._order):
            candidate = self._gradients[self._order[self._next]]
            if candidate.expected and not candidate.is_complete:
                break
            if candidate.expected and not candidate.launched:
                self._launch(candidate)
            self._next += 1

    def local_use(self) -> tuple[int, ...]:
        """Per unit, the parameters that this rank has a gradient for."""
        return tuple(g.used for g in self._gradients)

    def late(self) -> tuple[int, ...]:
        """Per unit, whether gradients came after it had been sent (a parameter inside and outside a reentrant
        recompute)."""
        return tuple(g.filled if g.launched else 0 for g in self._gradients)

    def of_any_rank(self, masks: tuple[int, ...]) -> tuple[int, ...]:
        """Per unit, bitwise or over the ranks. All ranks call it."""
        sizes = [len(g.handles) for g in self._gradients]
        bits = [mask >> i & 1 for mask, size in zip(masks, sizes, strict=True) for i in range(size)]
        found = iter(self._comm.all_reduce(torch.tensor(bits, dtype=torch.uint8), "max").tolist())
        return tuple(sum(next(found) << i for i in range(size)) for size in sizes)

    def flush(self, used: Sequence[int], late: Sequence[int]) -> None:
        """Reduce what is missing. ``used`` and ``late`` hold for any rank and are equal on all."""
        for index in self._order:
            gradients = self._gradients[index]
            if used[index] and not gradients.launched:
                self._launch(gradients)
        self._finish_all()
        for index, again in enumerate(late):
            if again:
                self._launch(self._gradients[index])
        self._finish_all()
        if not self._order_is_observed and any(used):
            self._adopt_order()

    def show(self, used: Sequence[int]) -> None:
        for gradients, now in zip(self._gradients, used, strict=True):
            gradients.show(now | gradients.before)

    def show_local(self) -> None:
        for gradients in self._gradients:
            gradients.show_local()

    def close(self) -> None:
        self._in_flight, self._landing, self._leaving = [], [], []
        for gradients in self._gradients:
            gradients.close()

    def _launch(self, gradients: UnitGradients) -> None:
        while len(self._in_flight) >= _MAX_IN_FLIGHT and self._wait_a_little(self._in_flight[0]):
            self._finish(self._in_flight.pop(0))
        gradients.launch(1.0 / self._comm.world_size)
        self._in_flight.append(gradients)
        while self._in_flight and is_over(self._in_flight[0].work):
            self._finish(self._in_flight.pop(0))  # the sooner it lands, the sooner its update can begin

    def _wait_a_little(self, gradients: UnitGradients) -> bool:
        """Whether waiting for the reduction is safe now: it is done, or the device's queue does the waiting."""
        done = getattr(gradients.work, "done", None)
        if done is None:
            return True
        deadline = time.monotonic() + self._patience
        with self._comm.stats.waiting("reduce_scatter", gradients.unit.name):
            while not done():
                if self._out_of_patience or time.monotonic() > deadline:
                    self._out_of_patience = True  # for the rest of this backward
                    return False
                time.sleep(0.0002)
        return True

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight.pop(0))
        while self._landing:
            self._land_oldest(is_last=len(self._landing) == 1)
        while self._leaving:
            self._leaving.pop(0).arrive()

    def _finish(self, gradients: UnitGradients) -> None:
        gradients.finish()
        self._landing.append(gradients)
        while len(self._landing) > _MAX_LANDING:
            self._land_oldest()

    def _land_oldest(self, is_last: bool = False) -> None:
        gradients = self._landing.pop(0)
        gradients.land()
        if self._on_reduced is not None and gradients.is_complete and not is_last:  # after the last one comes the step
            self._on_reduced(gradients)
        self._leaving.append(gradients)
        while len(self._leaving) > _MAX_LEAVING:
            self._leaving.pop(0).arrive()

    def _adopt_order(self) -> None:
        """From now on send units in the order in which rank 0 completed them in the first backward."""
        observed = list(dict.fromkeys(self._observed))  # what comes late completes a unit again
        rest = [i for i in self._order if i not in observed]
        order = torch.tensor(observed + rest, dtype=torch.int64, device=self._gradients[0].shard.device)
        self._comm.broadcast([order])
        self._order = order.tolist()
        self._order_is_observed = True
