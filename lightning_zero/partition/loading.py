"""Loading weights into a sharded module takes one unit at a time.

Parameters that somebody reads outside of a step stay whole until the next one, since he may hold on to them. Nobody holds
on to what ``load_state_dict`` writes to: when it comes to the next unit, the last one takes over what was loaded.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightning_zero.partition.outside import OutsideReads
from lightning_zero.partition.unit import Unit


class Loading:
    """Follows ``load_state_dict`` of a module, or of a part of it. All ranks load alike."""

    def __init__(
        self, where: Mapping[int, tuple[Unit, int]], outside: OutsideReads, computes: Callable[[], bool]
    ) -> None:
        self._where = where
        self._outside = outside
        self._computes = computes
        self._root: nn.Module | None = None
        """What is being loaded."""
        self._own: dict[int, Unit] = {}
        """The units that nobody had read before they were loaded."""

    def enter(self, module: nn.Module, *args: Any) -> None:
        """The parameters of ``module`` itself are about to be loaded; those of its submodules come later."""
        if self._computes():
            return
        self._root = self._root or module
        located = (self._where.get(id(parameter)) for parameter in module._parameters.values())
        units = {where[0].index: where[0] for where in located if where is not None}
        if units:
            self._settle(keep=units)
            self._own |= {index: unit for index, unit in units.items() if unit.face not in self._outside}

    def leave(self, module: nn.Module, *args: Any) -> None:
        """``module`` is loaded with all in it."""
        if module is self._root:
            self._root = None
            self._settle(keep={})

    def _settle(self, keep: Mapping[int, Unit]) -> None:
        done = [self._own.pop(index) for index in sorted(self._own.keys() - keep.keys())]
        self._outside.settle_units([unit for unit in done if unit.face in self._outside])
