"""Gradient clipping and loss unscaling over shards: what torch computes from whole gradients, with one number reduced."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_zero.comm import Comm


class GradientShards:
    """The owned parts of some parameters' reduced gradients; what is done to them is done to the gradients.

    ``shards`` are this rank's, one for each gradient that it owns a part of.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], shards: list[Tensor], comm: Comm) -> None:
        self._shards = shards
        self._comm = comm
        wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        self._norm_dtype = torch.float64 if wide else torch.float32

    def clip_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over all ranks; returns that norm (0-dim tensor)."""
        zero = torch.zeros((), dtype=self._norm_dtype, device=self._comm.device)
        return clip_by_norm(self._shards, max_norm, norm_type, self._comm.all_reduce, zero, self._comm.topology.replicas)

    def clip_by_value(self, clip_value: float) -> None:
        """Clamp every element to ``[-clip_value, clip_value]``."""
        for shard in self._shards:
            shard.clamp_(-clip_value, clip_value)

    def unscale(self, inverse_scale: float) -> Tensor:
        """Multiply by ``inverse_scale``; returns 1.0 if any rank's were not finite, else 0.0 (0-dim)."""
        home = self._shards[0].device if self._shards else self._comm.device
        found, scale = torch.zeros((), device=home), torch.full((), inverse_scale, device=home)
        if self._shards:
            torch._amp_foreach_non_finite_check_and_unscale_(self._shards, found, scale)
        return self._comm.all_reduce(found.to(self._comm.device), "max")


def clip_by_norm(
    shards: list[Tensor],
    max_norm: float,
    norm_type: float,
    all_reduce: Callable[[Tensor, str], Tensor],
    zero: Tensor,
    replicas: int = 1,
) -> Tensor:
    """Scale the gradient shards in place so that the norm over all ranks is at most ``max_norm``; returns the norm.

    The rule is ``torch.nn.utils.clip_grad_norm_``'s: the factor is ``max_norm / (norm + 1e-6)``, at most 1.
    """
    norm = total_norm(shards, norm_type, all_reduce, zero, replicas)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Where looking is free, gradients that need no clipping are left alone.
    if shards and not (factor.device.type == "cpu" and factor == 1):
        torch._foreach_mul_(shards, factor)
    return norm


def total_norm(
    shards: list[Tensor],
    norm_type: float,
    all_reduce: Callable[[Tensor, str], Tensor],
    zero: Tensor,
    replicas: int,
) -> Tensor:
    """The norm of all ranks' shards taken as one vector, as a 0-dim tensor of the dtype and device of ``zero`` (the
    ranks' shards may differ in dtype). Each shard is there ``replicas`` times, and counts once."""
    norm_type = float(norm_type)
    norms = torch.stack([zero, *(n.to(zero) for n in (torch._foreach_norm(shards, norm_type) if shards else ()))])
    if math.isinf(norm_type):
        return all_reduce(norms.max(), "max")
    power = (norms.double() ** norm_type).sum()
    return ((all_reduce(power, "sum") / replicas) ** (1.0 / norm_type)).to(zero)
