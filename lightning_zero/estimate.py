"""Bytes of model states on each rank, predicted for a module, or for one that trains. See ``formulas``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import ParameterDtypes
from lightning_zero.formulas import (
    KINDS,
    PLAIN_SIZES,
    FileBuffers,
    FlatPart,
    HostMemory,
    ItemSizes,
    MemoryEstimate,
    Setting,
    Traffic,
    checked_precision,
    places,
    ranks_text,
    short_bytes,
    short_count,
    sum_up,
)
from lightning_zero.offload.runs import is_adam
from lightning_zero.partition.coded import message_layout
from lightning_zero.partition.elementwise import states_per_element
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.partition.grouping import Group, group_parameters
from lightning_zero.partition.layout import build_layout, row_major_stride
from lightning_zero.partition.unit import Unit
from lightning_zero.precision import ZeroPrecision
from lightning_zero.settings import DEFAULT_UNIT_SIZE_MB, OffloadConfig
from lightning_zero.topology import make_topology

__all__ = [
    "KINDS", "MemoryEstimate", "checked_precision", "estimate_engine", "estimate_memory", "estimate_module", "estimate_plain",
    "optimizer_states", "ranks_text", "short_bytes", "short_count",
]  # fmt: skip


def estimate_memory(
    model_or_num_parameters: nn.Module | int | float | str,
    world_size: int,
    stage: int,
    offload: bool | OffloadConfig = False,
    precision: str = "32-true",
    optimizer_multiplier: float = 2.0,
    largest_unit: int | None = None,
    unit_size_mb: float = DEFAULT_UNIT_SIZE_MB,
    unit_policy: Any = None,
    prefetch: int = 1,
    backend: Literal["nccl", "gloo"] = "nccl",
    shard_group_size: int | None = None,
    delayed_update: bool = False,
) -> MemoryEstimate:
    """Predict the bytes of model states on one rank.

    The table of the ZeRO paper, 7.5 billion parameters on 64 ranks with Adam (K = 12):

    >>> for stage in range(4):
    ...     it = estimate_memory(7.5e9, world_size=64, stage=stage, precision="16-mixed")
    ...     print(f"{stage}  {it.formula:<11} {it.total / 1e9:5.1f} GB")
    0  16P         120.0 GB
    1  4P + 12P/N   31.4 GB
    2  2P + 14P/N   16.6 GB
    3  16P/N         1.9 GB

    >>> print(estimate_memory(1.5e9, world_size=8, stage=2))
    ZeRO stage 2, 8 ranks, 1.5B parameters, 32-true: 4P + 12P/N bytes
      parameters           6.00 GB
      gradients          750.00 MB
      optimizer            1.50 GB
      model states         8.25 GB
      buffers            100.66 MB  at their peak

    Args:
        model_or_num_parameters: A module, which may be on the meta device, or how many parameters, all of them trained; a text such as
            "7.5B" will do.
            A module is cut into the units that training would make, so padding and frozen parameters are accounted for.
        world_size: Ranks.
        stage: 1, 2 or 3 as for ZeroStrategy; 0 is plain data parallelism.
        offload: As for ZeroStrategy: True keeps master weights, optimizer state and reduced gradients in host memory, an
            OffloadConfig says what is in files instead, and where parameters are.
        precision: As for the Trainer. With "mixed" a number of parameters is counted as if autocast used all of them in
            16 bits, of a module those are that it does. Stage 0 is what Lightning's own plugin makes of it: fp32 with
            "mixed", 16 bits without masters with "true".
        optimizer_multiplier: Numbers of state per parameter: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
        largest_unit: Parameters in the largest unit; None is what units are cut to.
        unit_size_mb: As for ZeroStrategy.
        unit_policy: As for ZeroStrategy; needs a module.
        prefetch: As for ZeroStrategy.
        backend: What carries gradients. Under "gloo" the shards that other ranks send are buffers as well.
        shard_group_size: As for ZeroStrategy.
        delayed_update: Whether updates come a step late: their gradients are kept meanwhile.
    """
    tiers = OffloadConfig() if offload is True else offload or None
    setting = Setting(
        world_size, stage, tiers, precision, optimizer_multiplier, largest_unit, unit_size_mb, prefetch, backend,
        shard_group_size, bool(delayed_update),
    )  # fmt: skip
    if isinstance(model_or_num_parameters, nn.Module):
        return estimate_module(model_or_num_parameters, setting, unit_policy)
    return setting.of_count(model_or_num_parameters)


def estimate_module(module: nn.Module, setting: Setting, unit_policy: Any = None) -> MemoryEstimate:
    """:func:`estimate_memory` of a module."""
    if setting.stage:
        parts = _parts_of_groups(group_parameters(module, setting.unit_bytes, unit_policy), module, setting)
    else:
        parts = _plain_parts(module, setting.precision)
    if not parts:
        raise ValueError(f"{type(module).__name__} has no parameters")
    return setting.estimate(parts)


def estimate_engine(
    engine: ZeroEngine, world_size: int, precision: str, stage: int | None = None, early: bool = False, late: bool = False
) -> MemoryEstimate:
    """Predict what ``engine`` will hold once training runs, from its own units and optimizers.

    With ``stage`` what the same units would need at another one; 0 is plain data parallelism. ``early`` and ``late``:
    whether updates begin before the step, or come a step later.
    """
    if not engine.units:
        # At one rank there is nothing to shard.
        return estimate_plain(engine.module, engine.optimizers, world_size, precision)
    stage = engine.config.stage if stage is None else stage
    parts = [_part_of_unit(engine, unit, plain=stage == 0) for unit in engine.units]
    received = engine.received_share if stage else 0.0
    buffers = Traffic(stage, engine.config.prefetch, received).most(parts)
    states = optimizer_states(engine.optimizers)
    topology = make_topology(0, world_size, engine.units[0].layout.num_shards)
    if not stage:
        return sum_up(parts, topology, stage, precision, states, buffers)
    main, tiers, device = engine.config.main_device, engine.tiers, engine.units[0].buffer.shard.device
    rests = None if stage < 3 or tiers.parameters is None else "cpu" if tiers.files is None else "nvme"
    on_host, on_nvme = places(stage, tiers.main is not None, rests)
    crosses = any(unit.crosses for unit in engine.units)
    fetched = engine.config.prefetch + 1 if crosses and rests == "nvme" else 0
    files = _file_buffers(engine, states, crosses)
    host = HostMemory(crosses, any(unit.copies_all for unit in engine.units), early, late, fetched, files)
    moved = main is not None and main.type != device.type
    return sum_up(parts, topology, stage, precision, states, buffers, on_host if moved else (), on_nvme, host)


def _file_buffers(engine: ZeroEngine, states: float, crosses: bool) -> FileBuffers:
    tiers, optimizers = engine.tiers, engine.optimizers
    in_chunks = [is_adam(one) for one in optimizers if engine.units[0].main.dtype.itemsize == 4]
    parameters = tiers.files is not None and tiers.parameters is not None
    return FileBuffers(
        tiers.main is not None, states * any(in_chunks), states * (not all(in_chunks) or not in_chunks),
        parameters and not crosses, tiers.gradients is not None, engine.config.prefetch,
    )  # fmt: skip


def estimate_plain(
    module: nn.Module, optimizers: Sequence[Optimizer], world_size: int, precision: str
) -> MemoryEstimate:
    """Predict what plain data parallelism holds of ``module`` as it is."""
    topology = make_topology(0, world_size)
    return sum_up(_plain_parts(module, "32-true"), topology, 0, precision, optimizer_states(optimizers), 0)


def optimizer_states(optimizers: Sequence[Optimizer]) -> float:
    """Numbers of state per trained parameter, on average over the parameters of ``optimizers``."""
    states = trained = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            numel = sum(p.numel() for p in group["params"] if p.requires_grad)
            trained += numel
            if numel:
                states += numel * states_per_element(optimizer, group)
    return states / trained if trained else 0.0


def _parts_of_groups(groups: list[Group], module: nn.Module, setting: Setting) -> list[FlatPart]:
    """The flat buffers that the engine would make."""
    precision, num_shards = setting.precision, setting.topology.num_shards
    dtypes = replace(ZeroPrecision(precision).parameter_dtypes(module), separate_main=setting.has_second_copy)
    parts = []
    for group in groups:
        alike: dict[tuple[ItemSizes, bool], list[nn.Parameter]] = {}
        for _, parameter in group.parameters:
            if parameter.numel():
                alike.setdefault((_sizes(parameter, dtypes, precision), parameter.requires_grad), []).append(parameter)
        for (sizes, trainable), parameters in alike.items():
            shapes = tuple(tuple(p.shape) for p in parameters)
            strides = tuple(row_major_stride(shape) for shape in shapes)
            layout = build_layout(shapes, strides, num_shards, sizes.parameters)
            numel = sum(p.numel() for p in parameters)
            parts.append(FlatPart(numel, layout.padded_numel, sizes, trainable, not group.modules))
    return parts


def _sizes(parameter: nn.Parameter, dtypes: ParameterDtypes, precision: str) -> ItemSizes:
    compute, master = dtypes.compute_dtype(parameter), dtypes.master_dtype(parameter)
    own = 8 if precision == "64-true" else compute.itemsize
    main = 0 if master is None else max(own, master.itemsize)
    return ItemSizes(own, own, main, main or own)


def _plain_parts(module: nn.Module, precision: str) -> list[FlatPart]:
    """What Lightning's own plugin makes of the module."""
    fixed = PLAIN_SIZES[precision] if precision in ("64-true", "bf16-true", "16-true") else None
    parts = []
    for parameter in module.parameters():
        size = parameter.element_size()
        sizes = fixed or ItemSizes(size, size, 0, size)
        parts.append(FlatPart(parameter.numel(), parameter.numel(), sizes, parameter.requires_grad))
    return parts


def _part_of_unit(engine: ZeroEngine, unit: Unit, plain: bool) -> FlatPart:
    located = engine.locate(unit.tensors[0])
    gradients = None if located is None else located[1]
    own, main = unit.dtype.itemsize, unit.main.element_size()
    if plain:
        given = unit.face.dtype.itemsize
        sizes = ItemSizes(given, given, 0, given)
    else:
        sizes = ItemSizes(
            parameters=own,
            gradients=own if gradients is None else gradients.itemsize,
            master=0 if unit.master is None else main,
            optimizer=main,
        )
    numel = sum(tensor.numel() for tensor in unit.tensors)
    coded = message_layout(unit.layout).padded_numel if unit.buffer.is_coded else 0
    return FlatPart(numel, unit.layout.padded_numel, sizes, gradients is not None, not unit.modules, coded)


