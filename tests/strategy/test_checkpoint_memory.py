"""Memory while saving and loading a model of 210 MB with 210 MB of momentum, on two ranks."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig, ZeroStrategy
from lightning_zero.checkpoint.consolidate import consolidate
from tests.harness import make_trainer, run
from tests.parity import RandomData

WIDTH, LAYERS = 2048, 13
LAYER = 4 * (WIDTH * WIDTH + WIDTH) / 1e6
MODEL = LAYERS * LAYER
UNIT = 2 * LAYER  # of the default size, 32 MiB, rounded to whole layers
SLACK = 12.0
FORMS = ("full", "sharded")


class Large(pl.LightningModule):
    def __init__(self, on_meta: bool = False) -> None:
        super().__init__()
        self.on_meta = on_meta
        if not on_meta:
            self.build()

    def configure_model(self) -> None:
        if self.on_meta:
            with torch.device("meta"):
                self.build()

    def build(self) -> None:
        with torch.no_grad():
            self.layers = nn.Sequential(*(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)))
            for p in self.parameters():
                p.fill_(0.01)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


def anonymous() -> float:
    """MB that the kernel cannot take back: not the pages of files that are mapped."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[key].split()[0]) for key in ("RssAnon", "RssShmem")) / 1e3


class Peaks:
    """The largest growth of memory by what was going on."""

    def __init__(self) -> None:
        self.growth: dict[str, float] = {}

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before shall not be what grows now
        start, ended = anonymous(), threading.Event()
        most = [start]

        def watch() -> None:
            while not ended.is_set():
                most[0] = max(most[0], anonymous())
                time.sleep(0.005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            self.growth[what] = max(most[0], anonymous()) - start


class Watched(ZeroStrategy):
    def __init__(self, peaks: Peaks, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.peaks = peaks

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with self.peaks.during("read"):
            return super().load_checkpoint(*args, **kwargs)

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self.peaks.during("weights"):
            super().load_model_state_dict(*args, **kwargs)

    def load_optimizer_state_dict(self, *args: Any) -> None:
        with self.peaks.during("optimizer"):
            super().load_optimizer_state_dict(*args)


class Saves(pl.Callback):
    def __init__(self, peaks: Peaks, path: str) -> None:
        self.peaks, self.path = peaks, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        with self.peaks.during("save"):
            trainer.save_checkpoint(self.path)


def give_back_what_is_freed() -> None:
    """Else the C library keeps freed blocks, or not, by what other threads happen to have put behind them."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD, see docs/nvme.md


def save_from_files(form: str) -> float:
    give_back_what_is_freed()
    peaks = Peaks()
    offload = OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path="files")
    strategy = ZeroStrategy(stage=3, state_dict_type=form, offload=offload)  # type: ignore[arg-type]
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, callbacks=[Saves(peaks, f"{form}.ckpt")])
    trainer.fit(Large(), DataLoader(RandomData(2, WIDTH), batch_size=2))
    return peaks.growth["save"]


def test_saving_what_rests_in_files_takes_a_parameter_or_a_unit() -> None:
    """A folder, by parameter: read, and copied; a file, by unit, into files that are mapped."""
    [sharded] = run(1, save_from_files, "sharded", timeout=120)
    assert sharded < 2 * LAYER + SLACK
    [full] = run(1, save_from_files, "full", timeout=120)
    assert full < 3 * UNIT + SLACK


def save_and_load(folder: str) -> dict[str, dict[str, float]]:
    give_back_what_is_freed()
    found = {}
    for form in FORMS:
        peaks = Peaks()
        for epochs in (1, 2):
            path = f"{folder}/{form}.ckpt" if epochs > 1 else None
            strategy = Watched(peaks, stage=3, state_dict_type=form)
            trainer = make_trainer(".", strategy=strategy, max_epochs=epochs)
            module = Large()
            trainer.fit(module, DataLoader(RandomData(2, WIDTH)), ckpt_path=path)
            if path is None:
                with peaks.during("save"):
                    trainer.save_checkpoint(f"{folder}/{form}.ckpt")
            del trainer, module, strategy
        found[form] = peaks.growth
        of_sharded = Peaks()
        for offload in (False, OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path=folder)):
            trainer = make_trainer(".", strategy=Watched(of_sharded, stage=3, offload=offload, state_dict_type=form))
            trainer.validate(Large(on_meta=True), DataLoader(RandomData(2, WIDTH)), f"{folder}/{form}.ckpt")
            found[f"{form}, {'in files' if offload else 'in memory'}"] = {**of_sharded.growth}
            del trainer
    return found


def test_saving_and_loading_take_no_more_than_the_shards_and_a_unit(tmp_path: Path) -> None:
    assert MODEL > 200
    results = run(2, save_and_load, str(tmp_path), timeout=120)
    for rank, found in enumerate(results):
        for form in FORMS:
            growth = found[form]
            assert growth["read"] + growth["weights"] < UNIT + SLACK, (rank, form, growth)
            assert growth["optimizer"] < MODEL / 2 + UNIT + SLACK, (rank, form, growth)
            # Of a module that is sharded already: a unit, and one tensor of a folder at a time.
            for where in ("in memory", "in files"):
                growth = found[f"{form}, {where}"]
                assert growth["read"] + growth["weights"] < 2 * UNIT + SLACK, (rank, form, where, growth)
        # Rank 0 holds what it writes to a file, once; after fit the module is whole on every rank anyway.
        # A rank packs its half of a unit's momentum to send it, maybe before the other has taken the one before.
        assert found["full"]["save"] < (MODEL if rank == 0 else 0) + 2 * UNIT + SLACK, (rank, found)
        assert found["sharded"]["save"] < SLACK, (rank, found)
    peaks = Peaks()
    with peaks.during("consolidate"):
        consolidate(tmp_path / "sharded.ckpt", tmp_path / "one.ckpt")
    assert peaks.growth["consolidate"] < UNIT + SLACK, peaks.growth
    assert (tmp_path / "one.ckpt").stat().st_size == pytest.approx(2e6 * MODEL, rel=0.01)
