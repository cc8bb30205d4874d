"""Hybrid sharding: shards inside groups of ranks, replicas across them. What comes out is what DDP makes of it."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import MemoryMonitor, OffloadConfig, ZeroStrategy
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.comm import Comm
from lightning_zero.ops import available_isas
from lightning_zero.pairs import SWITCH_VARIABLE
from lightning_zero.topology import make_topology
from tests.harness import WorldError, make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, Outcome, RandomData, rank, trained
from tests.strategy.test_checkpoint import load
from tests.strategy.test_sharded_checkpoint import Wide, train
from tests.wire import handed_over

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
    "mixed": {"precision": "bf16-mixed"},
    "mixed, accumulated": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
}


def variants(optimizer: str, cases: list[tuple[str, int, dict[str, Any]]]) -> dict[tuple, Outcome]:
    """Inside a rank: DDP (stage 0), and each case, which is a variant, a stage and arguments of the strategy."""
    outcomes = {}
    for name, stage, kwargs in cases:
        train = partial(trained, partial(Branches, optimizer), data=(32, WIDTH), **VARIANTS[name])
        if (name, 0, "") not in outcomes:
            outcomes[name, 0, ""] = train(0)
        outcomes[name, stage, str(kwargs)] = train(stage, strategy_kwargs=kwargs)
    return outcomes


def check(results: list[dict[tuple, Outcome]], **tolerance: float) -> None:
    for number, outcomes in enumerate(results):
        for (name, stage, kwargs), got in outcomes.items():
            where = f"rank {number}, {name}, stage {stage}, {kwargs}"
            reference = outcomes[name, 0, ""]
            assert got.plain or stage == 0, where
            assert got.losses == pytest.approx(reference.losses, rel=tolerance["rtol"], abs=tolerance["atol"]), where
            for key, value in reference.weights.items():
                torch.testing.assert_close(
                    got.weights[key], value, **tolerance, msg=lambda text, at=f"{where}: {key}": f"{at}: {text}"
                )
                # Replicas have the same bits.
                assert torch.equal(got.weights[key], results[0][name, stage, kwargs].weights[key]), where


def groups(size: int, **kwargs: Any) -> dict[str, Any]:
    return {"shard_group_size": size, **kwargs}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_two_ranks_have_the_bits_of_ddp(optimizer: str) -> None:
    cases = [("plain", stage, groups(size)) for stage in STAGES for size in (1, 2)]
    check(run(2, variants, optimizer, cases), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_four_ranks(optimizer: str) -> None:
    # Every stage with every size of groups and every variant; what does not meet Adam meets SGD.
    if optimizer == "adam":
        variants_of_stage = [("plain", groups(2)), ("plain", groups(2, offload=True)), ("clipped by value", groups(1))]
    else:
        variants_of_stage = [("plain", groups(1)), ("plain", groups(4)), ("clipped by norm, accumulated", groups(2))]
    cases = [(name, stage, kwargs) for stage in STAGES for name, kwargs in variants_of_stage]
    check(run(4, variants, optimizer, cases), rtol=1e-5, atol=1e-6)


def test_three_replicas_and_sixteen_bits() -> None:
    three = [("plain", stage, groups(1)) for stage in STAGES]
    check(run(3, variants, "adam", three), rtol=1e-5, atol=1e-6)
    # DDP computes in 16 bits from fp32 weights and sums fp32 gradients; here the gradients are of 16 bits.
    cases = [("mixed, accumulated" if stage == 1 else "mixed", stage, groups(2)) for stage in STAGES]
    check(run(4, variants, "sgd", cases), rtol=2e-2, atol=2e-3)


def late(size: int | None) -> dict[str, Tensor]:
    kwargs = {"offload": OffloadConfig(early_update=True), "delayed_update": 2, "shard_group_size": size}
    return trained(partial(Branches, "adam"), 3, data=(32, WIDTH), strategy_kwargs=kwargs).weights


def early_and_late() -> list[dict[str, Tensor]]:
    return [late(size) for size in (None, 2)]


def test_updates_on_the_host_early_and_late() -> None:
    for wanted, *others in run(4, early_and_late):
        for found in others:
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


# -- what is sent ----------------------------------------------------------------------------------------------------


class Three(pl.LightningModule):
    """Three units, of 18 * 12, 12 * 8 and 8 * 5 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(18, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.last = nn.Linear(8, 5, bias=False)
        self.stats: list[dict[str, Any]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.stats.append(self.trainer.strategy.comm_stats())
        return self.last(self.middle(self.first(batch))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def sent() -> dict[tuple[int, int], tuple[dict[str, tuple[int, int]], int]]:
    """Calls and bytes of one step, as counted, and the bytes that were handed over to be sent."""
    found = {}
    for stage in STAGES:
        for size in (1, 2, 4):
            module = Three()
            strategy = ZeroStrategy(stage=stage, unit_policy={nn.Linear}, shard_group_size=size)
            trainer = make_trainer(".", strategy=strategy, max_steps=4, use_distributed_sampler=False)
            with handed_over(lambda module=module: len(module.stats)) as handed:
                trainer.fit(module, DataLoader(RandomData(8, 18), batch_size=2))
            before, after = module.stats[2:4]
            names = ("all_gather", "reduce_scatter", "all_reduce")
            step = {
                name: (after[name]["calls"] - before[name]["calls"], after[name]["bytes"] - before[name]["bytes"])
                for name in names
                if name in after
            }
            found[stage, size] = step, sum(nbytes for number, nbytes in handed if number == 3)
    return found


def test_bytes_are_those_of_the_formula() -> None:
    results = run(4, sent)
    for (stage, k), (step, handed) in results[0].items():
        # A shard is a whole number of 64 bytes.
        shards = [-(-numel // k // 16) * 64 for numel in (18 * 12, 12 * 8, 8 * 5)]
        shard, replicas = sum(shards), 4 // k
        # At stage 3 all three are gathered in forward and the second again in backward, which needs the third, still
        # there, and not the first.
        gathered = shard + (shards[1] if stage == 3 else 0)
        expected = {
            "all_gather": (3 + (stage == 3), (k - 1) * gathered),
            "reduce_scatter": (3, (k - 1) * shard),
            "all_reduce": (3, 2 * shard * (replicas - 1) // replicas),
        }
        if k == 1:
            del expected["all_gather"], expected["reduce_scatter"]
        if replicas == 1:
            del expected["all_reduce"]
        assert step == expected, (stage, k)
        # Nothing else is sent, and no less.
        assert handed == sum(nbytes for _, nbytes in step.values()), (stage, k)


COPY_ON_HOST = {"by collectives": "", "through sockets": "0000", "from memory to memory": "1111", "both": "1011"}
"""How bytes come from rank to rank, and on which ranks the switch is on."""


def reduced(way: str) -> list[tuple[int, torch.dtype, Tensor, Tensor]]:
    """By size of groups and dtype: the own shard of a sum over ranks, and what gathering the shards gives."""
    number, found, switches = dist.get_rank(), [], COPY_ON_HOST[way]
    if not switches:
        dist.get_backend = lambda group=None: "GLOO"  # by another name it is not known to be better in pairs
    else:
        os.environ[SWITCH_VARIABLE] = switches[number]
    for size in (1, 2, 4):
        comm = Comm(number, 4, torch.device("cpu"), topology=make_topology(number, 4, size))
        assert comm.point_to_point == bool(switches)
        if switches:
            near = [rank for rank in range(4) if rank != number and switches[number] == switches[rank] == "1"]
            assert comm.neighbours == near
        for dtype in (torch.float32, torch.bfloat16):
            full = torch.arange(64.0 * size).add(1000 * number).to(dtype)
            shard = comm.reduce_scatter(full.clone(), 0.25, torch.float32).wait()
            gathered = torch.empty(64 * size)
            comm.all_gather(gathered, shard).wait()
            found.append((size, dtype, shard, gathered))
        comm.close()
    return found


@pytest.mark.parametrize("way", COPY_ON_HOST)
def test_every_way_of_sending_sums_alike(way: str) -> None:
    if way in ("from memory to memory", "both") and not available_isas():
        pytest.skip("the compiled kernels were not built")
    for number, found in enumerate(run(4, reduced, way)):
        for size, dtype, shard, gathered in found:
            # The mean over ranks r of i + 1000 r is i + 1500; in 16 bits rounded to 8 at this size, some more than once.
            wanted = torch.arange(64.0 * size) + 1500
            tolerance = {"rtol": 0, "atol": 0 if dtype is torch.float32 else 16}
            own = wanted[64 * (number % size) :][:64]
            torch.testing.assert_close(shard, own, **tolerance)
            torch.testing.assert_close(gathered, wanted, **tolerance)


# -- checkpoints -----------------------------------------------------------------------------------------------------


# By form: stage and size of groups of the run that saves, and of the one that goes on.
CHANGES = {
    "full": [((3, 2), (1, None)), ((1, 1), (3, 4))],
    "sharded": [((3, 2), (2, 1)), ((3, 4), (2, 2))],
}


def interchange(folder: str) -> list[dict[str, Any]]:
    """The unbroken run, and those that stop half-way and go on with groups of another size at another stage."""
    outcomes = [train(Wide, "32-true", {"stage": 2})[1]]
    for form, changes in CHANGES.items():
        for (stage, size), (next_stage, next_size) in changes:
            path = f"{folder}/{form}-{size}.ckpt"
            settings = {"stage": stage, "shard_group_size": size, "state_dict_type": form, "unit_size_mb": TINY_UNIT_MB}
            trainer, first = train(Wide, "32-true", settings, max_epochs=1)
            trainer.save_checkpoint(path)
            then = {"stage": next_stage, "shard_group_size": next_size, "state_dict_type": form}
            _, second = train(Wide, "32-true", then, ckpt_path=path)
            outcomes.append({**second, "losses": first["losses"] + second["losses"]})
    return outcomes


def test_checkpoints_are_those_of_any_other_groups(tmp_path: Path) -> None:
    for unbroken, *others in run(4, interchange, str(tmp_path)):
        for other in others:
            assert other["losses"] == pytest.approx(unbroken["losses"], rel=1e-5)
            for name, value in unbroken["weights"].items():
                torch.testing.assert_close(other["weights"][name], value, rtol=1e-5, atol=1e-6)
    # Replicas write each shard once.
    written, whole = (
        sum(file.stat().st_size for file in (tmp_path / f"sharded-{size}.ckpt").glob("*.distcp")) for size in (2, 4)
    )
    assert written < 1.2 * whole
    consolidate(tmp_path / "sharded-2.ckpt", tmp_path / "one.ckpt")
    weights, wanted = (load(tmp_path / name)["state_dict"] for name in ("one.ckpt", "full-2.ckpt"))
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value)


# -- what is over all ranks ------------------------------------------------------------------------------------------


class Told(pl.Callback):
    """Between steps, does what only rank 1 does, or does differently."""

    def __init__(self, act: str) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if self.act == "edits":
            module.last.weight.data.add_(rank())
        elif rank() == 1:
            module.last.weight.sum()


def replicas_that_differ(stage: int, act: str) -> str:
    strategy = ZeroStrategy(stage=stage, shard_group_size=1, read_timeout=0.3)
    trainer = make_trainer(".", strategy=strategy, max_steps=3, callbacks=[Told(act)])
    try:
        trainer.fit(Three(), DataLoader(RandomData(12, 18), batch_size=2))
    except RuntimeError as error:
        if act == "reads":
            raise  # the other rank waits for this one until it ends
        return str(error)
    return "no error"


def test_replicas_must_do_the_same() -> None:
    for stage in (2, 3):
        for number, message in enumerate(run(2, replicas_that_differ, stage, "edits")):
            wanted = f"Parameters were edited differently on the ranks: 'last.weight' (this is rank {number})"
            assert message.startswith(wanted), message
    with pytest.raises(WorldError, match="rank 1 of 2 raised RuntimeError: The ranks have gone different ways:"):
        run(2, replicas_that_differ, 3, "reads")


class OneInf(Three):
    """The gradients of the last replica overflow in the second step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and rank() == 3 else loss


class Norms(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float, bool]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        with trainer.strategy.full_parameters():
            total = float(module.first.weight.sum())
        norm = trainer.strategy.last_grad_norm
        self.seen.append((trainer.precision_plugin.scaler.get_scale(), total, bool(norm.isfinite())))


def overflows(stage: int) -> list[tuple[float, float, bool]]:
    norms = Norms()
    trainer = make_trainer(
        ".", strategy=ZeroStrategy(stage=stage, shard_group_size=2), callbacks=[norms], max_steps=3,
        precision="16-mixed", gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(OneInf(), DataLoader(RandomData(24, 18), batch_size=2))
    return norms.seen


def test_an_overflow_in_one_group_skips_the_step_in_all() -> None:
    for stage in (2, 3):
        results = run(4, overflows, stage)
        assert all(seen == results[0] for seen in results)
        (scale, first, _), (lower, second, _), (last, third, finite) = results[0]
        assert lower == last == scale / 2
        assert first == second != third
        assert finite


# -- set-up and predictions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -2, 1.5, True, "2"])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ValueError, match=r"shard_group_size must be the number of ranks of a group .at least 1. or None"):
        ZeroStrategy(shard_group_size=size)


def misfit(size: int) -> str:
    trainer = make_trainer(".", strategy=ZeroStrategy(shard_group_size=size), max_steps=1)
    try:
        trainer.fit(Three(), DataLoader(RandomData(4, 18)))
    except ValueError as error:
        return str(error)
    return "no error"


def test_sizes_that_do_not_fit_the_ranks() -> None:
    for size in (3, 4):  # does not divide them, is more than there are
        expected = (
            f"shard_group_size={size} does not divide the 2 ranks into equal groups: use one of 1, 2, or None to shard over"
            " all ranks"
        )
        assert run(2, misfit, size) == [expected] * 2


def test_who_shares_what() -> None:
    topology = make_topology(4, 6, 2)
    assert (topology.shard_group, topology.replica_group) == ([4, 5], [0, 2, 4])
    assert (topology.shard_rank, topology.replicas) == (0, 3)
    topology = make_topology(3, 6, 2)
    assert (topology.shard_group, topology.replica_group) == ([2, 3], [1, 3, 5])
    assert (topology.shard_rank, topology.replicas) == (1, 3)
    assert make_topology(1, 3).shard_group == [0, 1, 2]
    assert make_topology(1, 3).replica_group == [1]


def monitored() -> dict[str, int]:
    strategy = ZeroStrategy(stage=2, unit_policy={nn.Linear}, shard_group_size=2)
    trainer = make_trainer(".", strategy=strategy, max_steps=6, callbacks=[MemoryMonitor(2)])
    trainer.fit(Three(), DataLoader(RandomData(48, 18), batch_size=2))
    return strategy.memory_stats()["peak"]


def test_the_monitor_predicts_what_groups_hold(capfd: pytest.CaptureFixture[str]) -> None:
    results = run(4, monitored)
    text = capfd.readouterr().out
    assert "Memory per rank in kB, predicted: ZeRO stage 2, 4 ranks in groups of k = 2" in text
    assert "4P + 12P/k" in text
    # Units of 216, 96 and 40 parameters: 7, 3 and 2 times 64 bytes on each of two ranks.
    shard = 64 * (7 + 3 + 2)
    for number, peak in enumerate(results):
        assert (peak["parameters"], peak["gradients"]) == (2 * shard, shard)
        # Two moments of what is no padding, and three step counters.
        assert peak["optimizer"] == 2 * 4 * (112 + 48 + 32, 104 + 48 + 8)[number % 2] + 3 * 4
