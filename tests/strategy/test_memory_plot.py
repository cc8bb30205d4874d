"""The picture of one step: what is recorded is what the rank held and did, and the file is a picture."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_zero import MemoryMonitor
from lightning_zero.callbacks.step_trace import GATHERING, REDUCING, UNSHARDED, StepTrace
from tests.harness import make_trainer, run
from tests.parity import RandomData, make_strategy
from tests.strategy.test_memory_monitor import Net

PNG = b"\x89PNG\r\n\x1a\n"


class Keeper(pl.Callback):
    """Takes the recorded step before the monitor's own teardown drops it."""

    def __init__(self, monitor: MemoryMonitor) -> None:
        self.monitor = monitor
        self.trace: StepTrace | None = None
        self.stats: dict[str, Any] = {}

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.stats = trainer.strategy.memory_stats()
        if self.monitor._recorder is not None:
            self.trace = self.monitor._recorder.trace


def draw(stage: int, batches: int = 5, **kwargs: Any) -> tuple[StepTrace | None, dict[str, Any], bytes]:
    path = Path(f"pictures/{stage}.png")
    monitor = MemoryMonitor(plot=str(path))
    keeper = Keeper(monitor)
    trainer = make_trainer(
        ".", strategy=make_strategy(stage), callbacks=[keeper, monitor], max_epochs=1, **kwargs
    )
    trainer.fit(Net(), DataLoader(RandomData(4 * batches, 16), batch_size=2))
    return keeper.trace, keeper.stats, path.read_bytes() if trainer.is_global_zero else b""


def draw_several() -> list[tuple[StepTrace | None, dict[str, Any], bytes]]:
    return [draw(1), draw(3), draw(2, batches=2, accumulate_grad_batches=2)]


def test_a_step_is_recorded_as_it_went() -> None:
    ranks = run(2, draw_several)
    assert [trace for trace, _, _ in ranks[1]] == [None] * 3
    for trace, stats, picture in ranks[0]:
        assert trace is not None
        # Units of the test model are its layers.
        assert trace.units == ["body.0", "body.2"]
        assert picture.startswith(PNG)
        assert len(picture) > 20_000
        totals = [sum(sample.held.values()) for sample in trace.samples]
        assert sum(stats["now"].values()) <= max(totals) <= stats["peak_total"]
        times = [sample.seconds for sample in trace.samples]
        assert times == sorted(times)
        assert times[-1] <= trace.seconds
        assert all(sample.held["parameters"] == stats["now"]["parameters"] for sample in trace.samples)
        assert all(nbytes >= 0 for sample in trace.samples for nbytes in sample.held.values())
        assert all(0 <= span.start <= span.stop <= trace.seconds for span in trace.spans)

    (stage_1, _, _), (stage_3, _, _), (stage_2, _, _) = ranks[0]
    assert [phase for _, phase in stage_1.marks] == ["forward", "backward", "update"]
    assert [phase for _, phase in stage_2.marks] == ["forward", "backward"] * 2 + ["update"]

    def doing(trace: StepTrace, what: str) -> list[int]:
        return [span.unit for span in sorted(trace.spans, key=lambda span: span.start) if span.what == what]

    # At stage 3 both layers are unsharded in forward. The second stays for backward, the first has no use for its
    # weight there, because its input needs no gradient.
    assert doing(stage_3, UNSHARDED) == [0, 1]
    assert doing(stage_3, REDUCING) == doing(stage_1, REDUCING) == [1, 0]
    # Stage 2 reduces every micro-batch. Whole parameters are never unsharded, but gathered after the update.
    assert doing(stage_2, REDUCING) == [1, 0, 1, 0]
    assert doing(stage_1, UNSHARDED) == []
    assert set(doing(stage_1, GATHERING)) == {0, 1}


def test_one_rank_is_drawn_too() -> None:
    ((trace, _, picture),) = run(1, draw, 3)
    # Nothing is sharded: there are no units, but gradients that come and go.
    assert trace.units == []
    assert {sample.held["gradients"] for sample in trace.samples} == {0, 629 * 4}
    assert picture.startswith(PNG)


def test_what_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must name a \.png file, got 'memory\.bmp'"):
        MemoryMonitor(plot="memory.bmp")
    with pytest.raises(TypeError, match="draws what ZeroStrategy does in a step; under DDPStrategy leave plot at None"):
        MemoryMonitor(plot="memory.png").setup(SimpleNamespace(strategy=DDPStrategy()), torch.nn.Module(), "fit")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib to draw .*: pip install 'lightning_zero\[plot\]'"):
        MemoryMonitor(plot="memory.png")
