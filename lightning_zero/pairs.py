"""Sends and receives between two ranks each, of which the collectives of CPUs are made.

Ranks of one host copy from each other's memory (lightning_zero.ops.Neighbours): a byte is moved once, where sockets move it
twice and the kernel looks at each packet of it. All others go through the process group's backend. Both ways a message
waits for its partner, in any order of tags, and the bytes are the same.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_zero.ops import Address, Neighbours
from lightning_zero.topology import Topology
from lightning_zero.work import Exchange

SWITCH_VARIABLE = "LIGHTNING_ZERO_COPY_ON_HOST"
"""``0`` sends everything through the process group."""
_TAG_ROUNDS = 1024  # a tag may come round again long after its transfer is done


class Pairs:
    """Messages of one kind between this rank and other data-parallel ranks, which are known by their index among these."""

    def __init__(
        self, kind: int, topology: Topology, group: Any, seconds: float, neighbours: "Neighbourhood"
    ) -> None:
        self._kind = kind
        """A number that no other kind has which uses the same ``neighbours``."""
        self._topology = topology
        self._group = group
        self._seconds = seconds
        self._neighbours = neighbours
        self._calls: dict[int, int] = defaultdict(int)

    def next_tag(self, channel: int) -> int:
        """Calls on one ``channel`` are matched in order."""
        count = self._calls[channel] = (self._calls[channel] + 1) % _TAG_ROUNDS
        return channel * _TAG_ROUNDS + count

    def exchange(
        self, what: str, tag: int, sends: dict[int, Tensor], receives: dict[int, Tensor], keep: list[Tensor]
    ) -> Exchange:
        """Start receiving from and sending to peers. ``keep`` is kept alive until then, ``what`` goes with "failed"."""
        names = self._topology.members
        works: list[tuple[int | str, Any]] = [
            (names[peer], self._receive(peer, tag, one)) for peer, one in receives.items() if one.numel()
        ]
        works += [(names[peer], self._send(peer, tag, one)) for peer, one in sends.items() if one.numel()]
        return Exchange(what, names[self._topology.rank], works, keep)

    def sum(self, what: str, tag: int, terms: Sequence[int], pieces: dict[int, Tensor], out: Tensor, scale: float) -> Exchange:
        """Between neighbours, of fp32: send their pieces to the other ranks of ``terms``; ``out`` becomes the sum of what these send and
        of the own piece, in the order of ``terms`` and times ``scale``. Nothing is put down in between."""
        peers = [rank for rank in terms if rank != self._topology.rank]
        near: Any = self._neighbours.of(peers[0])
        names = [self._topology.members[peer] for peer in peers]
        own = pieces[self._topology.rank]
        passage = near.sum(terms, self._key(tag), own, out, scale, self._seconds)
        exchange = self.exchange(what, tag, {peer: pieces[peer] for peer in peers}, {}, [])
        exchange.add(names[0] if len(names) == 1 else f"one of {names}", passage)
        return exchange

    def _receive(self, peer: int, tag: int, into: Tensor) -> Any:
        near = self._neighbours.of(peer)
        if near is None:
            return self._group.recv([into], peer, tag)
        return near.receive(peer, self._key(tag), into, self._seconds)

    def _send(self, peer: int, tag: int, tensor: Tensor) -> Any:
        near = self._neighbours.of(peer)
        if near is None:
            return self._group.send([tensor], peer, tag)
        return near.send(peer, self._key(tag), tensor, self._seconds)

    def _key(self, tag: int) -> int:
        return tag << 1 | self._kind


class Neighbourhood:
    """Which of the data-parallel ranks are on this host and let each other copy."""

    def __init__(self, topology: Topology, all_gather_object: Callable[[Any], list[Any]]) -> None:
        """A collective of these ranks."""
        self._neighbours = _try_neighbours(topology) if os.environ.get(SWITCH_VARIABLE, "1") != "0" else None
        self.places: set[int] = set()
        """Their indices."""
        addresses: list[Address | None] = all_gather_object(self._neighbours and self._neighbours.address)
        if self._neighbours is not None:
            self.places = {
                place
                for place, address in enumerate(addresses)
                if place != topology.rank and address is not None and self._neighbours.add(place, address)
            }
        # Both ways or not at all: they must agree about where a message goes.
        seen: list[set[int]] = all_gather_object(self.places)
        self.places = {place for place in self.places if topology.rank in seen[place]}
        if self._neighbours is not None:
            self._neighbours.all_added()

    def of(self, peer: int) -> Neighbours | None:
        return self._neighbours if peer in self.places else None


def _try_neighbours(topology: Topology) -> Neighbours | None:
    try:
        return Neighbours(topology.rank, topology.world_size)
    except OSError:
        return None
