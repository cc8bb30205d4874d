"""Which optimizers can update shards: those whose update of an element depends on nothing but that element's own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.partition.rest import bytes_of

_REFUSED = {
    "LBFGS": "it evaluates the loss several times per step through its closure and mixes all elements in its line search",
    "Adafactor": "it factors the second moment of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it needs sparse gradients, which are reduced as dense ones",
}

# Known to update element by element, so that nothing needs to be tried.
_ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in ("SGD ASGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop").split()
}


def is_known(optimizer: Optimizer) -> bool:
    """Whether it need not be tried, which calls its ``step``."""
    return type(optimizer) in _ELEMENTWISE


def check_supported(optimizer: Optimizer, names: dict[int, str]) -> None:
    """Refuse, by name, optimizers that sharding would change; raise on parameters the module does not have."""
    name = type(optimizer).__qualname__
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise TypeError(f"{name} is not a torch.optim.Optimizer (it has no step hooks), its state cannot be sharded.")
    if type(optimizer).__name__ in _REFUSED:
        raise ValueError(
            f"The optimizer {name} cannot be sharded: {_REFUSED[type(optimizer).__name__]}. Use an element-wise optimizer"
            " (SGD, Adam, AdamW, RMSprop, Adagrad, ...) or a strategy without sharding."
        )
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise ValueError(
                f"The optimizer {name} wraps another one ({attribute}: {type(value).__qualname__}), whose update would not"
                " see the shards. Use the inner optimizer directly."
            )
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"The optimizer {name} holds a parameter of shape {tuple(parameter.shape)} (param_groups[{group_index}]"
                    f"['params'][{index}]) that is not one of the LightningModule's parameters. Register it on the module."
                )
    for group_index, group in enumerate(optimizer.param_groups):
        if not is_known(optimizer) and not _is_elementwise(optimizer, group):
            raise ValueError(
                f"The optimizer {name} (param_groups[{group_index}]) cannot be sharded: its update of an element depends"
                " on other elements or on the tensor's shape (tried on a small matrix). Use an element-wise optimizer."
            )


def _is_elementwise(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether updating a small matrix as a whole and as two 1-D pieces gives the same."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    dtype = torch.float64 if group["params"] and group["params"][0].dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator, dtype=dtype).to(device)
    grads = [torch.randn(4, 6, generator=generator, dtype=dtype).to(device) for _ in range(3)]

    def trained(pieces: list[slice] | None) -> Tensor:
        values = [start.clone()] if pieces is None else [start.flatten()[piece].clone() for piece in pieces]
        parameters = [nn.Parameter(value) for value in values]
        trial = probe(optimizer, group, parameters)
        for grad in grads:
            for parameter, piece in zip(parameters, pieces or [None], strict=True):  # type: ignore[list-item]
                parameter.grad = grad.clone() if piece is None else grad.flatten()[piece].clone()
            trial.step()
        return torch.cat([p.detach().flatten() for p in parameters])

    try:
        return torch.allclose(trained(None), trained([slice(0, 11), slice(11, 24)]), rtol=1e-4, atol=1e-7)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False


def probe(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """A stand-in of the same class and settings that updates other parameters."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(vars(optimizer))
    settings = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
    other.param_groups = [{**settings, "params": parameters}]
    other.state = type(optimizer.state)(dict) if optimizer.state is not None else {}
    # Hooks and scheduler wrappers belong to the real one.
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        other.__dict__[hooks] = type(getattr(optimizer, hooks))()
    other.__dict__.pop("step", None)
    for parameter in parameters:
        # Some optimizers make their state when they are built.
        for state in optimizer.state.values():
            if isinstance(state, dict):
                other.state[parameter] = {
                    k: torch.full_like(parameter, float(bytes_of(v).flatten()[0]) if v.numel() else 0.0)
                    if is_moment(v, None)
                    else copy_value(v)
                    for k, v in state.items()
                }
                break
    return other


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the optimizer's state on this rank."""
    return sum(
        v.numel() * v.element_size()
        for state in optimizer.state.values() if isinstance(state, dict)
        for v in state.values() if isinstance(v, Tensor)
    )  # fmt: skip


def states_per_element(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many numbers of state the optimizer keeps for an element of this group: 2 for Adam. A trial step tells."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    parameter = nn.Parameter(torch.zeros(8, dtype=torch.float32, device=device))
    trial = probe(optimizer, group, [parameter])
    parameter.grad = torch.zeros_like(parameter)
    trial.step()
    return sum(is_moment(v, parameter.shape) for v in trial.state.get(parameter, {}).values())


def copy_value(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def is_moment(value: Any, shape: torch.Size | None) -> bool:
    """Whether a state entry is element-wise (of the parameter's shape) and not one value per parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and (shape is None or value.shape == shape)
