"""Flat layouts and the cut of a module into units, drawn at random: every element has one owner, for any number of ranks."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_zero.config import EngineConfig
from lightning_zero.partition.layout import ALIGNMENT_BYTES, build_layout, dense_stride
from lightning_zero.partition.sharding import plan_units
from lightning_zero.settings import largest_automatic_unit

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
# More ranks than elements are common among them.
WORLDS = st.one_of(st.integers(1, 8), st.integers(9, 300))
SHAPES = st.lists(st.integers(0, 6), max_size=4)


@st.composite
def tensors(draw: Any) -> list[torch.Tensor]:
    """Of any shape, the memory of some in another order than their dimensions."""
    dtype, made = draw(st.sampled_from(DTYPES)), []
    for number, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=6))):
        order = draw(st.permutations(range(len(shape))))
        numel = torch.Size(shape).numel()
        made.append((torch.arange(numel) + 7 * number).to(dtype).view(shape).permute(order))
    return made


@settings(max_examples=150, deadline=None)
@given(tensors(), WORLDS)
def test_every_element_has_one_owner(made: list[torch.Tensor], world: int) -> None:
    dtype = made[0].dtype
    layout = build_layout(
        tuple(tuple(t.shape) for t in made), tuple(dense_stride(t) for t in made), world, dtype.itemsize
    )
    assert layout.padded_numel >= layout.numel >= sum(t.numel() for t in made)
    flat = torch.full((layout.padded_numel,), 99, dtype=dtype)
    for slot, tensor in zip(layout.slots, made, strict=True):
        assert slot.range.start * dtype.itemsize % ALIGNMENT_BYTES == 0
        slot.view_of(flat).copy_(tensor)
    assert layout.shard_numel * dtype.itemsize % ALIGNMENT_BYTES == 0
    shards = [flat[layout.shard_range(rank).slice()].clone() for rank in range(world)]
    for index, tensor in enumerate(made):
        own = torch.empty_like(tensor)
        line = own.as_strided((own.numel(),), (1,))
        owned = torch.zeros(own.numel(), dtype=torch.int64)
        for rank, shard in enumerate(shards):
            local, whole = layout.local_range(index, rank), layout.tensor_range(index, rank)
            assert local.numel == whole.numel
            line[whole.slice()] = shard[local.slice()]
            owned[whole.slice()] += 1
        assert bool((owned == 1).all())
        assert torch.equal(own, tensor)
    # Nothing is spent but what brings tensors and shards to a boundary.
    align = ALIGNMENT_BYTES // dtype.itemsize
    assert layout.padded_numel < sum(t.numel() for t in made) + align * (len(made) + world)


@st.composite
def modules(draw: Any) -> nn.Module:
    """A tree with parameters of several dtypes, some frozen, some shared between branches."""
    pool: list[nn.Parameter] = []

    def parameter() -> nn.Parameter:
        if pool and draw(st.integers(0, 4)) == 0:
            return draw(st.sampled_from(pool))
        dtype = draw(st.sampled_from((torch.bfloat16, torch.float32, torch.float64)))
        pool.append(nn.Parameter(torch.empty(draw(SHAPES), dtype=dtype), requires_grad=draw(st.booleans())))
        return pool[-1]

    def module(depth: int) -> nn.Module:
        made = draw(st.sampled_from((nn.Identity, nn.Module)))()
        for number in range(draw(st.integers(0, 3))):
            made.register_parameter(f"p{number}", parameter())
        for number in range(draw(st.integers(0, 3)) if depth else 0):
            made.add_module(f"m{number}", module(depth - 1))
        return made

    return module(3)


@settings(max_examples=100, deadline=None)
@given(modules(), WORLDS, st.integers(1, 4096))
def test_every_parameter_is_in_one_unit(module: nn.Module, world: int, unit_bytes: int) -> None:
    plans = plan_units(module, EngineConfig(3, unit_bytes), world)
    planned = [p for plan in plans for _, p in plan.pairs]
    wanted = {id(p) for p in module.parameters() if p.numel()}
    assert len(planned) == len(wanted)
    assert {id(p) for p in planned} == wanted
    names = dict(module.named_parameters(remove_duplicate=False))
    for plan in plans:
        assert all(names[name] is p for name, p in plan.pairs)
        assert len({(p.dtype, p.requires_grad) for _, p in plan.pairs}) == 1
        assert [slot.range.numel for slot in plan.layout.slots] == [p.numel() for _, p in plan.pairs]
        assert plan.layout.num_shards == world
        # Larger than asked for only where one module's own parameters are.
        cap = largest_automatic_unit(sum(p.nbytes for p in module.parameters()), unit_bytes)
        owners = {name.rpartition(".")[0] for name, _ in plan.pairs}
        shared = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))
        assert plan.nbytes <= cap or len(owners) == 1 or shared
