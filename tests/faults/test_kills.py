"""A few of the kills that ``python -m tests.faults`` fires by the hundred."""

import signal

import pytest

from tests.faults.kills import SETTINGS, Range


@pytest.mark.parametrize("number", [1, 4])
def test_a_run_under_fire_ends_as_if_left_alone(number: int) -> None:
    report = Range(SETTINGS[number]).fire(seed=number, shots=2, signals=[signal.SIGKILL])
    assert report.faults == []
    assert report.attempts == 3
