"""What stands at a checkpoint's path is whole at every moment: kills, full disks, other kinds of entries, clean-up."""

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import beside
from lightning_zero.checkpoint.file import FileCheckpointIO
from tests.harness import WorldError, make_trainer, run
from tests.parity import make_strategy, rank
from tests.strategy.test_checkpoint import loader

WIDTH = 200
FORMS = ("full", "sharded")


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", loss := self.layer(batch.repeat(1, 40)[:, :WIDTH]).pow(2).mean(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fitted(form: str, ckpt_path: str | None = None, stage: int = 3, **kwargs: Any) -> pl.Trainer:
    strategy = ZeroStrategy(stage=stage, state_dict_type=form) if stage else make_strategy(0)
    settings = {"max_epochs": 1, "enable_checkpointing": "callbacks" in kwargs, "num_sanity_val_steps": 0, **kwargs}
    settings["use_distributed_sampler"] = False
    trainer = make_trainer(".", strategy=strategy, **settings)
    torch.manual_seed(1)
    trainer.fit(Model(), loader(), ckpt_path=ckpt_path)
    return trainer


# -- killed ----------------------------------------------------------------------------------------------------------


def die_while_saving(folder: str, form: str, victim: int, share: float) -> None:
    """Save, train on, and be killed at a certain byte of the second save."""
    path = f"{folder}/x.ckpt"
    trainer = fitted(form,)
    trainer.save_checkpoint(path)
    files = [Path(path)] if form == "full" else [Path(path) / f"__{victim}_0.distcp"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader())
    if rank() == victim:
        if share:
            # The limit on the size of files: passing it is a signal that kills, at exactly this byte.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            limit = int(share * sum(file.stat().st_size for file in files))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        else:
            threading.Thread(target=kill_when_begun, args=(folder,), daemon=True).start()
    trainer.save_checkpoint(path)


def kill_when_begun(folder: str) -> None:
    while not leftovers(folder):
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)


def leftovers(folder: str | Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".partial")]


def resume_and_save(folder: str, cases: list[tuple[str, int, float]]) -> list[int]:
    steps = []
    for i, (form, _, _) in enumerate(cases):
        trainer = fitted(form, f"{folder}/{i}/x.ckpt", max_epochs=2)
        trainer.save_checkpoint(f"{folder}/{i}/y.ckpt")
        steps.append(trainer.global_step)
    return steps


def test_a_kill_in_mid_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    cases = [("full", 0, 0.3), ("full", 0, 0), ("sharded", 0, 0.999), ("sharded", 1, 0)]
    for i, (form, victim, share) in enumerate(cases):
        folder = tmp_path / str(i)
        folder.mkdir()
        with pytest.raises(WorldError, match=f"rank {victim} of 2 died with exit code -{25 if share else 9}"):
            run(2, die_while_saving, str(folder), form, victim, share)
        names = set(os.listdir(folder))
        assert names - {"x.ckpt"} == set(leftovers(folder)) != names
        for name in leftovers(folder):
            os.utime(folder / name, (0, 0))  # the next save shall not think that its writer is about to lock it
    # The last one is removed by the rank that lives on, if it is given the time.
    assert len(list(tmp_path.glob("*/.lightning_zero-*.partial"))) in (3, 4)
    # Of the first save: it was at step 4, one more epoch ends at 8.
    assert run(2, resume_and_save, str(tmp_path), cases) == [[8] * len(cases)] * 2
    assert {tuple(sorted(os.listdir(tmp_path / str(i)))) for i in range(len(cases))} == {("x.ckpt", "y.ckpt")}


def test_what_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    alive = beside.Beside(tmp_path / "a.ckpt", "aa")
    with alive.begin_file() as file:
        file.write(b"half")
        os.utime(alive.partial, (0, 0))
        (tmp_path / ".lightning_zero-bb.partial").mkdir()
        os.utime(tmp_path / ".lightning_zero-bb.partial", (0, 0))
        FileCheckpointIO().save_checkpoint({"b": 1}, tmp_path / "b.ckpt")
        assert sorted(os.listdir(tmp_path)) == [os.path.basename(alive.partial), "b.ckpt"]
    alive.commit()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]
    assert (tmp_path / "a.ckpt").read_bytes() == b"half"


# -- the disk is full ------------------------------------------------------------------------------------------------


def fill_the_disk(folder: str) -> list[str]:
    """Every rank's message, by form and by which rank cannot write."""
    messages = []
    for form, victim in (("full", 0), ("sharded", 0), ("sharded", 1)):
        path = f"{folder}/{form}-{victim}"
        trainer = fitted(form)
        trainer.save_checkpoint(path)
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
        try:
            trainer.save_checkpoint(path)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert fitted("full", path, max_epochs=2).global_step == 8
    return messages


def test_a_full_disk_is_an_error_with_path_and_bytes_on_all_ranks(tmp_path: Path) -> None:
    for number, messages in enumerate(run(2, fill_the_disk, str(tmp_path))):
        assert len(messages) == 3
        for name, message in zip(("full-0", "sharded-0", "sharded-1"), messages, strict=True):
            own = "OSError" if name != "full-0" or number == 0 else "RuntimeError: Rank 0 could not save a checkpoint"
            assert message.startswith(own)
            assert f"The checkpoint '{tmp_path}/{name}' could not be written: File too large after" in message
            assert "bytes free. What stood there before is as it was." in message
    assert sorted(os.listdir(tmp_path)) == ["full-0", "sharded-0", "sharded-1"]


# -- other kinds of entries ------------------------------------------------------------------------------------------


