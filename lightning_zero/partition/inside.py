"""What users look at inside a step, past the modules."""

import torch

from lightning_zero.partition.hooks import in_backward
from lightning_zero.partition.schedule import Schedule
from lightning_zero.partition.unit import Unit


class InsideReads:
    """Units whose master weights are shown inside a step.

    Where steps compute with 16-bit weights of fp32 ones (mixed precision), code that touches a parameter itself while
    gradients are off gets the master weights, as outside of a step: a momentum encoder that is updated there, or a weight
    that is clamped, would lose small changes in 16 bits. Modules, and whatever is differentiated, get the 16-bit weights, for
    which what was looked at is given up first, its edits kept.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.units: list[Unit] = []
        """Those that are being looked at."""

    def shows(self, unit: Unit) -> bool:
        """Whether a parameter of ``unit`` that is touched now shows its master weights."""
        return (
            unit.face is not unit.buffer
            and self._schedule.active
            and not torch.is_grad_enabled()
            and not in_backward()
            and not unit.updating
            and not unit.buffer.is_coded
        )

    def look(self, unit: Unit) -> None:
        """Unshard the unit's face."""
        self._schedule.want(unit, face=True)
        self.units.append(unit)

    def settle(self) -> None:
        """Let edits take effect, and give up what was looked at."""
        units, self.units = self.units, []
        for unit in units:
            unit.keep_exact_edits()
            unit.face.reshard()
