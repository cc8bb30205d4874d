"""Set-up: a module's parameters become units, one at a time.

Each unit's values come to the device, go from rank 0 to all ranks, and are cut, before the next unit's do. So at stage 3 a
device never holds more than the shards made so far and one whole unit, and the memory of the unsharded parameters, wherever
it was, is let go as it goes on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.ops import BLOCK_NUMEL
from lightning_zero.partition.coded import can_be_coded
from lightning_zero.partition.grouping import Group, group_parameters
from lightning_zero.partition.layout import FlatLayout, build_layout, dense_stride
from lightning_zero.partition.memory import FlatViews, allocate

Source = Callable[[nn.Parameter], Tensor]
"""The first values of a parameter, anywhere. Asked on rank 0 only, once for each parameter."""
Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""


def own_values(parameter: nn.Parameter) -> Tensor:
    """The values that a parameter has already."""
    return parameter.data


@dataclass(frozen=True)
class Plan:
    """What becomes a unit: parameters of one group that are alike."""

    group: Group
    pairs: list[tuple[str, nn.Parameter]]
    compute_dtype: torch.dtype
    master_dtype: torch.dtype | None
    shows_main: bool
    is_coded: bool
    """Steps gather it as codes."""
    layout: FlatLayout

    @property
    def name(self) -> str:
        return self.group.name or "the module"

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for _, p in self.pairs)


def plan_units(module: nn.Module, config: EngineConfig, num_shards: int) -> list[Plan]:
    """Cut the parameters of ``module`` into units; nothing is moved yet."""
    dtypes, plans = config.dtypes, []
    for group in group_parameters(module, config.unit_bytes, config.unit_policy):
        alike: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group.parameters:
            if not parameter.numel():
                continue  # nothing to shard
            kind = (
                dtypes.compute_dtype(parameter), dtypes.master_dtype(parameter),
                dtypes.is_shown_as_main(parameter), parameter.requires_grad,
            )  # fmt: skip
            alike.setdefault(kind, []).append((name, parameter))
        for (compute, master, shows_main, _), pairs in alike.items():
            is_coded = config.gathers_codes and num_shards > 1 and can_be_coded(compute)
            layout = build_layout(
                tuple(tuple(p.shape) for _, p in pairs),
                tuple(dense_stride(p) for _, p in pairs),
                num_shards,
                compute.itemsize,
                BLOCK_NUMEL if is_coded else 1,
            )
            plans.append(Plan(group, pairs, compute, master, shows_main, is_coded, layout))
    return plans


def first_values(plans: list[Plan], comm: Comm, source: Source, progress: Progress) -> Iterator[tuple[Plan, FlatViews]]:
    """Each plan with rank 0's values of its parameters, whole, in a flat buffer on the device. All ranks call it.

    What ``source`` raises on rank 0 is raised there, and a RuntimeError that quotes it on the others.
    """
    done, total = 0, sum(plan.nbytes for plan in plans)
    for plan in plans:
        progress(done, total)
        yield plan, _first_values(plan, comm, source)
        done += plan.nbytes
    progress(total, total)


def _first_values(plan: Plan, comm: Comm, source: Source) -> FlatViews:
    # In the widest dtype: master weights take over all bits.
    flat = allocate(plan.layout, plan.master_dtype or plan.compute_dtype, comm.device)
    with (
        comm.failing_together(f"give values to the parameters of {plan.name!r}"),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        if comm.is_first:
            for view, (_, parameter) in zip(flat.views, plan.pairs, strict=True):
                view.copy_(source(parameter))
    comm.broadcast([flat.flat.view(torch.uint8)], counted=False)
    return flat
