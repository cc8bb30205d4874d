"""Which configuration to train with: the cheapest that fits, why cheaper ones do not, and the YAML to paste.

[Note: what is cheap]
Configurations are compared by the bytes that files take and give in a step (disks are that much slower), then by those
that a rank sends to other ranks, then by those that cross between device and host, then by stage (lower ones reduce less
often when gradients are accumulated). Stages 1 and 2 send what plain data parallelism sends, stage 3 half as much again;
offload moves gradients down and parameters up. In shard groups parameters and gradients travel inside a group, and only
gradient shards, there and back, across groups.
"""

import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Literal

import psutil
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.estimate import estimate_memory
from lightning_zero.formulas import (
    MemoryEstimate,
    check_world_size,
    checked_precision,
    parse_count,
    ranks_text,
    short_bytes,
    short_count,
)
from lightning_zero.settings import DEFAULT_UNIT_SIZE_MB, OffloadConfig
from lightning_zero.tables import ByteUnit, new_table, render

RESERVE = 0.2
"""Share of a memory that is kept for activations, temporary tensors and the runtime where nobody says how much they
need."""


_PATH = "FOLDER"
_TIERS = (
    None,
    OffloadConfig(),
    OffloadConfig(parameters="cpu"),
    OffloadConfig("nvme", None, _PATH),
    OffloadConfig("nvme", "nvme", _PATH),
)
_TIER_NAMES: dict[Any, str] = {
    None: "",
    ("cpu", None): " + offload",
    ("cpu", "cpu"): " + all offload",
    ("nvme", None): " + nvme",
    ("nvme", "nvme"): " + all nvme",
}


@dataclass(frozen=True)
class Machine:
    """What there is, and the groups in which ranks shard."""

    world_size: int
    num_nodes: int
    device_bytes: float
    """Of one device; on CPUs a rank's share of its node."""
    host_bytes: float
    """Of one node."""
    nvme_bytes: float
    on_cpu: bool
    """Ranks compute in host memory."""
    shard_group_size: int | None = None

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.num_nodes


@dataclass(frozen=True)
class Option:
    """One configuration."""

    stage: int
    tiers: OffloadConfig | None
    """What ``offload`` is to be."""
    estimate: MemoryEstimate
    disk: float
    """Bytes that a rank reads and writes in files in a step."""
    sent: float
    """Bytes that a rank sends in a step."""
    moved: float
    """Bytes that a rank moves between its device and its host in a step."""
    device: float
    """Bytes on each device, buffers included; on CPUs for each rank."""
    host: float
    """Bytes on each node."""
    obstacles: tuple[str, ...] = ()
    """Why it does not fit."""

    @property
    def name(self) -> str:
        return f"stage {self.stage}" + _TIER_NAMES[None if self.tiers is None else (self.tiers.optimizer, self.tiers.parameters)]

    @property
    def offload(self) -> bool:
        """Whether the step runs on the host."""
        return self.tiers is not None

    @property
    def settings(self) -> dict[str, Any]:
        """What to set in an OffloadConfig, which is not its default."""
        given = self.tiers or OffloadConfig()
        return {field.name: value for field in fields(given) if (value := getattr(given, field.name)) != field.default}

    @property
    def cost(self) -> tuple[float, float, float, int]:
        """See [Note: what is cheap]."""
        return self.disk, self.sent, self.moved, self.stage


