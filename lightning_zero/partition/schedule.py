"""In which order units are unsharded: the same order on every rank, prefetched, without asking each time.

[Note: one order on every rank]
A gather needs all ranks. If a rank takes another branch of the model, the others must not wait for a partner that
never comes. A *phase* is one micro-batch (forward to the end of backward) or one evaluation step. In the first phase of
a kind every gather is agreed on: ranks exchange which unit they want, all of them take part in gathering it, and those
that are done answer until everybody is. What was gathered, in order, is the *plan* of that kind of phase. From then
on the ranks follow the plan without asking. A rank that skips units still takes part in their gathers, so any
subsequence of the plan works. A rank that needs something else first walks to the end of the plan and then asks again.
Each phase ends with one small all-reduce that finds out whether anybody still asks.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from lightning_zero.comm import Comm
from lightning_zero.partition.buffer import State
from lightning_zero.partition.unit import Unit


@dataclass(frozen=True)
class Step:
    """One gather of a plan; ``keep``: the same buffer comes next again, so it is not given up in between."""

    buffer: int
    keep: bool = False


class Schedule:
    """Decides when which unit is gathered. See [Note: one order on every rank]."""

    def __init__(self, units: Sequence[Unit], comm: Comm, prefetch: int) -> None:
        self._buffers = [*(unit.buffer for unit in units), *(unit.face for unit in units)]
        """What can be gathered, by index: what steps compute with, then what users see of it."""
        self._comm = comm
        self._prefetch = prefetch
        self._plans: dict[Hashable, tuple[Step, ...]] = {}
        self._key: Hashable = None
        self._plan: tuple[Step, ...] = ()
        self._cursor = 0
        self._extra: list[int] = []
        self._kept: set[int] = set()
        self._ahead: set[int] = set()
        """Buffers on their way that nobody has asked for yet."""

    @property
    def active(self) -> bool:
        """Whether a phase is open."""
        return self._key is not None

    def begin(self, key: Hashable) -> None:
        """Open a phase; phases with the same ``key`` are expected to gather the same units in the same order."""
        if self.active:
            raise AssertionError(f"phase {self._key} is still open")
        self._key = key
        self._plan = self._plans.get(key, ())
        self._cursor = 0
        self._extra, self._kept, self._ahead = [], set(), set()

    def want(self, unit: Unit, face: bool = False) -> None:
        """Unshard ``unit`` now, or its ``face``."""
        index = unit.index + face * (len(self._buffers) // 2)
        buffer = self._buffers[index]
        if buffer.state is State.UNSHARDED:
            return
        if buffer.state is State.SHARDED:
            position = self._find(index)
            if position is not None:
                self._follow(position)
            elif self._comm.world_size == 1:
                self._extra.append(index)
            else:
                self._follow(len(self._plan))
                self._ask(index)
        buffer.unshard()
        self._ahead.discard(index)
        self._fetch_ahead()

    def keeps(self, unit: Unit) -> bool:
        """Whether giving ``unit`` up now would only mean gathering it again next."""
        return unit.index in self._kept

    def finish(self, facts: Sequence[int] = ()) -> bool:
        """Close the phase on all ranks; returns whether all ranks gave the same ``facts`` (up to three)."""
        self._follow(len(self._plan))
        same = self._answer(facts)
        for buffer in self._buffers:
            # Whole buffers are on their way from an update, not fetched for this phase.
            if buffer.state is State.GATHERING and not buffer.is_whole:
                buffer.reshard()
            if buffer.rest is not None:
                buffer.rest.forget()
        if self._extra:
            self._plans[self._key] = _collapse([*self._plan, *(Step(index) for index in self._extra)])
        self._key = None
        return same

    def abandon(self) -> None:
        """Close the phase on this rank alone, after an exception."""
        self._key = None

    def _find(self, index: int) -> int | None:
        for position in range(self._cursor, len(self._plan)):
            if self._plan[position].buffer == index:
                return position
        return None

    def _follow(self, position: int) -> None:
        """Take part in the planned gathers before ``position`` that this rank has no use for, and move past it."""
        while self._cursor < min(position, len(self._plan)):
            self._buffers[self._plan[self._cursor].buffer].serve()
            self._cursor += 1
        if position < len(self._plan):
            self._enter(self._plan[position])

    def _enter(self, step: Step) -> None:
        self._cursor += 1
        self._kept.discard(step.buffer)
        if step.keep:
            self._kept.add(step.buffer)

    def _fetch_ahead(self) -> None:
        while len(self._ahead) < self._prefetch and self._cursor < len(self._plan):
            step = self._plan[self._cursor]
            buffer = self._buffers[step.buffer]
            if buffer.state is not State.SHARDED:
                return
            buffer.unshard_async()
            self._enter(step)
            self._ahead.add(step.buffer)
        # Shards that rest elsewhere come one window before their gather.
        for step in self._plan[self._cursor : self._cursor + self._prefetch]:
            self._buffers[step.buffer].stage()

    def _ask(self, index: int) -> None:
        """Agree on buffers to gather until this rank's turn has come."""
        while True:
            name = self._buffers[index].name
            most, _ = self._comm.exchange(_PLACE, [index + 1], f"(wants {name!r} in {self._key})")
            winner = most[0] - 1
            self._extra.append(winner)
            if winner == index:
                return
            self._buffers[winner].serve()

    def _answer(self, facts: Sequence[int]) -> bool:
        """Serve the ranks that still ask; returns whether all gave the same facts."""
        if self._comm.world_size == 1:
            return True
        while True:
            most, least = self._comm.exchange(_PLACE, [0, *facts], f"(at the end of {self._key})")
            winner = most[0] - 1
            if winner < 0:
                return most == least
            self._extra.append(winner)
            self._buffers[winner].serve()


_PLACE = "in a step"


def _collapse(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Merge gathers of one buffer that follow each other, marking that it is kept."""
    merged: list[Step] = []
    for step in steps:
        if merged and merged[-1].buffer == step.buffer:
            merged[-1] = replace(merged[-1], keep=True)
        else:
            merged.append(step)
    return tuple(merged)
