"""``python -m tests.faults.soak --steps 2000``: train on and on, with validation, checkpoints and delayed updates, and see
that nothing grows: live tensors, memory of the process, open files, threads."""

import argparse
import contextlib
import gc
import io
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.faults.kills import Net
from tests.harness import make_trainer, run
from tests.parity import TINY_UNIT_MB, RandomData

STEPS_PER_EPOCH = 50
SPARE_RSS = 16 * 2**20
"""What the allocator of a process may keep to itself from one half to the other."""
SPARE_TENSORS = 1024
"""Numbers that a logger or a metric happens to hold when a sample is taken."""


@dataclass(frozen=True)
class Sample:
    step: int
    tensor_bytes: int
    rss: int
    files: int
    threads: int


class Watch(pl.Callback):
    """Takes a sample at the end of every epoch, with no checkpoint on its way."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy._folders.wait()  # type: ignore[attr-defined]
        gc.collect()
        storages = {}
        for one in gc.get_objects():
            if isinstance(one, torch.Tensor) and type(one).__name__ != "FakeTensor":
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    storage = one.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        process = psutil.Process()
        self.samples.append(
            Sample(
                trainer.global_step,
                sum(storages.values()),
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
            )
        )


def train(steps: int, settings: dict[str, Any]) -> list[Sample]:
    """Inside a rank."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch()
        saver = ModelCheckpoint(
            os.path.join(os.getcwd(), "saved"), every_n_train_steps=20, save_top_k=2, monitor="step", mode="max"
        )
        trainer = make_trainer(
            folder, strategy=ZeroStrategy(unit_size_mb=TINY_UNIT_MB, **settings), max_steps=steps, max_epochs=-1,
            callbacks=[saver, watch], enable_checkpointing=True,
        )  # fmt: skip
        data = DataLoader(RandomData(4 * STEPS_PER_EPOCH, 8), batch_size=2)
        trainer.fit(Net(), data, DataLoader(RandomData(8, 8), batch_size=2))
    return watch.samples


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3, delayed, folders": {"stage": 3, "offload": True, "delayed_update": 10, "state_dict_type": "sharded"},
    "stage 2, files": {"stage": 2},
}


def growth(samples: list[Sample]) -> dict[str, int]:
    """The most of the second half less the most of the first, without the first fifth: the warm-up."""
    warm = samples[len(samples) // 5 :]
    first, second = warm[: len(warm) // 2], warm[len(warm) // 2 :]
    most: Callable[[list[Sample], str], int] = lambda part, name: max(getattr(one, name) for one in part)  # noqa: E731
    return {name: most(second, name) - most(first, name) for name in ("tensor_bytes", "rss", "files", "threads")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    grew = False
    for name, settings in SETTINGS.items():
        start = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            results = run(arguments.ranks, train, arguments.steps, settings, timeout=3600)
        print(f"{name}: {arguments.steps} steps on {arguments.ranks} ranks in {time.monotonic() - start:.0f} s")
        for rank, samples in enumerate(results):
            last, grown = samples[-1], growth(samples)
            print(
                f"  rank {rank}: {last.tensor_bytes} bytes of tensors ({grown['tensor_bytes']:+d} from one half to the other),"
                f" {last.rss / 2**20:.1f} MiB ({grown['rss'] / 2**20:+.1f}), {last.files} files ({grown['files']:+d}),"
                f" {last.threads} threads ({grown['threads']:+d})"
            )
            grew |= grown["tensor_bytes"] > SPARE_TENSORS or grown["files"] > 0 or grown["threads"] > 0 or grown["rss"] > SPARE_RSS
    return int(grew)


if __name__ == "__main__":
    raise SystemExit(main())
