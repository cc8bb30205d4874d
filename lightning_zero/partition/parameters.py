"""Where the module's parameters are plain, and for whom.

A parameter is plain while a module uses it, while a user looks at it inside a step (``inside.py``) or outside of one
(``outside.py``), and while it is loaded (``loading.py``). Otherwise a handle stands for it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.partition import hooks
from lightning_zero.partition.buffer import ShardedBuffer, State
from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.partition.inside import InsideReads
from lightning_zero.partition.loading import Loading
from lightning_zero.partition.memory import BufferPool, FlatViews, Ledger
from lightning_zero.partition.outside import OutsideReads
from lightning_zero.partition.rest import Tiers
from lightning_zero.partition.schedule import Schedule
from lightning_zero.partition.sharding import Plan
from lightning_zero.partition.together import Together
from lightning_zero.partition.unit import Unit
from lightning_zero.transfer import Link


class Host(Protocol):
    """What the parameters need of the engine."""

    in_step: bool
    """Whether a step's forward is under way."""
    closed: bool
    together: Together

    def drain(self) -> None: ...


class ShardedParameters:
    """The parameters of ``module`` in units, made of ``planned`` and the first values of each.

    ``gradients`` has those of the units that are trained, by index, and may grow.
    """

    def __init__(
        self, module: nn.Module, planned: Iterable[tuple[Plan, FlatViews]], comm: Comm, config: EngineConfig, host: Host,
        gradients: Mapping[int, UnitGradients], pool: BufferPool, ledger: Ledger, tiers: Tiers, link: Link | None,
        keeper: hooks.Keeper | None,
    ) -> None:  # fmt: skip
        self.units: list[Unit] = []
        self.where: dict[int, tuple[Unit, int]] = {}
        """By id of a parameter, its unit and its index there."""
        self._host = host
        self._gradients = gradients
        self._whole = config.residence.whole_parameters
        self._rests_whole = tiers.whole
        self._handles: list[RemovableHandle] = []
        try:
            for plan, values in planned:
                with host.together.making_files():
                    unit = Unit(
                        len(self.units), plan.name, plan.group.modules, plan.pairs, plan.layout, values, comm, pool, ledger,
                        self.access, self._whole, plan.compute_dtype, plan.master_dtype, plan.shows_main,
                        config.main_device, link, tiers, plan.is_coded,
                    )  # fmt: skip
                self.units.append(unit)
                self._handles += hooks.hook_readers(unit, plan.group.readers, self)
                self.where.update((id(parameter), (unit, index)) for index, parameter in enumerate(unit.tensors))
        except Exception:
            self.release()  # the values of a unit could not be had, on all ranks
            raise
        self.are_sharded = bool(self.units) and not self._whole
        self.schedule = Schedule(self.units, comm, config.prefetch)
        self.inside = InsideReads(self.schedule)
        self.outside = OutsideReads(self.units, gradients, comm, config.read_timeout)
        self.saved = hooks.SavedTensors(self, keeper)
        for unit in self.units:
            self._handles += hooks.hook_modules(unit, self)
        if self.units:
            loading = Loading(self.where, self.outside, lambda: self.computes)
            self._handles += hooks.hook_loading(module, loading.enter, loading.leave)

    def release(self) -> None:
        """Make the module whole and plain, in host memory, one unit at a time."""
        self._rests_whole.release()
        for unit in self.units:
            unit.face.unshard()
            unit.face.release(self._rests_whole)

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    # -- used ---------------------------------------------------------------------------------------------------------

    @property
    def computes(self) -> bool:
        """Whether this is inside a step (or between its forward and its backward)."""
        return self.schedule.active or self._host.in_step

    def unshard(self, unit: Unit) -> None:
        """Make the unit's parameters plain; in a phase by the schedule, outside by agreement."""
        if self.computes:
            buffer = unit.buffer
            if buffer.state is State.UNSHARDED:
                return
            if self.inside.units:
                self.inside.settle()
            if buffer.is_whole:
                buffer.unshard()
                unit.finished_modules.clear()
                return
            self.schedule.want(unit)
            self.saved.watch(unit)
            unit.finished_modules.clear()
            unit.unsharded_in_backward = hooks.in_backward()
            return
        self._host.drain()
        if unit.face.state is State.UNSHARDED:
            return
        if unit.face.is_whole:
            self.outside.look(unit)
        else:
            self._unshard_outside(unit, False, f"the parameters of {unit.name!r}")

    def post_forward(self, unit: Unit, module: nn.Module) -> None:
        if not self.schedule.active or hooks.in_backward():
            return
        # Whole parameters that are frozen show their master weights again, see InsideReads.
        if not self.are_sharded and (unit.face is unit.buffer or unit.index in self._gradients):
            return
        unit.finished_modules.add(module)
        if len(unit.finished_modules) >= len(unit.modules) and not self.schedule.keeps(unit):
            self.reshard(unit)

    def post_backward(self, unit: Unit) -> None:
        """The backward of a frozen unit is done."""
        if self.schedule.active and unit.buffer.state is State.UNSHARDED:
            self.reshard(unit)

    def access(self, buffer: ShardedBuffer, tensor: Tensor) -> None:
        """A handle is read."""
        if not self.computes:
            self._host.drain()
        located = self.where.get(id(tensor))
        if located is not None:
            unit, index = located
            if self.inside.shows(unit):
                self.inside.look(unit)
            elif self.computes or unit.face.is_whole:
                self.unshard(unit)
            else:
                self._unshard_outside(unit, False, f"parameter {unit.names[index]!r}")
            return
        for gradients in self._gradients.values():
            if gradients.buffer is buffer:
                index = next(i for i, t in enumerate(gradients.handles) if t is tensor)
                self._unshard_outside(gradients.unit, True, f"the gradient of {gradients.unit.names[index]!r}")

    def _unshard_outside(self, unit: Unit, is_gradient: bool, what: str) -> None:
        if self._host.closed:
            raise RuntimeError(
                f"{what} was read, but the run has ended in an exception that left it sharded: load a checkpoint."
            )
        self.outside.read(unit, is_gradient, what)

    @contextmanager
    def full_parameters(self, module: nn.Module, write_back: bool) -> Iterator[None]:
        """Whole plain parameters of ``module`` for a block of code; edits are kept only with ``write_back``."""
        self._host.drain()
        self.settle()
        inside = {id(p) for p in module.parameters()}
        units = [u for u in self.units if not inside.isdisjoint(map(id, u.tensors))]
        for unit in units:
            self.unshard(unit)
        try:
            yield
        finally:
            if not write_back:
                for unit in units:
                    self.outside.discard(unit.face)
        if write_back:
            self.settle()

    # -- given up again -----------------------------------------------------------------------------------------------

    def reshard(self, unit: Unit) -> None:
        """Keep what was changed inside a step, and give the unit up, if no user is looking at it from outside."""
        if unit.buffer in self.outside:
            return
        if not unit.unsharded_in_backward:
            unit.keep_edits()
        if unit.buffer.is_whole:
            unit.buffer.hide()
        else:
            unit.buffer.reshard()
        unit.finished_modules.clear()
        unit.pending_backward = 0

    def reshard_all(self) -> None:
        self.inside.settle()
        for unit in self.units:
            if unit.buffer.state is State.UNSHARDED:
                self.reshard(unit)

    def settle(self) -> None:
        """Let what the user did outside of a step take effect: keep edits, reshard what was read."""
        self.inside.settle()
        if self._whole:
            for unit in self.units:
                if unit.buffer.state is State.UNSHARDED:
                    unit.keep_edits()
        self.outside.settle()

    def settle_together(self, place: str) -> None:
        """The same where all ranks meet, and no step follows that would find out whether their edits are the same."""
        self.settle()
        if self._whole:
            self.outside.meet(place)
