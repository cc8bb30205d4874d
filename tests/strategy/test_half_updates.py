"""A file that fails in the middle of an optimizer step: every rank ends with an error, nobody gets half of a step."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig, ZeroStrategy
from tests.harness import make_trainer, run
from tests.parity import RandomData, rank
from tests.strategy.test_transfers import Simple

UNIT_MB = 64 * 64 * 4 / 2**20
REFUSED = "An optimizer step has ended half-way"


class Momentum(Simple):
    """An optimizer without a kernel."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class ByHand(Simple):
    """Catches what its step raises, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        try:
            optimizer.step()
        except (OSError, RuntimeError) as error:
            self.caught = error


class Skips(ByHand):
    """Rank 1 does not take the third step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2 and rank() == 1:
            self.manual_backward(Simple.training_step(self, batch, batch_idx))
        else:
            super().training_step(batch, batch_idx)


class Breaks(pl.Callback):
    """On the last rank, before the fourth step: what ``how`` says happens to the second half of a file, or to all writes."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 3 or rank() != trainer.world_size - 1:
            return
        store = trainer.strategy._tiers.files
        what, _, name = self.how.partition(" ")
        file = store._files[name]
        if what == "cuts":
            os.truncate(file.path, os.path.getsize(file.path) // 2)
        elif what == "locks":  # what is read goes on being read
            os.dup2(os.open(file.path, os.O_RDONLY), file.descriptor)


def attempts(act: Any) -> str:
    """What ``act`` raises."""
    try:
        act()
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def start(case: tuple[Any, int, str, dict[str, Any], str], callbacks: list[Any]) -> tuple[pl.Trainer, Any, DataLoader]:
    factory, stage, precision, tiers, form = case
    strategy = ZeroStrategy(
        stage=stage, unit_size_mb=UNIT_MB, offload=OffloadConfig(**tiers, nvme_path="files"), state_dict_type=form,  # type: ignore[arg-type]
        read_timeout=5,
    )  # fmt: skip
    trainer = make_trainer(
        ".", strategy=strategy, max_epochs=2, callbacks=callbacks, precision=precision, enable_checkpointing=bool(callbacks)
    )
    torch.manual_seed(0)
    return trainer, factory(), DataLoader(RandomData(6 * trainer.world_size, 64), batch_size=2)


def broken(how: str, case: Any, folder: str) -> dict[str, Any]:
    """What fit raises, what those who then want something are told, and the checkpoints there are."""
    saver = ModelCheckpoint(folder, save_last=True, save_on_exception=True)
    trainer, module, data = start(case, [Breaks(how), saver])
    found: dict[str, Any] = {
        "fit": attempts(lambda: trainer.fit(module, data)),
        "caught": str(getattr(module, "caught", "")),
        "weights": attempts(lambda: module.layers[3].weight.sum()),
        "state": attempts(lambda: trainer.optimizers[0].state_dict()),
        "checkpoint": attempts(lambda: trainer.save_checkpoint(f"{folder}/after.ckpt")),
    }
    torch.distributed.barrier()
    found["saved"] = sorted(os.listdir(folder))
    found["left"] = [name for name in os.listdir("files") if f"rank{rank()}-" in name]
    return found


def each(cases: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    found = [broken(how, case, f"saved-{number}") for number, (how, case) in enumerate(cases)]
    # The last good checkpoint goes on as if nothing had been.
    ends = []
    for resume in ("saved-0/last.ckpt", None):
        trainer, module, data = start(cases[0][1], [])
        trainer.fit(module, data, ckpt_path=resume)
        ends.append([p.detach().clone() for p in module.parameters()])
    found[0]["resumed"] = all(map(torch.equal, *ends))
    return found


STATES = {"optimizer": "nvme"}
ALL = {"optimizer": "nvme", "parameters": "nvme"}
PARAMETERS = {"optimizer": "cpu", "parameters": "nvme"}
CUT, BAD = "ended after", "Bad file descriptor"
CASES = [
    ("cuts 0.exp_avg", (Simple, 2, "32-true", STATES, "full"), CUT),
    ("locks 0.exp_avg_sq", (Simple, 1, "bf16-mixed", STATES, "sharded"), BAD),
    ("cuts 0.momentum_buffer", (Momentum, 3, "32-true", STATES, "full"), CUT),
    ("locks master", (Simple, 3, "bf16-true", ALL, "full"), BAD),
    ("locks parameters", (Simple, 3, "bf16-mixed", PARAMETERS, "sharded"), BAD),
    ("cuts 0.exp_avg", (ByHand, 3, "32-true", ALL, "sharded"), CUT),
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nobody_gets_half_of_a_step(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    cases = CASES[:1] if world == 3 else CASES
    for number, results in enumerate(run(world, each, [(how, case) for how, case, _ in cases], timeout=60)):
        assert results[0]["resumed"]
        for (how, case, reason), one in zip(cases, results, strict=True):
            by_hand = case[0] is ByHand
            first = one["caught"] if by_hand else one["fit"]
            assert reason in first, (how, one)
            assert how.partition(" ")[2] in first, (how, one)
            if number < world - 1:
                assert f"Rank {world - 1} could not carry out an optimizer step. OSError: " in first, (how, one)
            assert not by_hand or REFUSED in one["fit"]  # the step after it
            for what in ("weights", "state", "checkpoint"):
                assert REFUSED in one[what], (what, how, one)
            # Those of the third step, which was whole.
            assert one["saved"] == ["epoch=0-step=3.ckpt", "last.ckpt"], (how, one)
            assert one["left"] == [], (how, one)


def skipping() -> str:
    trainer, module, data = start((Skips, 3, "32-true", ALL, "full"), [])
    return attempts(lambda: trainer.fit(module, data)) + str(getattr(module, "caught", ""))


def test_a_rank_that_takes_no_step_stalls_nobody() -> None:
    for told in run(2, skipping, timeout=40):
        assert "The ranks have gone different ways: " in told
        assert "rank 0 is ending an optimizer step" in told


def test_gradients_that_cannot_be_written_end_the_other_rank_too() -> None:
    """In the backward, before anything is updated."""
    zero, one = run(2, broken, "locks gradients", (Simple, 3, "32-true", ALL, "full"), "saved")
    assert "Bad file descriptor: writing 8192 bytes at offset" in one["fit"]
    assert "RuntimeError" in zero["fit"]
    assert zero["saved"] == one["saved"] == ["epoch=0-step=3.ckpt", "last.ckpt"]
