"""The region for kept inputs: gradients as without it, in memory that is used again and never overwritten too early."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.activations.checkpointing import Recomputation, checked_policy
from lightning_zero.activations.contiguous import ContiguousInputs, Region

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.last: Any = None
        self.looks: Callable[[Tensor], Any] = lambda x: None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.last = self.looks(x)
        y = x + self.down(torch.tanh(self.up(x)))
        return y if mask is None else y * mask


class Net(nn.Module):
    def __init__(self, depth: int = 3, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.register_buffer("mask", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor, masked: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x, self.mask) if masked else block(x)
        return x


class Nested(Block):
    """Has a recomputed part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.inner(torch.sin(x)))


class Doubling(Block):
    """Changes its input in place."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.mul_(2))


def pair(block: type[nn.Module] = Block, policy: Any = Block) -> tuple[Net, Net, Region]:
    """A net without and one with recomputed blocks whose inputs lie in a region."""
    torch.manual_seed(0)
    plain, kept = Net(block=block), Net(block=block)
    kept.load_state_dict(plain.state_dict())
    region = Region(CPU)
    Recomputation(kept, checked_policy(policy), ContiguousInputs(region))
    return plain, kept, region


def gradients(net: Net) -> list[Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return found


def same(plain: Net, kept: Net) -> None:
    for a, b in zip(gradients(plain), gradients(kept), strict=True):
        assert torch.equal(a, b)


def batch(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def step(net: Net, rows: int, seed: int = 0) -> None:
    net(batch(rows, seed).requires_grad_()).square().sum().backward()


def test_every_step_uses_what_the_first_one_needed() -> None:
    plain, kept, region = pair()
    addresses = set()
    for seed in range(4):
        step(plain, 64, seed)
        step(kept, 64, seed)
        same(plain, kept)
        addresses.add(region._memory.data_ptr())
        # The first step finds no region; from then on: three inputs of 64 x 8 floats, less the leaf that the user has.
        assert region.nbytes == (0 if not seed else 2 * 64 * 8 * 4)
    assert len(addresses) == 2


def test_other_shapes_grow_the_region_and_smaller_ones_do_not() -> None:
    plain, kept, region = pair()
    sizes = []
    for rows in (16, 16, 64, 16, 128, 16, 8):
        step(plain, rows)
        step(kept, rows)
        same(plain, kept)
        sizes.append(region.nbytes // (2 * 8 * 4))
    # In rows of two inputs; from the second time on with a quarter more. Each grows when nothing is kept any more.
    assert sizes == [0, 16, 16, 80, 80, 160, 160]


def test_graphs_in_flight_do_not_meet() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        plain, kept, region = pair()
        for _ in range(3):
            for net in (plain, kept):
                losses = [net(batch(32, seed)).square().sum() for seed in range(3)]
                for index in order:
                    losses[index].backward()
            same(plain, kept)
        assert region.nbytes == 3 * 3 * 32 * 8 * 4


def test_a_graph_that_stays_alive_keeps_its_place() -> None:
    plain, kept, region = pair()
    held: list[Tensor] = []
    for seed in range(5):
        for net in (plain, kept):
            loss = net(batch(32, seed)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=net is kept)
            if net is kept:
                held = [*held[-1:], loss]
        same(plain, kept)
    held[0].backward()
    assert all(p.grad is not None for p in kept.parameters())
    # The last two are alive at a time, and three while the next is made: places are found again.
    assert region._needed == 3 * 3 * 32 * 8 * 4


def test_gradients_of_gradients() -> None:
    plain, kept, _ = pair()
    for seed in range(3):
        for net in (plain, kept):
            x = batch(32, seed).requires_grad_()
            (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
        same(plain, kept)


def test_what_a_module_keeps_of_its_recompute_is_never_overwritten() -> None:
    _, kept, region = pair()
    expected: list[Tensor] = []
    seen: list[Tensor] = []

    def look(x: Tensor) -> Any:
        if torch._C._current_graph_task_id() != -1:  # the recompute's
            seen.append(x.detach()[1:3])
            expected.append(x.detach()[1:3].clone())

    kept.blocks[1].looks = look
    regions = set()
    for seed in range(5):
        step(kept, 32, seed)
        regions.add(region._memory.data_ptr())
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    lies_in_region = region._memory.untyped_storage().data_ptr() == seen[-1].untyped_storage().data_ptr()
    assert lies_in_region  # there was something to overwrite
    assert len(regions) == 5


def test_recomputes_within_recomputes() -> None:
    plain, kept, region = pair(Nested, Nested)
    # A policy chooses the outermost modules; this is for those that recompute parts of themselves in the same way.
    for block in kept.blocks:
        Recomputation(block, checked_policy("inner"), ContiguousInputs(region))
    for seed in range(3):
        for net in (plain, kept):
            step(net, 32, seed)
        same(plain, kept)
    # What the inner ones are called with is made again with the rest of the outer ones.
    assert region.nbytes == 2 * 32 * 8 * 4


def test_an_input_given_to_many_modules_is_kept_once() -> None:
    plain, kept, region = pair()
    mask = torch.rand(4096, 8)
    for _ in range(2):
        for net in (plain, kept):
            x = batch(4096, 0)
            for block in net.blocks:
                x = block(x, mask)
            x.square().sum().backward()
        same(plain, kept)
    assert region.nbytes == (3 + 1) * 4096 * 8 * 4


def test_views_and_odd_layouts() -> None:
    plain, kept, region = pair()
    makers: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.t().contiguous().t(),  # dense, transposed
        lambda x: x[::2],  # has holes
        lambda x: x[:1].expand(5, 8),
        lambda x: x[3:7].detach(),  # requires no grad
        lambda x: x[:0],
    ]
    for make in makers * 2:
        for net in (plain, kept):
            base = batch(16, 1).requires_grad_()
            net(make(base * 1.5)).square().sum().backward()
        same(plain, kept)
    assert region.nbytes > 0


def test_changes_in_place() -> None:
    """A copy does not notice changes of what it was made of. What cannot be right is an error, with the module's name."""
    plain, kept, _ = pair(Doubling, Doubling)
    for seed in range(2):
        for net in (plain, kept):
            net(batch(8, seed) * 1).square().sum().backward()  # plain torch can recompute none of this
        same(plain, kept)
    loss = kept(batch(8, 0) * 1).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"The inputs of 'blocks.2' for its recompute: .* has been changed in place since"):
        loss.backward()
    holed = batch(16, 0)[::2]  # not copied
    loss = pair()[1](holed).sum()
    holed.mul_(2)
    with pytest.raises(RuntimeError, match=r"The inputs of 'blocks.0' for its recompute: a tensor of shape \(8, 8\) .* changed in place"):
        loss.backward()


def test_every_byte_is_accounted_for() -> None:
    held = 0

    def account(kind: str, nbytes: int) -> None:
        nonlocal held
        assert kind == "activations"
        held += nbytes

    torch.manual_seed(0)
    net, region = Net(), Region(CPU, account)
    Recomputation(net, checked_policy(Block), ContiguousInputs(region))
    loss = net(batch(32, 0)).sum()
    assert held == 3 * 32 * 8 * 4  # each in memory of its own
    loss.backward()
    assert held == 0
    for _ in range(2):
        step(net, 32)
        assert held == region.nbytes > 0
    region.close()
    assert held == region.nbytes == 0
