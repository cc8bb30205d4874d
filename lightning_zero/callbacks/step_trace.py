"""What one rank holds in the course of one step, and what its units are doing meanwhile."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_zero.callbacks.measurements import BESIDE, BUFFERS, OTHER
from lightning_zero.formulas import KINDS
from lightning_zero.partition.buffer import State
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.partition.unit import Unit

IDLE = "idle"
"""Of the buffers: those that wait for their next use."""
UNSHARDED, GATHERING, REDUCING = "unsharded", "gathering", "reducing"


@dataclass
class Sample:
    """Bytes by kind from ``seconds`` after the start of the step on."""

    seconds: float
    held: dict[str, int]


@dataclass
class Span:
    """Something that a unit does for a while, in seconds after the start of the step."""

    unit: int
    what: str
    start: float
    stop: float


@dataclass
class StepTrace:
    """One step of one rank."""

    units: list[str]
    """Their names, by index."""
    samples: list[Sample] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """When a phase of the step begins."""
    seconds: float = 0.0


class StepRecorder:
    """Records steps of ``engine``, of which the last one is kept."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._open: dict[tuple[int, str], float] = {}
        self._start = 0.0
        self._current: StepTrace | None = None
        self.trace: StepTrace | None = None
        """The last complete step."""

    @property
    def recording(self) -> bool:
        return self._current is not None

    def begin(self) -> None:
        self._open = {}
        self._current = StepTrace(_names(self._engine.units))
        self._start = time.perf_counter()
        self._engine.ledger.watcher = self._look
        self.mark("forward")

    def mark(self, phase: str) -> None:
        """From here on the step is in ``phase``."""
        if self._current is not None:
            with self._not_watching():
                self._engine.memory_stats()  # what nobody has counted so far
            self._current.marks.append((self.now(), phase))
            self._look()

    def end(self) -> None:
        """The step is complete."""
        if self._current is None:
            return
        self.mark("")
        trace, self._current = self._current, None
        self._engine.ledger.watcher = None
        trace.marks.pop()
        trace.seconds = self.now()
        trace.spans += [Span(*key, start, trace.seconds) for key, start in self._open.items()]
        self.trace = trace

    def now(self) -> float:
        """Seconds since the start of the step."""
        return time.perf_counter() - self._start

    @contextmanager
    def _not_watching(self) -> Iterator[None]:
        ledger = self._engine.ledger
        watcher, ledger.watcher = ledger.watcher, None
        yield
        ledger.watcher = watcher

    def _look(self) -> None:
        trace, ledger, now = self._current, self._engine.ledger, self.now()
        if trace is None:
            return
        held = {kind: ledger.now.get(kind, 0) for kind in (*KINDS, *BESIDE)}
        held[OTHER] = sum(ledger.now.values()) - sum(held.values())
        held[BUFFERS] -= ledger.idle
        trace.samples.append(Sample(now, {**held, IDLE: ledger.idle}))
        doing = {(unit.index, what) for unit in self._engine.units for what in self._doing(unit)}
        for key in [key for key in self._open if key not in doing]:
            trace.spans.append(Span(*key, self._open.pop(key), now))
        for key in doing - self._open.keys():
            self._open[key] = now

    def _doing(self, unit: Unit) -> Iterator[str]:
        buffer = unit.buffer
        if buffer.is_moving:
            yield GATHERING
        elif buffer.state is State.UNSHARDED and not buffer.is_whole:
            yield UNSHARDED
        located = self._engine.locate(unit.tensors[0])
        if located is not None and located[1] is not None and located[1].is_moving:
            yield REDUCING


def _names(units: Sequence[Unit]) -> list[str]:
    """Parameters of several dtypes under one module are several units of one name."""
    often = Counter(unit.name for unit in units)
    dtypes = {unit.index: str(unit.dtype).removeprefix("torch.") for unit in units}
    return [f"{unit.name} {dtypes[unit.index]}" if often[unit.name] > 1 else unit.name for unit in units]
