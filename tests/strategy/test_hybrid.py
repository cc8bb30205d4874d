"""Hybrid sharding: shards inside groups of ranks, replicas across them. What comes out is what DDP makes of it."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import run
from tests.parity import STAGES, Outcome, rank, trained

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
WIDTH = 6


class Branches(pl.LightningModule):
    """Odd sizes, a frozen layer, one layer that some ranks use in some batches and one that nobody uses."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(3, 3)
        self.last = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.optimizer_name = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.frozen(torch.tanh(self.first(batch)))
        if (rank() + batch_idx) % 3 == 0:
            x = x + self.sometimes(x)
        loss = F.mse_loss(self.last(x) * self.scale, batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.first.weight.grad[0] = 0

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](p for p in self.parameters() if p.requires_grad)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm, accumulated": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


def variants(optimizer: str, groups: tuple[int, ...], names: tuple[str, ...], **kwargs: Any) -> dict[tuple, Outcome]:
    """Inside a rank: DDP (stage 0), and every stage with every size of groups."""
    outcomes = {}
    for name in names:
        common = {"data": (32, WIDTH), **VARIANTS[name], **kwargs}
        module = partial(Branches, optimizer)
        outcomes[name, 0, 0] = trained(module, 0, **common)
        for stage in STAGES:
            for size in groups:
                outcomes[name, stage, size] = trained(
                    module, stage, strategy_kwargs={"shard_group_size": size}, **common
                )
    return outcomes


def check(results: list[dict[tuple, Outcome]], **tolerance: float) -> None:
    for number, outcomes in enumerate(results):
        for (name, stage, size), got in outcomes.items():
            where = f"rank {number}, {name}, stage {stage}, groups of {size}"
            reference = outcomes[name, 0, 0]
            assert got.plain or stage == 0, where
            assert got.losses == pytest.approx(reference.losses, rel=1e-5, abs=tolerance["atol"]), where
            for key, value in reference.weights.items():
                torch.testing.assert_close(
                    got.weights[key], value, **tolerance, msg=lambda text, at=f"{where}: {key}": f"{at}: {text}"
                )
                # Replicas have the same bits.
                assert torch.equal(got.weights[key], results[0][name, stage, size].weights[key]), where


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_two_ranks_have_the_bits_of_ddp(optimizer: str) -> None:
    results = run(2, variants, optimizer, (1, 2), ("plain",))
    check(results, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_four_ranks(optimizer: str) -> None:
    check(run(4, variants, optimizer, (1, 2, 4), tuple(VARIANTS)), rtol=1e-5, atol=1e-6)
