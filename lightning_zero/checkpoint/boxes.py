"""Ranges of a flat tensor as boxes of the logical one. Integers only.

A checkpoint folder describes what each rank has written as boxes of logical tensors, while a rank owns a range of a
tensor's elements. Elements 4 to 16 of a tensor of shape (4, 5) are three boxes, the rest of row 0, rows 1 and 2, and the
start of row 3::

    . . . . 0        (0, 4) of size (1, 1)
    1 1 1 1 1        (1, 0) of size (2, 5)
    1 1 1 1 1
    2 . . . .        (3, 0) of size (1, 1)

Each box is one run of the range, so it is a view of the rank's memory. ``n`` dimensions need at most ``2 n - 1`` boxes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_zero.partition.layout import Range
from lightning_zero.partition.shards import TensorShard


@dataclass(frozen=True)
class Box:
    """A box of a logical tensor, and which elements of the shard's data it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    elements: Range
    order: tuple[int, ...]
    """The dimensions from the outermost to the innermost in memory."""

    def view_of(self, elements: Tensor) -> Tensor:
        """The box, of shape ``sizes``, as a view of its 1-D ``elements``."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return elements.view([self.sizes[d] for d in self.order]).permute(inverse)


def boxes_of(shard: TensorShard) -> list[Box]:
    """The boxes that make up a shard, in the order of its elements."""
    order = tuple(sorted(range(len(shard.shape)), key=lambda d: -shard.stride[d]))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    boxes, position = [], 0
    for offsets, sizes in _cut(shard.range.start, shard.range.stop, tuple(shard.shape[d] for d in order)):
        elements = Range(position, position + prod(sizes))
        boxes.append(Box(tuple(offsets[d] for d in inverse), tuple(sizes[d] for d in inverse), elements, order))
        position = elements.stop
    return boxes


def _cut(start: int, stop: int, sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that cover elements ``[start, stop)`` of a row-major tensor of ``sizes``."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = prod(sizes[1:])
    first, last = start // row, stop // row
    if first == last:
        yield from _in_row(first, start % row, stop % row, sizes)
        return
    if start % row:
        yield from _in_row(first, start % row, row, sizes)
        first += 1
    if first < last:
        yield (first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:])
    yield from _in_row(last, 0, stop % row, sizes)


def _in_row(index: int, start: int, stop: int, sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, inner in _cut(start, stop, sizes[1:]):
        yield (index, *offsets), (1, *inner)
