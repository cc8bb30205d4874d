"""Ranges of a flat tensor as boxes of the logical one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.checkpoint.boxes import boxes_of
from lightning_zero.partition.layout import Range, dense_stride
from lightning_zero.partition.shards import TensorShard


def shard_of(tensor: torch.Tensor, start: int, stop: int) -> TensorShard:
    stride = dense_stride(tensor)
    flat = torch.empty_strided(tensor.shape, stride).copy_(tensor).as_strided((tensor.numel(),), (1,))
    return TensorShard(flat[start:stop], tuple(tensor.shape), stride, Range(start, stop))


def test_the_example() -> None:
    boxes = boxes_of(shard_of(torch.zeros(4, 5), 4, 16))
    assert [(box.offsets, box.sizes) for box in boxes] == [((0, 4), (1, 1)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]
    assert [box.elements for box in boxes] == [Range(0, 1), Range(1, 11), Range(11, 12)]


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((), 0, 1, [((), ())]),
        ((7,), 2, 5, [((2,), (3,))]),
        ((4, 5), 0, 20, [((0, 0), (4, 5))]),
        ((4, 5), 6, 9, [((1, 1), (1, 3))]),
        ((4, 5), 6, 10, [((1, 1), (1, 4))]),
        ((0, 3), 0, 0, []),
        ((4, 5), 3, 3, []),
        ((2, 2, 2), 1, 7, [((0, 0, 1), (1, 1, 1)), ((0, 1, 0), (1, 1, 2)), ((1, 0, 0), (1, 1, 2)), ((1, 1, 0), (1, 1, 1))]),
    ],
)
def test_expected(shape: tuple[int, ...], start: int, stop: int, expected: list) -> None:
    assert [(box.offsets, box.sizes) for box in boxes_of(shard_of(torch.zeros(shape), start, stop))] == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.randoms(use_true_random=False), st.integers(1, 4))
def test_boxes_of_all_shards_make_up_the_tensor(shape: list[int], random: object, world: int) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape).permute(order)
    again = torch.full(tensor.shape, -1.0)
    cuts = sorted(random.randint(0, tensor.numel()) for _ in range(world - 1))  # type: ignore[attr-defined]
    for start, stop in zip([0, *cuts], [*cuts, tensor.numel()], strict=True):
        shard = shard_of(tensor, start, stop)
        boxes = boxes_of(shard)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for box in boxes:
            place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            assert bool((again[place] == -1).all())
            view = box.view_of(shard.data[box.elements.slice()])
            again[place] = view
            assert view.data_ptr() == shard.data[box.elements.start :].data_ptr()
    assert torch.equal(again, tensor)
