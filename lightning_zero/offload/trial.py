"""Finding out, from step to step, whether something that changes no results makes them shorter."""

import statistics
import time
from collections.abc import Callable

# Steps of a spell from which a time is taken, and the most steps of a spell.
_SPELL, _LONGEST = 5, 256
# A gain below this share of a step is taken for noise.
_GAIN = 0.01


class Trial:
    """Whether the coming step is to have it (``is_on``), from the times of the steps before.

    Steps come in spells without and with it. The first steps are without; then it is tried, and stays as long as the median
    time of a step is lower than it was without. What has not paid, or :meth:`failed`, is tried again after twice as many
    steps as the time before.
    """

    def __init__(self, spell: int = _SPELL, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_on = False
        self._spell = self._pause = spell
        self._clock = clock
        self._started: float | None = None
        self._times: list[float] = []
        """Of the steps of this spell but the first, which still feels the spell before."""
        self._steps = 0
        self._time_without = 0.0

    def step_ended(self) -> None:
        now = self._clock()
        if self._started is not None:
            self._steps += 1
            if self._steps > 1:
                self._times = [*self._times[-self._spell + 1 :], now - self._started]
        self._started = now
        if self.is_on:
            self._judge()
        elif self._steps > self._pause:
            self._time_without = statistics.median(self._times)
            self._switch(True)

    def failed(self) -> None:
        """What was tried in this step has been in vain."""
        if self.is_on:
            self._pause = min(2 * self._pause, _LONGEST)
            self._switch(False)

    def _judge(self) -> None:
        if self._steps == self._spell + 1 and statistics.median(self._times) > (1 - _GAIN) * self._time_without:
            self.failed()
        elif self._steps > _LONGEST:
            self._pause = self._spell
            self._switch(False)  # to see whether it still pays

    def _switch(self, is_on: bool) -> None:
        self.is_on, self._steps, self._times = is_on, 0, []
