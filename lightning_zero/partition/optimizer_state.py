"""State of a sharded optimizer: what its ``state_dict`` gives out, and what ``load_state_dict`` takes.

[Note: state is of shards]
Between steps ``optimizer.state`` is keyed by the module's parameters, as the user expects, but holds what the update made
of this rank's shards. ``state_dict`` and ``load_state_dict`` speak of whole tensors, in torch's own layout, or of shards
(:class:`StateForm`).
"""

from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.partition.buffer import in_memory_order
from lightning_zero.partition.elementwise import copy_value, is_moment
from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.partition.rest import Rested
from lightning_zero.partition.shards import LocalShards, TensorShard
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.updater import Updater
from lightning_zero.partition.whole import WholeTensors

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


class StateHost(Protocol):
    """What an optimizer's state needs of the engine."""

    whole: WholeTensors
    shards: LocalShards
    state_form: StateForm

    def locate(self, parameter: nn.Parameter) -> tuple[Unit, UnitGradients | None, int] | None: ...

    def drain(self) -> None: ...

    def all_gather_object(self, value: Any) -> list[Any]: ...


class OptimizerState:
    """The state of one optimizer, of which this rank has that of its shards. See [Note: state is of shards]."""

    def __init__(self, optimizer: Optimizer, host: StateHost, updater: Updater | None) -> None:
        self._optimizer = optimizer
        self._host = host
        self._updater = updater
        self.is_released = False
        """Whether the optimizer is the user's again, its state whole."""
        self.loading: list[list[nn.Parameter]] = []
        """The groups' parameters, while shards stand in for them to be loaded."""
        self._shard_initial()
        self._handles = [
            optimizer.register_state_dict_post_hook(self._give_out),
            optimizer.register_load_state_dict_pre_hook(self._pre_load),
            optimizer.register_load_state_dict_post_hook(self._post_load),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def release(self) -> None:
        """Make the state whole, on every rank. All ranks call it."""
        if self.is_released:
            return
        whole = self.whole()
        for index, parameter in enumerate(self._parameters()):
            self._optimizer.state.pop(parameter, None)  # steps have changed the order
            if index in whole:
                self._optimizer.state[parameter] = whole[index]
        self.is_released = True

    # -- given out ----------------------------------------------------------------------------------------------------

    def local(self) -> dict[int, dict[str, Any]]:
        """State by parameter index as this rank has it: element-wise entries are shards."""
        self._host.drain()
        local: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self._parameters()):
            state, located = self._optimizer.state.get(parameter), self._host.locate(parameter)
            if not state:
                continue
            local[index] = {
                name: self._host.shards.like(located[0], located[2], value)
                if located is not None and is_moment(value, located[0].shards[located[2]].shape)  # type: ignore[union-attr]
                else copy_value(value)
                for name, value in state.items()
            }
        return local

    def whole(self, keep: bool = True) -> dict[int, dict[str, Any]]:
        """State by parameter index with whole tensors; all ranks call it, those that do not ``keep`` get an empty dict."""
        self._host.drain()
        mine: dict[int, dict[str, Any]] = {}
        parameters = list(self._parameters())
        for index, parameter in enumerate(parameters):
            shard = self._shard(parameter)
            state = self._optimizer.state.get(parameter)
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
                where[2]: self._optimizer.state[parameters[i]][name]  # type: ignore[index]
                for i, where in zip(indices, located, strict=True)
                if parameters[i] in self._optimizer.state and self._shard(parameters[i]) is not None
            }
            tensors = self._host.whole.from_shards(unit, pieces, dtype)
            if keep:
                for i, where in zip(indices, located, strict=True):
                    known[i][name] = self._host.whole.copy(tensors[where[2]]).contiguous()  # type: ignore[index]
        return dict(sorted(known.items())) if keep else {}

    def _give_out(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.is_released:
            return state_dict
        form = self._host.state_form
        state = self.local() if form is StateForm.SHARDS else self.whole(form is StateForm.WHOLE)
        return {**state_dict, "state": state}

    # -- taken in -----------------------------------------------------------------------------------------------------

    def room_for(self, parameter: nn.Parameter, name: str, like: Tensor) -> Tensor | TensorShard | None:
        """What a saved state entry of the shape and dtype of ``like`` is to be read into; None for not at all."""
        located = self._host.locate(parameter)
        if located is None:
            return torch.empty(like.shape, dtype=like.dtype, device=parameter.device)
        unit, _, index = located
        if unit.shards[index] is None:
            return None
        if _is_element_wise(name, like, unit.layout.slots[index].shape):
            rest = None
            if self._updater is not None and like.dtype == unit.main.dtype:
                rest = self._updater.room(self._optimizer, unit, index, name, like.dtype)
            if rest is not None:
                return self._host.shards.like(unit, index, rest)
            return self._host.shards.empty_like(unit, index, like.dtype)
        return torch.empty(like.shape, dtype=like.dtype)

    def _pre_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Cut whole tensors to the local shards, and load them as state of the shards (whose dtype state must have)."""
        if self.loading:
            self.restore()  # the last load has raised
        parameters = list(self._parameters())
        count = sum(len(group["params"]) for group in state_dict["param_groups"])
        if self.is_released or count != len(parameters):
            return state_dict  # torch says what is wrong
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        cut = {
            key: self._sharded(parameter, state_dict["state"][key])
            for key, parameter in zip(keys, parameters, strict=True)
            if key in state_dict["state"] and self._shard(parameter) is not None
        }
        for group in self._optimizer.param_groups:
            self.loading.append(group["params"])
            shards = [self._shard(parameter) for parameter in group["params"]]
            nothing = nn.Parameter(torch.empty(0))
            group["params"] = [nothing if shard is None else shard for shard in shards]
        return {**state_dict, "state": cut}

    def _post_load(self, optimizer: Optimizer) -> None:
        if self.loading:
            self.restore()

    def restore(self) -> None:
        """After a load, or one that raised: the groups hold parameters again, which have the state of their shards."""
        loaded, self.loading = self.loading, []
        state = self._optimizer.state
        for group, parameters in zip(self._optimizer.param_groups, loaded, strict=True):
            for parameter, shard in zip(parameters, group["params"], strict=True):
                if shard in state:
                    # Kept again: torch has made state of another dtype anew.
                    state[parameter] = self._kept(parameter, state.pop(shard))
            group["params"] = parameters

    # -- shards -------------------------------------------------------------------------------------------------------

    def _shard_initial(self) -> None:
        """Some optimizers make whole state when they are built."""
        for parameter in self._parameters():
            state = self._optimizer.state.get(parameter)
            if state and self._shard(parameter) is None:
                del self._optimizer.state[parameter]  # an empty entry would be taken for a broken one
            elif state:
                self._optimizer.state[parameter] = self._sharded(parameter, state)

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
            elif _is_element_wise(name, value, slot.shape):
                # State that was made like a 16-bit weight is that of its master.
                dtype = shard.dtype if value.dtype == parameter.dtype else value.dtype
                local[name] = in_memory_order(value, slot.stride)[start].to(shard.device, dtype, copy=True)
            else:
                local[name] = value
        return self._kept(parameter, local)

    def _kept(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """State of the parameter's shard as it is kept, which the updater says."""
        located = self._host.locate(parameter)
        if located is None or self._updater is None:
            return state
        return self._updater.keep(self._optimizer, located[0], located[2], state)

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """What the optimizer updates in the parameter's place: itself where no unit holds it."""
        located = self._host.locate(parameter)
        return parameter if located is None else located[0].shards[located[2]]

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]


def _is_element_wise(name: str, value: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a state entry of a parameter of ``shape`` has one number for each of its elements."""
    return is_moment(value, torch.Size(shape)) or (not shape and name not in _PER_PARAMETER)
