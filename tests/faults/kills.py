"""One run under fire. Its ranks are processes of their own, and one of them gets a signal at a moment drawn at random."""

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.harness import WorldError, make_trainer, run
from tests.parity import TINY_UNIT_MB, RandomData, rank

EPOCHS = 8
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Setting:
    """How a run trains and saves."""

    stage: int
    form: str
    background: bool = False
    kwargs: tuple[tuple[str, Any], ...] = ()


SETTINGS = [
    Setting(1, "full"),
    Setting(3, "full", background=True),
    Setting(2, "sharded"),
    Setting(3, "sharded", background=True),
    Setting(3, "sharded", kwargs=(("offload", True), ("delayed_update", 1))),
    Setting(2, "full", kwargs=(("offload", True),)),
]


@dataclass
class Shot:
    """A signal to one rank, ``delay`` seconds after it has begun."""

    victim: int
    delay: float
    number: signal.Signals


@dataclass
class Report:
    attempts: int = 1
    hits: int = 0
    """Signals that ended an attempt."""
    faults: list[str] = field(default_factory=list)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - batch.roll(1, 1)).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.layers(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def train(folder: str, setting: Setting, shot: Shot | None) -> tuple[dict[str, Tensor], float]:
    """Inside a rank: go on from the last checkpoint in ``folder``, if there is one; the weights, and the seconds it took."""
    if shot is not None and rank() == shot.victim:
        threading.Timer(shot.delay, os.kill, (os.getpid(), shot.number)).start()
    start = time.monotonic()
    torch.manual_seed(0)
    module = Net()
    strategy = ZeroStrategy(
        stage=setting.stage, state_dict_type=setting.form, unit_size_mb=TINY_UNIT_MB, read_timeout=5.0,
        checkpoint_io=AsyncCheckpointIO() if setting.background else None, **dict(setting.kwargs),
    )  # fmt: skip
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=1, monitor="epoch", mode="max", save_last=True)
    trainer = make_trainer(".", strategy=strategy, max_epochs=EPOCHS, callbacks=[saver], enable_checkpointing=True)
    data = DataLoader(RandomData(16, 8), batch_size=2)
    trainer.fit(module, data, DataLoader(RandomData(4, 8)), ckpt_path="last", weights_only=True)
    return {name: value.clone() for name, value in module.state_dict().items()}, time.monotonic() - start


class Range:
    """Fires at runs of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        with tempfile.TemporaryDirectory() as folder:
            [(self.wanted, self.seconds), *_] = run(2, train, folder, setting, None)
            # Lightning's saves in the background may be overtaken by the removal of what they are about to write.
            self.left = {"last.ckpt", f"epoch={EPOCHS - 1}.ckpt"}
            if missing := self.left - set(os.listdir(folder)):
                raise AssertionError(f"the run that was left alone has not saved {missing}")

    def fire(self, seed: int, shots: int, signals: Sequence[signal.Signals] = SIGNALS) -> Report:
        """``shots`` at one run, each at an attempt to go on; then the run is left alone, to end as if nothing had been."""
        draw, report = random.Random(seed), Report()
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(shots):
                shot = Shot(draw.randrange(2), draw.uniform(0.0, self.seconds), draw.choice(signals))
                try:
                    run(2, train, folder, self.setting, shot)
                except WorldError as error:
                    report.hits += 1
                    if "hung" in str(error):
                        report.faults.append(f"{shot}: {error}")
                report.attempts += 1
            try:
                results = run(2, train, folder, self.setting, None)
            except WorldError as error:
                return Report(report.attempts, report.hits, [*report.faults, f"could not go on: {error}"])
            for weights, _ in results:
                report.faults += [f"{name} differs" for name, value in self.wanted.items() if not weights[name].equal(value)]
            # A callback that is killed between a save and the removal of the one before knows nothing of it later.
            left = set(os.listdir(folder))
            report.faults += [f"{name} is missing" for name in self.left - left]
            report.faults += [f"{name} is left" for name in left - self.left if not name.endswith(".ckpt")]
        return report
