"""StepTimeline: where the time of one step goes, as a trace of torch's profiler and as a picture."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerActivity, profile, supported_activities
from typing_extensions import override

from lightning_zero import estimate, profiling
from lightning_zero.callbacks import timeline_plot
from lightning_zero.callbacks.memory_plot import check_plot
from lightning_zero.callbacks.step_trace import StepRecorder
from lightning_zero.callbacks.timeline import ORIGIN, Timeline, cut, ranges_of
from lightning_zero.strategy import ZeroStrategy

# The first steps find out in which order units are used, and MemoryMonitor records the third.
_STEP = 3


class StepTimeline(pl.Callback):
    """Records the fourth optimizer step with torch's profiler, on rank 0, and draws where its time went.

    ``path`` is a ``.png`` file; beside it, with the ending ``.json``, is the trace for chrome://tracing or Perfetto, in
    which ranges carry the names of units: ``ZeRO::gather``, ``ZeRO::wait for all_gather``, ``ZeRO::reduce``, ``ZeRO::wait for
    reduce_scatter`` and ``ZeRO::publish`` (new weights leave). Such ranges are in the traces of any other use of torch's
    profiler as well, and cost nothing without one.

    The picture is the host's view: on a GPU it shows when work was queued, and the trace when it ran. A profiler makes
    operations slower, small ones most. ZeroStrategy only; needs matplotlib (the extra ``plot``).
    """

    def __init__(self, path: str) -> None:
        check_plot("StepTimeline(path=...)", path)
        self.path = path
        self.timeline: Timeline | None = None
        """What was recorded, on rank 0."""
        self._profiler: Any = None
        self._recorder: StepRecorder | None = None
        self._origin = 0.0
        """When the range of this name was, in the recorder's time."""

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if not isinstance(trainer.strategy, ZeroStrategy):
            raise TypeError(
                f"StepTimeline draws what ZeroStrategy does in a step; under {type(trainer.strategy).__name__} use a profiler"
                " of Lightning."
            )
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            raise ValueError(
                "StepTimeline and Trainer(profiler='pytorch') both need torch's profiler, of which there is one at a time:"
                " take one of the two. Lightning's trace has the ranges of units, too."
            )

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is not None:
            self._recorder.mark("forward")  # the next of several micro-batches
            return
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        if self.timeline is None and trainer.is_global_zero and engine is not None and _steps(trainer) == _STEP:
            self._profiler = profile(activities=supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA})
            self._profiler.start()
            self._recorder = StepRecorder(engine)
            self._recorder.begin()
            with profiling.span("step", ORIGIN):
                self._origin = self._recorder.now()

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Any) -> None:
        self._mark("backward")

    @override
    def on_before_optimizer_step(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Any) -> None:
        self._mark("update")

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is None or (pl_module.automatic_optimization and trainer.fit_loop._should_accumulate()):
            return
        self._recorder.end()
        self._profiler.stop()
        trace, self._recorder = self._recorder.trace, None
        if trace is not None:
            self.timeline = Timeline(trace, cut(trace, ranges_of(self._profiler.events(), self._origin)))
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(Path(self.path).with_suffix(".json")))
            timeline_plot.draw(self.path, _title(trainer), self.timeline)
        self._profiler = None

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if self._recorder is not None:  # an exception in that step
            self._recorder.end()
            self._profiler.stop()
            self._recorder = self._profiler = None

    def _mark(self, phase: str) -> None:
        if self._recorder is not None:
            self._recorder.mark(phase)


def _steps(trainer: "pl.Trainer") -> int:
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _title(trainer: "pl.Trainer") -> str:
    count = estimate.short_count(sum(p.numel() for p in trainer.lightning_module.parameters()))
    stage = trainer.strategy.stage  # type: ignore[attr-defined]
    return f"One step of rank 0 of {trainer.world_size}: ZeRO stage {stage}, {count} parameters, {trainer.precision}"
