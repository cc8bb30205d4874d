"""Bytes of model states on each rank, predicted: the formulas of the ZeRO paper (SC 20) and what this package adds.

[Note: the formulas]
Of P parameters on N ranks every rank holds parameters, gradients, master weights and optimizer state; what a stage
shards counts as P / N. With Adam and 16-bit parameters that is 2 + 2 + 4 + 8 bytes per parameter, where the paper calls
the 12 bytes of master weights and Adam state K. In 32-bit training the parameters are their own masters: 4 + 4 + 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import (
    DEFAULT_UNIT_SIZE_MB,
    RESIDENCE,
    OffloadConfig,
    ParameterDtypes,
    check_tiers,
    checked_unit_bytes,
)
from lightning_zero.partition.elementwise import states_per_element
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.partition.grouping import Group, group_parameters, largest_automatic_unit
from lightning_zero.partition.layout import build_layout, row_major_stride
from lightning_zero.partition.unit import Unit
from lightning_zero.precision import ZeroPrecision
from lightning_zero.topology import Topology, make_topology

KINDS = ("parameters", "gradients", "master", "optimizer")
"""Model states, by the names under which ``ZeroStrategy.memory_stats`` counts them; ``buffers`` come on top."""

# Flat buffers of gradients that units need at once: one is filled while two are on their way to their owners.
_GRADIENT_BUFFERS = 3
_ON_THEIR_WAY = 2


@dataclass(frozen=True)
class ItemSizes:
    """Bytes per element, by kind; ``optimizer`` is one state."""

    parameters: int
    gradients: int
    master: int
    optimizer: int


SIZES = {
    "32-true": ItemSizes(4, 4, 0, 4),
    "64-true": ItemSizes(8, 8, 0, 8),
    **dict.fromkeys(("bf16-mixed", "16-mixed", "bf16-true", "16-true"), ItemSizes(2, 2, 4, 4)),
}
# What Lightning's own data parallelism holds: fp32 everywhere in mixed precision, 16 bits everywhere in half precision.
PLAIN_SIZES = {
    **SIZES,
    **dict.fromkeys(("bf16-mixed", "16-mixed"), ItemSizes(4, 4, 0, 4)),
    **dict.fromkeys(("bf16-true", "16-true"), ItemSizes(2, 2, 0, 2)),
}
# Lightning's other spellings.
_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class FlatPart:
    """The parameters of one flat buffer."""

    numel: int
    """Elements of parameters."""
    padded_numel: int
    """Elements of the buffer."""
    sizes: ItemSizes
    trainable: bool = True
    held: bool = False
    """Unsharded from its first use to the end of the step, because no module's forward brackets its use."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes on one rank, by kind; the rank that holds the most where ranks differ."""

    stage: int
    """0 is plain data parallelism."""
    world_size: int
    num_shards: int
    """Ranks over which things are sharded: all of them, or those of a shard group."""
    num_parameters: int
    precision: str
    formula: str
    """Bytes of model states for P trained parameters on N ranks, or in groups of k; averages where they differ in
    precision."""
    parameters: int
    gradients: int
    master: int
    optimizer: int
    buffers: int
    """About the most that the flat buffers take in which units are unsharded and gradients collected."""
    on_host: tuple[str, ...] = ()
    """The kinds that rest in host memory."""
    on_nvme: tuple[str, ...] = ()
    """The kinds that rest in files."""

    @property
    def total(self) -> int:
        """Model states without buffers, wherever they rest."""
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def host(self) -> int:
        """Model states in host memory."""
        return sum(getattr(self, kind) for kind in self.on_host)

    @property
    def nvme(self) -> int:
        """Model states in files."""
        return sum(getattr(self, kind) for kind in self.on_nvme)

    @property
    def device(self) -> int:
        """Model states on the device."""
        return self.total - self.host - self.nvme

    def __str__(self) -> str:
        name = "plain data parallelism" if self.stage == 0 else f"ZeRO stage {self.stage}"
        ranks = ranks_text(self.world_size, self.num_shards)
        count = short_count(self.num_parameters)
        lines = [f"{name}, {ranks}, {count} parameters, {self.precision}: {self.formula} bytes"]
        for kind in KINDS:
            if getattr(self, kind):
                where = "  (host)" if kind in self.on_host else "  (files)" if kind in self.on_nvme else ""
                lines.append(f"  {kind:<15}{short_bytes(getattr(self, kind)):>10}{where}")
        lines.append(f"  {'model states':<15}{short_bytes(self.total):>10}")
        if self.on_host or self.on_nvme:
            lines.append(f"  {'on the device':<15}{short_bytes(self.device):>10}")
        if self.buffers:
            lines.append(f"  {'buffers':<15}{short_bytes(self.buffers):>10}  at their peak")
        return "\n".join(lines)


