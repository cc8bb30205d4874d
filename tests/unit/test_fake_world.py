"""One rank of 64 and of 1024, built and stepped for real in this process: exact calls, bytes sent and bytes held.

The collectives of the fake process group leave data as it is, so only counts and sizes mean anything here.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer

from benchmarks import paper_table
from examples.train_gpt import GPT, VOCABULARY
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.estimate import estimate_engine, estimate_memory
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.topology import make_topology
from tests.harness import fake_world

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, DEPTH = 768, 15
UNIT_BYTES = 32 * 2**20
WORLDS = [(0, 64), (63, 64), (0, 1024), (517, 1024)]


@pytest.fixture(scope="module")
def gpt() -> GPT:
    """More than 100M parameters, of real memory but without the cost of drawing them at random."""
    with Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).init_module(empty_init=True):
        return GPT(width=WIDTH, depth=DEPTH, heads=12)


@dataclass
class Sizes:
    """Bytes of the unsharded flat buffers, padding included."""

    root: int
    """The embedding, which is also the output layer, and the positions: unsharded from first use to the end."""
    block: int
    norm: int

    @property
    def all(self) -> int:
        return self.root + DEPTH * self.block + self.norm


@dataclass
class Steps:
    """What training steps of one rank left behind."""

    parameters: int
    sizes: Sizes
    sent: list[dict[str, tuple[int, int]]]
    """Per step: calls and bytes by collective."""
    stats: dict
    predicted: int
    predicted_buffers: int


def padded(numel: int, shards: int) -> int:
    """Bytes of fp32 elements, so that each shard is a multiple of 64 of them."""
    per_shard = -(-numel // shards)
    return -(-per_shard // 16) * 16 * 4 * shards


def train(model: GPT, stage: int, rank: int, world: int, count: int, group: int | None = None) -> Steps:
    for parameter in model.parameters():
        parameter.data.fill_(0.01)  # what an earlier test left may be denormal, and slow
    context, block = model.position.shape[0], 12 * WIDTH**2 + 13 * WIDTH
    numels = ((VOCABULARY + context) * WIDTH, block, 2 * WIDTH)
    sizes = Sizes(*(padded(numel, group or world) for numel in numels))
    tokens = torch.zeros(1, 9, dtype=torch.long)
    with fake_world(rank, world):
        comm = Comm(rank, world, torch.device("cpu"), topology=make_topology(rank, world, group))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine = ZeroEngine(model, comm, EngineConfig(stage, UNIT_BYTES), [optimizer])
        sent, before = [], comm.stats.as_dict()
        for _ in range(count):
            with engine.step("train", backward_follows=True):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            with engine.backward():
                loss.backward()
            optimizer.step()
            after = comm.stats.as_dict()
            sent.append(difference(after, before))
            before = after
        predicted = estimate_engine(engine, world, "32-true")
        steps = Steps(
            sum(p.numel() for p in model.parameters()),
            sizes,
            sent,
            engine.memory_stats(),
            predicted.total,
            predicted.buffers,
        )
        engine.close()
    return steps


def difference(after: dict, before: dict) -> dict[str, tuple[int, int]]:
    nothing = {"calls": 0, "bytes": 0}
    return {
        name: (count["calls"] - before.get(name, nothing)["calls"], count["bytes"] - before.get(name, nothing)["bytes"])
        for name, count in after.items()
    }


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter", "gigabytes"), [(1, 4 + 12 / 64, "31.4"), (2, 2 + 14 / 64, "16.6"), (3, 16 / 64, "1.9")]
)
def test_the_table_of_the_paper_is_measured(stage: int, bytes_per_parameter: float, gigabytes: str) -> None:
    with fake_world(0, 64):
        measured = paper_table.measure(stage, paper_table.LAYERS * 256**2, 64)
    # Without padding at this width; the optimizer's step counters are a few bytes.
    assert measured.states / measured.parameters == pytest.approx(bytes_per_parameter, rel=1e-3)
    assert paper_table.table([measured], 64).split().count(gigabytes) == 2


@pytest.mark.parametrize(("rank", "world"), WORLDS)
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_send_what_data_parallelism_sends(gpt: GPT, stage: int, rank: int, world: int) -> None:
    steps = train(gpt, stage, rank, world, count=1)
    assert steps.parameters > 100e6
    # Each unit is reduced once and gathered once; of every buffer a rank sends all shards but one.
    share = steps.sizes.all // world * (world - 1)
    assert steps.sent[0]["reduce_scatter"] == (DEPTH + 2, share)
    assert steps.sent[0]["all_gather"] == (DEPTH + 2, share)
    # An all-reduce of all gradients, as DDP's, sends the same but for the padding.
    all_reduce = 2 * 4 * steps.parameters * (world - 1) / world
    assert all_reduce <= 2 * share < 1.002 * all_reduce
    check_memory(steps, stage, world)


@pytest.mark.parametrize(("rank", "world"), WORLDS)
def test_stage_3_sends_one_and_a_half_times_as_much(gpt: GPT, rank: int, world: int) -> None:
    steps = train(gpt, 3, rank, world, count=2)
    sizes = steps.sizes
    # The first step does not know what comes next: every unit is gathered in forward and again in backward, but for
    # the root, which stays. From then on neither is the unit that ends forward and begins backward given up in between.
    gathered = sizes.root + 2 * DEPTH * sizes.block + 2 * sizes.norm, sizes.root + 2 * DEPTH * sizes.block + sizes.norm
    first, second = steps.sent
    assert first["all_gather"] == (2 * DEPTH + 3, gathered[0] // world * (world - 1))
    assert second["all_gather"] == (2 * DEPTH + 2, gathered[1] // world * (world - 1))
    assert first["reduce_scatter"] == second["reduce_scatter"] == (DEPTH + 2, sizes.all // world * (world - 1))
    total = second["all_gather"][1] + second["reduce_scatter"][1]
    all_reduce = 2 * 4 * steps.parameters * (world - 1) / world
    assert 1.49 < total / all_reduce < 1.502
    # Once the order is known, one small comparison per step is left.
    assert second["broadcast"] == (0, 0)
    assert second["control"][0] == 1
    assert second["control"][1] < 1000
    check_memory(steps, 3, world)


@pytest.mark.parametrize("stage", [2, 3])
def test_shard_groups_hold_what_their_ranks_would_alone(gpt: GPT, stage: int) -> None:
    steps = train(gpt, stage, 13, world=64, count=2, group=8)
    # Eight replicas of a shard, which is an eighth: there and back 7 of 8 pieces of it.
    assert steps.sent[1]["reduce_scatter"] == (DEPTH + 2, steps.sizes.all // 8 * 7)
    assert steps.sent[1]["all_reduce"] == (DEPTH + 2, 2 * (steps.sizes.all // 8) // 8 * 7)
    check_memory(steps, stage, 64, group=8)


def check_memory(steps: Steps, stage: int, ranks: int, group: int | None = None) -> None:
    world = group or ranks
    now, peak = steps.stats["now"], steps.stats["peak"]
    resident = sum(nbytes for kind, nbytes in now.items() if kind != "buffers")
    formula = {1: 8 + 8 / world, 2: 4 + 12 / world, 3: 16 / world}[stage] * steps.parameters
    assert estimate_memory(steps.parameters, ranks, stage, shard_group_size=group).total == pytest.approx(formula)
    assert resident == pytest.approx(formula, rel=0.01)
    assert resident == pytest.approx(steps.predicted, rel=0.005)
    whole, shard = steps.sizes.all, steps.sizes.all // world
    assert now["parameters"] == (shard if stage == 3 else whole)
    assert now["gradients"] == (whole if stage == 1 else shard)
    # The last rank owns the padding, which has no optimizer state; step counters are a few bytes more.
    assert now["optimizer"] == pytest.approx(2 * shard, rel=0.02)
    # Buffers do not grow with the depth of the model: a few units, whatever the stage.
    assert peak.get("buffers", 0) == pytest.approx(steps.predicted_buffers, rel=0.001)
    # Idle buffers of small units stay beside the large ones.
    small = 2 * (steps.sizes.root + steps.sizes.norm)
    assert now.get("buffers", 0) <= peak.get("buffers", 0) <= 5 * steps.sizes.block + small
    assert resident <= steps.stats["peak_total"] <= sum(peak.values())
