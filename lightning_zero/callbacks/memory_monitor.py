"""MemoryMonitor: what training holds and sends on each rank, in the logger and in a table before and after."""

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from typing_extensions import override

from lightning_zero import estimate
from lightning_zero.callbacks import measurements, memory_report
from lightning_zero.callbacks.measurements import Reading
from lightning_zero.callbacks.memory_report import Forecast
from lightning_zero.strategy import ZeroStrategy


class MemoryMonitor(pl.Callback):
    """Logs, and shows in a table before and after training, what each rank holds in memory and sends.

    Every ``every_n_steps`` optimizer steps the Trainer's loggers get, as ``_max`` and ``_mean`` over the ranks: bytes of
    model states by kind (``memory/parameters``, ``gradients``, ``master``, ``optimizer``, ``buffers``, ``other``,
    ``total``) and the peak of their total, the process' resident memory (``memory/rss``), what the host has left
    (``memory/host_available``, its minimum and mean), the device allocator's figures where there is a device, and per
    step the time and the bytes sent (``step/seconds``, ``step/bytes_sent``). In between nothing is measured.

    Under ZeroStrategy everything is shown; DDPStrategy and a single device have neither counted bytes nor peaks between
    two measurements. Other strategies are refused.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        plot: Not implemented yet.
    """

    def __init__(self, every_n_steps: int = 50, plot: str | None = None) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be an integer of at least 1, got {every_n_steps!r}")
        if plot is not None:
            raise NotImplementedError(f"MemoryMonitor(plot={plot!r}) is not implemented yet: leave plot at None.")
        self.every_n_steps = every_n_steps
        self._clock = _Clock()
        self._last: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._forecast: Forecast | None = None

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        _check_strategy(trainer.strategy)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._last, self._peaks = {}, {}
        self._forecast = _forecast(trainer)
        pl_module.print("\n" + memory_report.opening_table(self._forecast) + "\n")
        self._clock.start(trainer)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return
        self._clock.steps += 1
        # Counted as Lightning counts steps for loggers: the same on all ranks, so all of them measure at this point.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
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
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped
        pl_module.print("\n" + memory_report.closing_table(self._forecast, resident, peak, others, steps) + "\n")

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
        values = {
            **{f"memory/{name}": value for name, value in self._model_states(trainer).items()},
            **{f"memory/{name}": value for name, value in measurements.process_memory().items()},
            **{f"memory/{name}": value for name, value in measurements.device_memory(device).items()},
            **{f"step/{name}": value for name, value in per_step.items()},
        }
        readings = measurements.combine(values, device)
        for logger in trainer.loggers:
            logger.log_metrics(_as_metrics(readings, logger.group_separator), step=step)
        self._clock.start(trainer)


class _Clock:
    """Time and bytes sent from one measurement to the next, without the validation in between."""

    def __init__(self) -> None:
        self.steps = 0
        self._since = 0.0
        self._seconds = 0.0
        self._sent_before: dict[str, float] = {}
        self._sent: dict[str, float] = {}

    def start(self, trainer: "pl.Trainer") -> None:
        self.steps, self._seconds, self._sent = 0, 0.0, {}
        self.resume(trainer)

    def pause(self, trainer: "pl.Trainer") -> None:
        self._seconds += time.perf_counter() - self._since
        for name, nbytes in measurements.bytes_sent(trainer).items():
            self._sent[name] = self._sent.get(name, 0) + nbytes - self._sent_before.get(name, 0)

    def resume(self, trainer: "pl.Trainer") -> None:
        self._since = time.perf_counter()
        self._sent_before = measurements.bytes_sent(trainer)

    def lap(self, trainer: "pl.Trainer") -> dict[str, float]:
        """Means over the steps since the start."""
        self.pause(trainer)
        means = {"seconds": self._seconds / self.steps}
        if self._sent:
            means["bytes_sent"] = sum(self._sent.values()) / self.steps
            means |= {f"{name}_bytes": nbytes / self.steps for name, nbytes in self._sent.items()}
        return means


def _check_strategy(strategy: Strategy) -> None:
    # Subclasses of DDPStrategy and ZeroStrategy itself among them; others keep parameters in ways not known here.
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        raise TypeError(
            f"MemoryMonitor does not know how {type(strategy).__name__} keeps parameters. It works with ZeroStrategy,"
            " DDPStrategy and a single device; remove it from the callbacks."
        )


def _forecast(trainer: "pl.Trainer") -> Forecast:
    world_size, precision = trainer.world_size, str(trainer.precision)
    engine = trainer.strategy.engine if isinstance(trainer.strategy, ZeroStrategy) else None
    if engine is None:
        predicted = estimate.estimate_plain(trainer.lightning_module, trainer.optimizers, world_size, precision)
        plain = formula = predicted
    else:
        predicted = estimate.estimate_engine(engine, world_size, precision)
        plain = estimate.estimate_engine(engine, world_size, precision, plain=True)
        formula = estimate.estimate_memory(predicted.num_parameters, world_size, predicted.stage, precision=precision)
    name = f"ZeRO stage {predicted.stage}" if predicted.stage else type(trainer.strategy).__name__
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    optimizers = ", ".join(sorted({type(optimizer).__name__ for optimizer in trainer.optimizers}))
    count = estimate.short_count(predicted.num_parameters)
    details = f"{count} parameters, {precision}, {optimizers or 'no optimizer'}"
    return Forecast(f"{name}, {ranks}", details, predicted, formula, plain)


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