def estimate_memory(
    model_or_num_parameters: nn.Module | int | float,
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
      parameters        6.00 GB
      gradients       750.00 MB
      optimizer         1.50 GB
      model states      8.25 GB
      buffers         100.66 MB  at their peak

    Args:
        model_or_num_parameters: A module, which may be on the meta device, or how many parameters, all of them trained.
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
    """
    precision = checked_precision(precision)
    _check(world_size, stage, optimizer_multiplier, backend)
    topology = make_topology(0, world_size, shard_group_size if stage else None)
    sizes = (SIZES if stage else PLAIN_SIZES)[precision]
    unit_bytes = checked_unit_bytes(unit_size_mb)
    tiers = OffloadConfig() if offload is True else offload or None
    check_tiers(tiers, stage)
    if tiers is not None and not stage:
        raise ValueError("offload=True needs stage 1, 2 or 3: plain data parallelism keeps everything on the device")
    # What a device computes with stays there; the master is a second copy, of fp32 parameters too.
    second = tiers is not None and (backend == "nccl" or tiers.optimizer == "cpu")
    if second:
        sizes = ItemSizes(sizes.parameters, sizes.gradients, max(4, sizes.optimizer), sizes.optimizer)
    if not isinstance(model_or_num_parameters, nn.Module):
        parts = _parts_of_count(model_or_num_parameters, sizes, unit_bytes)
    elif stage:
        groups = group_parameters(model_or_num_parameters, unit_bytes, unit_policy)
        parts = _parts_of_groups(groups, model_or_num_parameters, topology.num_shards, precision, second)
    else:
        parts = _plain_parts(model_or_num_parameters, precision)
    if not parts:
        raise ValueError(f"{type(model_or_num_parameters).__name__} has no parameters")
    if largest_unit is not None and largest_unit < 1:
        raise ValueError(f"largest_unit must be at least 1 parameter, got {largest_unit}")
    passing = 0 if world_size == 1 else stage  # a single rank sends nothing
    traffic = _Traffic(passing, prefetch, topology.received_share if passing and backend == "gloo" else 0.0)
    if largest_unit is None:
        buffers = _buffers(parts, traffic)
    else:
        buffers = traffic.under_way(FlatPart(largest_unit, largest_unit, sizes))
    on_host, on_nvme = ((), ()) if tiers is None else _places(stage, tiers.optimizer == "nvme", tiers.parameters)
    return _estimate(parts, topology, stage, precision, optimizer_multiplier, buffers, on_host, on_nvme)


def estimate_engine(
    engine: ZeroEngine, world_size: int, precision: str, stage: int | None = None
) -> MemoryEstimate:
    """Predict what ``engine`` will hold once training runs, from its own units and optimizers.

    With ``stage`` what the same units would need at another one; 0 is plain data parallelism.
    """
    if not engine.units:
        # At one rank there is nothing to shard.
        return estimate_plain(engine.module, engine.optimizers, world_size, precision)
    stage = engine.config.stage if stage is None else stage
    parts = [_part_of_unit(engine, unit, plain=stage == 0) for unit in engine.units]
    received = engine.received_share if stage else 0.0
    buffers = _buffers(parts, _Traffic(stage, engine.config.prefetch, received))
    host, tiers = engine.config.main_device, engine.tiers
    crosses = host is not None and host.type != engine.units[0].buffer.shard.device.type
    on_host: tuple[str, ...] = ()
    on_nvme: tuple[str, ...] = ()
    if stage:
        rests = None if stage < 3 or tiers.parameters is None else "cpu" if tiers.files is None else "nvme"
        on_host, on_nvme = _places(stage, tiers.main is not None, rests)
    states = optimizer_states(engine.optimizers)
    topology = make_topology(0, world_size, engine.units[0].layout.num_shards)
    return _estimate(parts, topology, stage, precision, states, buffers, on_host if crosses else (), on_nvme)


def estimate_plain(
    module: nn.Module, optimizers: Sequence[Optimizer], world_size: int, precision: str
) -> MemoryEstimate:
    """Predict what plain data parallelism holds of ``module`` as it is."""
    topology = make_topology(0, world_size)
    return _estimate(_plain_parts(module, "32-true"), topology, 0, precision, optimizer_states(optimizers), 0)


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


def ranks_text(world_size: int, num_shards: int) -> str:
    """How many ranks there are, and in what groups."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return ranks if num_shards == world_size else f"{ranks} in groups of k = {num_shards}"


def short_bytes(count: float) -> str:
    """A size with its decimal unit, as in the paper: 1 GB is 10^9 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def short_count(count: float) -> str:
    """A number of parameters with one of the letters that :func:`parse_count` reads."""
    for letter in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.4g}{letter}"
        count /= 1000
    return f"{count:.4g}T"


def checked_precision(precision: str | int) -> str:
    """The Trainer's ``precision`` in full: "bf16" is "bf16-mixed", 32 is "32-true"."""
    name = _ALIASES.get(str(precision).lower(), str(precision).lower())
    if name not in SIZES:
        raise ValueError(f"precision must be one of {', '.join((*SIZES, *_ALIASES))}, got {precision!r}")
    return name


def _check(world_size: int, stage: int, optimizer_multiplier: float, backend: str) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
    if stage != 0 and stage not in RESIDENCE:
        raise ValueError(f"stage must be 0 (plain data parallelism), 1, 2 or 3, got {stage!r}")
    if optimizer_multiplier < 0:
        raise ValueError(f"optimizer_multiplier must not be negative, got {optimizer_multiplier}")
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend must be 'nccl' or 'gloo', got {backend!r}")


def _parts_of_count(count: float, sizes: ItemSizes, unit_bytes: int) -> list[FlatPart]:
    """Units as large as they get, without padding."""
    numel = int(count)
    if numel < 1:
        raise ValueError(f"the number of parameters must be at least 1, got {count!r}")
    largest = largest_automatic_unit(numel * sizes.parameters, unit_bytes) // sizes.parameters
    cuts = [largest] * (numel // largest) + [numel % largest] * (numel % largest > 0)
    return [FlatPart(cut, cut, sizes) for cut in cuts]


def _parts_of_groups(
    groups: list[Group], module: nn.Module, num_shards: int, precision: str, offload: bool
) -> list[FlatPart]:
    """The flat buffers that the engine would make."""
    dtypes = replace(ZeroPrecision(precision).parameter_dtypes(module), separate_main=offload)
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
    return FlatPart(numel, unit.layout.padded_numel, sizes, gradients is not None, not unit.modules)


@dataclass(frozen=True)
class _Traffic:
    """Which flat buffers units need in a step."""

    stage: int
    prefetch: int
    received: float
    """The share of a unit's gradients that is received beside them."""

    def under_way(self, part: FlatPart) -> int:
        """The unit in use, those prefetched, and the gradients being collected and reduced, all as large as ``part``."""
        units = 1 + self.prefetch if self.stage == 3 else 0
        units += _GRADIENT_BUFFERS * self._buffers_gradients(part)
        return self._bytes(part, units + _ON_THEIR_WAY * self.received * part.trainable)

    def pair(self, part: FlatPart) -> int:
        """The unit's parameters and its gradients, where they are buffered."""
        return self._bytes(part, (self.stage == 3) + self._buffers_gradients(part) + self.received * part.trainable)

    def _bytes(self, part: FlatPart, copies: float) -> int:
        return round(part.padded_numel * part.sizes.parameters * copies)

    def _buffers_gradients(self, part: FlatPart) -> bool:
        # At stage 1 gradients are reduced where they rest, unless that is in a wider dtype than the one sent.
        wider = part.sizes.gradients > part.sizes.parameters
        return part.trainable and (self.stage >= 2 or (self.stage == 1 and wider))


def _buffers(parts: list[FlatPart], traffic: _Traffic) -> int:
    """What units need at once: the largest that are under way together, and those held through the step."""
    held = sum(traffic.pair(part) for part in parts if part.held)
    passing = [part for part in parts if not part.held]
    most = max((traffic.under_way(part) for part in passing), default=0)
    # A small model has fewer units than could be under way.
    return held + min(most, sum(traffic.pair(part) for part in passing))


def _on_host(stage: int) -> tuple[str, ...]:
    """The kinds that rest in host memory under offload. At stage 1 the gradients that are not reduced yet stay whole."""
    return ("master", "optimizer") if RESIDENCE[stage].whole_gradients else ("gradients", "master", "optimizer")


def _places(stage: int, in_files: bool, parameters: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kinds in host memory, and those in files."""
    on_nvme = ("master", "optimizer") if in_files else ()
    on_host = tuple(kind for kind in _on_host(stage) if kind not in on_nvme)
    if parameters == "cpu":
        on_host = ("parameters", *on_host)
    return on_host, ("parameters", *on_nvme) if parameters == "nvme" else on_nvme


def _sharded_kinds(stage: int) -> set[str]:
    if stage == 0:
        return set()
    sharded = {
        "parameters": not RESIDENCE[stage].whole_parameters,
        "gradients": not RESIDENCE[stage].whole_gradients,
        "master": True,
        "optimizer": True,
    }
    return {kind for kind in KINDS if sharded[kind]}


def _bytes_per_parameter(sizes: ItemSizes, states: float) -> dict[str, float]:
    return {
        "parameters": sizes.parameters,
        "gradients": sizes.gradients,
        "master": sizes.master,
        "optimizer": sizes.optimizer * states,
    }


def _formula(parts: list[FlatPart], states: float, sharded: set[str], shards: str) -> str:
    """On average over the parameters, which mixed precision computes with in 16 or in 32 bits."""
    numel = sum(part.numel for part in parts)
    whole = shard = 0.0
    for part in parts:
        for kind, size in _bytes_per_parameter(part.sizes, states).items():
            share = size * part.numel / numel
            whole, shard = (whole, shard + share) if kind in sharded else (whole + share, shard)
    terms = [f"{whole:.3g}P"] * (whole > 0) + [f"{shard:.3g}P/{shards}"] * (shard > 0)
    return " + ".join(terms)


def _estimate(
    parts: list[FlatPart],
    topology: Topology,
    stage: int,
    precision: str,
    states: float,
    buffers: int,
    on_host: tuple[str, ...] = (),
    on_nvme: tuple[str, ...] = (),
) -> MemoryEstimate:
    sharded = _sharded_kinds(stage)
    held = dict.fromkeys(KINDS, 0.0)
    for part in parts:
        numel = part.padded_numel if stage else part.numel
        for kind, size in _bytes_per_parameter(part.sizes, states).items():
            # A frozen parameter has a master where steps compute with fewer bits than it came with.
            if part.trainable or kind in ("parameters", "master"):
                held[kind] += numel * size / (topology.num_shards if kind in sharded else 1)
    trained = [part for part in parts if part.trainable]
    return MemoryEstimate(
        stage,
        topology.world_size,
        topology.num_shards,
        sum(part.numel for part in parts),
        precision,
        _formula(trained or parts, states, sharded, "N" if topology.replicas == 1 else "k"),
        **{kind: round(nbytes) for kind, nbytes in held.items()},
        buffers=buffers,
        on_host=on_host,
        on_nvme=on_nvme,
    )