def overwrite(folder: str) -> list[int]:
    path, steps = f"{folder}/last.ckpt", []
    for form in ("full", "sharded", "sharded", "full", "full"):
        fitted(form, path if steps else None, max_epochs=len(steps) + 1).save_checkpoint(path)
        assert os.path.isdir(path) == (form == "sharded")
        steps.append(fitted("full", path, max_epochs=len(steps) + 2).global_step)
    return steps


@pytest.mark.parametrize("exchanges", [True, False])
def test_files_and_folders_take_each_others_place(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(beside, "_exchange", lambda a, b: False)  # as file systems have it that cannot
    for i, kinds in enumerate((("file", "folder"), ("folder", "file"), ("folder", "folder"), ("file", "file"))):
        destination = tmp_path / str(i) / "x.ckpt"
        for number, kind in enumerate(kinds):
            one = beside.Beside(destination, f"{i}{number}")
            if kind == "file":
                with one.begin_file() as file:
                    file.write(b"%d" % number)
            else:
                one.begin_folder()
                Path(one.partial, ".metadata").write_text(str(number))
            one.commit()
            where = destination if kind == "file" else destination / ".metadata"
            assert where.read_text() == str(number)
            assert os.listdir(tmp_path / str(i)) == ["x.ckpt"]


def test_overwriting_in_a_run(tmp_path: Path) -> None:
    assert run(2, overwrite, str(tmp_path)) == [[8, 12, 16, 20, 24]] * 2
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_what_waits_between_two_renames_is_found(tmp_path: Path) -> None:
    io = FileCheckpointIO()
    io.save_checkpoint({"a": 1}, tmp_path / "x.ckpt")
    os.rename(tmp_path / "x.ckpt", beside.retired_path(str(tmp_path / "x.ckpt")))
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"a": 1}
    io.save_checkpoint({"a": 2}, tmp_path / "x.ckpt")
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"a": 2}
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").write_text("miaow")
    with pytest.raises(IsADirectoryError, match="is a folder that is no checkpoint"):
        FileCheckpointIO().save_checkpoint({}, tmp_path / "photos")
    with pytest.raises(ValueError, match="is a folder, but not a whole checkpoint"):
        FileCheckpointIO().load_checkpoint(tmp_path / "photos")
    assert (tmp_path / "photos" / "cat").read_text() == "miaow"


# -- Lightning's callbacks -------------------------------------------------------------------------------------------


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 7:
            raise ValueError("seventh")


def with_callbacks(folder: str) -> None:
    for name, stage, form in (("ddp", 0, "full"), ("full", 2, "full"), ("sharded", 3, "sharded")):
        place = f"{folder}/{name}"
        callbacks = [
            ModelCheckpoint(f"{place}/top", "{step}", monitor="loss", mode="max", save_top_k=1, save_last=True),
            ModelCheckpoint(f"{place}/link", "{step}", save_top_k=2, monitor="step", mode="max", every_n_train_steps=2,
                            save_last="link"),
            ModelCheckpoint(f"{place}/weights", "{step}", save_weights_only=True, every_n_train_steps=3, save_top_k=-1),
            OnExceptionCheckpoint(f"{place}/failed"),
            Fails(),
        ]  # fmt: skip
        with pytest.raises(ValueError, match="seventh"):
            fitted(form, None, stage, max_epochs=2, callbacks=callbacks)
        for path in ("top/last.ckpt", "link/last.ckpt", "failed/on_exception.ckpt"):
            fitted("full", f"{place}/{path}", max(stage, 1), max_epochs=4)


def test_callbacks_leave_what_they_leave_with_ddp(tmp_path: Path) -> None:
    run(2, with_callbacks, str(tmp_path))
    found = {
        name: sorted(str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).glob("*/*"))
        for name in ("ddp", "full", "sharded")
    }
    assert len(found["ddp"]) == 8
    assert found["full"] == found["sharded"] == found["ddp"]
    assert os.readlink(tmp_path / "sharded" / "link" / "last.ckpt") == "step=6.ckpt"
    names = {p.name for p in (tmp_path / "sharded" / "weights" / "step=3.ckpt").iterdir()}
    assert names == {".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp"}
    sizes = [sum(p.stat().st_size for p in (tmp_path / "sharded" / f).iterdir()) for f in
             ("weights/step=3.ckpt", "link/step=6.ckpt")]  # fmt: skip
    assert sizes[0] < 0.4 * sizes[1], "weights only has no optimizer state"


# -- file systems that fsspec knows ----------------------------------------------------------------------------------


def in_memory() -> list[int]:
    """The file system of one process."""
    steps = []
    for form in FORMS:
        path = f"memory://models/{form}.ckpt"
        trainer = fitted(form)
        for _ in range(2):
            trainer.save_checkpoint(path)
        steps.append(fitted("full", path, max_epochs=2).global_step)
    import fsspec

    fs = fsspec.filesystem("memory")
    assert sorted(fs.ls("/models", detail=False)) == ["/models/full.ckpt", "/models/sharded.ckpt"]
    fitted("full").strategy.remove_checkpoint("memory://models/sharded.ckpt")
    assert sorted(fs.ls("/models", detail=False)) == ["/models/full.ckpt"]
    return steps


def test_other_file_systems() -> None:
    assert run(1, in_memory) == [[8, 8]]


def by_url(folder: str) -> list[int]:
    steps = []
    for form in FORMS:
        path = f"file://{folder}/{form}.ckpt"
        trainer = fitted(form)
        trainer.save_checkpoint(path)
        steps.append(fitted("full", path, max_epochs=2).global_step)
    return steps


def test_local_paths_as_urls(tmp_path: Path) -> None:
    assert run(2, by_url, str(tmp_path)) == [[8, 8]] * 2
    assert sorted(os.listdir(tmp_path)) == ["full.ckpt", "sharded.ckpt"]
