"""MemoryMonitor: what training holds and sends on each rank, in the logger and in a table before and after."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from typing_extensions import override

from lightning_zero import estimate
from lightning_zero.callbacks import measurements, memory_plot, memory_report
from lightning_zero.callbacks.measurements import Reading
from lightning_zero.callbacks.memory_report import Forecast
from lightning_zero.callbacks.step_clock import StepClock
from lightning_zero.callbacks.step_trace import StepRecorder
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.strategy import ZeroStrategy

# The first steps find out in which order units are used, the last of these is like all others.
_RECORDED_STEPS = 3


class MemoryMonitor(pl.Callback):
    """Logs, and shows in a table before and after training, what each rank holds in memory and sends.

    Every ``every_n_steps`` optimizer steps the Trainer's loggers get, as ``_max`` and ``_mean`` over the ranks: bytes of
    model states by kind (``memory/parameters``, ``gradients``, ``master``, ``optimizer``, ``buffers``, what is
    held beside them (``activations`` in memory of their own; in host memory ``staging``, ``undo``,
    ``delayed_gradients`` and ``file_buffers``), ``other``, ``total``, wherever they rest, and ``nvme``, what is taken in files) and the peak of their total,
    ``memory/residual`` (what the peak holds beside them: activations and temporary memory; on a CPU everything else in
    the process too), the process' resident memory (``memory/rss``), what the host has left (``memory/host_available``,
    its minimum and mean), and the device allocator's figures where there is a device. Per step, as means since the last measurement: ``step/bytes_sent``, by collective too, ``step/seconds``
    and its parts ``step/wait_seconds`` (this rank stood still for others), ``step/optimizer_seconds`` (clipping and
    update) and ``step/compute_seconds`` (the rest: forward, backward, data, callbacks). Under NCCL the device's queue
    waits, which counts as computing. With delayed updates ``step/update_pending`` tells whether one is. In between
    nothing is measured.

    Under ZeroStrategy everything is shown; DDPStrategy and a single device have neither counted bytes, waits, nor peaks
    between two measurements. Other strategies are refused.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        plot: A ``.png`` file, written when training ends, under ZeroStrategy: rank 0's memory in the course of one step
            by kind, with the units that cause it, beside the prediction for every stage. Needs matplotlib (the extra
            ``plot``).
    """

    def __init__(self, every_n_steps: int = 50, plot: str | None = None) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be an integer of at least 1, got {every_n_steps!r}")
        if plot is not None:
            memory_plot.check_plot("MemoryMonitor(plot=...)", plot)
        self.every_n_steps = every_n_steps
        self.plot = plot
        self._recorder: StepRecorder | None = None
        self._clock = StepClock()
        self._last: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._forecast: Forecast | None = None

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        _check_strategy(trainer.strategy, self.plot)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._last, self._peaks = {}, {}
        self._forecast = _forecast(trainer)
        pl_module.print("\n" + memory_report.opening_table(self._forecast) + "\n")
        engine = _engine(trainer)
        if self.plot is not None and trainer.is_global_zero and engine is not None:
            self._recorder = StepRecorder(engine)
        self._clock.attach(trainer)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is None:
            return
        if self._recorder.recording:
            self._recorder.mark("forward")  # the next of several micro-batches
        elif _steps(trainer) < _RECORDED_STEPS:
            self._recorder.begin()

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Any) -> None:
        self._mark("backward")

    @override
    def on_before_optimizer_step(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Any) -> None:
        self._mark("update")
        self._clock.begin_update(trainer)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return
        if self._recorder is not None:
            self._recorder.end()
        self._clock.steps += 1
        # Counted as Lightning counts steps for loggers: the same on all ranks, so all of them measure at this point.
        step = _steps(trainer)
        if (step + 1) % self.every_n_steps == 0:
            self._measure(trainer, step)
        elif not self._peaks:
            self._model_states(trainer)

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._clock.pause(trainer)

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._clock.resume(trainer)

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        # Kept for the closing table: at the end of training other callbacks may read whole parameters first.
        self._last = self._model_states(trainer)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._clock.detach()
        device = trainer.strategy.root_device
        values = {**(self._last or self._model_states(trainer)), **measurements.process_memory()}
        readings = measurements.combine({**values, **measurements.device_memory(device)}, device)
        if self._forecast is None:
            raise RuntimeError("MemoryMonitor.on_train_end was called without on_train_start")
        kinds = (*measurements.STATE_KINDS, "total")
        resident = {kind: readings[kind] for kind in kinds}
        peak = {kind: readings[f"{kind}_peak"] for kind in kinds}
        others: dict[str, tuple[Reading | None, Reading | None]] = {
            "process RSS": (readings["rss"], readings["rss_peak"])
        }
        if "device_allocated" in readings:
            others["device used"] = (readings["device_allocated"], readings.get("device_peak"))
        if "device_reserved" in readings:
            others["device held"] = (readings["device_reserved"], None)
        table = memory_report.closing_table(self._forecast, resident, peak, others, _steps(trainer))
        pl_module.print("\n" + table + "\n")
        self._draw(trainer, pl_module, peak["total"].max)

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._clock.detach()
        if self._recorder is not None:
            self._recorder.end()
        self._recorder = None

    def _mark(self, phase: str) -> None:
        if self._recorder is not None:
            self._recorder.mark(phase)

    def _draw(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", peak: float) -> None:
        if self._recorder is None or self._forecast is None or self.plot is None or self._recorder.trace is None:
            return
        engine = _engine(trainer)
        if engine is None:
            return
        predicted = self._forecast.predicted
        precision = str(trainer.precision)
        stages = [0, 1, 2, 3] if engine.units else [0]
        by_stage = [
            estimate.estimate_engine(engine, _data_parallel_size(trainer), precision, stage, **_timing(trainer))
            for stage in stages
        ]
        title = f"{self._forecast.setting}: {self._forecast.details}"
        memory_plot.draw(self.plot, title, self._recorder.trace, by_stage, predicted.stage, peak, predicted.on_host)
        pl_module.print(f"The memory of one step is drawn in {self.plot}")

    def _model_states(self, trainer: "pl.Trainer") -> dict[str, float]:
        """As measured now, with the peaks of earlier measurements where nobody else keeps them."""
        values = measurements.model_states(trainer)
        for name in values:
            if name.endswith("_peak"):
                values[name] = self._peaks[name] = max(self._peaks.get(name, 0), values[name])
        return values

    def _measure(self, trainer: "pl.Trainer", step: int) -> None:
        device = trainer.strategy.root_device
        per_step = self._clock.lap(trainer)
        on_device = measurements.device_memory(device)
        held = {**self._model_states(trainer), **measurements.process_memory(), **on_device}
        held |= measurements.residual(held, on_device)
        per_step |= measurements.pending_update(trainer)
        values = {f"memory/{name}": value for name, value in held.items()}
        values |= {f"step/{name}": value for name, value in per_step.items()}
        readings = measurements.combine(values, device)
        for logger in trainer.loggers:
            logger.log_metrics(_as_metrics(readings, logger.group_separator), step=step)
        self._clock.start(trainer)


def _steps(trainer: "pl.Trainer") -> int:
    """Optimizer steps so far, as Lightning counts them for loggers; the step under way is not among them."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _engine(trainer: "pl.Trainer") -> ZeroEngine | None:
    return trainer.strategy.engine if isinstance(trainer.strategy, ZeroStrategy) else None


