"""Whether saved optimizer state is that of the optimizer: a step with state that is not would fail on some ranks only."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.partition.elementwise import is_known, is_moment, probe

WAY_OUT = " Resume with the same optimizers, or load the weights only (`load_from_checkpoint`) and start a new fit."


def check_state(optimizer: Optimizer, index: int, saved: Any) -> None:
    """Compare the state dict ``saved`` (its tensors may be without memory) with the state that a trial step makes.

    Raises ValueError with optimizer, parameter and entry. Optimizers that are not torch's own are taken as they are.
    """
    what = f"The checkpoint does not fit optimizer {index}, {type(optimizer).__qualname__}"
    groups, state = (saved.get("param_groups"), saved.get("state")) if isinstance(saved, dict) else (None, None)
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        raise ValueError(f"{what}: its state is wrong: 'param_groups' are no list of groups.{WAY_OUT}")
    if not isinstance(state, Mapping) or not all(isinstance(entries, Mapping) for entries in state.values()):
        raise ValueError(f"{what}: its state is wrong: 'state' is no dict by parameter.{WAY_OUT}")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        return  # torch says what is wrong
    for own, group in zip(optimizer.param_groups, groups):
        has_settings = set(optimizer.defaults) <= set(group)  # else it is another optimizer's, which is said elsewhere
        known = [
            (parameter, key, state[key]) for parameter, key in zip(own["params"], group["params"]) if state.get(key)
        ]
        if known and has_settings and is_known(optimizer):
            wanted = _trial(optimizer, group, known[0][0].device, what)
            for parameter, key, entries in known:
                for name, example in wanted.items():
                    _check_entry(what, key, entries, name, example, parameter.shape)


def _check_entry(what: str, key: Any, entries: Mapping[str, Any], name: str, example: Any, shape: torch.Size) -> None:
    entry = f"{name!r} of parameter {key!r}"
    if name not in entries:
        raise ValueError(f"{what}: its state is wrong: {entry} is missing.{WAY_OUT}")
    value = entries[name]
    if is_moment(example, None) and value is not None:
        if getattr(value, "shape", None) is None or torch.Size(value.shape) != shape:
            found = type(value).__name__ if getattr(value, "shape", None) is None else f"of shape {tuple(value.shape)}"
            raise ValueError(
                f"{what}: its state is wrong: {entry} is {found}, the parameter is of shape {tuple(shape)}.{WAY_OUT}"
            )
    elif isinstance(example, Tensor) and not isinstance(value, (int, float)):
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"{what}: its state is wrong: {entry} is not one number.{WAY_OUT}")


def _trial(optimizer: Optimizer, group: dict[str, Any], device: torch.device, what: str) -> dict[str, Any]:
    """The state that a step with the saved settings makes for a parameter of two elements."""
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float32, device=device))
    parameter.grad = torch.zeros_like(parameter)
    trial = probe(optimizer, group, [parameter])
    trial.state[parameter] = {}
    try:
        trial.step()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{what}: its state is wrong: no step can be made with its settings. {type(error).__name__}: {error}.{WAY_OUT}"
        ) from error
    return dict(trial.state[parameter])