@dataclass(frozen=True)
class Plan:
    """All configurations, cheapest first, and the one to take."""

    machine: Machine
    options: tuple[Option, ...]
    precision: str
    at_setup: float
    """Bytes of the whole module, which every rank builds before it shards it, unless on the meta device."""

    @property
    def chosen(self) -> Option | None:
        """The cheapest that fits, None if there is none."""
        return next((option for option in self.options if not option.obstacles), None)

    @property
    def init_args(self) -> dict[str, Any]:
        """Arguments for ZeroStrategy; raises RuntimeError if nothing fits."""
        if self.chosen is None:
            raise RuntimeError(f"No configuration fits.\n{self}")
        groups = self.machine.shard_group_size
        tiers = self.chosen.tiers
        offload = {} if tiers is None else {"offload": tiers if self.chosen.settings else True}
        return {"stage": self.chosen.stage, **offload, **({} if groups is None else {"shard_group_size": groups})}

    @property
    def yaml(self) -> str:
        """The Trainer's section for LightningCLI; raises RuntimeError if nothing fits."""
        trainer = {
            "accelerator": "cpu" if self.machine.on_cpu else "gpu",
            "devices": self.machine.ranks_per_node,
            "num_nodes": self.machine.num_nodes,
            "precision": self.precision,
        }
        lines = ["trainer:", *(f"  {name}: {value}" for name, value in trainer.items())]
        lines += ["  strategy:", "    class_path: lightning_zero.ZeroStrategy", "    init_args:"]
        for name, value in self.init_args.items():
            if isinstance(value, OffloadConfig):
                lines += [f"      {name}:", *(f"        {key}: {given}" for key, given in self.chosen.settings.items())]  # type: ignore[union-attr]
            else:
                lines.append(f"      {name}: {str(value).lower()}")
        return "\n".join(lines)

    @property
    def reasons(self) -> list[str]:
        """What was chosen, and why nothing cheaper."""
        lines = []
        for option in self.options:
            if option is self.chosen:
                left = short_bytes(self.machine.device_bytes - option.device)
                where = "to each rank" if self.machine.on_cpu else "on each device"
                lines.append(f"{option.name} fits and leaves {left} {where} for everything else.")
                break
            lines += [f"{option.name} does not fit: {obstacle}." for obstacle in option.obstacles]
        return lines if self.chosen is not None else [*lines, *self._missing()]

    def __str__(self) -> str:
        return self._table() + ("" if self.chosen is None else f"\n\n{self.yaml}")

    def _table(self) -> str:
        machine, first = self.machine, self.options[0].estimate
        ranks = ranks_text(machine.world_size, first.num_shards)
        nodes = "1 node" if machine.num_nodes == 1 else f"{machine.num_nodes} nodes"
        count = short_count(first.num_parameters)
        unit = ByteUnit.for_bytes(max(max(o.sent, o.moved, o.device, o.host) for o in self.options))
        moved = [] if machine.on_cpu else ["host <->\ndevice"]
        table = new_table("sent\nper step", *moved, f"on each\n{'rank' if machine.on_cpu else 'device'}", "on each\nnode", "fits")
        for option in self.options:
            numbers = (option.sent, *[option.moved] * len(moved), option.device, option.host)
            table.add_row(option.name, *map(unit.show, numbers), "no" if option.obstacles else "yes")
        there = f"Each device has {short_bytes(machine.device_bytes)}, each node {short_bytes(machine.host_bytes)}."
        if machine.on_cpu:
            there = f"Each node has {short_bytes(machine.host_bytes)} of memory, which its ranks share."
        titles = [f"{count} parameters, {self.precision}, {ranks} on {nodes}. Cheapest first, in {unit.name}.", there]
        return render(table, titles, [*self.reasons, *self._notes()])

    def _notes(self) -> list[str]:
        built = self.at_setup * self.machine.ranks_per_node
        if built <= self.machine.host_bytes:
            return []
        return [
            f"A module that every rank builds in host memory takes {short_bytes(built)} of each node until it is sharded:"
            " build it on the meta device (docs/large-models.md)."
        ]

    def _missing(self) -> list[str]:
        """What would help."""
        machine = self.machine
        lines = ["Nothing fits. More ranks, a smaller model or fewer bits would help."]
        if not machine.nvme_bytes:
            last = max(self.options, key=lambda option: (option.stage, option.offload)).estimate
            states = (last.master + last.optimizer) * machine.ranks_per_node
            lines.append(
                f"Optimizer state and masters in files (OffloadConfig(optimizer='nvme')) would take {short_bytes(states)} off"
                " each node and need as much space there: say how much NVMe there is."
            )
        return lines


