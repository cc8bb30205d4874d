"""Between Lightning's checkpoint, one nested dict, and a folder of shards."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.fitting import WAY_OUT, check_state
from lightning_zero.checkpoint.folder import WEIGHTS, FolderCheckpoint, nested, weights_of
from lightning_zero.checkpoint.planners import Path
from lightning_zero.checkpoint.waiting import waiting
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.partition.shards import TensorShard

OWN_KEY = "lightning_zero"
"""Where a checkpoint holds what plain Lightning has no place for."""


def to_folder(
    checkpoint: Mapping[str, Any], module: nn.Module, engine: ZeroEngine | None, optimizers: Iterable[Optimizer]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state that a folder keeps as tensors, this rank's part of it, and the rest of ``checkpoint``.

    ``optimizer_states`` hold shards (``StateForm.SHARDS``), ``state_dict`` the module's own parameters.
    """
    meta = dict(checkpoint)
    weights = meta.pop("state_dict")
    if engine is not None:
        weights = engine.shards.state_dict(weights, engine.closed)
    state: dict[str, Any] = {WEIGHTS[0]: weights}
    if "optimizer_states" in meta:
        for index, (optimizer, own) in enumerate(zip(optimizers, meta.pop("optimizer_states"), strict=True)):
            state[_name(index)] = _by_name(own, _names(optimizer, module))
        masters = {} if engine is None else engine.shards.masters()
        if masters:
            # Half precision: the folder's weights are 16-bit, training goes on from the masters beside them.
            state[OWN_KEY] = {"masters": masters}
    return state, meta


def from_folder(folder: FolderCheckpoint, meta: Mapping[str, Any], into: Mapping[str, Any] | None) -> dict[str, Any]:
    """Lightning's checkpoint, ``meta`` with the rest. Weights are read straight into tensors of the same name and shape in ``into``; with
    None they are left where they are (``waiting``), as are optimizer state and masters, as SavedOptimizer and SavedMasters.
    All ranks call it."""
    checkpoint = dict(meta)
    checkpoint["state_dict"] = _read_weights(folder, into)
    if optimizers := optimizers_of(folder):
        checkpoint["optimizer_states"] = optimizers
    if folder.below(OWN_KEY, "masters"):
        checkpoint[OWN_KEY] = {"masters": SavedMasters(folder)}
    return checkpoint


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer's state in a folder, where parameters are known by their names."""

    folder: FolderCheckpoint
    index: int

    @property
    def below(self) -> dict[Path, str]:
        return self.folder.below(_name(self.index))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All but the state of parameters, among it the param groups."""
        found = _fetch(self.folder, {path: key for path, key in self.below.items() if path[:1] != ("state",)})
        groups = found.get("param_groups") if isinstance(found, dict) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
            path = os.fspath(self.folder.path)
            raise ValueError(f"The checkpoint {path!r} has no 'param_groups' for optimizer {self.index}.{WAY_OUT}")
        return found

    @cached_property
    def names(self) -> list[str]:
        """The parameters in the order of the groups."""
        return [name for group in self.settings["param_groups"] for name in group["params"]]

    def numbered(self, numbers: Mapping[str, int] | None = None) -> dict[Path, str]:
        """The keys of the parameters' state, by their path in a state dict of torch. ``numbers`` are those of the
        parameters, if they are not to be those of :attr:`names`."""
        if numbers is None:
            numbers = {name: number for number, name in enumerate(self.names)}
        state = self.folder.below(_name(self.index), "state")
        found = {(numbers[str(path[0])], *path[1:]): key for path, key in state.items() if path}
        return {("state", *path): key for path, key in sorted(found.items(), key=lambda item: item[0][0])}

    def state_dict(self, value: Callable[[str], Any], numbers: Mapping[str, int] | None = None) -> dict[str, Any]:
        """A state dict in torch's own layout; ``value`` says what stands at a key."""
        groups, start = [], 0
        for group in self.settings["param_groups"]:
            groups.append({**group, "params": list(range(start, start + len(group["params"])))})
            start += len(group["params"])
        flat: dict[int, dict[Path, Any]] = {}
        for (_, number, *path), key in self.numbered(numbers).items():
            flat.setdefault(int(number), {})[tuple(path)] = value(key)
        states = {number: nested(entries) for number, entries in flat.items()}
        return {**self.settings, "state": states, "param_groups": groups}

    def read(self, optimizer: Optimizer, module: nn.Module, engine: ZeroEngine | None) -> dict[str, Any]:
        """A state dict for ``optimizer`` with this rank's shards only. All ranks call it."""
        names, parameters = _names(optimizer, module), _parameters(optimizer)
        self._check(optimizer, names)
        numbers = {name: number for number, name in enumerate(names)}
        check_state(optimizer, self.index, self.state_dict(self.folder.tensor, numbers))
        binding = None if engine is None else engine.binding(optimizer)
        targets: dict[str, Any] = {}
        for (_, number, *path), key in self.numbered(numbers).items():
            like, parameter = self.folder.tensor(key), parameters[int(number)]
            if like is None:
                targets[key] = None
            elif binding is None:
                targets[key] = torch.empty_like(like, device=parameter.device)
            else:
                targets[key] = binding.state.room_for(parameter, str(path[0]), like)
        values = self.folder.read(targets)
        return self.state_dict(lambda key: values.get(key, targets[key]), numbers)

    def _check(self, optimizer: Optimizer, names: list[str]) -> None:
        what = f"The checkpoint {os.fspath(self.folder.path)!r} does not fit optimizer {self.index}"
        sizes = [len(group["params"]) for group in self.settings["param_groups"]]
        own = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != own:
            raise ValueError(f"{what}: it has param groups of {sizes} parameters, the optimizer has {own}.{WAY_OUT}")
        unknown = sorted(set(self.names) - set(names))
        if unknown:
            raise ValueError(f"{what}: it has state for {unknown[:3]}, which the optimizer does not update.{WAY_OUT}")


