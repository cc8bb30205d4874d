"""The time of one step, in pieces."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_zero import profiling
from lightning_zero.callbacks.step_trace import StepTrace

WAITS = {"all_gather": "waiting for parameters", "reduce_scatter": "waiting for gradients"}
OTHER_WAITS, ENGINE, HOST = "waiting, other", "starting to send", "Python and the rest"
_OPERATION = "operation"
ORIGIN = "begins"
_ORIGIN = f"{profiling.PREFIX}step ({ORIGIN})"


@dataclass
class Piece:
    """What this rank's thread does for a while, in seconds after the start of the step."""

    kind: str
    start: float
    stop: float


@dataclass
class Timeline:
    """One step of one rank; the pieces follow each other without gaps."""

    trace: StepTrace
    pieces: list[Piece] = field(default_factory=list)

    def shares(self) -> dict[str, float]:
        """Seconds by kind, largest first; together they are the step."""
        sums: dict[str, float] = {}
        for piece in self.pieces:
            sums[piece.kind] = sums.get(piece.kind, 0.0) + piece.stop - piece.start
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Range:
    """Something that ran on this thread, in seconds after the start of the step."""

    name: str
    start: float
    stop: float


def ranges_of(events: Iterable[Any], origin: float) -> list[Range]:
    """What ran on the thread that has the range by which the two clocks are compared, which began at ``origin``; outer
    ranges before those inside them."""
    on_host = [event for event in events if event.device_type.name == "CPU"]
    first = next(event for event in on_host if event.name == _ORIGIN)
    zero = first.time_range.start - 1e6 * origin
    found = [
        Range(e.name, (e.time_range.start - zero) / 1e6, (e.time_range.end - zero) / 1e6)
        for e in on_host
        if e.thread == first.thread
    ]
    return sorted(found, key=lambda it: (it.start, -it.stop))


def cut(trace: StepTrace, ranges: list[Range]) -> list[Piece]:
    """The step in pieces, each by what goes on in it. What a range contains is its own, be it an operation or Python."""
    changes = sorted(
        [(it.start, 1, kind) for it in ranges for kind in [_kind_of(it.name)]]
        + [(it.stop, -1, kind) for it in ranges for kind in [_kind_of(it.name)]]
        + [(seconds, 0, phase) for seconds, phase in trace.marks],
        key=lambda change: change[0],
    )
    pieces: list[Piece] = []
    running: Counter[str] = Counter()
    phase, since = trace.marks[0][1], 0.0
    for time, change, what in [*changes, (trace.seconds, 0, "")]:
        time = min(max(time, 0.0), trace.seconds)
        if time > since:
            kind = _kind_now(running, phase)
            if pieces and pieces[-1].kind == kind:
                pieces[-1].stop = time
            else:
                pieces.append(Piece(kind, since, time))
            since = time
        if change:
            running[what] += change
        else:
            phase = what
    return pieces


def _kind_of(name: str) -> str:
    if name.startswith(f"{profiling.PREFIX}{profiling.WAIT} for "):
        collective = name.removeprefix(f"{profiling.PREFIX}{profiling.WAIT} for ").split()[0]
        return WAITS.get(collective, OTHER_WAITS)
    if name.startswith(profiling.PREFIX) and name != _ORIGIN:
        return ENGINE
    return _OPERATION if name.startswith("aten::") else ""


def _kind_now(running: "Counter[str]", phase: str) -> str:
    for kind in (*WAITS.values(), OTHER_WAITS, ENGINE):
        if running[kind]:
            return kind
    if phase == "update":
        return phase
    return phase if running[_OPERATION] else HOST
