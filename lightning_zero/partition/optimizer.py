"""Binding a user's optimizer to shards.

[Note: an optimizer keeps the module's own parameters]
Between steps ``param_groups`` hold the module's parameters, so that toggling, schedulers, finetuning callbacks and
layer-wise rates work untouched. For the duration of the update the groups hold this rank's 1-D shards of those
parameters that have a gradient, with the reduced gradient as ``.grad``; state made by the optimizer is then of the
shards. Element-wise optimizers cannot tell the difference. ``state_dict`` and ``load_state_dict`` speak of whole
tensors, in torch's own layout.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import profiling
from lightning_zero.partition.buffer import in_memory_order
from lightning_zero.partition.elementwise import copy_value, is_moment, probe
from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.partition.rest import Rested, bytes_of
from lightning_zero.partition.shards import LocalShards, TensorShard
from lightning_zero.partition.together import Together
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.whole import WholeTensors
from lightning_zero.transfer import Link

# State that is one number per parameter; of a 0-dim parameter the shape does not tell.
_PER_PARAMETER = ("step", "eta", "mu", "mu_product")


class StateForm(Enum):
    """What ``state_dict`` of a bound optimizer holds."""

    WHOLE = auto()
    """Whole tensors in host memory, in torch's own layout."""
    NOTHING = auto()
    """No state, on a rank that only takes part in gathering it."""
    SHARDS = auto()
    """This rank's shards, as they are."""


class Host(Protocol):
    """What a binding needs of the engine."""

    whole: WholeTensors
    shards: LocalShards
    together: Together
    state_form: StateForm

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def locate(self, parameter: nn.Parameter) -> "tuple[Unit, UnitGradients | None, int] | None": ...

    def drain(self) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self, units: list[Unit]) -> None: ...

    def all_gather_object(self, value: Any) -> list[Any]: ...


@dataclass
class UpdateItem:
    """One parameter's shard with what its update needs; all tensors are 1-D of one length."""

    unit: Unit
    index: int
    start: int
    """Where it lies in the unit's main shard."""
    shard: nn.Parameter
    grad: Tensor
    """In the dtype of reduced gradients, which may be narrower than the shard's. It may rest elsewhere: all that do are
    the part of the unit's ``gradient_place`` from ``start`` on."""
    state: dict[str, Any]


@dataclass
class UpdateGroup:
    """One param group: settings as they are now, and its shards that have a gradient."""

    settings: dict[str, Any]
    items: list[UpdateItem]


