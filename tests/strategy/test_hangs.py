"""Ranks that go different ways: they end where DDP ends, or every one of them raises and says why."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import ZeroStrategy
from lightning_zero.partition import gradient_sync
from tests.harness import WorldError, make_trainer, run
from tests.parity import STAGES, Outcome, RandomData, all_stages, assert_same, make_strategy, outcome

WIDTH = 8
# Every linear layer of that width is a unit of its own.
UNIT = {"unit_size_mb": 2e-4}


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Model(pl.LightningModule):
    """A first and a last layer around what a test is about."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.first = layer()
        self.middle = self.make_middle()
        self.last = nn.Linear(WIDTH, 1)

    def make_middle(self) -> nn.Module:
        return nn.ModuleList([layer() for _ in range(4)])

    def between(self, x: Tensor, step: int) -> Tensor:
        return x

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return self.last(self.between(self.first(x).tanh(), step))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch, batch_idx) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Branches(Model):
    """Each rank has a branch of its own for the whole run."""

    def between(self, x: Tensor, step: int) -> Tensor:
        return self.middle[self.global_rank](x).tanh()


class Experts(Model):
    """Experts that change with rank and step, in an order of their own, some of them several times."""

    def between(self, x: Tensor, step: int) -> Tensor:
        chosen = random.Random(17 * step + self.global_rank).choices(range(4), k=1 + (step + self.global_rank) % 3)
        return sum(self.middle[i](x).tanh() for i in chosen)


class FrozenExperts(Experts):
    """The same with two experts that are not trained."""

    def make_middle(self) -> nn.Module:
        middle = super().make_middle()
        middle[1:3].requires_grad_(False)
        return middle


class RecomputedExperts(Experts):
    def between(self, x: Tensor, step: int) -> Tensor:
        return checkpoint(super().between, x, step, use_reentrant=False)


class LayerDrop(Model):
    def between(self, x: Tensor, step: int) -> Tensor:
        dropped = random.Random(step).sample(range(4), self.global_rank + 1)
        for i, block in enumerate(self.middle):
            if i not in dropped:
                x = x + block(x).tanh()
        return x


class EarlyExit(Model):
    """Ranks leave after different depths: their backwards start in different places."""

    def between(self, x: Tensor, step: int) -> Tensor:
        for block in self.middle[: 1 + (step + 2 * self.global_rank) % 4]:
            x = x + block(x).tanh()
        return x


class Loop(Model):
    """One cell, applied a rank- and step-dependent number of times, also never."""

    def make_middle(self) -> nn.Module:
        return nn.GRUCell(WIDTH, WIDTH)

    def between(self, x: Tensor, step: int) -> Tensor:
        state = x
        for _ in range((step * (1 + self.global_rank)) % 4):
            state = self.middle(x, state)
        return state


class OtherOrder(Model):
    def between(self, x: Tensor, step: int) -> Tensor:
        blocks = list(self.middle)
        for block in blocks if self.global_rank == 0 else reversed(blocks):
            x = x + block(x).tanh()
        return x


class SideReads(Model):
    """One rank also looks at weights: by a forward without gradients, and by a penalty on a bare weight."""

    def between(self, x: Tensor, step: int) -> Tensor:
        for block in self.middle[:2]:
            x = block(x).tanh()
        if self.global_rank == step % 2:
            with torch.no_grad():
                x = x + self.middle[3](x)
            x = x + self.middle[2].weight.square().sum()
        return x


class DeadLayer(Model):
    """Built, never used."""

    def between(self, x: Tensor, step: int) -> Tensor:
        return self.middle[1](x).tanh()


