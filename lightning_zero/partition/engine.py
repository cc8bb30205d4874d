"""ZeroEngine: one per run, leads parameters, gradients and optimizers through its steps."""

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
from lightning_zero.partition.clipping import GradientShards
from lightning_zero.partition.elementwise import check_supported, state_bytes
from lightning_zero.partition.gradient_sync import GradientSync
from lightning_zero.partition.gradients import UnitGradients, gradient_dtypes, is_unfrozen
from lightning_zero.partition.grouping import check_nothing_new
from lightning_zero.partition.memory import BufferPool, Ledger
from lightning_zero.partition.optimizer import OptimizerBinding
from lightning_zero.partition.optimizer_state import StateForm
from lightning_zero.partition.parameters import ShardedParameters
from lightning_zero.partition.refused import can_shard
from lightning_zero.partition.rest import Tiers
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
        self._comm = comm
        self._pool = BufferPool(comm.device, self.ledger, capacity=config.prefetch + 4)
        self._gradients: dict[int, UnitGradients] = {}
        self._handles: list[RemovableHandle] = []
        self._bindings: list[OptimizerBinding] = []
        self.in_step = self._backward_open = self._accumulates = False
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
        shards = can_shard(module, optimizers, config.residence.whole_parameters, needed) and (needed or asked)
        plans = plan_units(module, config, comm.num_shards) if shards else []
        self.parameters = ShardedParameters(
            module, first_values(plans, comm, source, progress) if shards else (), comm, config, self, self._gradients,
            self._pool, self.ledger, self.tiers, self._link, keeper,
        )  # fmt: skip
        self.units = self.parameters.units
        self._schedule = self.parameters.schedule
        self.whole = WholeTensors(self.units, comm, self._pool, self.tiers.whole)
        self.shards = LocalShards(self.units)
        self._packing = self.parameters.saved.context if self.parameters.are_sharded or keeper is not None else nullcontext
        self._sync = self._make_sync()
        self.bind(optimizers)

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        """Let ``optimizers`` of the module's parameters update shards; those that cannot are refused by name."""
        optimizers = list(optimizers)
        names = {id(p): n for n, p in self.module.named_parameters()}  # `configure_optimizers` may have changed the module
        for optimizer in optimizers if self.units or self._comm.is_shared else ():
            check_supported(optimizer, names)
        if self.units:
            check_nothing_new(self.module, self.parameters.where)
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

    def _make_sync(self) -> GradientSync:
        """Gradients for the units that have something to train; called again when there is more of it."""
        whole = self.config.residence.whole_gradients
        for unit in self.units:
            if unit.index not in self._gradients and any(p.requires_grad for p in unit.tensors):
                with self.together.making_files():
                    self._gradients[unit.index] = UnitGradients(
                        unit, self._comm, self._pool, self.ledger, whole, self.parameters.access, self._link,
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
        self.parameters.saved.begin_forward(hooks.resident(self.module, self.units))
        if not self.units:
            with self._packing():
                yield
            return
        self.together.check()
        if self.in_step:
            self.abandon()  # left by an exception that somebody caught
        self.complete()
        self.parameters.settle()
        if kind == "train":
            if self._comm.world_size > 1:
                check_nothing_new(self.module, self.parameters.where)
            self._look_for_unfrozen()
        else:
            self.drain()
        self._kind, self._phase, self.in_step = kind, 0, True
        self._phase_reduces = self._sync.enabled
        self._open_phase()
        with self._packing():
            yield
        self.in_step = False
        if not backward_follows:
            self._close_phase()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around ``loss.backward()``: gradients are reduced when it ends."""
        if not self.units:
            with self._packing():
                yield
            return
        self._open_backward()
        with self._packing():
            yield
        self._close_backward()

    def complete(self) -> None:
        """A training step without a backward (it returned None) still takes part in the other ranks' reduction."""
        if not self._schedule.active or self.in_step or self._backward_open:
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
        if self.parameters.are_sharded:
            self._comm.exchange("evaluating", [1])

    def serve_until_done(self, kind: str) -> None:
        """After this rank's last evaluation step: take part in the gathers of ranks that have more steps to do."""
        if not self.parameters.are_sharded:
            return
        while self._comm.exchange("evaluating", [0])[0][0]:
            self._kind, self._phase = kind, 0
            self._open_phase()
            self._close_phase()

    def _open_phase(self) -> None:
        if self.parameters.are_sharded or self._kind == "train":
            self._schedule.begin((self._kind, self._phase))

    def _close_phase(self) -> None:
        if self._schedule.active:
            if self.parameters.are_sharded:
                self._schedule.finish()
            else:
                self._schedule.abandon()
        self.parameters.reshard_all()

    def _open_backward(self) -> None:
        for binding in self._bindings:
            binding.begin_backward()
        self._look_for_unfrozen()
        self.parameters.inside.settle()
        self._sync.begin_backward()
        self._backward_open = True

    def _close_backward(self) -> None:
        self._backward_open = False
        if self._sync.enabled:
            self._reduce_rest()
        else:
            self._schedule.abandon()
            self._sync.show_local()
        self.parameters.reshard_all()
        self._phase += 1
        if self.in_step:
            self._open_phase()

    def _update_early(self, gradients: UnitGradients) -> None:
        for binding in self._bindings:
            binding.update_early(gradients)

    def _reduce_rest(self) -> None:
        use, late = self._sync.local_use(), self._sync.late()
        if not self._schedule.active:
            self._schedule.begin("a backward outside of a step")
        stop = self._comm.over_model(int(self.stop_wanted))  # read once: a signal may come at any time
        if not self._schedule.finish([fingerprint(use), fingerprint(late), self.parameters.outside.edits ^ stop]):
            self.parameters.outside.compare_edits()
            use, late = self._sync.of_any_rank(use), self._sync.of_any_rank(late)
            stop = int(self._comm.all_reduce(torch.tensor(stop), "max"))
        if stop:
            self.on_stop()
        self.parameters.outside.forget_edits()
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

    # -- what hooks of gradients call ---------------------------------------------------------------------------------

    def gradient_coming(self) -> None:
        if not self._backward_open and self.units:
            self._open_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)

    def gradient_arrived(self, gradients: UnitGradients, index: int) -> None:
        if not self._backward_open:
            self.gradient_coming()
        gradients.add(index, gradients.unit.tensors[index])
        if gradients.is_complete:
            if self.parameters.are_sharded:
                self.parameters.reshard(gradients.unit)
            if not gradients.launched:
                self._sync.arrived(gradients)

    # -- optimizers --------------------------------------------------------------------------------------------------

    def locate(self, parameter: nn.Parameter) -> tuple[Unit, UnitGradients | None, int] | None:
        where = self.parameters.where.get(id(parameter))
        return None if where is None else (where[0], self._gradients.get(where[0].index), where[1])

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

    def before_update(self) -> None:
        """Called when gradients are final and the update is about to read shards."""
        self.complete()
        self.parameters.settle()
        if self.in_step:
            self.parameters.reshard_all()  # edits made between backward and the update come first

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
        self.parameters.settle()
        return GradientShards(parameters, self._owned_gradient, self._comm)

    def _owned_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        located = self.locate(parameter)
        return None if located is None or located[1] is None else located[1].local(located[2])

    def all_gather_object(self, value: Any) -> list[Any]:
        self._comm.exchange("collecting an optimizer's state", timeout=self.config.read_timeout)
        return self._comm.all_gather_object(value)

    # -- whole tensors -----------------------------------------------------------------------------------------------

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
        self.parameters.settle_together(what)

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
        self.in_step = self._backward_open = False
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
            self.parameters.settle_together("ending")
            self._sync.close()
            for binding in self._bindings:
                binding.end()
            self.parameters.release()
        finally:
            self.parameters.unhook()
            for removable in self._handles:
                removable.remove()
            self._pool.clear()
            self._comm.close()
            if self._updater is not None:
                self._updater.close()
