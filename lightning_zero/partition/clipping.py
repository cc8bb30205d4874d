"""Gradient clipping over shards: what torch.nn.utils computes from whole gradients, with one number reduced."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def clip_by_norm(
    shards: list[Tensor],
    max_norm: float,
    norm_type: float,
    all_reduce: Callable[[Tensor, str], Tensor],
    zero: Tensor,
) -> Tensor:
    """Scale the gradient shards in place so that the norm over all ranks is at most ``max_norm``; returns the norm.

    The rule is ``torch.nn.utils.clip_grad_norm_``'s: the factor is ``max_norm / (norm + 1e-6)``, at most 1.
    """
    norm = total_norm(shards, norm_type, all_reduce, zero)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Where looking is free, gradients that need no clipping are left alone.
    if shards and not (factor.device.type == "cpu" and factor == 1):
        torch._foreach_mul_(shards, factor)
    return norm


def total_norm(
    shards: list[Tensor], norm_type: float, all_reduce: Callable[[Tensor, str], Tensor], zero: Tensor
) -> Tensor:
    """The norm of all ranks' shards taken as one vector, as a 0-dim tensor of the dtype and device of ``zero`` (the
    ranks' shards may differ in dtype)."""
    norm_type = float(norm_type)
    norms = torch.stack([zero, *(n.to(zero) for n in (torch._foreach_norm(shards, norm_type) if shards else ()))])
    if math.isinf(norm_type):
        return all_reduce(norms.max(), "max")
    power = (norms.double() ** norm_type).sum()
    return (all_reduce(power, "sum") ** (1.0 / norm_type)).to(zero)


def clip_by_value(shards: list[Tensor], clip_value: float) -> None:
    """Clamp every element of the gradient shards to ``[-clip_value, clip_value]``, in place."""
    for shard in shards:
        shard.clamp_(-clip_value, clip_value)
