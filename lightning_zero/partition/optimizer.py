"""Binding a user's optimizer to shards.

[Note: an optimizer keeps the module's own parameters]
Between steps ``param_groups`` hold the module's parameters, so that toggling, schedulers, finetuning callbacks and
layer-wise rates work untouched. For the duration of the update the groups hold this rank's 1-D shards of those
parameters that have a gradient, with the reduced gradient as ``.grad``; state made by the optimizer is then of the
shards. Element-wise optimizers cannot tell the difference.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import profiling
from lightning_zero.partition.elementwise import copy_value
from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.partition.optimizer_state import OptimizerState, StateHost
from lightning_zero.partition.together import Together
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.updater import UpdateGroup, UpdateItem, Updater


class Host(StateHost, Protocol):
    """What a binding needs of the engine."""

    together: Together

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def before_update(self) -> None: ...

    def after_update(self, units: list[Unit]) -> None: ...


class OptimizerBinding:
    """Lets one optimizer update shards. See [Note: an optimizer keeps the module's own parameters]."""

    def __init__(self, optimizer: Optimizer, host: Host, updater: Updater | None = None) -> None:
        self.optimizer = optimizer
        self._host = host
        self._originals: list[list[nn.Parameter]] | None = None
        self._swapped: list[tuple[nn.Parameter, nn.Parameter, Tensor]] = []
        """What the groups hold for the duration of an update: parameter, shard, reduced gradient of the shard."""
        self._group_of: dict[int, int] = {}
        self._units: dict[int, Unit] = {}
        self._depth = 0
        self._updater = updater
        self._pending: tuple[Future, dict[int, Unit]] | None = None
        self._finished: dict[int, Unit] = {}
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            previous = getattr(hook, "__self__", None)
            if isinstance(previous, OptimizerBinding):
                previous.close()
        self.state = OptimizerState(optimizer, host, updater)
        self._last = optimizer.register_step_pre_hook(self._pre_step)
        first = optimizer.register_step_post_hook(self._post_step)
        optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
        self._handles = [self._last, first]

    def close(self) -> None:
        """Give the optimizer back to the user, with whole state on every rank. All ranks call it."""
        self.state.release()
        self.state.close()
        for handle in self._handles:
            handle.remove()

    def end(self) -> None:
        """At the end of a run: a single rank has all of the state. Several make it whole when somebody wants it, since
        that takes memory and all of them; and so does state that rests elsewhere."""
        if self._host.world_size == 1 and self._updater is None:
            self.close()

    def begin_backward(self) -> None:
        self.cancel()  # an update that raised, and somebody caught it
        # The user's step hooks, whenever they were registered, are not to see shards: nothing runs between ours but the step.
        self.optimizer._optimizer_step_pre_hooks.move_to_end(self._last.id)  # type: ignore[attr-defined]

    def cancel(self) -> None:
        """Leave an update that raised half-way, or never came."""
        if self._updater is not None:
            self._updater.revoke()
        if self._originals is not None:
            self._restore()
            self._depth = 0
        if self.state.loading:
            self.state.restore()

    # -- the update --------------------------------------------------------------------------------------------------

    def _pre_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._depth += 1
        if self._depth > 1:
            return None  # the step of a subclass calls that of its base: torch runs the hooks for both
        if self._host.closed:
            self.state.release()
            return None
        if self._updater is not None and self._updater.is_early:
            groups = enumerate(optimizer.param_groups)
            self._group_of = {id(p): index for index, group in groups for p in group["params"]}
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if closure is None:
            self._swap()
            return None

        run_then_swap = partial(self._swap, closure)
        # The closure runs forward, backward, the user's hooks and clipping: all of them see the module's parameters.
        return (args[0], run_then_swap, *args[2:]) if len(args) > 1 else args, (
            {**kwargs, "closure": run_then_swap} if "closure" in kwargs else kwargs
        )

    def _post_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        self._depth -= 1
        if self._depth or self.state.is_released:
            return
        if self._originals is None:
            if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
                return  # nothing was updated, and Lightning says that its closure was not called
            raise RuntimeError(
                f"{type(optimizer).__qualname__}.step did not call its closure, so there are no gradients to step with."
            )
        self._restore()
        units, self._finished = self._finished, {}
        if self._updater is None:
            for unit in self._units.values():
                with profiling.span(profiling.PUBLISH, unit.name):
                    unit.publish()
        if self._pending is None:
            units |= self._units
        self._host.after_update([units[index] for index in sorted(units)])

    def take_pending(self) -> dict[int, Unit]:
        """Wait for a delayed update; the units, by index, whose shards have new values for the other ranks."""
        if self._pending is None:
            return {}
        (future, units), self._pending = self._pending, None
        with self._host.together.updating(self._updater):
            future.result()
            for unit in units.values():
                unit.end_update()
                if unit.edited_meanwhile:
                    raise RuntimeError(
                        f"Parameters of {unit.name!r} ({', '.join(unit.names[:3])}, ...) were edited inside a step while"
                        f" their delayed update was under way (this is rank {self._host.rank}). Edit them outside of steps"
                        " (hooks, callbacks), or do without delayed_update."
                    )
                unit.publish()
            for unit in units.values():
                unit.published_to_rest()
        return units

    @property
    def is_pending(self) -> bool:
        """Whether a delayed update has not been published."""
        return self._pending is not None

    def update_early(self, gradients: UnitGradients) -> None:
        """The reduced gradients of a unit are there; if a step is waiting for them, its update can begin."""
        if self._updater is None or not self._updater.is_early or not self._depth or self._originals is not None:
            return
        unit = gradients.unit
        groups: dict[int, UpdateGroup] = {}
        for index, parameter in enumerate(unit.tensors):
            number, shard = self._group_of.get(id(parameter)), unit.shards[index]
            if number is None or shard is None or not parameter.requires_grad:
                continue
            group = groups.setdefault(number, self._update_group(self.optimizer.param_groups[number]))
            local = unit.in_shard(index)
            state = self.optimizer.state.get(parameter, {})
            group.items.append(UpdateItem(unit, index, local.start, shard, gradients.shard[local.slice()], state))
        if groups:
            unit.keep_edits_so_far()
            self._updater.run_early(self.optimizer, [groups[number] for number in sorted(groups)])

    def _hand_over(self, updater: Updater) -> None:
        """Let the updater update the shards. The step that torch runs after this finds its groups empty."""
        swapped = {id(shard): (parameter, gradient) for parameter, shard, gradient in self._swapped}
        groups = []
        for group in self.optimizer.param_groups:
            update = self._update_group(group)
            for shard in group["params"]:
                if id(shard) not in swapped:
                    continue  # without elements
                parameter, gradient = swapped[id(shard)]
                unit, _, index = self._host.locate(parameter)  # type: ignore[misc]
                state = self.optimizer.state[parameter] = self.optimizer.state.pop(shard, {})
                start = unit.in_shard(index).start
                update.items.append(UpdateItem(unit, index, start, shard, gradient, state))
            groups.append(update)
            group["params"] = []
        self._swapped = []
        future = updater.run(self.optimizer, groups)
        if future is not None:
            self._pending = (future, self._units)
            for unit in self._units.values():
                unit.begin_update()
            return
        for unit in self._units.values():
            unit.published_to_rest()

    def _update_group(self, group: dict[str, Any]) -> UpdateGroup:
        return UpdateGroup({k: copy_value(v) for k, v in group.items() if k != "params"}, [])

    def _swap(self, closure: Callable[[], Any] | None = None) -> Any:
        try:
            loss = None if closure is None else closure()
            self._host.before_update()
            self._finished = self.take_pending()
            self._enter()
            if self._updater is not None:
                with self._host.together.updating(self._updater):
                    self._hand_over(self._updater)
        except BaseException:
            self._depth = 0  # torch runs no post hooks
            raise
        return loss

    def _enter(self) -> None:
        if self._originals is not None:
            raise RuntimeError(f"{type(self.optimizer).__qualname__}.step was called inside its own step")
        state = self.optimizer.state
        self._originals, self._units = [], {}
        for group in self.optimizer.param_groups:
            self._originals.append(group["params"])
            shards = []
            for parameter in group["params"]:
                located = self._host.locate(parameter)
                if located is None:
                    # Without elements; or new, where a single rank has it whole.
                    if parameter.numel() and (self._host.world_size > 1 or self._updater is not None):
                        raise RuntimeError(
                            f"{type(self.optimizer).__qualname__} holds a parameter of shape {tuple(parameter.shape)} that"
                            " is not one of the LightningModule's parameters."
                        )
                    shards.append(parameter)
                    continue
                unit, gradients, index = located
                gradient = None if gradients is None else gradients.local(index)
                if gradient is None:
                    continue
                self._units[unit.index] = unit
                shard = unit.shards[index]
                if shard is None:
                    continue
                if gradient.device != shard.device:
                    gradient = gradient.to(shard.device)  # the user's own
                if self._updater is None:
                    shard.grad = gradient if gradient.dtype == shard.dtype else gradient.to(shard.dtype)
                if parameter in state:
                    state[shard] = state.pop(parameter)
                self._swapped.append((parameter, shard, gradient))
                shards.append(shard)
            group["params"] = shards

    def _restore(self) -> None:
        state = self.optimizer.state
        for parameter, shard, _ in self._swapped:
            shard.grad = None
            if shard in state:
                state[parameter] = state.pop(shard)
        for group, originals in zip(self.optimizer.param_groups, self._originals or [], strict=True):
            group["params"] = originals
        self._originals, self._swapped = None, []
