"""Modules drawn at random from what users write: shared, tied, frozen, branching and recomputed parts, odd shapes."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Residual(nn.Module):
    """``x + f(x)`` for an inner module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self, fresh: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.fresh = fresh

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x * 1 if self.fresh else x, x, need_weights=False)[0]


class AlongTime(nn.Module):
    """A layer that wants channels before time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Bare(nn.Module):
    """Parameters used by no layer: a scalar, one of odd shape, an empty one, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.randn(1, 1, WIDTH) / 10)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.weights = nn.ParameterList(torch.randn(WIDTH) / 10 for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift + sum(w * x for w in self.weights) + self.empty.sum()


class Borrowed(nn.Module):
    """Uses the weight of a layer that lives elsewhere."""

    def __init__(self, owner: nn.Linear, transposed: bool) -> None:
        super().__init__()
        self.owner = [owner]  # in a list: not registered here
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        weight = self.owner[0].weight
        return F.linear(x, weight.t() if self.transposed else weight)


class Branch(nn.Module):
    """Takes one way or the other, by the data: ranks part ways. Or never takes the second."""

    def __init__(self, first: nn.Module, second: nn.Module, never: bool) -> None:
        super().__init__()
        self.first, self.second, self.never = first, second, never

    def forward(self, x: Tensor) -> Tensor:
        if self.never or float(x.detach().sum()) > 0:
            return self.first(x)
        return self.second(x)


class Nested(nn.Module):
    """Takes and returns dicts, through a method that is not ``forward``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"inner": inner, "gate": nn.Linear(WIDTH, WIDTH, bias=False)})

    def encode(self, x: Tensor) -> dict[str, Any]:
        return {"value": [self.parts["inner"](x)], "gate": torch.sigmoid(self.parts["gate"](x))}

    def forward(self, x: Tensor) -> Tensor:
        got = self.encode(x)
        return got["value"][0] * got["gate"]


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant) if self.training else self.inner(x)


class Builder:
    """Draws modules; the same for the same seed.

    DDP knows no reentrant recompute of modules with unused parameters: with ``reentrant=False`` those parts are recomputed
    in the other way. How often running ``statistics`` are taken in a recompute is a matter of its kind, and ranks have
    some of their own, which a checkpoint does not: there are none in recomputed parts, and none at all with False.
    """

    def __init__(self, seed: int, reentrant: bool = True, statistics: bool = True) -> None:
        self.draw = random.Random(seed)
        self.reentrant = reentrant
        self.recomputes = False
        self.statistics = statistics
        self.linears: list[nn.Linear] = []
        self.blocks: list[nn.Module] = []

    def build(self) -> nn.Sequential:
        blocks = [self.block(2) for _ in range(self.draw.randint(2, 6))]
        if self.draw.random() < 0.3:
            blocks.append(self.draw.choice(blocks))  # used twice
        module = nn.Sequential(*(Residual(b) for b in blocks), nn.Linear(WIDTH, 3))
        parameters = list(module.parameters())
        if self.draw.random() < 0.4:
            for p in parameters:
                p.requires_grad_(self.draw.random() < 0.7)
        module[-1].requires_grad_(True)
        return module

    def block(self, depth: int) -> nn.Module:
        kinds = [self.linear, self.linear, self.norm, self.recurrent, self.attention, self.along_time, self.bare, self.normed]
        if depth:
            kinds += [self.stack, self.stack, self.branch, self.nested, self.recomputed, self.recomputed]
        if self.linears:
            kinds += [self.tied, self.borrowed]
        return self.draw.choice(kinds)(depth)

    def linear(self, depth: int) -> nn.Module:
        wide = self.draw.choice([WIDTH, 17])
        first, last = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH, bias=self.draw.random() < 0.5)
        self.linears += [layer for layer in (first, last) if wide == WIDTH]
        return nn.Sequential(first, self.draw.choice([nn.Tanh, nn.GELU, nn.ReLU])(), last)

    def norm(self, depth: int) -> nn.Module:
        return nn.LayerNorm(WIDTH)

    def normed(self, depth: int) -> nn.Module:
        return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def recurrent(self, depth: int) -> nn.Module:
        return Recurrent(self.draw.choice([nn.LSTM, nn.GRU]))

    def attention(self, depth: int) -> nn.Module:
        return Attention(self.draw.random() < 0.5)

    def along_time(self, depth: int) -> nn.Module:
        takes_statistics = self.draw.random() < 0.5 and self.statistics
        return AlongTime(nn.BatchNorm1d(WIDTH) if takes_statistics else nn.Conv1d(WIDTH, WIDTH, 3, padding=1))

    def bare(self, depth: int) -> nn.Module:
        return Bare()

    def stack(self, depth: int) -> nn.Module:
        return nn.Sequential(*(self.block(depth - 1) for _ in range(self.draw.randint(1, 3))))

    def branch(self, depth: int) -> nn.Module:
        return Branch(self.block(depth - 1), self.block(depth - 1), self.draw.random() < 0.3)

    def nested(self, depth: int) -> nn.Module:
        return Nested(self.block(depth - 1))

    def recomputed(self, depth: int) -> nn.Module:
        reentrant = self.draw.choice([False, False, True])
        self.recomputes = True
        outside, self.statistics = self.statistics, False
        inner = self.block(depth - 1)
        self.statistics = outside
        return Recomputed(inner, reentrant and self.reentrant)

    def tied(self, depth: int) -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        layer.weight = self.draw.choice(self.linears).weight
        return layer

    def borrowed(self, depth: int) -> nn.Module:
        return Borrowed(self.draw.choice(self.linears), self.draw.random() < 0.5)
