"""Disks that are full, files that are cut short, runs that are killed: an error that says so, and nothing left behind."""

import os
import resource
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig, ZeroStrategy
from tests.harness import WorldError, make_trainer, run
from tests.parity import RandomData, rank
from tests.strategy.test_transfers import Simple

UNIT_MB = 64 * 64 * 4 / 2**20


class Does(pl.Callback):
    """Something at the end of the third batch; and remembers the weights as they were then."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        self.weights = [p.detach().clone() for p in module.parameters()]
        folder = trainer.strategy._tiers.main.folder
        if self.what == "cuts":
            for name in os.listdir(folder):
                os.truncate(os.path.join(folder, name), 0)
        elif self.what == "deletes":
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
        elif self.what == "locks gradients":  # what is read goes on being read
            file = trainer.strategy._tiers.files._files["gradients"]
            os.dup2(os.open(file.path, os.O_RDONLY), file.descriptor)
        elif self.what == "fills the disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif self.what.startswith("flips") and rank() == trainer.world_size - 1:
            with open(os.path.join(folder, self.what.split()[1]), "r+b") as file:
                file.seek(4096 + 77)
                byte = file.read(1)[0]
                file.seek(4096 + 77)
                file.write(bytes([byte ^ 1]))
                file.flush()
                os.fsync(file.fileno())
        elif self.what == "raises":
            raise KeyError("on purpose")
        elif self.what == "stops":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)


def fit(what: str, path: str, stage: int = 2, precision: str = "32-true", **kwargs: Any) -> tuple[Any, str, str]:
    """The error; whether the weights are those of the third batch, if they can be read, and what is left."""
    torch.manual_seed(0)
    offload = OffloadConfig(optimizer="nvme", nvme_path=path, **kwargs)
    strategy = ZeroStrategy(stage=stage, unit_size_mb=UNIT_MB, offload=offload)
    module, does = Simple(), Does(what)
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, callbacks=[does], precision=precision)
    error: BaseException | None = None
    try:
        trainer.fit(module, DataLoader(RandomData(12 * trainer.world_size, 64), batch_size=2))
    except (OSError, RuntimeError, KeyError, SIGTERMException) as caught:
        error = caught
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    same = None
    if does.weights and not isinstance(error, (OSError, RuntimeError)):
        same = all(map(torch.equal, does.weights, module.parameters()))
    elif does.weights:
        with suppress(RuntimeError):
            same = all(map(torch.equal, does.weights, module.parameters()))
    left = [name for name in os.listdir(path) if f"rank{rank()}-" in name] if os.path.isdir(path) else None
    return f"{type(error).__name__}: {error}", same, left  # type: ignore[return-value]


def several(cases: list[tuple[str, int, str]], path: str) -> list[Any]:
    return [fit(what, path, stage, precision) for what, stage, precision in cases]


def test_errors_of_the_disk_name_the_file_and_change_nothing(tmp_path: Path) -> None:
    cases = [("cuts", 2, "32-true"), ("cuts", 3, "bf16-true"), ("fills the disk", 1, "bf16-mixed")]
    [(cut, cut_16, full)] = run(1, several, cases, str(tmp_path))
    size = 4 * 64 * 64
    error, same, left = cut
    assert f"reading {size} bytes at offset 0 ended after 0: '{tmp_path}/lightning_zero-rank0-0/0.exp_avg" in error
    assert (same, left) == (True, [])
    # What steps compute with is whole at stage 3 only by its masters, which the file has lost.
    assert f"reading {size} bytes at offset 0 ended after 0: '{tmp_path}/lightning_zero-rank0-0/master'" in cut_16[0]
    assert cut_16[2] == []
    # Written behind: the first unit has new weights by then.
    error, same, left = full
    assert f"File too large: writing {size} bytes" in error
    assert (same, left) == (None, [])


def test_gradients_that_cannot_be_written_end_the_run_before_the_step(tmp_path: Path) -> None:
    [(error, same, left)] = run(1, partial(fit, parameters="nvme"), "locks gradients", str(tmp_path), 3)
    assert f"Bad file descriptor: writing {4 * 64 * 64} bytes at offset " in error
    assert f"{tmp_path}/lightning_zero-rank0-0/gradients" in error
    assert (same, left) == (True, [])


def test_files_deleted_under_a_run_stay_its_own(tmp_path: Path) -> None:
    [[nothing, deleted]] = run(1, several, [("nothing", 2, "32-true"), ("deletes", 2, "32-true")], str(tmp_path))
    assert nothing[0] == deleted[0] == "NoneType: None"
    assert deleted[2] == []


def flipped(path: str) -> list[Any]:
    return [fit(f"flips {name}", path, 2, "bf16-true", checksums=True) for name in ("master", "0.exp_avg_sq")]


@pytest.mark.parametrize("world", [1, 2])
def test_a_bit_that_the_disk_has_flipped_ends_the_run(world: int, tmp_path: Path) -> None:
    results = run(world, flipped, str(tmp_path))
    last = world - 1
    told = "reading {} bytes at offset {}: the bytes 4096 to 8192 of the file are not those that were written (checksum)"
    size = 4 * 64 * 64 // world
    for number, name in enumerate(("master", "0.exp_avg_sq")):
        offset = 0 if size > 4096 else 4096
        for rank_, by_name in enumerate(results):
            error, _, left = by_name[number]
            assert told.format(size, offset) in error, error
            assert f"'{tmp_path}/lightning_zero-rank{last}-0/{name}'" in error
            assert left == []
            assert error.startswith("OSError" if rank_ == last else f"RuntimeError: Rank {last} could not carry out")
    if world == 1:
        error, _, left = run(1, partial(fit, parameters="nvme", checksums=True), "flips parameters", str(tmp_path), 3)[0]
        assert "the bytes 4096 to 8192 of the file are not those that were written (checksum)" in error
        assert f"'{tmp_path}/lightning_zero-rank0-0/parameters'" in error
        # A disk that is sound, and a run that does not look.
        nothing = run(1, partial(fit, parameters="nvme", checksums=True), "nothing", str(tmp_path), 3)[0]
        unseen = run(1, fit, "flips master", str(tmp_path), 2, "bf16-mixed")[0]
        assert (nothing[0], unseen[0]) == ("NoneType: None", "NoneType: None")


def no_room(path: str) -> tuple[Any, ...]:
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return fit("nothing", path)


def test_too_small_a_disk_is_an_error_at_set_up_on_all_ranks(tmp_path: Path) -> None:
    zero, one = run(2, no_room, str(tmp_path))
    reason = "File too large: there is no room for 8192 bytes, "
    assert f"RuntimeError: Rank 1 could not make its files. OSError: [Errno 27] {reason}" in zero[0]
    assert f"OSError: [Errno 27] {reason}" in one[0]
    assert f"are free: '{tmp_path}/lightning_zero-rank1-0/0.exp_avg'" in one[0]
    assert zero[2] == one[2] == []


def ends(path: str, what: str) -> list[Any]:
    return [fit(what, path), fit(what, path, 3, "bf16-mixed", parameters="nvme")]


def test_ten_runs_leave_nothing(tmp_path: Path) -> None:
    """Ended, stopped by an exception, by a signal; killed, with what that leaves removed by the next."""
    path = str(tmp_path)
    for what, error in (("nothing", "NoneType"), ("raises", "KeyError"), ("stops", "SIGTERMException")):
        for results in run(1, ends, path, what):
            assert [result[0].partition(":")[0] for result in results] == [error] * 2
            assert [result[2] for result in results] == [[], []]
    for _ in range(2):
        with pytest.raises(WorldError, match="died with exit code -9"):
            run(2, fit, "dies", path)
        assert os.listdir(path)
    run(1, fit, "nothing", path)
    assert os.listdir(path) == []


# -- traffic -----------------------------------------------------------------------------------------------------------


class Counts(pl.Callback):
    """Bytes that go to and from files in each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.before = (0, 0)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        queue = trainer.strategy._tiers.main.queue
        now = queue.read_bytes, queue.written_bytes
        self.steps.append((now[0] - self.before[0], now[1] - self.before[1]))
        self.before = now


