"""ZeroEngine: one per run, ties units, schedule, gradients and optimizers together."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zero.comm import Comm, fingerprint
from lightning_zero.config import EngineConfig
from lightning_zero.partition import hooks
from lightning_zero.partition.buffer import ShardedBuffer, State
from lightning_zero.partition.clipping import GradientShards
from lightning_zero.partition.elementwise import check_supported, state_bytes
from lightning_zero.partition.gradient_sync import GradientSync
from lightning_zero.partition.gradients import UnitGradients, gradient_dtypes, is_unfrozen
from lightning_zero.partition.grouping import check_nothing_new
from lightning_zero.partition.inside import InsideReads
from lightning_zero.partition.loading import Loading
from lightning_zero.partition.memory import BufferPool, Ledger
from lightning_zero.partition.optimizer import OptimizerBinding
from lightning_zero.partition.optimizer_state import StateForm
from lightning_zero.partition.outside import OutsideReads
from lightning_zero.partition.refused import can_shard
from lightning_zero.partition.rest import Tiers
from lightning_zero.partition.schedule import Schedule
from lightning_zero.partition.sharding import Progress, Source, first_values, own_values, plan_units
from lightning_zero.partition.shards import LocalShards
from lightning_zero.partition.together import Together
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.updater import Updater
from lightning_zero.partition.whole import WholeTensors
from lightning_zero.whereabouts import ENDING

ALWAYS_RELEASE_VARIABLE = "LIGHTNING_ZERO_ALWAYS_RELEASE"


class ZeroEngine:
    """Shards a module's parameters, their gradients and optimizer state over the ranks of ``comm``.

    The module stays the user's own object. A run is a series of steps (:meth:`step`), in each of which units are
    unsharded as they are used; :meth:`backward` reduces gradients; bound optimizers update shards; :meth:`close` makes
    the module whole and plain again.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        config: EngineConfig,
        optimizers: Iterable[Optimizer] = (),
        updater: Updater | None = None,
        keeper: hooks.Keeper | None = None,
        source: Source = own_values,
        progress: Progress = lambda done, total: None,
        tiers: Tiers | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.module = module
        self.config = config
        self.ledger = ledger or Ledger()
        self.units: list[Unit] = []
        self._comm = comm
        self._pool = BufferPool(comm.device, self.ledger, capacity=config.prefetch + 4)
        self._where: dict[int, tuple[Unit, int]] = {}
        self._gradients: dict[int, UnitGradients] = {}
        self._handles: list[RemovableHandle] = []
        self._bindings: list[OptimizerBinding] = []
        self._outside = OutsideReads(comm)
        self._in_step = self._backward_open = self._accumulates = False
        self._phase_reduces = True
        self._kind, self._phase = "", 0
        self.state_form = StateForm.WHOLE
        self._updater = updater
        self._link = None if updater is None else updater.link
        self.tiers = tiers or Tiers()
        self.together = Together(comm, self.tiers.files is not None)
        self.closed = self.stop_wanted = False
        """Set at any time, on any rank: ``on_stop`` is then called on all ranks in the same backward."""
        self.on_stop: Callable[[], None] = lambda: None
        self.optimizers: list[Optimizer] = []
        self._states_counted = 0
        optimizers = list(optimizers)
        needed = comm.is_shared or tiers is not None or any(config.dtypes.master_dtype(p) for p in module.parameters())
        asked = os.environ.get(ALWAYS_RELEASE_VARIABLE, "0") not in ("", "0")
        if can_shard(module, optimizers, config.residence.whole_parameters, needed) and (needed or asked):
            self._make_units(source, progress)
        self._shards_parameters = bool(self.units) and not config.residence.whole_parameters
        self.whole = WholeTensors(self.units, comm, self._pool, self.tiers.whole)
        self.shards = LocalShards(self.units)
        self._schedule = Schedule(self.units, comm, config.prefetch, config.read_timeout)
        self._inside = InsideReads(self._schedule)
        self._saved = hooks.SavedTensors(self, keeper)
        self._packs = self._shards_parameters or keeper is not None
        for unit in self.units:
            self._handles += hooks.hook_modules(unit, self)
        loading = Loading(self.units, self._where, self._outside, lambda: self.computes)
        self._handles += hooks.hook_loading(module, loading.enter, loading.leave) if self.units else ()
        self._sync = self._make_sync()
        self.bind(optimizers)

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        """Let ``optimizers`` of the module's parameters update shards; those that cannot are refused by name."""
        optimizers = list(optimizers)
        names = {id(p): n for n, p in self.module.named_parameters()}  # `configure_optimizers` may have changed the module
        for optimizer in optimizers if self.units or self._comm.is_shared else ():
            check_supported(optimizer, names)
        if self.units:
            check_nothing_new(self.module, self._where)
        self.optimizers += optimizers
        if self.units:
            self._bindings += [OptimizerBinding(optimizer, self, self._updater) for optimizer in optimizers]
            if self._updater is not None:
                with self.together.making_files():
                    self._updater.prepare(optimizers, self.locate)

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def world_size(self) -> int:
        return self._comm.world_size

    @property
    def received_share(self) -> float:
        """Memory for what the other ranks send, for each byte of gradients that is being reduced."""
        return self._comm.received_share

    # -- set-up ------------------------------------------------------------------------------------------------------

    def _make_units(self, source: Source, progress: Progress) -> None:
        whole, config = self.config.residence.whole_parameters, self.config
        plans = plan_units(self.module, config, self._comm.num_shards)
        try:
            for plan, values in first_values(plans, self._comm, source, progress):
                with self.together.making_files():
                    unit = Unit(
                        len(self.units), plan.name, plan.group.modules, plan.pairs, plan.layout, values, self._comm,
                        self._pool, self.ledger, self._access, whole, plan.compute_dtype, plan.master_dtype,
                        plan.shows_main, config.main_device, self._link, self.tiers, plan.is_coded,
                    )  # fmt: skip
                self.units.append(unit)
                self._handles += hooks.hook_readers(unit, plan.group.readers, self)
                self._where.update((id(parameter), (unit, index)) for index, parameter in enumerate(unit.tensors))
        except Exception:
            self._release()  # the values of a unit could not be had, on all ranks
            raise

    def _release(self) -> None:
        """Make the module whole and plain, in host memory, one unit at a time."""
        self.tiers.whole.release()
        for unit in self.units:
            unit.face.unshard()
            unit.face.release(self.tiers.whole)

    def _make_sync(self) -> GradientSync:
        """Gradients for the units that have something to train; called again when there is more of it."""
        whole = self.config.residence.whole_gradients
        for unit in self.units:
            if unit.index not in self._gradients and any(p.requires_grad for p in unit.tensors):
                with self.together.making_files():
                    self._gradients[unit.index] = UnitGradients(
                        unit, self._comm, self._pool, self.ledger, whole, self._access, self._link,
                        self.tiers.gradients,
                        gradient_dtypes(unit, self.config, self._comm.world_size, crosses=self._link is not None),
                    )  # fmt: skip
            if unit.index in self._gradients:
                self._handles += hooks.hook_gradients(self._gradients[unit.index], self)
        tells = self._updater is not None and self._updater.is_early
        gradients = [self._gradients[i] for i in sorted(self._gradients)]
        return GradientSync(gradients, self._comm, self._update_early if tells else None)

    def binding(self, optimizer: Optimizer) -> OptimizerBinding | None:
        """The binding of ``optimizer``; None if its parameters are not sharded."""
        return next((b for b in self._bindings if b.optimizer is optimizer), None)

    # -- steps and phases --------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, kind: str, backward_follows: bool = False) -> Iterator[None]:
        """One call of a step method. With ``backward_follows`` the phase stays open until :meth:`backward` ends."""
        self._saved.begin_forward(hooks.resident(self.module, self.units))
        if not self.units:
            with self._saved.context() if self._packs else nullcontext():
                yield
            return
        self.together.check()
        if self._in_step:
            self.abandon()  # left by an exception that somebody caught
        self.complete()
        self.settle()
        if kind == "train":
            if self._comm.world_size > 1:
                check_nothing_new(self.module, self._where)
            self._look_for_unfrozen()
        else:
            self.drain()
        self._kind, self._phase, self._in_step = kind, 0, True
        self._phase_reduces = self._sync.enabled
        self._open_phase()
        with self._saved.context() if self._packs else nullcontext():
            yield
        self._in_step = False
        if not backward_follows:
            self._close_phase()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around ``loss.backward()``: gradients are reduced when it ends."""
        if not self.units:
            with self._saved.context() if self._packs else nullcontext():
                yield
            return
        self._open_backward()
        with self._saved.context() if self._packs else nullcontext():
            yield
        self._close_backward()

    def complete(self) -> None:
        """A training step without a backward (it returned None) still takes part in the other ranks' reduction."""
        if not self._schedule.active or self._in_step or self._backward_open:
            return
        if self._phase_reduces:
            self._open_backward()
            self._close_backward()
        else:
            self._schedule.abandon()

    @property
    def reduces(self) -> bool:
        """Whether the next backward reduces gradients as far as the user can tell."""
        return not self._accumulates

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally where whole gradients are resident; elsewhere every micro-batch is reduced."""
        self._accumulates = True
        self._sync.enabled = not self.config.residence.whole_gradients
        try:
            yield
        finally:
            self._accumulates = False
            self._sync.enabled = True

    def announce_step(self) -> None:
        """Before an evaluation step, where the ranks' numbers of steps differ. See :meth:`serve_until_done`."""
        if self._shards_parameters:
            self._comm.exchange("evaluating", [1])

    def serve_until_done(self, kind: str) -> None:
        """After this rank's last evaluation step: take part in the gathers of ranks that have more steps to do."""
        if not self._shards_parameters:
            return
        while self._comm.exchange("evaluating", [0])[0][0]:
            self._kind, self._phase = kind, 0
            self._open_phase()
            self._close_phase()

    def _open_phase(self) -> None:
        if self._shards_parameters or self._kind == "train":
            self._schedule.begin((self._kind, self._phase))

    def _close_phase(self) -> None:
        if self._schedule.active:
            if self._shards_parameters:
                self._schedule.finish()
            else:
                self._schedule.abandon()
        self._reshard_all()

    def _open_backward(self) -> None:
        for binding in self._bindings:
            binding.begin_backward()
        self._look_for_unfrozen()
        self._inside.settle()
        self._sync.begin_backward()
        self._backward_open = True

    def _close_backward(self) -> None:
        self._backward_open = False
        if self._sync.enabled:
            self._reduce_rest()
        else:
            self._schedule.abandon()
            self._sync.show_local()
        self._reshard_all()
        self._phase += 1
        if self._in_step:
            self._open_phase()

    def _update_early(self, gradients: UnitGradients) -> None:
        for binding in self._bindings:
            binding.update_early(gradients)

    def _reduce_rest(self) -> None:
        use, late = self._sync.local_use(), self._sync.late()
        if not self._schedule.active:
            self._schedule.begin("a backward outside of a step")
        stop = self._comm.over_model(int(self.stop_wanted))  # read once: a signal may come at any time
        if not self._schedule.finish([fingerprint(use), fingerprint(late), self._outside.edits ^ stop]):
            self._outside.compare_edits(self.units)
            use, late = self._sync.of_any_rank(use), self._sync.of_any_rank(late)
            stop = int(self._comm.all_reduce(torch.tensor(stop), "max"))
        if stop:
            self.on_stop()
        self._outside.forget_edits()
        self._sync.flush(use, late)
        self._sync.show(use)

    def _look_for_unfrozen(self) -> None:
        """Parameters that were frozen so far may be trained from now on (finetuning callbacks)."""
        with torch._C.DisableTorchFunctionSubclass():
            found = any(is_unfrozen(unit, self._gradients.get(unit.index)) for unit in self.units)
        if found:
            enabled = self._sync.enabled
            self._sync = self._make_sync()
            self._sync.enabled = enabled

    # -- what hooks call ---------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        self.unshard(unit)

    def post_forward(self, unit: Unit, module: nn.Module) -> None:
        if not self._schedule.active or hooks.in_backward():
            return
        # Whole parameters that are frozen show their master weights again, see InsideReads.
        if not self._shards_parameters and (unit.face is unit.buffer or unit.index in self._gradients):
            return
        unit.finished_modules.add(module)
        if len(unit.finished_modules) >= len(unit.modules) and not self._schedule.keeps(unit):
            self._reshard(unit)

    def post_backward(self, unit: Unit) -> None:
        """The backward of a frozen unit is done."""
        if self._schedule.active and unit.buffer.state is State.UNSHARDED:
            self._reshard(unit)

    def gradient_coming(self) -> None:
        if not self._backward_open and self.units:
            self._open_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)

    def gradient_arrived(self, gradients: UnitGradients, index: int) -> None:
        if not self._backward_open:
            self.gradient_coming()
        gradients.add(index, gradients.unit.tensors[index])
        if gradients.is_complete:
            if self._shards_parameters:
                self._reshard(gradients.unit)
            if not gradients.launched:
                self._sync.arrived(gradients)

    def unshard(self, unit: Unit) -> None:
        """Make the unit's parameters plain; in a phase by the schedule, outside by agreement."""
        if self.computes:
            buffer = unit.buffer
            if buffer.state is State.UNSHARDED:
                return
            if self._inside.units:
                self._inside.settle()
            if buffer.is_whole:
                buffer.unshard()
                unit.finished_modules.clear()
                return
            self._schedule.want(unit)
            self._saved.watch(unit)
            unit.finished_modules.clear()
            unit.unsharded_in_backward = hooks.in_backward()
            return
        self.drain()
        if unit.face.state is State.UNSHARDED:
            return
        if unit.face.is_whole:
            self._outside.look(unit)
        else:
            self._unshard_outside(unit, False, f"the parameters of {unit.name!r}")

    @property
    def computes(self) -> bool:
        """Whether this is inside a step (or between its forward and its backward)."""
        return self._schedule.active or self._in_step

    @property
    def has_pending_update(self) -> bool:
        """Whether a delayed update has not been published."""
        return any(binding.is_pending for binding in self._bindings)

    def drain(self) -> None:
        """Finish delayed updates and take back early ones: somebody is going to look at parameters or optimizer state.
        All ranks call it."""
        self.together.check()
        if self._updater is not None:
            self._updater.revoke()
        pending = [binding for binding in self._bindings if binding.is_pending]
        if not pending:
            return
        self._comm.exchange("finishing a delayed update", timeout=self.config.read_timeout)
        for binding in pending:
            units = binding.take_pending()
            self.after_update([units[index] for index in sorted(units)])

    def _access(self, buffer: ShardedBuffer, tensor: Tensor) -> None:
        """A handle is read."""
        if not self.computes:
            self.drain()
        located = self._where.get(id(tensor))
        if located is not None:
            unit, index = located
            if self._inside.shows(unit):
                self._inside.look(unit)
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
        if self.closed:
            raise RuntimeError(
                f"{what} was read, but the run has ended in an exception that left it sharded: load a checkpoint."
            )
        for index, of_gradient in self._schedule.agree_outside(unit, is_gradient, what):
            buffer = self._gradients[index].buffer if of_gradient else self.units[index].face
            if (index, of_gradient) == (unit.index, is_gradient):
                self._outside.unshard(buffer)
            else:
                buffer.serve()

    # -- resharding --------------------------------------------------------------------------------------------------

    def _reshard(self, unit: Unit) -> None:
        if unit.buffer in self._outside:
            return
        if not unit.unsharded_in_backward:
            unit.keep_edits()
        if unit.buffer.is_whole:
            unit.buffer.hide()
        else:
            unit.buffer.reshard()
        unit.finished_modules.clear()
        unit.pending_backward = 0

    def _reshard_all(self) -> None:
        self._inside.settle()
        for unit in self.units:
            if unit.buffer.state is State.UNSHARDED:
                self._reshard(unit)

    def settle(self) -> None:
        """Let what the user did outside of a step take effect: keep edits, reshard what was read."""
        self._inside.settle()
        if self.config.residence.whole_parameters:
            for unit in self.units:
                if unit.buffer.state is State.UNSHARDED:
                    unit.keep_edits()
        self._outside.settle(self.units, self._gradients.values())

    def _settle_together(self, place: str) -> None:
        """The same where all ranks meet, and no step follows that would find out whether their edits are the same."""
        self.settle()
        if self.config.residence.whole_parameters:
            self._outside.meet(self.units, place, self.config.read_timeout)

    # -- optimizers --------------------------------------------------------------------------------------------------

    def locate(self, parameter: nn.Parameter) -> tuple[Unit, UnitGradients | None, int] | None:
        where = self._where.get(id(parameter))
        return None if where is None else (where[0], self._gradients.get(where[0].index), where[1])

    def before_update(self) -> None:
        """Called when gradients are final and the update is about to read shards."""
        self.complete()
        self.settle()
        if self._in_step:
            self._reshard_all()  # edits made between backward and the update come first

    def after_update(self, units: list[Unit]) -> None:
        """Called when the shards of ``units`` have new values; they start on their way to the other ranks."""
        for unit in units:
            unit.buffer.reshard()  # and wait for a gather of the last update that this rank had no use for
            if unit.buffer.is_whole:
                unit.buffer.unshard_async()
        # State comes with a parameter's first update, and does not grow from then on.
        if sum(len(o.state) for o in self.optimizers) != self._states_counted:
            self._count_optimizer_state()

    def gradient_shards(self, parameters: Iterable[nn.Parameter]) -> GradientShards:
        """The reduced gradients of ``parameters``, to clip or to scale."""
        self.complete()
        self.settle()
        return GradientShards(parameters, self._owned_gradient, self._comm)

    def _owned_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        located = self.locate(parameter)
        return None if located is None or located[1] is None else located[1].local(located[2])

    def all_gather_object(self, value: Any) -> list[Any]:
        self._comm.exchange("collecting an optimizer's state", timeout=self.config.read_timeout)
        return self._comm.all_gather_object(value)

    # -- whole tensors -----------------------------------------------------------------------------------------------

    @contextmanager
    def full_parameters(self, module: nn.Module, write_back: bool) -> Iterator[None]:
        """Whole plain parameters of ``module`` for a block of code; edits are kept only with ``write_back``."""
        self.drain()
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
                    self._outside.discard(unit.face)
        if write_back:
            self.settle()

    def whole_state_dict(self, state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
        """Replace the parameters in ``state`` by whole copies in host memory, one unit at a time.

        All ranks call it; on those that do not ``keep``, parameters stay what they are.
        """
        self.meet("collecting the module's weights")
        return self.whole.state_dict(state, keep)

    def meet(self, what: str) -> None:
        """Wait until all ranks are here, for ``what`` at most ``read_timeout``, and let all updates and edits reach the
        shards."""
        self._comm.exchange(what, timeout=self.config.read_timeout)
        self.drain()
        self._settle_together(what)

    def memory_stats(self) -> dict[str, Any]:
        """Bytes on this rank by kind, now and at their peak, and the peak of their sum.

        Where nothing is sharded nobody keeps account: the peaks are then those of the calls made so far.
        """
        self._count_optimizer_state()
        if not self.units:
            self.ledger.look_at(list(self.module.parameters()))
        return self.ledger.as_dict()

    def _count_optimizer_state(self) -> None:
        self._states_counted = sum(len(o.state) for o in self.optimizers)
        self.ledger.set("optimizer", sum(state_bytes(o) for o in self.optimizers))

    @contextmanager
    def state_as(self, form: StateForm) -> Iterator[None]:
        """State dicts of the optimizers made inside have their state in this form."""
        self.state_form = form
        try:
            yield
        finally:
            self.state_form = StateForm.WHOLE

    # -- end ---------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Leave an interrupted step."""
        self._in_step = self._backward_open = False
        self._schedule.abandon()
        for binding in self._bindings:
            binding.cancel()

    def close(self, timeout: float | None = None) -> None:
        """Make the module whole and plain. All ranks call it; raises RuntimeError if they do not within ``timeout``."""
        if not self.units or self.closed:
            return
        self.closed = True
        self.abandon()
        try:
            if timeout is not None:
                self._comm.exchange(ENDING, [len(self.units)], timeout=timeout)
            self.drain()
            self._settle_together("ending")
            self._sync.close()
            for binding in self._bindings:
                binding.end()
            self._release()
        finally:
            for removable in self._handles:
                removable.remove()
            self._pool.clear()
            self._comm.close()
            if self._updater is not None:
                self._updater.close()
