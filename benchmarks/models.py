"""What the benchmarks train: models of different shapes, each returning its loss for one tensor of inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """With ``blocks`` that are repeated, and recomputed in backward if ``recompute`` is set."""

    blocks: nn.ModuleList
    recompute = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(Model):
    """By default 30M parameters, of which the embedding is a seventh."""

    def __init__(
        self, width: int = 512, layers: int = 8, heads: int = 8, vocabulary: int = 8192, context: int = 128
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        x = self.run_blocks(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Layer(nn.Module):
    """Two small operations around a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Narrow(Model):
    """Deep and narrow: 200 small layers, 20 blocks of ten; 3.4M parameters."""

    def __init__(self, width: int = 128, blocks: int = 20, layers: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(Layer(width) for _ in range(layers))) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        return self.run_blocks(x).square().mean()


class Wide(Model):
    """Nearly all of its 26M parameters are one embedding, of which a batch uses few rows."""

    def __init__(self, width: int = 128, vocabulary: int = 200_000, classes: int = 100) -> None:
        super().__init__()
        self.classes = classes
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run_blocks(self.tokens(tokens[:, 1:]).mean(1))
        return F.cross_entropy(self.head(x), tokens[:, 0] % self.classes)


class Residual(nn.Module):
    """Two convolutions around a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm2(self.first(F.relu(self.norm1(x))))))


class Convolutional(Model):
    """A residual network of 2.4M parameters for images of 32 x 32."""

    def __init__(self, channels: int = 128, blocks: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        labels = (images.mean((1, 2, 3)) > 0).long()
        return F.cross_entropy(self.head(self.run_blocks(self.stem(images)).mean((2, 3))), labels)


@dataclass(frozen=True)
class Task:
    """A model and what one rank feeds it."""

    text: str
    model: Callable[[], Model]
    batch: Callable[[Generator], Tensor]


def tokens(sequences: int, length: int, vocabulary: int) -> Callable[[Generator], Tensor]:
    return lambda generator: torch.randint(vocabulary, (sequences, length), generator=generator)


def numbers(*shape: int) -> Callable[[Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


TASKS = {
    "gpt": Task("GPT, 30M", GPT, tokens(4, 129, 8192)),
    "small gpt": Task("GPT, 5M", lambda: GPT(256, 4, 4), tokens(4, 129, 8192)),
    # To compare how a step grows, with few tokens.
    "gpt 10M": Task("GPT, 10M", lambda: GPT(320, 6, 5), tokens(2, 65, 8192)),
    "gpt 30M": Task("GPT, 30M", GPT, tokens(2, 65, 8192)),
    "gpt 100M": Task("GPT, 100M", lambda: GPT(768, 13, 12), tokens(2, 65, 8192)),
    "gpt 300M": Task("GPT, 300M", lambda: GPT(1024, 23, 16), tokens(2, 65, 8192)),
    "narrow": Task("200 layers of 128", Narrow, numbers(256, 128)),
    "tiny": Task("8 layers of 16", lambda: Narrow(16, 4, 2), numbers(8, 16)),
    "wide": Task("an embedding of 26M", Wide, tokens(64, 33, 200_000)),
    "convolutional": Task("ResNet, 2.4M", Convolutional, numbers(16, 3, 32, 32)),
}
