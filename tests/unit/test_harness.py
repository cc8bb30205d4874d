"""The harness reports what went wrong, and on which rank."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.harness import WorldError, fake_world, make_trainer, run


def sum_of_ranks(offset: float) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total


def rank_and_cwd() -> tuple[int, str]:
    return dist.get_rank(), os.getcwd()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("only here")
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def skip_collective_on(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()


def read_variable(name: str) -> str | None:
    return os.environ.get(name)


def print_rank() -> None:
    print("printed by", dist.get_rank())


def random_number() -> float:
    return torch.rand(()).item()


def fit_boring(root: str) -> tuple[int, int, torch.Tensor]:
    trainer = make_trainer(root, strategy="ddp", max_steps=2, limit_val_batches=1)
    model = BoringModel()
    trainer.fit(model)
    return trainer.global_rank, trainer.world_size, model.layer.weight.detach()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_in_the_order_of_ranks(world: int) -> None:
    assert [rank for rank, _ in run(world, rank_and_cwd)] == list(range(world))


def test_tensors_are_sent_and_returned() -> None:
    first, second = run(2, sum_of_ranks, 0.5)
    assert first.tolist() == second.tolist() == [2.0]


def test_files_of_a_world_go_away() -> None:
    for _, folder in run(2, rank_and_cwd):
        assert not os.path.exists(folder)


def test_each_world_is_fresh() -> None:
    first, second = run(2, random_number)
    assert first == second == run(1, random_number)[0]


def test_ranks_see_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_PROBE", "seen")
    assert run(1, read_variable, "HARNESS_PROBE") == ["seen"]
    monkeypatch.delenv("HARNESS_PROBE")
    assert run(1, read_variable, "HARNESS_PROBE") == [None]


def test_output_of_ranks_is_output_of_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    run(2, print_rank)
    assert [line for line in capsys.readouterr().out.splitlines() if "printed" in line] == [
        "printed by 0",
        "printed by 1",
    ]


def test_an_exception_is_reported_with_its_traceback() -> None:
    with pytest.raises(WorldError, match=r"^rank 1 of 2 raised KeyError: 'only here'\n") as info:
        run(2, raise_on, 1)
    assert 'raise KeyError("only here")' in str(info.value)


def test_a_killed_rank_comes_before_those_it_takes_along() -> None:
    with pytest.raises(WorldError, match=r"^rank 1 of 3 died with exit code -9"):
        run(3, kill_on, 1)


def test_ranks_that_hang_are_named_with_their_stack() -> None:
    start = time.monotonic()
    with pytest.raises(WorldError, match=r"^rank 1 of 2 hung: no result after 3 s") as info:
        run(2, skip_collective_on, 0, timeout=3)
    assert time.monotonic() - start < 10
    assert "in skip_collective_on" in str(info.value)
    assert "rank 0" not in str(info.value)


def test_a_thread_left_behind_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.harness._EXIT_TIMEOUT", 1.0)
    with pytest.raises(WorldError, match="rank 0 of 1 returned but did not end"):
        run(1, leave_thread)


def test_a_trainer_joins_the_world(tmp_path: os.PathLike[str]) -> None:
    (rank_0, world_0, weight_0), (rank_1, world_1, weight_1) = run(2, fit_boring, tmp_path)
    assert (rank_0, rank_1, world_0, world_1) == (0, 1, 2, 2)
    assert torch.equal(weight_0, weight_1)


def test_a_fake_world_has_any_size() -> None:
    with fake_world(rank=3, world=1024):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 1024)
    assert not dist.is_initialized()