def make_plan(
    model_or_num_parameters: nn.Module | int | float | str,
    world_size: int,
    num_nodes: int = 1,
    device_memory: float | str | None = None,
    host_memory: float | str | None = None,
    nvme_space: float | str = 0,
    precision: str = "32-true",
    optimizer_multiplier: float = 2.0,
    activations: float | str | None = None,
    accelerator: Literal["auto", "cpu", "gpu"] = "auto",
    unit_size_mb: float = DEFAULT_UNIT_SIZE_MB,
    unit_policy: Any = None,
    prefetch: int = 1,
    shard_group_size: int | None = None,
) -> Plan:
    """Compare all configurations of ZeroStrategy and find the cheapest that fits.

    >>> plan = make_plan(7.5e9, 64, num_nodes=8, device_memory="32GB", host_memory="512GB", precision="bf16-mixed")
    >>> plan.init_args
    {'stage': 2}
    >>> plan.reasons[0]
    'stage 1 does not fit: 31.41 GB, and 6.40 GB for everything else, are more than the 32.00 GB of a device.'

    Args:
        model_or_num_parameters: As for ``estimate_memory``.
        world_size: Ranks.
        num_nodes: Machines that the ranks are spread over, as many on each.
        device_memory: Bytes of one device, or a text such as "80GB"; None is this machine's.
        host_memory: Bytes of one node; None is this machine's.
        nvme_space: Bytes of one node's NVMe that files may take; 0 for no files.
        precision: As for the Trainer.
        optimizer_multiplier: Numbers of state per parameter, as for ``estimate_memory``.
        activations: Bytes on each device for everything beside model states and buffers; None keeps a fifth of it free.
        accelerator: "cpu": the ranks of a node share its host memory and have no device; "auto" is that where
            ``device_memory`` is not given and this machine has no accelerator.
        unit_size_mb: As for ZeroStrategy.
        unit_policy: As for ZeroStrategy.
        prefetch: As for ZeroStrategy.
        shard_group_size: As for ZeroStrategy.

    Raises:
        ValueError: a size is not one, or ranks do not divide evenly over nodes or shard groups.
    """
    if isinstance(model_or_num_parameters, str):
        model_or_num_parameters = parse_count(model_or_num_parameters)
    machine = _machine(world_size, num_nodes, device_memory, host_memory, nvme_space, accelerator)
    machine = replace(machine, shard_group_size=shard_group_size)
    kept = None if activations is None else parse_bytes(activations)
    settings = {"unit_size_mb": unit_size_mb, "unit_policy": unit_policy, "prefetch": prefetch}
    tiers = _TIERS if machine.nvme_bytes else _TIERS[:3]
    return compare(model_or_num_parameters, machine, precision, optimizer_multiplier, kept, tiers, **settings)


def compare(
    model_or_num_parameters: nn.Module | int | float,
    machine: Machine,
    precision: str,
    optimizer_multiplier: float,
    activations: float | None = None,
    offload: Sequence[OffloadConfig | None] = (None, OffloadConfig()),
    **settings: Any,
) -> Plan:
    """Go through the configurations for ``machine``, each with one of ``offload``. ``settings`` are further arguments of ``estimate_memory``."""
    precision = checked_precision(precision)
    at_setup = _bytes_at_setup(model_or_num_parameters, precision)
    options = []
    if machine.on_cpu:
        # There is nowhere to go but to files.
        offload = list(dict.fromkeys(tiers if tiers and tiers.uses_nvme else None for tiers in offload))
    for stage, tiers in product((1, 2, 3), offload):
        sharded = tiers is not None and tiers.parameters is not None
        if (sharded and stage < 3) or (machine.world_size == 1 and stage > 1 and not sharded):
            continue
        estimate = estimate_memory(
            model_or_num_parameters, machine.world_size, stage, tiers or False, precision, optimizer_multiplier,
            backend="gloo" if machine.on_cpu else "nccl", shard_group_size=machine.shard_group_size, **settings,
        )  # fmt: skip
        options.append(_option(estimate, tiers, machine, activations))
    return Plan(machine, tuple(sorted(options, key=lambda option: option.cost)), precision, at_setup)


