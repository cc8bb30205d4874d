"""The model of everything: each stage follows DDP's trajectory, at 1, 2 and 3 ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.harness import run
from tests.parity import all_stages, assert_same

# A gradient that is zero but for rounding (a key bias in attention) is noise; eps keeps Adam from making it a step.
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return {"x": x + self.mlp(x)}


class Everything(pl.LightningModule):
    """Tied embedding used three ways, LSTM, MultiheadAttention, a frozen block, nested outputs, a bare parameter."""

    def __init__(self, recompute: str = "none", optimizer: str = "adamw") -> None:
        super().__init__()
        width, vocabulary = 8, 11
        self.recompute, self.optimizer_name = recompute, optimizer
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.never_used = nn.Linear(3, 3)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + F.embedding(tokens, self.embedding.weight)
        return self.lstm(x)[0]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encode(tokens)
        for block in self.blocks:
            if self.recompute == "none":
                x = block(x)["x"]
            else:
                x = checkpoint(lambda t, b=block: b(t)["x"], x, use_reentrant=self.recompute == "reentrant")
        return self.head(x) * self.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = (batch.abs() * 10).long() % 11
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        tokens = (batch.abs() * 10).long() % 11
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("validation", loss, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.embedding.weight.grad[3] = 0
        norms = grad_norm(self, norm_type=2)
        self.log_dict({k: v for k, v in norms.items() if "total" in k or "lstm" in k})

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer_name](self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def everything(recompute: str, optimizer: str) -> Callable[[], pl.LightningModule]:
    return partial(Everything, recompute, optimizer)


RECOMPUTE = ("none", "non-reentrant", "reentrant")
# Every optimizer and every kind of recompute at every number of ranks, and with each other.
SQUARE = [
    (world, RECOMPUTE[(world + number) % 3], optimizer) for world in (1, 2, 3) for number, optimizer in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("world", "recompute", "optimizer"), SQUARE)
def test_everything(world: int, recompute: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    # DDP refuses reentrant recompute of a model with unused parameters; without recompute the numbers are the same.
    results = run(world, all_stages, everything(recompute, optimizer), {"data": (24, 6)}, everything("none", optimizer))
    assert_same(results)
    assert len(results[0][3].losses) == 12 // world
