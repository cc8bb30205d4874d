"""Where the time of steps goes: waiting for other ranks, the optimizer, and the rest."""

import time
from typing import Any

import lightning.pytorch as pl
from torch.utils.hooks import RemovableHandle

from lightning_zero.callbacks import measurements


class StepClock:
    """Time and bytes sent from one measurement to the next, without the validation in between."""

    def __init__(self) -> None:
        self.steps = 0
        self._since = 0.0
        self._before: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._update_since: tuple[float, float] | None = None
        self._handles: list[RemovableHandle] = []

    def attach(self, trainer: "pl.Trainer") -> None:
        """Learn from the optimizers when an update is done, and start."""

        def done(*args: Any) -> None:
            self.end_update(trainer)

        self._handles = [optimizer.register_step_post_hook(done) for optimizer in trainer.optimizers]
        self.start(trainer)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def start(self, trainer: "pl.Trainer") -> None:
        self.steps, self._sums = 0, {}
        self.resume(trainer)

    def pause(self, trainer: "pl.Trainer") -> None:
        self._add("seconds", time.perf_counter() - self._since)
        for name, value in measurements.traffic(trainer).items():
            self._add(name, value - self._before.get(name, 0))

    def resume(self, trainer: "pl.Trainer") -> None:
        self._since = time.perf_counter()
        self._before = measurements.traffic(trainer)

    def begin_update(self, trainer: "pl.Trainer") -> None:
        """Gradients are there; clipping and the optimizer's step come next."""
        self._update_since = time.perf_counter(), _waited(trainer)

    def end_update(self, trainer: "pl.Trainer") -> None:
        if self._update_since is not None:
            since, waited = self._update_since
            self._update_since = None
            self._add("optimizer_seconds", time.perf_counter() - since - (_waited(trainer) - waited))

    def lap(self, trainer: "pl.Trainer") -> dict[str, float]:
        """Means over the steps since the start."""
        self.pause(trainer)
        means = {name: value / self.steps for name, value in self._sums.items()}
        means.setdefault("optimizer_seconds", 0.0)
        if "wait_seconds" in means:
            means["bytes_sent"] = sum(value for name, value in means.items() if name.endswith("_bytes"))
            means["compute_seconds"] = means["seconds"] - means["wait_seconds"] - means["optimizer_seconds"]
        return means

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value


def _waited(trainer: "pl.Trainer") -> float:
    return measurements.traffic(trainer).get("wait_seconds", 0.0)