class ReadsInAnyOrder(DeadLayer):
    """Weights and gradients are read by each rank in an order of its own, as from a set of names."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        shift = 2 * self.global_rank
        parameters = [p for p in self.parameters() if p.grad is not None]
        for p in parameters[shift:] + parameters[:shift]:
            p.grad.mul_(1.5)

    def on_train_batch_end(self, *args: Any) -> None:
        shift = 3 * self.global_rank
        parameters = list(self.named_parameters())
        self.log_dict({name: p.detach().norm() for name, p in parameters[shift:] + parameters[:shift]})


class Sometimes(Model):
    """Parts used in one micro-batch, on one rank: the second micro-batch of rank 1 and the third of rank 0."""

    def between(self, x: Tensor, step: int) -> Tensor:
        x = self.middle[0](x)
        if (self.global_rank, step % 4) in ((1, 1), (0, 2)):
            x = x + self.middle[1 + self.global_rank](x).tanh()
        return x


DIVERGENT: dict[str, tuple[type[Model], int, dict[str, Any]]] = {
    "branches": (Branches, 2, {}),
    "experts": (Experts, 2, {}),
    "experts of three ranks": (Experts, 3, {}),
    "experts, accumulated": (Experts, 2, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "frozen experts": (FrozenExperts, 2, {}),
    "recomputed experts": (RecomputedExperts, 2, {}),
    "layer drop": (LayerDrop, 2, {}),
    "early exit": (EarlyExit, 2, {}),
    "a loop": (Loop, 3, {}),
    "another order": (OtherOrder, 2, {}),
    "side reads": (SideReads, 2, {}),
    "a dead layer": (DeadLayer, 2, {}),
    "reads in any order": (ReadsInAnyOrder, 3, {}),
    "sometimes": (Sometimes, 2, {"accumulate_grad_batches": 4}),
}


def impatient_stages(cls: Any, kwargs: dict[str, Any]) -> dict[int, Outcome]:
    """Ranks that differ lose some time before they notice: less of it here."""
    gradient_sync._PATIENCE_SECONDS = 0.02
    return all_stages(cls, kwargs)


@pytest.mark.parametrize("case", DIVERGENT)
def test_ranks_that_use_different_parts(case: str) -> None:
    cls, world, kwargs = DIVERGENT[case]
    kwargs = {"data": (8 * world, WIDTH), "batch_size": 1, "strategy_kwargs": UNIT, "max_epochs": 1, **kwargs}
    results = run(world, impatient_stages, cls, kwargs)
    # What was reduced after every micro-batch was added up in another order.
    assert_same(results, exact=world == 2 and "accumulate_grad_batches" not in kwargs)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_ranks_that_use_different_parts_at_any_prefetch_with_adam(prefetch: int) -> None:
    kwargs = {"data": (16, WIDTH), "batch_size": 1, "strategy_kwargs": {**UNIT, "prefetch": prefetch}}
    assert_same(run(2, impatient_stages, partial(Experts, "adam"), kwargs))


def dead_layer_stays(stage: int) -> bool:
    torch.manual_seed(0)
    module = DeadLayer()
    before = module.middle[0].weight.detach().clone()
    trainer = make_trainer(".", strategy=make_strategy(stage, **UNIT), max_steps=3)
    trainer.fit(module, DataLoader(RandomData(8, WIDTH)))
    return bool(torch.equal(module.middle[0].weight, before))


@pytest.mark.parametrize("stage", STAGES)
def test_a_dead_layer_is_left_alone(stage: int) -> None:
    assert run(2, dead_layer_stays, stage) == [True, True]


# -- different numbers of batches -------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Rank-dependent data without a length."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.samples = torch.randn(length, 1, WIDTH, generator=generator)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.samples)


class Validated(Model):
    synced = True

    def between(self, x: Tensor, step: int) -> Tensor:
        for block in self.middle:
            x = block(x).tanh()
        return x

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = (self(batch, batch_idx) - batch.sum(1, keepdim=True)).square().mean()
        self.log("validation", loss, sync_dist=self.synced)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self(batch, batch_idx).mean(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch, batch_idx)


def uneven_training(lengths: list[int], common: bool, trainer_kwargs: dict[str, Any]) -> dict[int, Outcome]:
    """Rank r gets ``lengths[r]`` batches; the reference gets the smallest number everywhere."""
    results = {}
    for stage in (0, *STAGES):
        torch.manual_seed(0)
        module = Validated()
        length = lengths[dist.get_rank()]
        trainer = make_trainer(
            ".",
            strategy=make_strategy(stage, **UNIT),
            use_distributed_sampler=False,
            **{"limit_train_batches": min(lengths)} if stage == 0 else {},
            **trainer_kwargs,
        )
        data = Stream(length) if not common else Stream(length).samples
        trainer.fit(module, DataLoader(data, batch_size=None), DataLoader(Stream(2), batch_size=None))
        results[stage] = outcome(trainer, module, [])
        results[stage].extra["steps"] = trainer.global_step
    return results


def test_training_ends_with_the_rank_that_has_the_fewest_batches() -> None:
    for lengths, sized, kwargs in (
        ([5, 4], False, {"max_epochs": 2}),
        ([3, 5], False, {"max_epochs": 2, "accumulate_grad_batches": 2}),
        ([4, 5], True, {"max_epochs": 1}),
    ):
        results = run(2, uneven_training, lengths, sized, kwargs)
        assert_same(results, exact="accumulate_grad_batches" not in kwargs)
        steps = -(-min(lengths) // kwargs.get("accumulate_grad_batches", 1)) * kwargs["max_epochs"]
        assert {by_stage[s].extra["steps"] for by_stage in results for s in (0, *STAGES)} == {steps}


def uneven_evaluation(lengths: list[int]) -> dict[int, dict[str, float]]:
    results: dict[int, dict[str, float]] = {}
    for stage in (0, *STAGES):
        torch.manual_seed(0)
        module = Validated()
        length = lengths[dist.get_rank()]
        trainer = make_trainer(".", strategy=make_strategy(stage, **UNIT), use_distributed_sampler=False, max_epochs=1)

        def loader(n: int) -> DataLoader:
            return DataLoader(Stream(n), batch_size=None)

        trainer.fit(module, loader(2), [loader(length), loader(max(lengths) + 1 - length)])
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.test(module, loader(length), verbose=False)
        metrics["test"] = float(trainer.callback_metrics["test"])
        predictions = trainer.predict(module, loader(length), return_predictions=True)
        metrics["predicted"] = len(predictions)
        metrics["prediction"] = float(torch.cat(predictions).sum())
        results[stage] = metrics
    return results


@pytest.mark.parametrize("lengths", [[3, 4], [4, 1, 2]])
def test_evaluation_with_different_numbers_of_batches(lengths: list[int]) -> None:
    for rank, by_stage in enumerate(run(len(lengths), uneven_evaluation, lengths)):
        assert by_stage[0]["predicted"] == lengths[rank]
        for stage in STAGES:
            assert by_stage[stage] == pytest.approx(by_stage[0], rel=1e-5), (rank, stage)


def starved(stage: int, kind: str) -> str:
    """Rank 1 has no batch at all."""
    module = Validated()
    module.synced = False  # Lightning itself waits for a rank that logs nothing
    length = 3 if dist.get_rank() == 0 else 0
    trainer = make_trainer(
        ".", strategy=make_strategy(stage, **UNIT), use_distributed_sampler=False, max_epochs=1, num_sanity_val_steps=0
    )
    few, many = DataLoader(Stream(length), batch_size=None), DataLoader(Stream(2), batch_size=None)
    try:
        if kind == "train":
            trainer.fit(module, few)
        elif kind == "validate":
            trainer.fit(module, many, few)
        else:
            trainer.predict(module, few)
    except RuntimeError as error:
        return str(error)
    return "ended"


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_a_single_batch(stage: int) -> None:
    assert run(2, starved, stage, "validate", timeout=20.0) == ["ended", "ended"]
    assert run(2, starved, stage, "predict", timeout=20.0) == ["ended", "ended"]
    for message in run(2, starved, stage, "train", timeout=20.0):
        assert message == "ended" or "rank" in message


# -- what only one rank does -------------------------------------------------------------------------------------------


class Alone(pl.Callback):
    """Rank 1 does something that all ranks should do, the others go on."""

    def __init__(self, action: str) -> None:
        self.action = action

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 or trainer.global_rank != 1:
            return
        if self.action == "save":
            trainer.save_checkpoint("alone.ckpt")
        elif self.action == "read":
            float(module.first.weight.sum())
        elif self.action == "call":
            module.first(torch.ones(WIDTH))
        elif self.action == "pickle":
            torch.save(module.state_dict(), "alone.pt")
        elif self.action == "optimizer":
            trainer.optimizers[0].state_dict()
        elif self.action == "gradient":
            float(module.first.weight.grad.sum())


def alone(stage: int, action: str) -> str:
    strategy = make_strategy(stage, read_timeout=0.3, **UNIT)
    trainer = make_trainer(".", strategy=strategy, max_steps=2, callbacks=[Alone(action)])
    trainer.fit(DeadLayer(), DataLoader(RandomData(8, WIDTH)))
    return "ended"


@pytest.mark.parametrize("action", ["read", "call", "pickle"])
def test_one_rank_may_look_at_whole_parameters(action: str) -> None:
    assert run(2, alone, 2, action) == ["ended", "ended"]


def failure_of(case: tuple[int, str]) -> str:
    """The rank that is alone raises. Its end ends the others, which may be in any call by then."""
    with pytest.raises(WorldError) as failure:
        run(2, alone, *case)
    return str(failure.value)


def test_what_only_one_rank_does_is_an_error() -> None:
    cases = [(1, "save"), (2, "optimizer"), (1, "gradient")]
    cases += [(3, action) for action in ("save", "gradient", "read", "call", "pickle")]
    with ThreadPoolExecutor(4) as pool:  # they do little but wait
        for (stage, action), message in zip(cases, pool.map(failure_of, cases), strict=True):
            assert "rank 1 of 2 raised RuntimeError: The ranks have gone different ways" in message, (stage, action)
            assert "rank 1 is" in message
            assert "rank 0 is" in message or "rank(s) [0] did not come within 0.3 s" in message
            assert "save and step together" in message
            if action in ("read", "pickle", "gradient"):
                assert "first.weight" in message


# -- stop signals ----------------------------------------------------------------------------------------------------


class StopWhileWaiting(pl.Callback):
    """Rank 0 gets SIGTERM while it waits for rank 1, which is late for an evaluation batch."""

    def __init__(self, both: bool) -> None:
        self.both = both

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self.pids: list[int] = [0, 0]
        dist.all_gather_object(self.pids, os.getpid())

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            time.sleep(0.5)
            for pid in self.pids if self.both else self.pids[:1]:
                os.kill(pid, signal.SIGTERM)


def stopped(method: str, stages: tuple[int, ...]) -> list[int]:
    ends = []
    for stage in stages:
        callback = StopWhileWaiting(both=method == "validate")
        trainer = make_trainer(".", strategy=make_strategy(stage, **UNIT), max_steps=9, callbacks=[callback])
        train, validation = (DataLoader(RandomData(40, WIDTH), batch_size=2) for _ in range(2))
        loaders = (train, validation) if method == "fit" else (validation,)
        with pytest.raises(SIGTERMException):
            getattr(trainer, method)(Validated(), *loaders)
        ends.append(trainer.global_step if method == "fit" else trainer.validate_loop.batch_progress.current.completed)
    return ends


def test_a_stop_signal_in_the_sanity_check_ends_training_after_its_first_batch() -> None:
    assert run(2, stopped, "fit", STAGES) == [[1, 1, 1]] * 2


def test_a_stop_signal_in_evaluation_ends_it_with_the_batch() -> None:
    """Ranks that gather are at the same one."""
    assert run(2, stopped, "validate", (3,)) == [[2]] * 2


class BreaksBeforeClipping(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.body(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 1:
            raise ArithmeticError("only here")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def breaks_before_clipping(stage: int) -> None:
    strategy = ZeroStrategy(stage=stage, read_timeout=1.0)
    trainer = make_trainer(".", strategy=strategy, max_steps=3, gradient_clip_val=0.1)
    trainer.fit(BreaksBeforeClipping(), DataLoader(RandomData(16, 8), batch_size=2))


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_on_one_rank_does_not_meet_the_norm_of_another(stage: int) -> None:
    """Sums of other sizes would end the process of the rank that goes on, from within Gloo."""
    with pytest.raises(WorldError) as error:
        run(2, breaks_before_clipping, stage)
    assert "only here" in str(error.value)
    assert "died" not in str(error.value)
    assert "hung" not in str(error.value)