def _check_strategy(strategy: Strategy, plot: str | None) -> None:
    # Subclasses of DDPStrategy and ZeroStrategy itself among them; others keep parameters in ways not known here.
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        raise TypeError(
            f"MemoryMonitor does not know how {type(strategy).__name__} keeps parameters. It works with ZeroStrategy,"
            " DDPStrategy and a single device; remove it from the callbacks."
        )
    if plot is not None and not isinstance(strategy, ZeroStrategy):
        raise TypeError(
            f"MemoryMonitor(plot={plot!r}) draws what ZeroStrategy does in a step; under {type(strategy).__name__} leave"
            " plot at None."
        )


def _forecast(trainer: "pl.Trainer") -> Forecast:
    world_size, precision = _data_parallel_size(trainer), str(trainer.precision)
    engine = _engine(trainer)
    if engine is None:
        predicted = estimate.estimate_plain(trainer.lightning_module, trainer.optimizers, world_size, precision)
        plain = formula = predicted
    else:
        predicted = estimate.estimate_engine(engine, world_size, precision, **_timing(trainer))
        plain = estimate.estimate_engine(engine, world_size, precision, stage=0)
        formula = estimate.estimate_memory(
            predicted.num_parameters, world_size, predicted.stage, precision=precision,
            shard_group_size=predicted.num_shards,
        )  # fmt: skip
    name = f"ZeRO stage {predicted.stage}" if predicted.stage else type(trainer.strategy).__name__
    ranks = estimate.ranks_text(world_size, predicted.num_shards)
    optimizers = ", ".join(sorted({type(optimizer).__name__ for optimizer in trainer.optimizers}))
    count = estimate.short_count(predicted.num_parameters)
    details = f"{count} parameters, {precision}, {optimizers or 'no optimizer'}"
    return Forecast(f"{name}, {ranks}", details, predicted, formula, plain)


def _timing(trainer: "pl.Trainer") -> dict[str, bool]:
    """Whether updates begin before the step, or come a step later."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeroStrategy):
        return {}
    offload = strategy.offload
    return {"early": offload is not None and offload.early_update, "late": strategy.delayed_from is not None}


def _data_parallel_size(trainer: "pl.Trainer") -> int:
    strategy = trainer.strategy
    return strategy.data_parallel_size if isinstance(strategy, ZeroStrategy) else trainer.world_size


def _as_metrics(readings: Mapping[str, Reading], separator: str) -> dict[str, float]:
    metrics = {}
    for name, reading in readings.items():
        if name.endswith("_peak") and name != "memory/total_peak":
            continue  # for the closing table
        name = name.replace("/", separator)
        if name.endswith("host_available"):
            metrics[f"{name}_min"] = reading.min
        else:
            metrics[f"{name}_max"] = reading.max
        metrics[f"{name}_mean"] = reading.mean
    return metrics