def traffic(cases: list[tuple[int, str, str | None]]) -> list[list[tuple[float, float]]]:
    """By case and step, bytes read and written per parameter of the rank's."""
    found = []
    for stage, precision, parameters in cases:
        offload = OffloadConfig(optimizer="nvme", parameters=parameters, nvme_path=".")  # type: ignore[arg-type]
        strategy = ZeroStrategy(stage=stage, unit_size_mb=UNIT_MB, offload=offload)
        counts = Counts()
        trainer = make_trainer(".", strategy=strategy, max_epochs=1, callbacks=[counts], precision=precision)
        trainer.fit(Simple(), DataLoader(RandomData(24, 64), batch_size=2))
        share = 4 * 64 * 64 / trainer.world_size
        found.append([(read / share, written / share) for read, written in counts.steps])
    return found


def test_a_step_touches_each_byte_once_in_each_direction() -> None:
    """Master, exp_avg and exp_avg_sq are 12 bytes; in 32-bit the master is the parameter shard, in memory or in a file.
    Of parameters in files all units are read in forward and two of four in backward (the last is still there, the first
    layer's weight is not needed), and what has changed is written. With all in files so are gradients, once each way."""
    cases = [(1, "32-true", None), (2, "bf16-mixed", None), (3, "bf16-true", None), (3, "bf16-true", "nvme"), (3, "32-true", "nvme")]
    expected = [(8.0, 8.0), (12.0, 12.0), (12.0, 12.0), (14.0 + 1.5 * 2, 14.0 + 2), (16.0 + 1.5 * 4, 16.0)]
    for found in run(2, traffic, cases):
        for case, steps, step in zip(cases, found, expected, strict=True):
            assert set(steps[1:]) == {step}, case
