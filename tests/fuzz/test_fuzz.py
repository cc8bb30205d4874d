"""A few of the runs that ``python -m tests.fuzz`` tries by the hundred."""

from pathlib import Path

import pytest

from tests.fuzz.resharding import Move, changes
from tests.fuzz.training import OPTIMIZERS, Plan, differences
from tests.harness import run

# By the number of ranks. They reach all that there is to draw, see below.
SEEDS = {1: [23, 14], 2: [38, 44, 143, 181, 1, 20], 3: [7, 28, 29]}


@pytest.mark.parametrize("world", SEEDS)
def test_random_modules_train_as_under_ddp(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    assert run(world, differences, SEEDS[world]) == [{}] * world


def test_much_is_drawn() -> None:
    plans = [Plan(seed) for seeds in SEEDS.values() for seed in seeds]
    assert len({plan.optimizer for plan in plans}) >= len(OPTIMIZERS) - 2
    assert {plan.manual for plan in plans} == {True, False}
    assert {plan.strategy["offload"] for plan in plans} == {True, False}
    assert {plan.trainer.get("accumulate_grad_batches", 1) for plan in plans} == {1, 2, 3}
    assert {hook for plan in plans for hook in plan.hooks} == {"clamp", "mask", "norms", "read", "noise", "assign"}


MOVES = {(1, 2): [0, 3], (2, 3): [7]}


@pytest.mark.parametrize("worlds", MOVES)
def test_checkpoints_go_from_ranks_to_ranks(worlds: tuple[int, int], tmp_path: Path) -> None:
    assert changes(str(tmp_path), [Move(seed, worlds) for seed in MOVES[worlds]]) == {}
