"""Gradient clipping and loss unscaling over shards: what torch computes from whole gradients, with one number reduced."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_zero.comm import Comm
from lightning_zero.partition.rest import bytes_of, resting


class GradientShards:
    """The owned parts of some parameters' reduced gradients; what is done to them is done to the gradients.

    ``owned`` gives this rank's part of a parameter's gradient, 1-D, if there is one. Each comes with the number of ranks
    that own the same: replicas of shard groups, and model-parallel ranks where the parameter is not one of a
    tensor-parallel layer.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], owned: Callable[[nn.Parameter], Tensor | None], comm: Comm
    ) -> None:
        parameters = list(parameters)
        parts = [(parameter, owned(parameter)) for parameter in parameters]
        shards = [(parameter, shard) for parameter, shard in parts if shard is not None and shard.numel()]
        self._shards = [shard for _, shard in shards]
        replicas, alike = comm.topology.replicas, 1 if comm.model is None else comm.model.size
        self._owners = [replicas * (1 if is_tensor_parallel(parameter) else alike) for parameter, _ in shards]
        self._comm = comm
        wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        self._norm_dtype = torch.float64 if wide else torch.float32

    def clip_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over all ranks; returns that norm (0-dim tensor)."""
        zero = torch.zeros((), dtype=self._norm_dtype, device=self._comm.device)
        return clip_by_norm(self._shards, self._owners, max_norm, norm_type, self._comm.all_reduce_everywhere, zero)

    def clip_by_value(self, clip_value: float) -> None:
        """Clamp every element to ``[-clip_value, clip_value]``."""
        for shards in edited(self._shards):
            for shard in shards:
                shard.clamp_(-clip_value, clip_value)

    def unscale(self, inverse_scale: float) -> Tensor:
        """Multiply by ``inverse_scale``; returns 1.0 if any rank's were not finite, else 0.0 (0-dim)."""
        home = self._shards[0].device if self._shards else self._comm.device
        # The dtype is named, since a step of manual optimization under 16-true has another default.
        found = torch.zeros((), dtype=torch.float32, device=home)
        scale = torch.full((), inverse_scale, dtype=torch.float32, device=home)
        for shards in edited(self._shards):
            torch._amp_foreach_non_finite_check_and_unscale_(shards, found, scale)
        return self._comm.all_reduce_everywhere(found.to(self._comm.device), "max")


def is_tensor_parallel(parameter: nn.Parameter) -> bool:
    """Whether the ranks of a model-parallel group have different parts of one parameter, by Megatron's attribute."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def clip_by_norm(
    shards: list[Tensor],
    owners: list[int],
    max_norm: float,
    norm_type: float,
    all_reduce: Callable[[Tensor, str], Tensor],
    zero: Tensor,
) -> Tensor:
    """Scale the gradient shards in place so that the norm over all ranks is at most ``max_norm``; returns the norm.

    The rule is ``torch.nn.utils.clip_grad_norm_``'s: the factor is ``max_norm / (norm + 1e-6)``, at most 1.
    """
    norm = total_norm(shards, owners, norm_type, all_reduce, zero)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Where looking is free, gradients that need no clipping are left alone.
    if shards and not (factor.device.type == "cpu" and factor == 1):
        for some in edited(shards):
            torch._foreach_mul_(some, factor)
    return norm


def total_norm(
    shards: list[Tensor],
    owners: list[int],
    norm_type: float,
    all_reduce: Callable[[Tensor, str], Tensor],
    zero: Tensor,
) -> Tensor:
    """The norm of all ranks' shards taken as one vector, as a 0-dim tensor of the dtype and device of ``zero`` (the
    ranks' shards may differ in dtype). A shard that several ranks own counts once."""
    norm_type = float(norm_type)
    each = [norm.to(zero) for some in values(shards) for norm in torch._foreach_norm(some, norm_type)]
    norms = torch.stack([zero, *each])
    if math.isinf(norm_type):
        return all_reduce(norms.max(), "max")
    powers = norms.double() ** norm_type
    if max(owners, default=1) > 1:
        powers /= torch.tensor([1, *owners], dtype=torch.float64, device=norms.device)
    power = powers.sum()
    return (all_reduce(power, "sum") ** (1.0 / norm_type)).to(zero)


def values(shards: list[Tensor]) -> Iterator[list[Tensor]]:
    """The shards, to look at: all at once, or one at a time where some rest elsewhere."""
    for some in _staged(shards):
        yield [bytes_of(shard) for shard in some]


def edited(shards: list[Tensor]) -> Iterator[list[Tensor]]:
    """The same to write to."""
    for some in _staged(shards):
        owners = [owner for owner in map(resting, some) if owner is not None]
        for owner in owners:
            owner.bring_to_write()
        yield some
        for owner in owners:
            owner.put_away()


def _staged(shards: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups to work on one after the other; of what rests elsewhere the next one is being fetched."""
    owners = [resting(shard) for shard in shards]
    if not any(owners):
        if shards:
            yield shards
        return
    for number, shard in enumerate(shards):
        for owner in owners[number : number + 2]:
            if owner is not None:
                owner.stage()
        yield [shard]
