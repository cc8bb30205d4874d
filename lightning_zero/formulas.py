"""The arithmetic of memory: bytes of model states on a rank, from flat buffers and settings. Numbers only, no torch.

[Note: the formulas]
Of P parameters on N ranks every rank holds parameters, gradients, master weights and optimizer state; what a stage
shards counts as P / N. With Adam and 16-bit parameters that is 2 + 2 + 4 + 8 bytes per parameter, where the ZeRO paper
(SC 20) calls the 12 bytes of master weights and Adam state K. In 32-bit training the parameters are their own masters:
4 + 4 + 8.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_zero.settings import (
    CHUNK_BYTES,
    CHUNKS_AT_ONCE,
    DEFAULT_UNIT_SIZE_MB,
    RESIDENCE,
    OffloadConfig,
    check_tiers,
    checked_unit_bytes,
    largest_automatic_unit,
)
from lightning_zero.topology import Topology, make_topology

KINDS = ("parameters", "gradients", "master", "optimizer")
"""Model states, by the names under which ``ZeroStrategy.memory_stats`` counts them; ``buffers`` come on top."""
HOST_KINDS = ("staging", "undo", "delayed_gradients", "file_buffers")
"""What the host holds beside model states: copies on their way to a device, the old bytes of early updates, gradients whose
update comes a step late, and what files are read into and written from."""

# Flat buffers of gradients that units need at once: one is filled while two are on their way to their owners.
_GRADIENT_BUFFERS = 3
_ON_THEIR_WAY = 2
# Host memory of one size that copies need at once: new weights, of which one is written while four are leaving, and
# gradients that come in another dtype than they are kept in, or go on to files.
_WEIGHTS_LEAVING = 5
_GRADIENTS_LANDING = 3
_GRADIENTS_TO_FILES = 4
# Memory for what is read from files that waits for its next use, and gradients of parameters that are worked on at once.
_IDLE_FILE_BUFFERS = 3
_GRADIENTS_FETCHED = 2


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
    coded_bytes: int = 0
    """Of all ranks' messages, where it is gathered as codes; the buffer itself is needed only when they are here."""


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
    staging: int = 0
    """At most, in host memory: what is on its way between device and host."""
    undo: int = 0
    """At most, in host memory: what takes early updates back."""
    delayed_gradients: int = 0
    """In host memory: the gradients whose update comes a step late."""
    file_buffers: int = 0
    """At most, in host memory: what files are read into and written from."""

    @property
    def total(self) -> int:
        """Model states without buffers, wherever they rest."""
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def host(self) -> int:
        """Model states in host memory."""
        return sum(getattr(self, kind) for kind in self.on_host)

    @property
    def beside(self) -> int:
        """What the host holds beside model states."""
        return sum(getattr(self, kind) for kind in HOST_KINDS)

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
                lines.append(f"  {kind:<18}{short_bytes(getattr(self, kind)):>10}{where}")
        lines.append(f"  {'model states':<18}{short_bytes(self.total):>10}")
        if self.on_host or self.on_nvme:
            lines.append(f"  {'on the device':<18}{short_bytes(self.device):>10}")
        if self.buffers:
            lines.append(f"  {'buffers':<18}{short_bytes(self.buffers):>10}  at their peak")
        for kind in HOST_KINDS:
            if getattr(self, kind):
                label = kind.replace("_", " ")
                lines.append(f"  {label:<18}{short_bytes(getattr(self, kind)):>10}  (host) at their peak")
        return "\n".join(lines)