def optimizers_of(folder: FolderCheckpoint) -> list[SavedOptimizer]:
    """The optimizers whose state is in the folder."""
    optimizers: list[SavedOptimizer] = []
    while folder.below(_name(len(optimizers))):
        optimizers.append(SavedOptimizer(folder, len(optimizers)))
    return optimizers


@dataclass(frozen=True)
class SavedMasters:
    """Master weights in a folder."""

    folder: FolderCheckpoint

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """Of their shapes and dtypes, without memory."""
        return {name: self.folder.tensor(key) for name, key in self._keys.items()}

    @property
    def _keys(self) -> dict[str, str]:
        return {str(path[0]): key for path, key in self.folder.below(OWN_KEY, "masters").items()}

    def read(self, engine: ZeroEngine) -> dict[str, TensorShard]:
        """This rank's shards by name. All ranks call it."""
        keys = self._keys
        shards = engine.shards.room_for_masters({name: one.dtype for name, one in self.tensors.items() if one is not None})
        self.folder.read({keys[name]: shard for name, shard in shards.items()})
        return shards


def load_optimizers(
    checkpoint: Mapping[str, Any],
    optimizers: list[Optimizer],
    module: nn.Module,
    engine: ZeroEngine | None,
    device: torch.device,
) -> None:
    """Load the optimizers' state and the master weights, from either form of checkpoint. All ranks call it."""
    states = checkpoint["optimizer_states"]
    if states and len(states) != len(optimizers):
        raise ValueError(
            f"The checkpoint has the state of {len(states)} optimizer(s), the module has configured {len(optimizers)}."
            f"{WAY_OUT}"
        )
    for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        if isinstance(state, SavedOptimizer):
            state = state.read(optimizer, module, engine)
        else:
            check_state(optimizer, index, state)
        # Before loading, which adds to the defaults.
        settings = [set(optimizer.defaults) & set(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        _check_settings(optimizer, index, settings)
        if engine is None or engine.binding(optimizer) is None:
            _optimizer_to_device(optimizer, device)
    own = checkpoint.get(OWN_KEY, {})
    masters = own.get("masters", {}) if isinstance(own, dict) else own
    if engine is not None:
        _check_masters(masters.tensors if isinstance(masters, SavedMasters) else masters, module)
        engine.whole.load_masters(masters.read(engine) if isinstance(masters, SavedMasters) else masters)


def _check_settings(optimizer: Optimizer, index: int, settings: list[set[str]]) -> None:
    """Raise ValueError if the settings it has loaded are those of another class of optimizer."""
    for group, wanted in zip(optimizer.param_groups, settings, strict=True):
        missing = sorted(wanted - set(group))
        if missing:
            raise ValueError(
                f"The checkpoint does not fit optimizer {index}, {type(optimizer).__qualname__}: its param groups have no"
                f" {', '.join(map(repr, missing))}, so it was saved with another class of optimizer.{WAY_OUT}"
            )


def _check_masters(masters: Any, module: nn.Module) -> None:
    """Raise ValueError unless they are tensors of the parameters' shapes."""
    if not isinstance(masters, Mapping):
        raise ValueError(f"The checkpoint's master weights are {type(masters).__name__} instead of tensors by name.")
    for name, parameter in module.named_parameters():
        value = masters.get(name, parameter)
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"The checkpoint's master weight {name!r} is {found}, not {tuple(parameter.shape)}.")


def _read_weights(folder: FolderCheckpoint, into: Mapping[str, Any] | None) -> dict[str, Any]:
    keys = weights_of(folder)
    targets: dict[str, Any] = {}
    left: dict[str, Tensor] = {}
    for path, key in keys.items():
        like = folder.tensor(key)
        if into is None and like is not None:
            left[key] = waiting(like, partial(_read_alone, folder, key, like))
            continue
        own = into.get(str(path[0])) if into is not None and len(path) == 1 else None
        targets[key] = None if like is None else own if _fits(own, like) else torch.empty_like(like, device="cpu")
    found = {**targets, **left, **folder.read(targets)}
    return nested({path: found[key] for path, key in keys.items()}) if keys else {}


def _read_alone(folder: FolderCheckpoint, key: str, like: Tensor) -> Tensor:
    """One tensor, whenever this rank wants it."""
    values = torch.empty_like(like, device="cpu")
    folder.read({key: values}, alone=True)
    return values


def _fetch(folder: FolderCheckpoint, keys: Mapping[Path, str]) -> Any:
    like = {key: folder.tensor(key) for key in keys.values()}
    targets = {key: None if one is None else torch.empty_like(one, device="cpu") for key, one in like.items()}
    values = folder.read(targets)
    return nested({path: values.get(key, targets[key]) for path, key in keys.items()})


def _fits(own: Any, like: Tensor) -> bool:
    return isinstance(own, Tensor) and own.shape == like.shape and own.layout is torch.strided and not own.is_meta


def _name(index: int) -> str:
    return f"optimizer_{index}"


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    return [known.get(id(parameter), f"parameter {i}") for i, parameter in enumerate(_parameters(optimizer))]


def _by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {names[i]: own for i, own in state["state"].items()}, "param_groups": groups}
