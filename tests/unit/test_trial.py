"""Trying whether something makes steps shorter, by times that are made up."""

import pytest

from lightning_zero.offload.trial import Trial


class Steps:
    """Runs steps that take ``seconds`` without it and ``with_it`` with it; remembers which ones had it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.trial = Trial(clock=lambda: self.now)
        self.had_it: list[bool] = []

    def run(self, count: int, seconds: float, with_it: float, fails: bool = False) -> int:
        """How many of them had it."""
        before = sum(self.had_it)
        for _ in range(count):
            self.had_it.append(self.trial.is_on)
            self.now += with_it if self.trial.is_on else seconds
            if fails:
                self.trial.failed()
            self.trial.step_ended()
        return sum(self.had_it) - before


def test_what_pays_stays_on_but_for_a_look_now_and_then() -> None:
    steps = Steps()
    assert steps.run(7, 1.0, 0.8) == 0
    assert steps.run(1000, 1.0, 0.8) >= 970


@pytest.mark.parametrize("with_it", [0.995, 1.0, 1.3])
def test_what_does_not_pay_is_tried_ever_more_seldom(with_it: float) -> None:
    steps = Steps()
    assert 0 < steps.run(100, 1.0, with_it) <= 24
    assert steps.run(1000, 1.0, with_it) <= 30


def test_what_fails_is_off_after_one_step() -> None:
    steps = Steps()
    assert steps.run(1000, 1.0, 0.5, fails=True) <= 9


def test_it_comes_back_when_it_pays_again() -> None:
    steps = Steps()
    steps.run(1000, 1.0, 1.3)
    assert steps.run(1000, 1.0, 0.8) >= 700
    assert steps.run(1000, 1.0, 1.3) <= 300  # noticed at the next look


def test_a_slow_step_now_and_then_changes_nothing() -> None:
    """Validation, a checkpoint: the median does not see them."""
    steps = Steps()
    steps.run(8, 1.0, 0.8)
    for _ in range(10):
        assert steps.run(9, 1.0, 0.8) == 9
        assert steps.run(1, 50.0, 50.0) == 1