@dataclass(frozen=True)
class Setting:
    """What the bytes depend on beside the model: the arguments of ``estimate_memory``, checked."""

    world_size: int
    stage: int
    tiers: OffloadConfig | None = None
    precision: str = "32-true"
    optimizer_multiplier: float = 2.0
    largest_unit: int | None = None
    unit_size_mb: float = DEFAULT_UNIT_SIZE_MB
    prefetch: int = 1
    backend: Literal["nccl", "gloo"] = "nccl"
    shard_group_size: int | None = None
    delayed_update: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", checked_precision(self.precision))
        check_world_size(self.world_size)
        if self.stage != 0 and self.stage not in RESIDENCE:
            raise ValueError(f"stage must be 0 (plain data parallelism), 1, 2 or 3, got {self.stage!r}")
        if self.optimizer_multiplier < 0:
            raise ValueError(f"optimizer_multiplier must not be negative, got {self.optimizer_multiplier}")
        if self.backend not in ("nccl", "gloo"):
            raise ValueError(f"backend must be 'nccl' or 'gloo', got {self.backend!r}")
        check_tiers(self.tiers, self.stage)
        if self.tiers is not None and not self.stage:
            raise ValueError("offload=True needs stage 1, 2 or 3: plain data parallelism keeps everything on the device")
        if self.delayed_update and (self.tiers is None or self.tiers.optimizer == "nvme"):
            raise ValueError("delayed_update needs offload=True: it is the step on the host that is delayed")
        if self.largest_unit is not None and self.largest_unit < 1:
            raise ValueError(f"largest_unit must be at least 1 parameter, got {self.largest_unit}")
        checked_unit_bytes(self.unit_size_mb)

    @property
    def unit_bytes(self) -> int:
        return checked_unit_bytes(self.unit_size_mb)

    @property
    def topology(self) -> Topology:
        return make_topology(0, self.world_size, self.shard_group_size if self.stage else None)

    @property
    def has_second_copy(self) -> bool:
        """Whether masters are a copy of fp32 parameters too: what a device computes with stays there."""
        return self.tiers is not None and (self.backend == "nccl" or self.tiers.optimizer == "cpu")

    @property
    def sizes(self) -> ItemSizes:
        """Of a parameter that steps cast."""
        sizes = (SIZES if self.stage else PLAIN_SIZES)[self.precision]
        if not self.has_second_copy:
            return sizes
        return ItemSizes(sizes.parameters, sizes.gradients, max(4, sizes.optimizer), sizes.optimizer)

    def of_count(self, count: float | str) -> MemoryEstimate:
        """For a number of parameters, all of them trained; or a text that :func:`parse_count` reads."""
        return self.estimate(self._parts_of_count(parse_count(count) if isinstance(count, str) else count))

    def _parts_of_count(self, count: float) -> list[FlatPart]:
        """Units as large as they get, without padding."""
        numel = int(count)
        if numel < 1:
            raise ValueError(f"the number of parameters must be at least 1, got {count!r}")
        sizes = self.sizes
        largest = largest_automatic_unit(numel * sizes.parameters, self.unit_bytes) // sizes.parameters
        cuts = [largest] * (numel // largest) + [numel % largest] * (numel % largest > 0)
        return [FlatPart(cut, cut, sizes) for cut in cuts]

    def estimate(self, parts: Sequence[FlatPart]) -> MemoryEstimate:
        topology, tiers = self.topology, self.tiers
        passing = 0 if self.world_size == 1 else self.stage  # a single rank sends nothing
        received = topology.received_share if passing and self.backend == "gloo" else 0.0
        traffic = Traffic(passing, self.prefetch, received)
        if self.largest_unit is None:
            buffers = traffic.most(parts)
        else:
            buffers = traffic.under_way(FlatPart(self.largest_unit, self.largest_unit, self.sizes))
        on_host, on_nvme = ((), ()) if tiers is None else places(self.stage, tiers.optimizer == "nvme", tiers.parameters)
        crosses = tiers is not None and self.backend == "nccl"
        leaves = crosses or (tiers is not None and tiers.parameters == "nvme")
        host = HostMemory(
            crosses, leaves, tiers is not None and tiers.early_update, self.delayed_update,
            self.prefetch + 1 if crosses and tiers and tiers.parameters == "nvme" else 0, self._file_buffers(crosses),
        )  # fmt: skip
        return sum_up(parts, topology, self.stage, self.precision, self.optimizer_multiplier, buffers, on_host, on_nvme, host)

    def _file_buffers(self, crosses: bool) -> "FileBuffers":
        tiers, states = self.tiers, self.optimizer_multiplier
        if tiers is None:
            return FileBuffers()
        is_adam = states in (2, 3) and self.precision != "64-true"  # as far as numbers tell
        main, parameters = tiers.optimizer == "nvme", tiers.parameters == "nvme"
        return FileBuffers(
            main, states * is_adam, states * (not is_adam), parameters and not crosses, main and parameters, self.prefetch
        )


@dataclass(frozen=True)
class Traffic:
    """Which flat buffers units need in a step."""

    stage: int
    prefetch: int
    received: float
    """The share of a unit's gradients that is received beside them."""

    def most(self, parts: Sequence[FlatPart]) -> int:
        """What units need at once: the largest that are under way together, and those held through the step."""
        held = sum(self.pair(part) for part in parts if part.held)
        passing = [part for part in parts if not part.held]
        most = max((self.under_way(part) for part in passing), default=0)
        # A small model has fewer units than could be under way.
        return held + min(most, sum(self.pair(part) for part in passing))

    def under_way(self, part: FlatPart) -> int:
        """The unit in use, those prefetched, and the gradients being collected and reduced, all as large as ``part``."""
        ahead = 0 if part.coded_bytes else self.prefetch
        units = 1 + ahead if self.stage == 3 else 0
        units += _GRADIENT_BUFFERS * self._buffers_gradients(part)
        codes = part.coded_bytes * max(1, self.prefetch) if self.stage == 3 else 0
        return codes + self._bytes(part, units + _ON_THEIR_WAY * self.received * part.trainable)

    def pair(self, part: FlatPart) -> int:
        """The unit's parameters and its gradients, where they are buffered."""
        codes = part.coded_bytes if self.stage == 3 else 0
        return codes + self._bytes(part, (self.stage == 3) + self._buffers_gradients(part) + self.received * part.trainable)

    def _bytes(self, part: FlatPart, copies: float) -> int:
        return round(part.padded_numel * part.sizes.parameters * copies)

    def _buffers_gradients(self, part: FlatPart) -> bool:
        # At stage 1 gradients are reduced where they rest, unless that is in a wider dtype than the one sent.
        wider = part.sizes.gradients > part.sizes.parameters
        return part.trainable and (self.stage >= 2 or (self.stage == 1 and wider))


@dataclass(frozen=True)
class FileBuffers:
    """What goes through host memory on its way from and to files."""

    main: bool = False
    """Master weights and optimizer state do."""
    streamed: float = 0
    whole: float = 0
    """Numbers of state per parameter that a step streams in chunks (Adam's), or has there for a whole unit (others')."""
    parameters: bool = False
    gradients: bool = False
    prefetch: int = 1

    def most(self, parts: Sequence[FlatPart], num_shards: int) -> int:
        trained = [part for part in parts if part.trainable]
        return self._chunks(trained, num_shards) + self._shards(parts, trained, num_shards)

    def _chunks(self, trained: Sequence[FlatPart], num_shards: int) -> int:
        if not self.main or not self.streamed:
            return 0
        kinds = max((bool(part.sizes.master) or self.parameters for part in trained), default=False)
        count = sum(-(-part.padded_numel // num_shards * 4 // CHUNK_BYTES) for part in trained)
        return round(min(count, CHUNKS_AT_ONCE) * (kinds + self.streamed + self.gradients) * CHUNK_BYTES)

    def _shards(self, parts: Sequence[FlatPart], trained: Sequence[FlatPart], num_shards: int) -> int:
        """Shards of units: being fetched, used and given up, forward and backward."""
        fetched = 2 * (self.prefetch + 1) if self.parameters else 0
        largest = max((part.padded_numel * part.sizes.parameters for part in parts), default=0)
        gradients = max((part.padded_numel * part.sizes.gradients for part in trained), default=0)
        most = fetched * largest + _GRADIENTS_FETCHED * gradients * self.gradients
        if self.main and self.whole:
            mains = max((part.padded_numel * (part.sizes.master or part.sizes.parameters) for part in trained), default=0)
            most += round((1 + self.whole + _IDLE_FILE_BUFFERS) * mains)
        return most // num_shards


@dataclass(frozen=True)
class HostMemory:
    """What the host is to hold beside model states."""

    crosses: bool = False
    """Gradients come to the host from a device, and new weights go back."""
    leaves: bool = False
    """New weights go through host memory of their own, to a device or to files."""
    early: bool = False
    late: bool = False
    """Updates begin before the step, or come a step later."""
    fetched: int = 0
    """Units that are on their way from files to a device at once."""
    files: FileBuffers = FileBuffers()

    def staging(self, parts: Sequence[FlatPart], num_shards: int, stage: int) -> int:
        """Memory is used again by what has its size, so there is some of each size."""
        if not self.leaves:
            return 0
        at_once = _WEIGHTS_LEAVING + self.fetched
        weights, landing, leaving, held = Counter[int](), Counter[int](), Counter[int](), 0
        for part in (part for part in parts if part.trainable):
            numel = part.padded_numel // num_shards
            weights[numel * part.sizes.parameters] += 1
            if self.crosses and part.sizes.gradients > part.sizes.parameters:
                landing[numel * part.sizes.parameters] += 1
            if self.crosses and self.files.gradients:
                leaving[numel * part.sizes.gradients] += 1
            if self.crosses and RESIDENCE[stage].whole_gradients:
                held += numel * part.sizes.gradients  # reduced, beside the whole ones on the device
        # Weights that are computed before their time wait for it.
        waits = self.early or self.late
        held += sum(size * (count if waits else min(count, at_once)) for size, count in weights.items())
        held += sum(size * min(count, _GRADIENTS_TO_FILES) for size, count in leaving.items())
        return held + sum(size * min(count, _GRADIENTS_LANDING) for size, count in landing.items())

    def undo(self, parts: Sequence[FlatPart], num_shards: int, states: float) -> int:
        """Masters and state as they were."""
        if not self.early:
            return 0
        return round(
            sum(
                part.padded_numel / num_shards * ((part.sizes.master or part.sizes.parameters) + states * part.sizes.optimizer)
                for part in parts
                if part.trainable
            )
        )

    def delayed_gradients(self, parts: Sequence[FlatPart], num_shards: int) -> int:
        if not self.late:
            return 0
        return sum(part.padded_numel // num_shards * part.sizes.gradients for part in parts if part.trainable)


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


_LETTERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_count(text: str) -> int:
    """Read a number of parameters such as ``7.5B``, ``350M`` or ``1e9``.

    >>> parse_count("7.5B"), parse_count("350 m"), parse_count("1_000"), parse_count("7,500,000")
    (7500000000, 350000000, 1000, 7500000)
    """
    given, text = text, text.replace(",", "").replace(" ", "")
    letter = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        count = float(text[: len(text) - len(letter)]) * _LETTERS[letter]
    except (KeyError, ValueError):
        raise ValueError(f"{given!r} is not a number of parameters such as 7.5B, 350M or 1e9") from None
    if not 1 <= count < float("inf"):
        raise ValueError(f"the number of parameters must be at least 1 and finite, got {given!r}")
    return round(count)


def short_count(count: float) -> str:
    """A number of parameters with one of the letters that :func:`parse_count` reads."""
    for letter in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.4g}{letter}"
        count /= 1000
    return f"{count:.4g}T"


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless it is a number of ranks."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")


def checked_precision(precision: str | int) -> str:
    """The Trainer's ``precision`` in full: "bf16" is "bf16-mixed", 32 is "32-true"."""
    name = _ALIASES.get(str(precision).lower(), str(precision).lower())
    if name not in SIZES:
        raise ValueError(f"precision must be one of {', '.join((*SIZES, *_ALIASES))}, got {precision!r}")
    return name


def _on_host(stage: int) -> tuple[str, ...]:
    """The kinds that rest in host memory under offload. At stage 1 the gradients that are not reduced yet stay whole."""
    return ("master", "optimizer") if RESIDENCE[stage].whole_gradients else ("gradients", "master", "optimizer")


def places(stage: int, in_files: bool, parameters: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kinds in host memory, and those in files."""
    on_nvme: tuple[str, ...] = ("master", "optimizer") if in_files else ()
    if in_files and parameters == "nvme":
        on_nvme = ("gradients", *on_nvme)
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


def _formula(parts: Sequence[FlatPart], states: float, sharded: set[str], shards: str) -> str:
    """On average over the parameters, which mixed precision computes with in 16 or in 32 bits."""
    numel = sum(part.numel for part in parts)
    whole = shard = 0.0
    for part in parts:
        for kind, size in _bytes_per_parameter(part.sizes, states).items():
            share = size * part.numel / numel
            whole, shard = (whole, shard + share) if kind in sharded else (whole + share, shard)
    terms = [f"{whole:.3g}P"] * (whole > 0) + [f"{shard:.3g}P/{shards}"] * (shard > 0)
    return " + ".join(terms)


def sum_up(
    parts: Sequence[FlatPart],
    topology: Topology,
    stage: int,
    precision: str,
    states: float,
    buffers: int,
    on_host: tuple[str, ...] = (),
    on_nvme: tuple[str, ...] = (),
    host: HostMemory = HostMemory(),
) -> MemoryEstimate:
    """The bytes of flat buffers, at ``stage``, with ``states`` numbers of optimizer state per parameter."""
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
        staging=host.staging(parts, topology.num_shards, stage),
        undo=host.undo(parts, topology.num_shards, states),
        delayed_gradients=host.delayed_gradients(parts, topology.num_shards),
        file_buffers=host.files.most(parts, topology.num_shards),
    )
