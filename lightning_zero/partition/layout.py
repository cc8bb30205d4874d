"""Flat layout: tensor <-> range <-> rank. Integers only, no process group, no data.

A flat buffer holds several tensors one after another and is cut into ``num_shards`` equal shards. Every tensor and
every shard starts on a 64-byte boundary, so that kernels see the alignment they would see without sharding, and an
element-wise kernel splits a tensor into the same vector body and scalar tail whether it is sharded or not.

Two tensors of 20 and 9 fp32 elements on two ranks (one boundary = 16 elements)::

    element   0        16       32       48       64
              |--------+---|....|----|...........|
    tensor    0: [0, 20)        1: [32, 41)         numel 41, padded to 64
    shard     rank 0: [0, 32)   rank 1: [32, 64)    shard_numel 32
"""

from dataclasses import dataclass
from functools import cache

import torch

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Range:
    """Half-open range of elements ``[start, stop)``."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: "Range") -> "Range":
        """The common part; empty ranges keep a valid start."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> "Range":
        return Range(self.start + by, self.stop + by)

    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in the flat buffer; ``stride`` is the tensor's own dense memory order."""

    range: Range
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of an unsharded flat buffer of shape ``(padded_numel,)``."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.range.start)


@dataclass(frozen=True)
class FlatLayout:
    """Layout of one flat buffer in ``num_shards`` shards."""

    slots: tuple[Slot, ...]
    num_shards: int
    numel: int
    shard_numel: int

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.num_shards

    def shard_range(self, rank: int) -> Range:
        """The elements of the flat buffer that ``rank`` owns."""
        if not 0 <= rank < self.num_shards:
            raise ValueError(f"rank must be in [0, {self.num_shards}), got {rank}")
        return Range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def local_range(self, index: int, rank: int) -> Range:
        """The part of tensor ``index`` that ``rank`` owns, counted from the start of that rank's shard."""
        shard = self.shard_range(rank)
        return self.slots[index].range.intersect(shard).shift(-shard.start)

    def tensor_range(self, index: int, rank: int) -> Range:
        """The same elements as :meth:`local_range`, counted from the start of the tensor."""
        shard = self.shard_range(rank)
        slot = self.slots[index].range
        return slot.intersect(shard).shift(-slot.start)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides under which ``tensor`` can be stored without gaps, in its own memory order."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def row_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@cache  # one object for equal layouts: repeated blocks share buffers, and comparing them must cost nothing
def build_layout(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    num_shards: int,
    itemsize: int,
    block_numel: int = 1,
) -> FlatLayout:
    """Lay out tensors of the given shapes, in order, in ``num_shards`` shards of ``itemsize``-byte elements. Tensors and
    shards also start at multiples of ``block_numel``, a power of two."""
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    align = max(block_numel, ALIGNMENT_BYTES // itemsize)
    slots, offset, end = [], 0, 0
    for shape, stride in zip(shapes, strides, strict=True):
        numel = 1
        for size in shape:
            numel *= size
        slots.append(Slot(Range(offset, offset + numel), tuple(shape), tuple(stride)))
        end = offset + numel
        offset = _round_up(end, align)
    shard_numel = _round_up(-(-end // num_shards), align)
    return FlatLayout(tuple(slots), num_shards, end, shard_numel)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
