"""Where the time of a step goes: the pieces are the step, and traces name units."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_zero import StepTimeline, profiling
from lightning_zero.callbacks.step_trace import StepTrace
from lightning_zero.callbacks.timeline import ENGINE, HOST, WAITS, Piece, Range, Timeline, cut
from tests.harness import make_trainer, run
from tests.parity import RandomData, make_strategy
from tests.strategy.test_memory_monitor import Net

PNG = b"\x89PNG\r\n\x1a\n"


def record(stage: int, batches: int = 5, **kwargs: Any) -> tuple[Timeline | None, set[str], bytes]:
    path = Path(f"pictures/{stage}.png")
    callback = StepTimeline(str(path))
    trainer = make_trainer(".", strategy=make_strategy(stage), callbacks=[callback], max_epochs=1, **kwargs)
    trainer.fit(Net(), DataLoader(RandomData(4 * batches, 16), batch_size=2))
    if not trainer.is_global_zero:
        return callback.timeline, set(), b""
    events = json.loads(path.with_suffix(".json").read_text())["traceEvents"]
    return callback.timeline, {event["name"] for event in events if "name" in event}, path.read_bytes()


def record_several() -> list[tuple[Timeline | None, set[str], bytes]]:
    return [record(1), record(3), record(2, batches=10, accumulate_grad_batches=2)]


def test_the_pieces_are_the_step() -> None:
    ranks = run(2, record_several)
    assert [timeline for timeline, _, _ in ranks[1]] == [None] * 3
    for timeline, names, picture in ranks[0]:
        assert timeline is not None
        pieces, seconds = timeline.pieces, timeline.trace.seconds
        assert [pieces[0].start, pieces[-1].stop] == [0.0, seconds]
        assert all(a.stop == b.start for a, b in pairwise(pieces))
        assert all(piece.start < piece.stop for piece in pieces)
        assert sum(timeline.shares().values()) == pytest.approx(seconds)
        assert {"forward", "backward", "update", WAITS["reduce_scatter"], ENGINE, HOST} <= set(timeline.shares())
        assert picture.startswith(PNG)
        assert len(picture) > 20_000
        for unit in ("body.0", "body.2"):
            for what in ("gather", "reduce", "wait for all_gather", "wait for reduce_scatter", "publish"):
                assert f"ZeRO::{what} ({unit})" in names, sorted(name for name in names if "ZeRO" in name)
    accumulated = ranks[0][2][0]
    assert accumulated is not None
    assert [phase for _, phase in accumulated.trace.marks] == ["forward", "backward"] * 2 + ["update"]


def test_cutting() -> None:
    trace = StepTrace([], marks=[(0.0, "forward"), (4.0, "backward"), (8.0, "update")], seconds=10.0)
    ranges = [
        Range("Optimizer.step", -1.0, 11.0),  # around all of it, and no operation
        Range("ZeRO::gather (a)", 0.5, 1.0),
        Range("ZeRO::wait for all_gather (a)", 1.0, 2.0),
        Range("aten::addmm", 2.0, 3.5),
        Range("aten::copy_", 2.5, 3.0),  # inside the one before
        Range("aten::mm", 4.5, 6.0),
        Range("ZeRO::wait for reduce_scatter (a)", 6.0, 7.0),
    ]
    assert cut(trace, ranges) == [
        Piece(HOST, 0.0, 0.5),
        Piece(ENGINE, 0.5, 1.0),
        Piece(WAITS["all_gather"], 1.0, 2.0),
        Piece("forward", 2.0, 3.5),
        Piece(HOST, 3.5, 4.5),
        Piece("backward", 4.5, 6.0),
        Piece(WAITS["reduce_scatter"], 6.0, 7.0),
        Piece(HOST, 7.0, 8.0),
        Piece("update", 8.0, 10.0),
    ]


def test_without_a_profiler_there_is_no_range() -> None:
    assert profiling.span("gather", "a") is profiling.span("wait", "b", of="all_gather")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for of in ("", "all_gather"):
            with profiling.span("gather", "a", of=of):
                pass
    assert [event.name for event in profiler.events()] == ["ZeRO::gather (a)", "ZeRO::gather for all_gather (a)"]


@pytest.mark.parametrize(
    ("strategy", "profiler", "error", "message"),
    [
        (DDPStrategy(), None, TypeError, "under DDPStrategy use a profiler"),
        (make_strategy(2), "pytorch", ValueError, "take one of the two"),
    ],
)
def test_what_it_cannot_do_is_refused(strategy: Any, profiler: Any, error: type, message: str) -> None:
    from lightning.pytorch.profilers import PyTorchProfiler

    trainer: Any = SimpleNamespace(strategy=strategy, profiler=PyTorchProfiler() if profiler else None)
    with pytest.raises(error, match=message):
        StepTimeline("a.png").setup(trainer, Net(), "fit")


def test_the_file_must_be_a_png() -> None:
    with pytest.raises(ValueError, match=r"StepTimeline\(path=...\) must name a .png file, got 'a.svg'"):
        StepTimeline("a.svg")
