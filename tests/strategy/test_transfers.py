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
from tests.slow_link import FarStrategy
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
    for world in (1, 2):
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
            torch.testing.assert_close(far[name], near[name], msg=lambda m: f"stage {stage}, {name}: {m}", **tolerance)


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


class Watching(Simple):
    """Counts early updates that were accepted and taken back."""

    def __init__(self, edit: bool) -> None:
        super().__init__()
        self.edit = edit

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.edit:
            self.layers[3].weight.grad.mul_(0.5)


def early(edit: bool, kwargs: dict[str, Any]) -> list[tuple[dict, dict, int, int]]:
    from lightning_zero.offload import update

    results = []
    for stage in STAGES:
        common = {"stage": stage, "unit_size_mb": 64 * 64 * 4 / 2**20}
        plain = fit_simple(ZeroStrategy(**common, offload=True), edit, kwargs)
        counts = {"accepted": 0, "undone": 0}
        holds, undo = update._EarlyUpdate.holds_for, update._EarlyUpdate.undo
        try:
            update._EarlyUpdate.holds_for = lambda self, parts: _count(counts, "accepted", holds(self, parts))
            update._EarlyUpdate.undo = lambda self: _count(counts, "undone", True) and undo(self)
            got = fit_simple(FarStrategy(**common, offload=OffloadConfig(early_update=True)), edit, kwargs)
            here = fit_simple(ZeroStrategy(**common, offload=OffloadConfig(early_update=True)), edit, kwargs)
        finally:
            update._EarlyUpdate.holds_for, update._EarlyUpdate.undo = holds, undo
        assert all(torch.equal(got[name], here[name]) for name in got)
        results.append((plain, got, counts["accepted"], counts["undone"]))
    return results


def _count(counts: dict[str, int], name: str, value: bool) -> bool:
    counts[name] += bool(value)
    return value


def fit_simple(strategy: ZeroStrategy, edit: bool, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Watching(edit)
    make_trainer(".", strategy=strategy, max_epochs=1, **kwargs).fit(
        module, DataLoader(RandomData(40, 64), batch_size=2)
    )
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("edit", "kwargs", "some_accepted", "some_undone"),
    [
        (False, {}, True, False),
        (False, {"precision": "bf16-true"}, True, False),
        (False, {"gradient_clip_val": 1e6}, True, False),  # never clips
        (False, {"gradient_clip_val": 1e-3}, False, True),  # always clips
        (True, {}, False, True),
        (False, {"accumulate_grad_batches": 2}, True, False),
    ],
)
def test_early_updates_are_accepted_or_undone_to_the_bit(
    edit: bool, kwargs: dict[str, Any], some_accepted: bool, some_undone: bool
) -> None:
    for results in run(2, early, edit, kwargs):
        for plain, got, accepted, undone in results:
            assert all(torch.equal(plain[name], got[name]) for name in plain)
            assert (accepted > 0) == some_accepted
            assert (undone > 0) == some_undone
