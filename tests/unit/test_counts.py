"""What a step costs, in counts that are the same on a busy machine: calls, bytes, allocations, Python functions.

One rank of many in this process. A model of B blocks, each a unit of P parameters, takes a few steps, until the order of
its gathers is known; then one step is counted.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.topology import make_topology
from tests.harness import fake_world

pytestmark = pytest.mark.usefixtures("one_thread")

PACKAGE = str(Path(lightning_zero.__file__).parent)
WIDTH, WORLD = 16, 64
STEPS_BEFORE = 3


class Block(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


@dataclass
class Counts:
    """Of one training step: forward, backward, update."""

    sent: dict[str, tuple[int, int]]
    """Calls and bytes by collective."""
    functions: Counter
    """Calls of Python functions of this package, by name."""

    @property
    def calls(self) -> int:
        return sum(self.functions.values())


def count(stage: int, blocks: int, parameters: int = 4, world: int = WORLD, group: int | None = None) -> Counts:
    module = nn.Sequential(*(Block(parameters) for _ in range(blocks)))
    x = torch.randn(2, WIDTH, requires_grad=True)
    with fake_world(5, world):
        comm = Comm(5, world, torch.device("cpu"), topology=make_topology(5, world, group))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)
        engine = ZeroEngine(module, comm, EngineConfig(stage, 2**20, unit_policy=(Block,)), [optimizer])

        def step() -> None:
            with engine.step("train", backward_follows=True):
                loss = module(x).square().mean()
            optimizer.zero_grad()
            with engine.backward():
                loss.backward()
            optimizer.step()

        for _ in range(STEPS_BEFORE):
            step()
        before, functions = comm.stats.as_dict(), Counter()

        def note(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                functions[frame.f_code.co_name] += 1

        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
        after = comm.stats.as_dict()
        engine.close()
    nothing = {"calls": 0, "bytes": 0}
    sent = {
        name: tuple(now[key] - before.get(name, nothing)[key] for key in ("calls", "bytes")) for name, now in after.items()
    }
    return Counts({name: numbers for name, numbers in sent.items() if any(numbers)}, functions)  # type: ignore[misc]


def shard_bytes(parameters: int, shards: int) -> int:
    """Of one unit; a shard is a whole number of 64 bytes."""
    return -(-parameters * WIDTH**2 // shards // 16) * 64


@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_of_a_step(stage: int, group: int | None) -> None:
    blocks, parameters, shards = 6, 4, group or WORLD
    shard = shard_bytes(parameters, shards)
    # Forward and backward gather each unit, but for the last one of forward, which backward begins with.
    gathers = 2 * blocks - 1 if stage == 3 else blocks
    expected = {
        "all_gather": (gathers, gathers * shard * (shards - 1)),
        "reduce_scatter": (blocks, blocks * shard * (shards - 1)),
        # One message, at the end of backward: the largest and the smallest of five integers.
        "control": (1, 2 * 80 * (WORLD - 1) // WORLD),
    }
    if group is not None:
        replicas = WORLD // group
        expected["all_reduce"] = (blocks, blocks * (2 * shard * (replicas - 1) // replicas))
    assert count(stage, blocks, parameters, group=group).sent == expected


# Python functions of this package that a step calls, at most: anyway, for each unit, for each parameter. A twentieth more
# than were counted when this was written; whoever makes them fewer may lower the numbers.
FUNCTIONS = {1: (69, 108, 14), 2: (75, 118, 14), 3: (40, 178, 24)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_python_functions_of_a_step(stage: int) -> None:
    anyway, per_unit, per_parameter = FUNCTIONS[stage]
    for blocks, parameters in ((6, 4), (18, 4), (6, 12)):
        found = count(stage, blocks, parameters)
        most = anyway + blocks * (per_unit + parameters * per_parameter)
        assert found.calls <= most, found.functions.most_common(40)
    # What is done for each unit does not depend on how many there are, and nothing on the number of ranks.
    few, more, most_of_all = (count(stage, blocks).calls for blocks in (6, 12, 18))
    assert most_of_all - more == more - few
    assert count(stage, 6, world=1024).calls == few


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_allocations_of_a_step(stage: int) -> None:
    # In use at once at stage 3 are two units, the one at hand and the next, and the gradients of three, one that collects
    # and two that are on their way: buffers that the next step takes again.
    for blocks in (6, 18):
        assert count(stage, blocks).functions["allocate"] == 0