def choose(
    module: nn.Module,
    comm: Comm,
    device: torch.device,
    precision: str,
    optimizer_multiplier: float,
    offload: Sequence[OffloadConfig | None],
    config: EngineConfig,
) -> Option:
    """What a run that begins is to use, from what all its ranks see; says so. A collective.

    Raises RuntimeError, with the reasons, if nothing fits.
    """
    plan = compare(
        module, machine_of(comm, device, module), precision, optimizer_multiplier, offload=offload,
        unit_size_mb=config.unit_bytes / 2**20, unit_policy=config.unit_policy, prefetch=config.prefetch,
    )  # fmt: skip
    if plan.chosen is None:
        raise RuntimeError(
            f"ZeroStrategy(stage='auto') has found nothing that fits; to try it all the same, name a stage.\n{plan}"
        )
    rank_zero_info(f"ZeroStrategy(stage='auto') has chosen {plan.chosen.name}. {' '.join(plan.reasons)}")
    return plan.chosen


def parse_bytes(size: float | str) -> float:
    """Bytes from a number or a text; units are decimal, those with an "i" binary.

    >>> parse_bytes("80GB"), parse_bytes("1.5 TiB"), parse_bytes(1000)
    (80000000000.0, 1649267441664.0, 1000.0)
    """
    text = str(size).replace(" ", "").replace(",", "").lower()
    number = text.rstrip("bikmgt")
    suffix = text[len(number) :].removesuffix("b")
    powers = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
    try:
        value = float(number) * (1024 if suffix.endswith("i") else 1000) ** powers[suffix.removesuffix("i")]
    except (ValueError, KeyError):
        raise ValueError(f"{size!r} is not a size such as 80GB, 512 GiB or 8e10") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"a size must be finite and not negative, got {size!r}")
    return value


def host_bytes() -> float:
    """Memory of this machine, or of the container that this process is confined to."""
    total = float(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path):
            with open(path) as file:
                limit = file.read().strip()
            return min(total, float(limit)) if limit.isdigit() else total
    return total


def host_bytes_free() -> float:
    """Memory of this machine or container that nobody uses."""
    return min(float(psutil.virtual_memory().available), host_bytes())


def device_bytes() -> float | None:
    """Memory of the first accelerator; None if there is none, or it does not say."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return float(module.mem_get_info()[1]) if hasattr(module, "mem_get_info") else None


def device_bytes_free(device: torch.device) -> float:
    """Memory of the device that nobody else uses. Raises NotImplementedError if it does not tell."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        raise NotImplementedError(f"{device.type} devices do not tell how much memory they have: choose a stage yourself")
    return float(module.mem_get_info(device)[0] + module.memory_reserved(device))


def machine_of(comm: Comm, device: torch.device, module: nn.Module) -> Machine:
    """What the ranks of a run have left to use, ``module`` among it, which all have built already. A collective; the same
    on all ranks."""
    on_cpu = device.type == "cpu"
    built = sum(p.nbytes for p in module.parameters() if p.is_cpu)
    mine = (socket.gethostname(), host_bytes_free(), 0.0 if on_cpu else device_bytes_free(device), built)
    hosts, on_hosts, on_devices, built_on_host = zip(*comm.all_gather_object(mine), strict=True)
    most = max(Counter(hosts).values())
    # Ranks look one after another: the least that any of them sees.
    host = min(on_hosts) + most * min(built_on_host)
    nodes = len(set(hosts)) if comm.world_size % len(set(hosts)) == 0 else 1
    device_memory = host / most if on_cpu else min(on_devices)
    groups = None if comm.topology.replicas == 1 else comm.num_shards
    return Machine(comm.world_size, nodes, device_memory, host, float("inf"), on_cpu, groups)


