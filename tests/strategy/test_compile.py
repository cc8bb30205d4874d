"""Units around compiled blocks: the numbers are the same, and nothing is compiled again when parameters come and go."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from benchmarks.models import GPT, Block
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.partition.engine import ZeroEngine
from tests.harness import run

LAYERS, STEPS = 10, 4  # more layers than dynamo compiles of one function before it gives up


def train(stage: int) -> tuple[list[float], list[int]]:
    """The losses, and how many graphs there were after each step; stage 0 is a module without an engine."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = GPT(width=32, layers=LAYERS, heads=2, vocabulary=64, context=16)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    engine: Any = None
    if stage:
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        config = EngineConfig(stage, 2**20, unit_policy=(Block,))
        engine = ZeroEngine(model, Comm(rank, ranks, torch.device("cpu")), config, [optimizer])
    losses, graphs = [], []
    for _ in range(STEPS):
        batch = torch.randint(64, (2, 17), generator=generator)
        optimizer.zero_grad()
        if engine is None:
            loss = model(batch)
            loss.backward()
        else:
            with engine.step("train", backward_follows=True):
                loss = model(batch)
            with engine.backward():
                loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs


def train_all() -> list[tuple[list[float], list[int]]]:
    torch._dynamo.config.error_on_recompile = True
    return [train(stage) for stage in (0, 2, 3)]


def test_nothing_is_compiled_again() -> None:
    for plain, *sharded in run(2, train_all, timeout=240):
        assert len(set(plain[0])) == STEPS
        for losses, graphs in (plain, *sharded):
            assert graphs == [1] * STEPS  # of all blocks together
            # All ranks have the same samples, so the mean of their gradients is each one's.
            assert losses == pytest.approx(plain[0], rel=1e-6)
