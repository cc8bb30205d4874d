"""The offload pipeline over a slow link: the same numbers, each byte once, nothing read before it has come."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.config import OffloadConfig
from tests.harness import make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, RandomData
from tests.slow_link import EarlyStrategy, FarStrategy, SlowLink
from tests.strategy.test_offload import Net


class Meddling(Net):
    """Clips now and then, edits gradients now and then, and skips a layer in every other batch."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.global_step % 3 == 1:
            self.second.weight.grad[0] *= 2.0


def fit(strategy: ZeroStrategy, factory: Any, **kwargs: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = factory()
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, **kwargs)
    trainer.fit(module, DataLoader(RandomData(28, 6), batch_size=2))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def near_and_far(optimizer: str, strategy_kwargs: dict[str, Any], kwargs: dict[str, Any]) -> list[tuple]:
    results = []
    for stage in STAGES:
        common = {"stage": stage, "unit_size_mb": TINY_UNIT_MB, "offload": True, **strategy_kwargs}
        factory = partial(Meddling, optimizer)
        results.append(tuple(fit(cls(**common), factory, **kwargs) for cls in (ZeroStrategy, FarStrategy)))
    return results


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.05}),
    "accumulated": ({}, {"accumulate_grad_batches": 3}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "16-true": ({}, {"precision": "16-true"}),
    "delayed": ({"delayed_update": 2}, {}),
    "delayed bf16": ({"delayed_update": 2}, {"precision": "bf16-true"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_distance_changes_nothing(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients of two ranks in 16 bit, what crosses the link is their sum rounded as it was sent: where it
    is then kept in fp32 (loss scaling), that is one rounding more."""
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    exact = variant != "16-true"
    for world in (1, 2) if variant == "bf16-mixed" else (2,):
        for results in run(world, near_and_far, "adamw_fused", *VARIANTS[variant]):
            compare(results, exact)


def test_distance_changes_nothing_for_other_optimizers() -> None:
    for results in run(3, near_and_far, "sgd", {}, {}):
        compare(results, exact=False)


def compare(results: list[tuple[dict[str, Tensor], ...]], exact: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-2, "atol": 1e-3}
    for stage, (near, far) in zip(STAGES, results, strict=True):
        assert near.keys() == far.keys()
        for name in near:
            where = f"stage {stage}, {name}"
            torch.testing.assert_close(far[name], near[name], msg=partial("{}: {}".format, where), **tolerance)


class Simple(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bytes_crossing(stage: int, flag: str) -> tuple[float, float, int]:
    strategy = FarStrategy(stage=stage, unit_size_mb=64 * 64 * 2 / 2**20, offload=True)
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, precision=flag)
    trainer.fit(Simple(), DataLoader(RandomData(64, 64), batch_size=2))
    parameters, steps, ranks = 4 * 64 * 64, trainer.global_step, trainer.world_size
    scale = parameters * steps / ranks
    return strategy.link.down / scale, strategy.link.up / scale, len(strategy.link.pooled)


@pytest.mark.parametrize(("flag", "width"), [("bf16-mixed", 2), ("bf16-true", 2), ("32-true", 4)])
def test_each_parameter_crosses_once_each_way(flag: str, width: int) -> None:
    """ZeRO-Offload's minimum: 2 bytes down and 2 up per 16-bit parameter and step. Staging is bounded by what is under
    way, whatever the number of steps (16 here)."""
    for stage in STAGES:
        for down, up, buffers in run(2, bytes_crossing, stage, flag):
            assert (down, up) == (width, width)
            assert buffers <= 2 * 4 + 5


class Meddler(Simple):
    """Does something that makes an early update wrong, in the fifth batch and then in every sixth."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.how == "weights in a step" and batch_idx % 6 == 4:
            with torch.no_grad():
                self.layers[3].weight.mul_(0.5)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.global_step % 6 != 4:
            return
        weight = self.layers[3].weight
        if self.how == "gradients":
            weight.grad.mul_(0.5)
        elif self.how == "rates":
            optimizer.param_groups[0]["lr"] *= 0.5
        elif self.how == "no gradient":
            weight.grad = None
        elif self.how == "a look":
            self.seen.append(weight.sum().item())
        elif self.how == "weights":
            with torch.no_grad():
                weight.mul_(0.5)
        elif self.how == "an exception":
            raise KeyError("caught below")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().optimizer_step(*args, **kwargs)
        except KeyError:
            self.seen.append(self.layers[3].weight.sum().item())
            self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.ready += 1


def early(how: str, kwargs: dict[str, Any]) -> list[tuple[int, int]]:
    results = []
    for stage in STAGES:
        common: dict[str, Any] = {"stage": stage, "unit_size_mb": 64 * 64 * 4 / 2**20}
        config = OffloadConfig(early_update=True)
        far = FarStrategy(**common, offload=config)
        plain, seen = fit_simple(ZeroStrategy(**common, offload=True), how, kwargs)
        near = EarlyStrategy(**common, offload=config)
        here, _ = fit_simple(near, how, kwargs)
        there, seen_there = fit_simple(far, how, kwargs)
        assert near.updater is not None
        assert far.updater is not None
        for other in (here, there):
            assert [name for name in plain if not torch.equal(plain[name], other[name])] == [], f"stage {stage}"
        assert seen == seen_there
        results += [(each.updater.early.accepted, each.updater.early.taken_back) for each in (near, far)]
    return results


def fit_simple(strategy: ZeroStrategy, how: str, kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(0)
    module = Meddler(how)
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, **kwargs)
    trainer.fit(module, DataLoader(RandomData(40, 64), batch_size=2))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, module.seen


@pytest.mark.parametrize(
    ("how", "kwargs"),
    [
        ("not at all", {}),
        ("not at all", {"precision": "bf16-true"}),
        ("not at all", {"gradient_clip_val": 1e6}),  # never clips
        ("not at all", {"accumulate_grad_batches": 2}),
    ],
)
def test_early_updates_hold(how: str, kwargs: dict[str, Any]) -> None:
    """None that only accumulates; the last unit of a backward has nobody to wait for, so it is not early."""
    for results in run(2, early, how, kwargs):
        for accepted, taken_back in results:
            assert accepted > 0
            assert taken_back == 0


@pytest.mark.parametrize(
    ("how", "kwargs"),
    [
        ("not at all", {"gradient_clip_val": 1e-3}),  # always clips
        ("gradients", {}),
        ("rates", {}),
        ("no gradient", {}),
        ("a look", {}),
        ("weights", {}),
        ("an exception", {}),
    ],
)
def test_early_updates_are_taken_back_to_the_bit(how: str, kwargs: dict[str, Any]) -> None:
    for results in run(2, early, how, kwargs):
        for _, taken_back in results:
            assert taken_back > 0


def test_edits_inside_a_step_go_with_early_updates() -> None:
    run(2, early, "weights in a step", {})


class EditsLate(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.5)
        return super().training_step(batch, batch_idx)


def edits_while_delayed(stage: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        fit(ZeroStrategy(stage=stage, unit_size_mb=TINY_UNIT_MB, offload=True, delayed_update=1), EditsLate)
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_edits_inside_a_step_are_refused_during_a_delayed_update(stage: int) -> None:
    for message in run(2, edits_while_delayed, stage):
        assert "first.weight" in message
        assert "were edited inside a step while their delayed update was under way" in message


def test_the_slow_link_shows_who_does_not_wait() -> None:
    link = SlowLink(delay=0.05)
    there = torch.ones(4)
    transfer = link.upload(torch.zeros(4), there)
    assert there.isnan().all()
    transfer.wait()
    assert there.tolist() == [0.0] * 4
    source, here = torch.ones(4), link.take(4, torch.float32)
    transfer = link.download(source, here)
    source.fill_(2.0)  # too early
    transfer.synchronize()
    assert here.tolist() == [2.0] * 4
    link.give(here)
    assert here.isnan().all()