class Updater(Protocol):
    """Who carries out updates in the optimizer's place, and publishes them."""

    link: Link | None
    """The way to the host memory where masters and state are; None where that is the device's own."""
    has_changed: bool
    """Whether the update under way, or the last one, has changed anything."""
    is_early: bool
    """Whether it wants to hear of gradients before the step (:meth:`run_early`)."""

    def prepare(self, optimizers: Iterable[Optimizer], locate: Callable[[Any], Any]) -> None:
        """Take the room for the state of ``optimizers``; ``locate`` is the engine's. Raises OSError if there is too little."""

    def run(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> Future | None:
        """Update the shards in ``groups``; a future where the update goes on beside the next step, to be published when
        that is over."""

    def run_early(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> None:
        """The gradients of one unit are there, and a step will follow, as far as one can tell."""

    def room(self, optimizer: Optimizer, unit: Unit, index: int, name: str, dtype: torch.dtype) -> Rested | None:
        """Where the state ``name`` of a unit's parameter rests; None for in memory."""

    def keep(self, optimizer: Optimizer, unit: Unit, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter's shard as it is kept: what is element-wise may rest elsewhere from now on."""

    def put_away(self) -> None:
        """Let the state that users have looked at rest again, with their changes."""

    def revoke(self) -> None:
        """Undo what has been updated early: somebody looks, or the step does not come."""

    def close(self) -> None: ...


def stand_in(optimizer: Optimizer, groups: list[UpdateGroup]) -> Optimizer:
    """An optimizer of the same class whose step updates the given shards with the given settings."""
    other = probe(optimizer, {}, [])
    for group in groups:
        for item in group.items:
            item.shard.grad = bytes_of(item.grad).to(item.shard.dtype)
    other.param_groups = [{**group.settings, "params": [item.shard for item in group.items]} for group in groups]
    other.state = defaultdict(dict, {item.shard: item.state for group in groups for item in group.items})
    return other


class OptimizerBinding:
    """Lets one optimizer update shards. See [Note: an optimizer keeps the module's own parameters]."""

    def __init__(self, optimizer: Optimizer, host: Host, updater: "Updater | None" = None) -> None:
        self.optimizer = optimizer
        self._host = host
        self._originals: list[list[nn.Parameter]] | None = None
        self._swapped: list[tuple[nn.Parameter, nn.Parameter, Tensor]] = []
        """What the groups hold for the duration of an update: parameter, shard, reduced gradient of the shard."""
        self._group_of: dict[int, int] = {}
        self._units: dict[int, Unit] = {}
        self._depth = 0
        self._released = False
        self._updater = updater
        self._pending: tuple[Future, dict[int, Unit]] | None = None
        self._finished: dict[int, Unit] = {}
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            previous = getattr(hook, "__self__", None)
            if isinstance(previous, OptimizerBinding):
                previous.release()
                previous.close()
        self._shard_initial_state()
        self._last = optimizer.register_step_pre_hook(self._pre_step)
        first = optimizer.register_step_post_hook(self._post_step)
        optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
        self._handles = [
            self._last,
            first,
            optimizer.register_state_dict_post_hook(self._whole_state),
            optimizer.register_load_state_dict_pre_hook(self._pre_load),
            optimizer.register_load_state_dict_post_hook(self._post_load),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def release(self) -> None:
        """Give the optimizer back to the user, with whole state on every rank. All ranks call it."""
        if self._released:
            return
        whole = self.whole_state()
        for index, parameter in enumerate(self._parameters()):
            self.optimizer.state.pop(parameter, None)  # steps have changed the order
            if index in whole:
                self.optimizer.state[parameter] = whole[index]
        self._released = True

    def end(self) -> None:
        """At the end of a run: a single rank has all of the state. Several make it whole when somebody wants it, since
        that takes memory and all of them; and so does state that rests elsewhere."""
        if self._host.world_size == 1 and self._updater is None:
            self.release()
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

    # -- the update --------------------------------------------------------------------------------------------------

    def _pre_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._depth += 1
        if self._depth > 1:
            return None  # the step of a subclass calls that of its base: torch runs the hooks for both
        if self._host.closed:
            self.release()
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
        if self._depth or self._released:
            return
        if self._originals is None:
            if all(parameter.grad is None for parameter in self._parameters()):
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

    # -- state -------------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _shard_initial_state(self) -> None:
        """Some optimizers make whole state when they are built."""
        for parameter in self._parameters():
            state = self.optimizer.state.get(parameter)
            if state and self._shard(parameter) is None:
                del self.optimizer.state[parameter]  # an empty entry would be taken for a broken one
            elif state:
                self.optimizer.state[parameter] = self._sharded(parameter, state)

    def _sharded(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        located = self._host.locate(parameter)
        if located is None:
            return state
        unit, _, index = located
        slot, local = unit.layout.slots[index], {}
        shard = unit.shards[index]
        if shard is None:
            return {}
        start = unit.in_tensor(index).slice()
        for name, value in state.items():
            if isinstance(value, TensorShard):
                local[name] = value.data.tensor if isinstance(value.data, Rested) else value.data
            elif is_element_wise(name, value, slot.shape):
                # State that was made like a 16-bit weight is that of its master.
                dtype = shard.dtype if value.dtype == parameter.dtype else value.dtype
                local[name] = in_memory_order(value, slot.stride)[start].to(shard.device, dtype, copy=True)
            else:
                local[name] = value
        return local if self._updater is None else self._updater.keep(self.optimizer, unit, index, local)

    def local_state(self) -> dict[int, dict[str, Any]]:
        """State by parameter index as this rank has it: element-wise entries are shards."""
        self._host.drain()
        local: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self._parameters()):
            state, located = self.optimizer.state.get(parameter), self._host.locate(parameter)
            if not state:
                continue
            local[index] = {
                name: self._host.shards.like(located[0], located[2], value)
                if located is not None and is_moment(value, located[0].shards[located[2]].shape)  # type: ignore[union-attr]
                else copy_value(value)
                for name, value in state.items()
            }
        return local

    def room_for(self, parameter: nn.Parameter, name: str, like: Tensor) -> Tensor | TensorShard | None:
        """What a saved state entry of the shape and dtype of ``like`` is to be read into; None for not at all."""
        located = self._host.locate(parameter)
        if located is None:
            return torch.empty(like.shape, dtype=like.dtype, device=parameter.device)
        unit, _, index = located
        if unit.shards[index] is None:
            return None
        if is_element_wise(name, like, unit.layout.slots[index].shape):
            rest = None
            if self._updater is not None and like.dtype == unit.main.dtype:
                rest = self._updater.room(self.optimizer, unit, index, name, like.dtype)
            if rest is not None:
                return self._host.shards.like(unit, index, rest)
            return self._host.shards.empty_like(unit, index, like.dtype)
        return torch.empty(like.shape, dtype=like.dtype)

    def whole_state(self, keep: bool = True) -> dict[int, dict[str, Any]]:
        """State by parameter index with whole tensors; all ranks call it, those that do not ``keep`` get an empty dict."""
        self._host.drain()
        mine: dict[int, dict[str, Any]] = {}
        parameters = list(self._parameters())
        for index, parameter in enumerate(parameters):
            shard = self._shard(parameter)
            state = self.optimizer.state.get(parameter)
            if state and shard is not None:
                mine[index] = {
                    name: value.dtype
                    if shard is not parameter and is_moment(value, shard.shape)
                    else copy_value(value)
                    for name, value in state.items()
                }
        known: dict[int, dict[str, Any]] = {}
        for answer in self._host.all_gather_object(mine):
            for index, entries in answer.items():
                known.setdefault(index, entries)
        by_unit: dict[tuple[int, str, torch.dtype], list[int]] = {}
        for index, entries in sorted(known.items()):
            for name, value in entries.items():
                if isinstance(value, torch.dtype):
                    unit = self._host.locate(parameters[index])[0]  # type: ignore[index]
                    by_unit.setdefault((unit.index, name, value), []).append(index)
        for (_, name, dtype), indices in by_unit.items():
            located = [self._host.locate(parameters[i]) for i in indices]
            unit = located[0][0]  # type: ignore[index]
            pieces = {
                where[2]: self.optimizer.state[parameters[i]][name]  # type: ignore[index]
                for i, where in zip(indices, located, strict=True)
                if parameters[i] in self.optimizer.state and self._shard(parameters[i]) is not None
            }
            tensors = self._host.whole.from_shards(unit, pieces, dtype)
            if keep:
                for i, where in zip(indices, located, strict=True):
                    known[i][name] = self._host.whole.copy(tensors[where[2]]).contiguous()  # type: ignore[index]
        return dict(sorted(known.items())) if keep else {}

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """What the optimizer updates in the parameter's place: itself where no unit holds it."""
        located = self._host.locate(parameter)
        return parameter if located is None else located[0].shards[located[2]]

    def _whole_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._released:
            return state_dict
        form = self._host.state_form
        state = self.local_state() if form is StateForm.SHARDS else self.whole_state(form is StateForm.WHOLE)
        return {**state_dict, "state": state}

    def _pre_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Cut whole tensors to the local shards, and load them as state of the shards (whose dtype state must have)."""
        parameters = list(self._parameters())
        count = sum(len(group["params"]) for group in state_dict["param_groups"])
        if self._released or count != len(parameters):
            return state_dict  # torch says what is wrong
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        cut = {
            key: self._sharded(parameter, state_dict["state"][key])
            for key, parameter in zip(keys, parameters, strict=True)
            if key in state_dict["state"] and self._shard(parameter) is not None
        }
        self._originals = []
        for group in self.optimizer.param_groups:
            self._originals.append(group["params"])
            stand_ins = []
            for parameter in group["params"]:
                shard = self._shard(parameter)
                if shard is None:
                    shard = nn.Parameter(torch.empty(0, dtype=torch.float32, device=parameter.device))
                self._swapped.append((parameter, shard, shard))
                stand_ins.append(shard)
            group["params"] = stand_ins
        return {**state_dict, "state": cut}

    def _post_load(self, optimizer: Optimizer) -> None:
        if self._originals is None:
            return
        self._restore()
        for parameter in self._parameters() if self._updater is not None else ():
            located, state = self._host.locate(parameter), self.optimizer.state.get(parameter)
            if state and located is not None and self._shard(parameter) is not None:
                # torch has made state of another dtype anew.
                self.optimizer.state[parameter] = self._updater.keep(self.optimizer, located[0], located[2], state)  # type: ignore[union-attr]


def is_element_wise(name: str, value: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a state entry of a parameter of ``shape`` has one number for each of its elements."""
    return is_moment(value, torch.Size(shape)) or (not shape and name not in _PER_PARAMETER)
