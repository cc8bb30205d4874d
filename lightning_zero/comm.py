"""The one door to torch.distributed: what the engine sends, how much, and by which algorithm on which backend.

Gathers, reductions and control messages travel over groups of their own: ranks may interleave the three differently
(a branch taken on one rank only), and a collective is matched with its partners by its order within a group.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_zero import profiling
from lightning_zero.pairs import Neighbourhood, Pairs
from lightning_zero.topology import Topology, make_topology
from lightning_zero.whereabouts import Whereabouts
from lightning_zero.work import Arriving, Done, Exchange, FutureWork, Result, Work
from lightning_zero.worker import Worker

CONTROL_CALLS = "control"
_WIDTH = 4
_REDUCING = "reducing gradients"
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class CommStats:
    """Calls, bytes and seconds by collective, per rank.

    Bytes are meant in the bandwidth-optimal sense, as what a rank must send at least: ``(N - 1) / N`` of a gathered or
    reduce-scattered buffer, twice that for an all-reduce. Seconds are those that the program has stood still for it;
    where the device's queue does the waiting (NCCL), nobody sees them here.
    """

    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def count(self, name: str, nbytes: int) -> None:
        self.calls[name] += 1
        self.bytes[name] += nbytes

    @contextmanager
    def waiting(self, name: str, unit: str = "") -> Iterator[None]:
        """Around a wait for the collective, for the sake of ``unit`` if there is one."""
        start = time.perf_counter()
        try:
            with profiling.span(profiling.WAIT, unit, of=name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"calls": self.calls[name], "bytes": self.bytes[name], "seconds": self.seconds[name]}
            for name in self.calls
        }


class Comm:
    """Collectives over the data-parallel ranks of one run.

    Flat buffers have shape ``(num_shards * shard_numel,)`` and shards ``(shard_numel,)``; this rank owns the
    ``shard_rank``-th. Shards travel inside a shard group, reduced ones across the groups as well; everything else is
    compared and added over all ranks. With one rank nothing is sent and no process group is needed.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.rank = rank
        """Among all ranks, as messages name it."""
        self.topology = topology = topology or make_topology(rank, world_size)
        self.world_size = topology.world_size
        """Data-parallel ranks."""
        self.num_shards, self.shard_rank = topology.num_shards, topology.shard_rank
        self.device = device
        self.stats = CommStats()
        self._exchanges = 0
        self._worker = Worker("lightning_zero-reduce")
        self._side_stream: Any = None
        self.point_to_point = False
        """Whether collectives are made of sends and receives (Gloo on CPUs), so that reducing takes memory of its own."""
        self.neighbours: list[int] = []
        """Data-parallel ranks whose memory this one copies from, instead of receiving through sockets."""
        self._adds_on_the_way = False
        """Whether ranks add up fp32 gradients while they copy them from each other."""
        self._gather_group = self._reduce_group = self._control_group = self._storage_group = None
        self._scatter_group = self._replica_group = None
        self._timeout = timeout
        actual = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if actual != world_size:
            raise RuntimeError(
                f"rank {rank}: the process group was initialised with {actual} ranks, the Trainer asks for {world_size}."
                " Destroy the old group or launch with the same number of processes."
            )
        self.model: ModelComm | None = None
        """Where there are model-parallel groups."""
        if world_size == 1:
            return
        backend = dist.get_backend()
        if topology.model_parallel_size > 1:
            self.model = ModelComm(topology, backend, device, timeout, self.stats)
        if self.world_size == 1:
            self._reduce_group = self._new_group(backend)  # metrics are not to be reduced over the others
            return
        self.point_to_point = backend == "gloo" and device.type == "cpu"
        if not self.point_to_point:
            self._make_shard_groups(backend)
        if backend == "fake":
            return
        if self._gather_group is None:
            self._gather_group = self._new_group(backend)
        self._reduce_group = self._new_group(backend)
        if self._scatter_group is None:
            self._scatter_group = self._reduce_group
        self._control_group = self._new_group("gloo")
        if self.point_to_point:
            neighbourhood = Neighbourhood(topology, self.all_gather_object)
            self.neighbours = sorted(neighbourhood.places)
            seconds = (timeout or dist.default_pg_timeout).total_seconds()
            self._gathers = Pairs(0, topology, self._gather_group, seconds, neighbourhood)
            self._reductions = Pairs(1, topology, self._reduce_group, seconds, neighbourhood)
            others = set(topology.shard_group) - {topology.rank}
            self._adds_on_the_way = topology.replicas == 1 and others <= neighbourhood.places
        # A prefix of its own for every Comm, the same on all its ranks because they are made in the same order.
        store = dist.PrefixStore(f"lightning_zero/{_next_comm()}/{topology.column}", _get_default_store())
        self._whereabouts = Whereabouts(rank, topology.members, store)

    def _new_group(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        """A new process group of data-parallel ranks, all of them if none are given. A collective of these."""
        topology = self.topology
        return _new_group(topology.members if ranks is None else topology.as_global(ranks), backend, self._timeout)

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks, of this or of other batches."""
        return self.world_size > 1 or self.model is not None

    @property
    def data_group(self) -> Any:
        """The process group of the data-parallel ranks; None for all ranks."""
        return None if self.model is None else self._reduce_group

    def _make_shard_groups(self, backend: str) -> None:
        """Where shard groups are not of all ranks, collectives inside and across them need groups of their own; sends and
        receives do not."""
        inside, across = self.topology.shard_group, self.topology.replica_group
        if len(across) > 1:
            self._gather_group = self._new_group(backend, inside)
            self._scatter_group = self._new_group(backend, inside)
            self._replica_group = self._new_group(backend, across)

    # -- parameters and gradients ------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor, channel: int = 0) -> Work:
        """Fill the flat buffer ``full`` with every rank's ``shard``; ``shard`` may be its own slice of ``full``.

        Calls on one ``channel`` are matched in order; between channels point-to-point backends need no order.
        """
        own = full.narrow(0, self.shard_rank * shard.numel(), shard.numel())
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self.num_shards == 1 or not shard.numel():
            return Done()
        self.stats.count("all_gather", shard.numel() * shard.element_size() * (self.num_shards - 1))
        if not self.point_to_point:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return gather(full, own, group=self._gather_group, async_op=True)
        pieces = dict(zip(self.topology.shard_group, full.chunk(self.num_shards), strict=True))
        peers = self._others(self.topology.shard_group)
        sends, receives = dict.fromkeys(peers, own), {peer: pieces[peer] for peer in peers}
        return self._gathers.exchange("gathering parameters", self._gathers.next_tag(channel), sends, receives, [full, shard])

    def reduce_scatter(self, full: Tensor, scale: float, dtype: torch.dtype, channel: int = 0) -> Work:
        """Sum the flat buffers of all ranks, times ``scale``; waiting returns this rank's shard of it as ``dtype``.

        That is a reduce-scatter inside the shard group and, where there are several, an all-reduce of the shards across
        them; replicas get the same bits. The result has memory of its own; ``full`` must stay untouched until then. Sums
        of 16-bit buffers are formed in fp32 where this package does the adding (Gloo), and sent as ``full`` is.
        """
        shard_numel = full.numel() // self.num_shards
        own = full.narrow(0, self.shard_rank * shard_numel, shard_numel)
        if self.world_size == 1 or not shard_numel:
            return Result([], lambda: _scaled(own.clone(), scale, dtype))
        if self.num_shards > 1:
            self.stats.count("reduce_scatter", own.nbytes * (self.num_shards - 1))
        if self.topology.replicas > 1:
            self.stats.count("all_reduce", 2 * own.nbytes * (self.topology.replicas - 1) // self.topology.replicas)
        if self.point_to_point:
            return self._reduce_by_pairs(full, own, scale, dtype, channel)
        return self._reduce_by_collectives(full, own, scale, dtype)

    def _reduce_by_pairs(self, full: Tensor, own: Tensor, scale: float, dtype: torch.dtype, channel: int) -> Work:
        group, replicas = self.topology.shard_group, self.topology.replica_group
        tag, again = self._reductions.next_tag(channel), self._reductions.next_tag(channel)
        pieces = dict(zip(group, full.chunk(self.num_shards), strict=True))
        if self._adds_on_the_way and own.dtype == torch.float32:
            out = torch.empty_like(own)
            return Arriving(self._reductions.sum(_REDUCING, tag, group, pieces, out, scale), out, dtype)
        received = {peer: torch.empty_like(own) for peer in self._others(group)}
        sent = {peer: pieces[peer] for peer in received}
        exchange = self._reductions.exchange(_REDUCING, tag, sent, received, [full])
        terms = [received.get(rank, own) for rank in group]

        def finish() -> Tensor:
            total = _sum(exchange, terms, self.shard_rank)
            if len(replicas) == 1:
                return _scaled(total, scale, dtype)
            # Scaled now: of 16 bits the sum over all ranks may be too large.
            return self._add_replicas(_scaled(total, scale, total.dtype), own.dtype, again).to(dtype)

        return FutureWork(self._worker.submit(finish))

    def _add_replicas(self, shard: Tensor, wire: torch.dtype, tag: int) -> Tensor:
        """Sum ``shard`` over its replicas: each adds up one piece of it, and sends the sum to the others."""
        replicas = self.topology.replica_group
        peers, shard = self._others(replicas), shard.to(wire)
        pieces = dict(zip(replicas, shard.tensor_split(len(replicas)), strict=True))
        own = pieces[self.topology.rank]
        received = {peer: torch.empty_like(own) for peer in peers}
        exchange = self._reductions.exchange(_REDUCING, tag, {peer: pieces[peer] for peer in peers}, received, [shard])
        own.copy_(_sum(exchange, [received.get(rank, own) for rank in replicas], replicas.index(self.topology.rank)))
        sums = {peer: pieces[peer] for peer in peers}
        self._reductions.exchange(_REDUCING, tag, dict.fromkeys(peers, own), sums, [shard]).wait()
        return shard

    def _reduce_by_collectives(self, full: Tensor, own: Tensor, scale: float, dtype: torch.dtype) -> Work:
        # Not ReduceOp.AVG: Gloo and some versions of other backends sum instead, without a word.
        if self.num_shards == 1:
            out, works = own.clone(), []
        else:
            reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            out = torch.empty_like(own)
            works = [reduce(out, full, op=dist.ReduceOp.SUM, group=self._scatter_group, async_op=True)]
        if self.topology.replicas == 1:
            return Result(works, lambda: _scaled(out, scale, dtype))
        with self._beside():
            for work in works:
                work.wait()
            _scaled(out, scale, out.dtype)  # now: of 16 bits the sum over all ranks may be too large
            work = dist.all_reduce(out, group=self._replica_group, async_op=True)
        return Result([work], lambda: out.to(dtype))

    def received_bytes(self, full: Tensor) -> int:
        """Memory that reducing ``full`` takes beside it until it is done, at most: a shard is enough where the ranks add while
        they copy."""
        return round(full.nbytes * self.received_share)

    @property
    def received_share(self) -> float:
        """The same for each byte."""
        return self.topology.received_share if self.point_to_point else 0.0

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is queued inside on an accelerator runs beside what is queued later; on a CPU this is nothing."""
        if self.device.type == "cpu":
            yield
            return
        accelerator: Any = torch.get_device_module(self.device)
        if self._side_stream is None:
            self._side_stream = accelerator.Stream(self.device)
        self._side_stream.wait_stream(accelerator.current_stream(self.device))
        with accelerator.stream(self._side_stream):
            yield

    # -- small things ------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce a small tensor in place over the data-parallel ranks (``sum`` or ``max``) and return it."""
        if self.world_size > 1:
            self._count_control(tensor)
            # Not among the exchanges, if there is a choice: a rank that an exception has brought to one must not meet
            # another's sum there. Gloo ends the process where sizes differ.
            group = self._reduce_group if tensor.device.type == self.device.type else self._control_group
            with self.stats.waiting(CONTROL_CALLS), self._losing_ranks("a sum over the ranks"):
                dist.all_reduce(tensor, op=_OPS[op], group=group)
        return tensor

    def all_reduce_everywhere(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The same over all ranks, those of model-parallel groups too."""
        tensor = self.all_reduce(tensor, op)
        return tensor if self.model is None else self.model.all_reduce(tensor, op)

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the data-parallel ranks, from which the others take what they begin with."""
        return self.world_size == 1 or self.rank == self.topology.members[0]

    def over_model(self, value: int) -> int:
        """The largest value of this rank's model-parallel group."""
        return value if self.model is None else int(self.model.all_reduce(torch.tensor(value), "max"))

    def broadcast(self, tensors: list[Tensor], src: int = 0, counted: bool = True) -> None:
        """Overwrite the tensors of every rank with those of ``src``."""
        if self.world_size > 1:
            works = []
            for tensor in tensors:
                if counted:
                    self.stats.count("broadcast", tensor.numel() * tensor.element_size())
                works.append(dist.broadcast(tensor, self.topology.members[src], self._reduce_group, async_op=True))
            with self.stats.waiting("broadcast"), self._losing_ranks(f"a broadcast from rank {src}"):
                for work in works:
                    work.wait()

    @contextmanager
    def _losing_ranks(self, what: str) -> Iterator[None]:
        """Around a collective: its error says what has happened."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: {what} failed. One of the ranks has ended, or is somewhere else in the program and did"
                f" not answer in time. ({error})"
            ) from error

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control_group)
        return values

    @contextmanager
    def failing_together(self, doing: str) -> Iterator[None]:
        """What one rank does inside fails on all ranks. All ranks come here; ``doing`` goes with "could not"."""
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
        if self.all_reduce(torch.tensor(int(failed is not None)), "max"):
            reasons = self.all_gather_object(failed and f"{type(failed).__name__}: {failed}")
            for rank, reason in enumerate(reasons):
                if failed is None and reason is not None:
                    raise RuntimeError(f"Rank {rank} could not {doing}. {reason}")
        if failed is not None:
            raise failed

    def exchange(
        self, place: str, values: Sequence[int] = (), detail: str = "", timeout: float | None = None
    ) -> tuple[list[int], list[int]]:
        """Compare up to four integers over all ranks: the largest and the smallest of each.

        ``place`` says where in the program this rank is, ``detail`` what it is doing there. Raises RuntimeError on all
        ranks if they meet here from different places, and with ``timeout`` (seconds) on the ranks that came if others do
        not come at all; both name the ranks and what they were doing.
        """
        self._exchanges += 1
        own = [fingerprint(place), *values, *[0] * (_WIDTH - len(values))]
        if self.world_size == 1:
            return own[1:], own[1:]
        header = torch.tensor([own, [-v for v in own]], dtype=torch.int64)
        self._count_control(header)
        try:
            with self.stats.waiting(CONTROL_CALLS):
                self._all_reduce_within(header, timeout)
        except RuntimeError as error:
            raise self._whereabouts.apart(f"{place} {detail}", self._exchanges, timeout) from error
        most, least = header[0].tolist(), (-header[1]).tolist()
        if most[0] != least[0]:
            raise self._whereabouts.apart(f"{place} {detail}", self._exchanges, timeout)
        return most[1:], least[1:]

    def _all_reduce_within(self, header: Tensor, timeout: float | None) -> None:
        if timeout is None or self._control_group is None:
            dist.all_reduce(header, op=dist.ReduceOp.MAX, group=self._control_group)
            return
        # The time limit is the collective's own: one that was only given up on would go on waiting in a thread of the
        # group, and the process could not end.
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        options.timeout = timedelta(seconds=timeout)
        self._control_group.allreduce([header], options).wait()

    def check_same(self, what: str, values: Sequence[str]) -> None:
        """Raise RuntimeError on all ranks unless all have the same ``values``; it names the first difference."""
        most, least = self.exchange(f"comparing {what}", [fingerprint(tuple(values))])
        if most == least:
            return
        for theirs in zip_longest(*self.all_gather_object(list(values)), fillvalue="nothing"):
            if len(set(theirs)) > 1:
                listed = "; ".join(f"rank {rank} has {value}" for rank, value in zip(self.topology.members, theirs))
                raise RuntimeError(f"The ranks do not have the same {what}: {listed}. This is rank {self.rank}.")

    @property
    def storage_group(self) -> Any:
        """The group over which ranks agree on what each writes to a checkpoint; the first use is a collective."""
        shares = self.world_size > 1 and self._control_group is not None
        if self._storage_group is None and (shares or self.model is not None):  # one of its own, not that of all ranks
            self._storage_group = self._new_group("gloo")
        return self._storage_group

    def close(self) -> None:
        """End the helper thread; the groups stay usable for gathering state after training."""
        self._worker.close()

    def _others(self, group: list[int]) -> list[int]:
        # Starting after the own rank spreads the load: not everyone talks to the first rank first.
        own = group.index(self.topology.rank)
        return group[own + 1 :] + group[:own]

    def _count_control(self, tensor: Tensor) -> None:
        nbytes = 2 * tensor.numel() * tensor.element_size() * (self.world_size - 1) // self.world_size
        self.stats.count(CONTROL_CALLS, nbytes)


class ModelComm:
    """Collectives over this rank's model-parallel group, whose ranks work on the same batch. All of its ranks call alike."""

    def __init__(
        self, topology: Topology, backend: str, device: torch.device, timeout: timedelta | None, stats: CommStats
    ) -> None:
        self.rank, self.size = topology.column, topology.model_parallel_size
        self._ranks = topology.model_group
        self._stats = stats
        self._group = self._control_group = None
        if backend != "fake":
            self._group = _new_group(self._ranks, backend, timeout)
            self._control_group = _new_group(self._ranks, "gloo", timeout)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce a small tensor in place (``sum`` or ``max``) and return it."""
        with self._stats.waiting(CONTROL_CALLS):
            dist.all_reduce(tensor, op=_OPS[op], group=self._group_for(tensor))
        self._stats.count(CONTROL_CALLS, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return tensor

    def all_gather(self, shard: Tensor) -> Tensor:
        """The shards of all ranks, 1-D and of one size, one after the other."""
        full = shard.new_empty(self.size * shard.numel())
        self._stats.count("activations", shard.nbytes * (self.size - 1))
        with self._stats.waiting("activations"):
            dist.all_gather(list(full.chunk(self.size)), shard, group=self._group_for(shard))
        return full

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first rank's ``tensor``."""
        copy = tensor.clone()
        dist.broadcast(copy, self._ranks[0], group=self._group_for(tensor))
        return copy

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in the group's order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control_group)
        return values

    def _group_for(self, tensor: Tensor) -> Any:
        return self._control_group if tensor.device.type == "cpu" else self._group


def all_model_groups(group: Any) -> list[list[int]]:
    """The global ranks of every rank's model-parallel ``group``, each group once. A collective of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sorted(dist.get_process_group_ranks(group)))
    return [list(ranks) for ranks in sorted({tuple(ranks) for ranks in found})]


def _new_group(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> Any:
    """A new process group of these global ranks, which alone need to call this."""
    if len(ranks) == dist.get_world_size():
        return dist.new_group(backend=backend, timeout=timeout)
    return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)


def check_backend(name: str) -> None:
    """Raise ValueError unless ``name`` ("gloo", or "cpu:gloo,cuda:nccl") names backends that torch knows."""
    known = dist.Backend.backend_list
    for part in name.split(","):
        if part.rpartition(":")[2].strip().lower() not in known:
            raise ValueError(f"process_group_backend must be one of {', '.join(known)}, got {name!r}")


def fingerprint(value: Any) -> int:
    """A 62-bit number that is the same on all ranks for values with the same ``repr``."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 2


def _sum(exchange: Exchange, terms: list[Tensor], own: int) -> Tensor:
    """Add one shard per rank, in rank order on every rank, into memory other than ``terms[own]``."""
    exchange.wait()
    first, *rest = terms
    if first.dtype.is_floating_point and first.dtype.itemsize < 4:
        total = first.float()
    elif not rest:
        return first.clone()
    else:
        second = rest.pop(0)
        total = torch.add(first, second, out=second if own == 0 else first)
    for term in rest:
        total.add_(term)
    return total


def _scaled(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if scale != 1.0:
        tensor = tensor.mul_(scale)
    return tensor.to(dtype)


_comms = 0


def _next_comm() -> int:
    global _comms
    _comms += 1
    return _comms