def _machine(
    world_size: int, num_nodes: int, device: float | str | None, host: float | str | None, nvme: float | str,
    accelerator: str,
) -> Machine:  # fmt: skip
    if accelerator not in ("auto", "cpu", "gpu"):
        raise ValueError(f"accelerator must be 'auto', 'cpu' or 'gpu', got {accelerator!r}")
    check_world_size(world_size)
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1 or world_size % num_nodes:
        raise ValueError(f"num_nodes must divide the {world_size} ranks evenly, got {num_nodes!r}")
    found = device_bytes() if device is None else parse_bytes(device)
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and found is None)
    if on_cpu and device is not None:
        raise ValueError(f"device_memory={device!r} has no meaning with accelerator='cpu': give host_memory")
    per_node = host_bytes() if host is None else parse_bytes(host)
    if on_cpu:
        found = per_node / (world_size // num_nodes)
    elif found is None:
        raise ValueError("this machine has no accelerator that tells its memory: give device_memory")
    return Machine(world_size, num_nodes, found or 0.0, per_node, parse_bytes(nvme), on_cpu)


def _bytes_at_setup(model_or_num_parameters: nn.Module | int | float, precision: str) -> float:
    """The whole module, as a rank builds it that does so in host memory."""
    if isinstance(model_or_num_parameters, nn.Module):
        return sum(p.nbytes for p in model_or_num_parameters.parameters())
    return model_or_num_parameters * (8 if precision == "64-true" else 4)


def _option(
    estimate: MemoryEstimate, tiers: OffloadConfig | None, machine: Machine, activations: float | None
) -> Option:
    shards, replicas = estimate.num_shards, machine.world_size // estimate.num_shards
    compute = estimate.parameters * (shards if estimate.stage == 3 else 1)
    inside, across = (shards - 1) / shards, 2 * (replicas - 1) / replicas / shards
    device = estimate.device + estimate.buffers + (estimate.host + estimate.beside if machine.on_cpu else 0)
    if tiers is not None and tiers.parameters is not None and not machine.on_cpu:
        moved = 4 * compute / shards  # shards come in forward and in backward
    else:
        moved = 2 * compute / shards if tiers else 0.0
    # Shards of parameters are read twice and written once, all else once each.
    disk = 2 * estimate.nvme + (estimate.parameters if "parameters" in estimate.on_nvme else 0)
    # The whole module, which is mapped from files after a run, in at most 32 bits.
    in_files = estimate.nvme + (4 * estimate.num_parameters if "parameters" in estimate.on_nvme else 0)
    on_host = estimate.host + estimate.beside
    on_node = (device if machine.on_cpu else on_host) * machine.ranks_per_node
    return Option(
        estimate.stage,
        tiers,
        estimate,
        disk,
        sent=((3 if estimate.stage == 3 else 2) * inside + across) * compute,
        moved=moved,
        device=device,
        host=on_node,
        obstacles=tuple(_obstacles(device, on_node, in_files, machine, activations)),
    )


def _obstacles(
    device: float, on_node: float, in_files: float, machine: Machine, activations: float | None
) -> Iterable[str]:
    room = machine.device_bytes
    kept = RESERVE * room if activations is None else activations
    owner = "a rank's share of a node" if machine.on_cpu else "a device"
    if device + kept > room:
        yield _too_much(device, kept, room, owner)
    if not machine.on_cpu and on_node > (1 - RESERVE) * machine.host_bytes:
        yield _too_much(on_node, RESERVE * machine.host_bytes, machine.host_bytes, "a node")
    in_files *= machine.ranks_per_node
    if in_files > machine.nvme_bytes:
        yield f"its files take {short_bytes(in_files)} of the {short_bytes(machine.nvme_bytes)} of a node's NVMe"


def _too_much(needed: float, kept: float, room: float, owner: str) -> str:
    return (
        f"{short_bytes(needed)}, and {short_bytes(kept)} for everything else, are more than the {short_bytes(room)} of {owner}"
    )
