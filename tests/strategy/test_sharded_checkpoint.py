"""Folders of shards: the same content as the full file, readable by Lightning's own tools, resumed by everybody.

All ranks train on the same batches, so that the unbroken run is the same one at any rank count.
"""

import os
import pickle
import resource
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import saving
from lightning_zero.checkpoint.consolidate import consolidate
from tests.harness import make_trainer, run
from tests.parity import TINY_UNIT_MB, RandomData, Recorder, rank
from tests.strategy.test_checkpoint import (
    WIDTH,
    Hooked,
    Model,
    assert_same_content,
    load,
    loader,
    saver,
    without_folder,
)


class Wide(Model):
    """Boxes of many shapes: a channels-last kernel of four dimensions beside what the base class has."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(7, 4, 5, 3).to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.kernel.mean())

    def configure_optimizers(self) -> Any:
        [optimizer], schedulers = super().configure_optimizers()
        optimizer.add_param_group({"params": [self.kernel], "lr": 0.03})
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02, 0.03], total_steps=20)
        return [optimizer], [{**schedulers[0], "scheduler": scheduler}]


# name -> precision and settings of the strategy that saves
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "1": ("32-true", {"stage": 1}),
    "2": ("32-true", {"stage": 2, "unit_size_mb": TINY_UNIT_MB}),
    "3": ("32-true", {"stage": 3}),
    "half": ("bf16-true", {"stage": 3}),
    "mixed": ("bf16-mixed", {"stage": 2}),
    "delayed": ("32-true", {"stage": 3, "offload": True, "delayed_update": 1}),
}


def train(
    make: Any, precision: str, settings: dict[str, Any], ckpt_path: str | None = None, data: Any = None, **kwargs: Any
) -> tuple[pl.Trainer, dict[str, Any]]:
    """Train and return what must not depend on how."""
    torch.manual_seed(5 + rank())
    module, recorder = make(), Recorder()
    trainer = make_trainer(
        ".", strategy=ZeroStrategy(**settings), precision=precision, callbacks=[recorder, *kwargs.pop("callbacks", [])],
        use_distributed_sampler=False, num_sanity_val_steps=0, **{"max_epochs": 2, "enable_checkpointing": True, **kwargs},
    )  # fmt: skip
    trainer.fit(module, data or loader(), loader(4), ckpt_path=ckpt_path)
    weights = {k: v.detach().clone() for k, v in module.state_dict().items()}
    return trainer, {"losses": recorder.losses, "weights": weights, "rates": getattr(module, "rates", [])}


def save_in_both_forms(folder: str) -> dict[str, Any]:
    """Half of a run, saved in the middle of it and at its end as file and folder; and the unbroken run."""
    unbroken = {}
    for name, (precision, settings) in SAVED.items():
        for form in ("full", "sharded"):
            callbacks = [saver(f"{folder}/{name}/{form}", every_n_train_steps=2)]
            trainer, _ = train(Wide, precision, {**settings, "state_dict_type": form}, max_epochs=1, callbacks=callbacks)
            trainer.save_checkpoint(f"{folder}/{name}/{form}/after.ckpt")
            trainer.save_checkpoint(f"{folder}/{name}/{form}/weights.ckpt", weights_only=True)
        unbroken[name] = train(Wide, precision, settings)[1]
    return unbroken


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run(2, save_in_both_forms, str(folder))[0]


FILES = ("after.ckpt", "epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "weights.ckpt")


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def test_lightning_consolidates_to_the_full_file(saved: tuple[Path, Any], tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

    folder, _ = saved
    for name in SAVED:
        assert sorted(p.name for p in (folder / name / "sharded").iterdir()) == list(FILES)
        for file in FILES:
            shards = folder / name / "sharded" / file
            assert sorted(p.name for p in shards.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
            wanted = without_folder(load(folder / name / "full" / file))
            got = _format_checkpoint(_load_distributed_checkpoint(shards))
            by_number(got, wanted)
            assert_same_content(without_folder(got), wanted)


def by_number(consolidated: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Lightning's tool leaves optimizer state under the parameters' names."""
    for state, own in zip(consolidated.get("optimizer_states", []), wanted.get("optimizer_states", []), strict=True):
        names = [name for group in state["param_groups"] for name in group["params"]]
        numbers = [number for group in own["param_groups"] for number in group["params"]]
        number_of = dict(zip(names, numbers, strict=True))
        state["state"] = {number_of[name]: entries for name, entries in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [number_of[name] for name in group["params"]]


def test_names_shapes_and_bytes(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    for name in ("1", "2", "3"):
        file = load(folder / name / "full" / "after.ckpt")
        found = metadata(folder / name / "sharded" / "after.ckpt")
        for key, value in file["state_dict"].items():
            for top in ("model", "state_dict"):
                stored = found.state_dict_metadata[f"{top}.{key}"]
                assert (stored.size, stored.properties.dtype) == (value.shape, value.dtype)
                assert sum(chunk.sizes.numel() for chunk in stored.chunks) == value.numel()
        # Every byte once: ties and second names take none, no rank writes what another has.
        numel = sum({v.data_ptr(): v.numel() for v in file["state_dict"].values()}.values())
        numel += sum(v.numel() for s in file["optimizer_states"][0]["state"].values() for v in s.values())
        parts = {(info.relative_path, info.offset) for info in found.storage_data.values()}
        tensors = [m for m in found.storage_data if m.offset is not None and m.fqn.startswith(("model", "optimizer"))]
        assert len(parts) < len(found.storage_data)
        boxes = {(found.storage_data[m].relative_path, found.storage_data[m].offset): sizes_of(found, m) for m in tensors}
        assert sum(boxes.values()) == numel
    kernel = metadata(folder / "3" / "sharded" / "after.ckpt").state_dict_metadata["model.kernel"]
    assert len(kernel.chunks) > 2, "the cut was to go through the kernel"


def sizes_of(found: Any, index: Any) -> int:
    chunks = found.state_dict_metadata[index.fqn].chunks
    return next(c.sizes.numel() for c in chunks if c.offsets == index.offset)


# -- resuming --------------------------------------------------------------------------------------------------------


def resume(folder: str) -> list[tuple[str, dict[str, Any]]]:
    """From either form, to other stages, with and without offload."""
    results = []
    for name, file, precision, settings in (
        ("1", "sharded/after.ckpt", "32-true", {"stage": 3, "unit_size_mb": TINY_UNIT_MB}),
        ("2", "sharded/epoch=0-step=4.ckpt", "32-true", {"stage": 1, "offload": True}),
        ("3", "sharded/after.ckpt", "32-true", {"stage": 2, "state_dict_type": "sharded"}),
        ("3", "full/after.ckpt", "32-true", {"stage": 3, "state_dict_type": "sharded"}),
        ("half", "sharded/after.ckpt", "bf16-true", {"stage": 2}),
        ("mixed", "sharded/epoch=0-step=4.ckpt", "bf16-mixed", {"stage": 3}),
    ):
        results.append((name, train(Wide, precision, settings, f"{folder}/{name}/{file}")[1]))
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resume_at_any_rank_count_and_stage(
    world: int, saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    folder, unbroken = saved
    for results in run(world, resume, str(folder)):
        assert len(results) == 6
        for name, got in results:
            wanted = {**unbroken[name], **{k: unbroken[name][k][4:] for k in ("losses", "rates")}}
            assert len(got["losses"]) == 4
            exact = world == 2 or (world == 1 and name != "half")
            tolerance = {} if exact and name != "2" else {"rtol": 1e-5, "atol": 1e-6}
            if name in ("half", "mixed") and world != 2:
                tolerance = {"rtol": 2e-2, "atol": 2e-2}
            assert_same_content(got, wanted, **tolerance)


class Resumable(DataLoader):
    """Goes on where it was, as loaders can that Lightning keeps the state of."""

    done = skipped = 0

    def __iter__(self) -> Iterator[Tensor]:
        first, self.skipped = self.skipped, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self.done = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["done"]


def resumable() -> Resumable:
    return Resumable(RandomData(8, WIDTH), batch_size=2)


def save_in_mid_epoch(folder: str) -> dict[str, Any]:
    settings = {"stage": 2, "state_dict_type": "sharded"}
    callbacks = [saver(folder, every_n_train_steps=3)]
    return train(Wide, "32-true", settings, data=resumable(), callbacks=callbacks)[1]


def resume_in_mid_epoch(folder: str) -> dict[str, Any]:
    """One process that shards nothing."""
    return train(Wide, "32-true", {"stage": 3}, f"{folder}/epoch=0-step=3.ckpt", data=resumable())[1]


def test_resume_in_mid_epoch_with_the_state_of_the_loader(tmp_path: Path) -> None:
    unbroken = run(2, save_in_mid_epoch, str(tmp_path))[0]
    got = run(1, resume_in_mid_epoch, str(tmp_path))[0]
    assert len(got["losses"]) == 5
    assert_same_content(got, {**unbroken, **{k: unbroken[k][3:] for k in ("losses", "rates")}})


# -- exchange with torch's FSDP --------------------------------------------------------------------------------------


class Plain(pl.LightningModule):
    """What FSDP of both generations can shard on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 7), nn.BatchNorm1d(7), nn.Linear(7, 5), nn.Linear(5, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch), batch.roll(1, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def their_strategy(kind: str) -> tuple[Any, Any]:
    """Lightning's strategy, which refuses CPUs, with what its save and load look at; and its class."""
    torch.manual_seed(77)
    module = Plain()
    if kind == "fsdp2":
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        model: Any = module
    else:
        model = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    lightning_module = SimpleNamespace(
        strict_loading=True, trainer=SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
    )
    stand_in = SimpleNamespace(
        model=model, optimizers=[optimizer], lightning_module=lightning_module, broadcast=lambda x: x,
        global_rank=rank(), _state_dict_type="sharded", _save_distributed_checkpoint=True,
    )  # fmt: skip
    return stand_in, ModelParallelStrategy if kind == "fsdp2" else FSDPStrategy


def to_and_fro(folder: str) -> dict[str, Any]:
    """Ours to theirs, theirs to ours: half of a run here, the rest after the state has been through FSDP."""
    results = {"unbroken": train(Plain, "32-true", {"stage": 3})[1]}
    settings = {"stage": 3, "state_dict_type": "sharded"}
    train(Plain, "32-true", settings, max_epochs=1)[0].save_checkpoint(f"{folder}/ours")
    for kind in ("fsdp1", "fsdp2"):
        theirs, cls = their_strategy(kind)
        meta = cls.load_checkpoint(theirs, f"{folder}/ours")
        checkpoint = {
            **meta,
            "state_dict": cls.lightning_module_state_dict(theirs),
            "optimizer_states": [cls.optimizer_state(theirs, theirs.optimizers[0])],
        }
        cls.save_checkpoint(theirs, checkpoint, f"{folder}/{kind}")
        for stage in (1, 3):
            results[f"{kind}-{stage}"] = train(Plain, "32-true", {"stage": stage}, f"{folder}/{kind}")[1]
    return results


def test_exchange_with_fsdp_of_both_generations(tmp_path: Path) -> None:
    for results in run(2, to_and_fro, str(tmp_path)):
        unbroken = results.pop("unbroken")
        assert set(results) == {"fsdp1-1", "fsdp1-3", "fsdp2-1", "fsdp2-3"}
        for got in results.values():
            assert_same_content(got["weights"], unbroken["weights"])
            assert got["losses"] == unbroken["losses"][4:]
    files = {}
    for name in ("ours", "fsdp1", "fsdp2"):
        consolidate(tmp_path / name, tmp_path / f"{name}.ckpt")
        files[name] = load(tmp_path / f"{name}.ckpt")
        files[name]["optimizer_states"][0]["param_groups"][0].pop("initial_lr", None)  # theirs had no scheduler
        assert_same_content(files[name], files["ours"])
    assert files["ours"]["optimizer_states"][0]["state"][0]["exp_avg"].shape == (7, 6)


# -- in the background -----------------------------------------------------------------------------------------------


class HeldBack(pl.Callback):
    """Saves of the background wait until this is over; in the meantime training goes on."""

    def __init__(self) -> None:
        self.go, self.seen = threading.Event(), None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy._folders._worker.submit(self.go.wait)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 5:  # before another rank can be past step 6
            self.seen = os.path.exists(trainer.checkpoint_callback.dirpath)
        if trainer.global_step == 6:
            self.go.set()


def save_in_background(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for form in ("sharded", "full"):
        held = HeldBack()
        callbacks = [saver(f"{folder}/{form}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max"), held]
        if form == "full":
            callbacks.pop()
        settings = {"stage": 3, "state_dict_type": form, "checkpoint_io": AsyncCheckpointIO()}
        results[form] = train(Wide, "32-true", settings, callbacks=callbacks)[1]
        results[form, "seen"] = held.seen
    return results


class RanksApart(pl.Callback):
    """At the second save rank 1 knows that the first one has failed, and rank 0 does not."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if rank() == 0:
            original = saving.save_folder

            def slow(*args: Any) -> None:
                try:
                    original(*args)
                finally:
                    time.sleep(1.0)

            saving.save_folder = slow

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3 and rank() == 1:
            futures.wait(trainer.strategy._folders._pending)


def fail_in_background(folder: str) -> str:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, old[1]))
    settings = {"stage": 3, "state_dict_type": "sharded", "checkpoint_io": AsyncCheckpointIO()}
    with pytest.raises(OSError, match="could not be written: File too large") as error:
        train(Wide, "32-true", settings, callbacks=[saver(folder, every_n_train_steps=2), RanksApart()])
    return str(error.value)


def test_saving_in_the_background(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    unbroken = saved[1]
    for results in run(2, save_in_background, str(tmp_path)):
        # Two saves were held back while steps 3 to 5 changed the weights.
        assert results["sharded", "seen"] is False
        for form in ("sharded", "full"):
            assert_same_content(results[form], unbroken["3"])
            assert sorted(os.listdir(tmp_path / form)) == ["epoch=1-step=6.ckpt", "epoch=1-step=8.ckpt"]
    for step in (6, 8):
        name = f"epoch=1-step={step}.ckpt"
        consolidate(tmp_path / "sharded" / name, tmp_path / name)
        assert_same_content(without_folder(load(tmp_path / name)), without_folder(load(tmp_path / "full" / name)))
    messages = run(2, fail_in_background, str(tmp_path / "failed"))
    assert messages[0] == messages[1]


class Elsewhere(TorchCheckpointIO):
    """A plugin of the user."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.saved.append(os.path.basename(path))
        super().save_checkpoint(checkpoint, path)


def with_a_plugin(folder: str) -> list[str]:
    io = Elsewhere()
    train(Wide, "32-true", {"stage": 3, "checkpoint_io": io}, callbacks=[saver(folder, every_n_train_steps=4)])
    settings = {"stage": 3, "checkpoint_io": AsyncCheckpointIO(io), "state_dict_type": "sharded"}
    with pytest.raises(ValueError, match="not through a CheckpointIO: leave Elsewhere out, or use state_dict_type='full'"):
        train(Wide, "32-true", settings)
    return io.saved


def test_a_plugin_of_the_user_is_used_or_refused(tmp_path: Path) -> None:
    assert run(2, with_a_plugin, str(tmp_path)) == [["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"], []]


# -- hooks of the user and callbacks that look into checkpoints ------------------------------------------------------


class Looking(Hooked):
    """Keeps what its hooks see."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["again"] = checkpoint["state_dict"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.loaded = {k: v.detach().clone() for k, v in checkpoint["again"].items() if isinstance(v, Tensor)}
        for key, value in self.loaded.items():
            assert torch.equal(value, checkpoint["state_dict"][key]), key


def look_into(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, make, averages in (("hooks", Looking, False), ("average", Wide, True)):
        for form, stage in (("full", 2), ("sharded", 2), ("sharded", 3)):
            settings = {"stage": stage, "state_dict_type": form, "unit_size_mb": TINY_UNIT_MB}
            averaging = lambda: [EMAWeightAveraging(decay=0.7)] if averages else []  # noqa: B023, E731
            path = f"{folder}/{name}-{form}-{stage}.ckpt"
            train(make, "32-true", settings, max_epochs=1, callbacks=[*averaging(), SavesAtTheEnd(path)])
            results[name, form, stage] = train(make, "32-true", settings, path, callbacks=averaging())[1]
        results[name, "unbroken", 2] = train(make, "32-true", {"stage": 2}, callbacks=averaging())[1]
    return results


class Edits(Wide):
    """Whose hook changes a weight while it is being saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with torch.no_grad():
            self.half_frozen.bias.fill_(7.0)


def edit_while_saving(folder: str) -> None:
    for stage in (1, 2, 3):
        settings = {"stage": stage, "state_dict_type": "sharded", "unit_size_mb": TINY_UNIT_MB}
        train(Edits, "32-true", settings, max_epochs=1, callbacks=[SavesAtTheEnd(f"{folder}/{stage}.ckpt")])


def test_what_a_hook_changes_while_saving_is_saved(tmp_path: Path) -> None:
    run(2, edit_while_saving, str(tmp_path))
    for stage in (1, 2, 3):
        consolidate(tmp_path / f"{stage}.ckpt", tmp_path / f"{stage}.pt")
        assert load(tmp_path / f"{stage}.pt")["state_dict"]["half_frozen.bias"].unique().tolist() == [7.0]


class SavesAtTheEnd(pl.Callback):
    """While averages and shards are still there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_hooks_and_averages(tmp_path: Path) -> None:
    for results in run(2, look_into, str(tmp_path)):
        for (name, form, _), got in results.items():
            unbroken = results[name, "unbroken", 2]
            assert_same_content(got["weights"], unbroken["weights"])
            assert form == "unbroken" or got["losses"] == unbroken["losses"][4:]
    for stage in (2, 3):
        consolidate(tmp_path / f"hooks-sharded-{stage}.ckpt", tmp_path / f"{stage}.ckpt")
        assert_same_content(without_folder(load(tmp_path / f"{stage}.ckpt")), without_folder(load(tmp_path / "hooks-full-2.ckpt")))
