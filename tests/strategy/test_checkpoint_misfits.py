"""Checkpoints that do not fit, ranks that save alone, another precision than the one that saved."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ZeroStrategy
from tests.harness import WorldError, make_trainer, run
from tests.parity import rank
from tests.strategy.test_checkpoint import WIDTH, assert_same_content, load, loader

FORMS = ("full", "sharded")


class Net(pl.LightningModule):
    def __init__(self, optimizer: str = "adamw", width: int = 7, extra: bool = False) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.first, self.last = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        if extra:
            self.extra = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.last(self.first(batch).tanh()), batch)

    def configure_optimizers(self) -> Any:
        first, last = list(self.first.parameters()), list(self.last.parameters())
        if self.optimizer_name == "groups":
            return torch.optim.AdamW([{"params": first}, {"params": last}], lr=0.01)
        if self.optimizer_name == "first":
            return torch.optim.AdamW(first, lr=0.01)
        if self.optimizer_name == "two":
            self.automatic_optimization = False
            return [torch.optim.AdamW(first, lr=0.01), torch.optim.AdamW(last, lr=0.01)]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.01)
        return torch.optim.AdamW([*first, *last], lr=0.01)


def fitted(make: Callable[[], Net], form: str, ckpt_path: str | None = None, **kwargs: Any) -> tuple[pl.Trainer, Net]:
    torch.manual_seed(3)
    module, settings = make(), {"max_epochs": 1, "use_distributed_sampler": False, **kwargs}
    trainer = make_trainer(".", strategy=ZeroStrategy(stage=3, state_dict_type=form), **settings)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer, module


def save(folder: str) -> None:
    for form in FORMS:
        trainer, _ = fitted(Net, form)
        trainer.save_checkpoint(f"{folder}/{form}")
        trainer.save_checkpoint(f"{folder}/{form}-weights", weights_only=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("misfits")
    run(2, save, str(folder))
    return folder


# optimizer of the run that resumes -> the error, if it is a file, if it is a folder
MISFITS = {
    "groups": ("different number of parameter groups", r"has param groups of \[4\] parameters, the optimizer has \[2, 2\]"),
    "first": ("doesn't match the size of optimizer's group", r"param groups of \[4\] parameters, the optimizer has \[2\]"),
    "two": (r"the state of 1 optimizer\(s\), the module has configured 2", r"of 1 optimizer\(s\), the module has configured 2"),
    "sgd": (r"optimizer 0, SGD: its param groups have no 'dampening'", r"optimizer 0, SGD: its param groups have no 'damp"),
}


def resume_with_misfits(folder: str) -> None:
    for name, messages in MISFITS.items():
        for form, message in zip(FORMS, messages, strict=True):
            with pytest.raises(ValueError, match=message):
                fitted(lambda: Net(name), "full", f"{folder}/{form}", max_epochs=2)  # noqa: B023
    for form in FORMS:
        with pytest.raises(RuntimeError, match=r"size mismatch for first.weight.*\[7, 6\].*\[9, 6\]"):
            fitted(lambda: Net(width=9), "full", f"{folder}/{form}")
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "extra.weight"'):
            fitted(lambda: Net(extra=True), "full", f"{folder}/{form}")
        with pytest.raises(KeyError, match="checkpoint contains only the model"):
            fitted(Net, "full", f"{folder}/{form}-weights")
    with pytest.raises((FileNotFoundError, ValueError), match="nowhere"):
        fitted(Net, "full", f"{folder}/nowhere")
    os.makedirs(f"{folder}/half", exist_ok=True)
    with pytest.raises(ValueError, match="half' is a folder, but not a whole checkpoint"):
        fitted(Net, "full", f"{folder}/half")


def test_what_does_not_fit_is_an_error_that_says_what(saved: Path) -> None:
    run(2, resume_with_misfits, str(saved))


def not_strict(folder: str) -> list[dict[str, Tensor]]:
    """A layer that the checkpoint does not have keeps its values; weights alone start a new run by hand."""

    def make() -> Net:
        module = Net(extra=True)
        module.strict_loading = False
        return module

    found = []
    for form in FORMS:
        trainer = make_trainer(".", strategy=ZeroStrategy(stage=3))
        torch.manual_seed(3)
        module = make()
        module.validation_step = module.training_step
        trainer.validate(module, loader(), ckpt_path=f"{folder}/{form}-weights", verbose=False)
        found.append({k: v.detach().clone() for k, v in module.state_dict().items()})
    return found


def test_strict_loading_can_be_switched_off(saved: Path) -> None:
    torch.manual_seed(3)
    fresh = Net(extra=True)
    for found in run(2, not_strict, str(saved)):
        for got in found:
            wanted = load(saved / "full")["state_dict"]
            assert_same_content({k: v for k, v in got.items() if k in wanted}, wanted)
            assert torch.equal(got["extra.weight"], fresh.extra.weight.detach())


def other_precisions(folder: str) -> dict[str, Any]:
    found = {}
    for precision in ("bf16-mixed", "bf16-true", "64-true"):
        for form in FORMS:
            _, module = fitted(Net, "full", f"{folder}/{form}", precision=precision, max_epochs=2)
            found[precision, form] = {k: v.detach().clone() for k, v in module.state_dict().items()}
    return found


def test_going_on_in_another_precision(saved: Path) -> None:
    for found in run(2, other_precisions, str(saved)):
        for precision, dtype in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)):
            file, folder = (found[precision, form] for form in FORMS)
            assert folder["first.weight"].dtype == dtype
            assert_same_content(folder, file)


def alone(form: str, when: str) -> str:
    class SavesAlone(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if when == "inside" and rank() == 0:
                trainer.save_checkpoint("alone")

    strategy = ZeroStrategy(stage=2, state_dict_type=form, read_timeout=0.3)
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, callbacks=[SavesAlone()])
    trainer.fit(Net(), loader())
    if rank() == 0:
        trainer.save_checkpoint("alone", weights_only=True)
    return "ended"


@pytest.mark.parametrize(("form", "when"), [("sharded", "inside"), ("sharded", "after"), ("full", "after")])
def test_a_save_on_rank_0_alone_is_an_error_within_seconds(form: str, when: str) -> None:
    with pytest.raises(WorldError, match=r"rank 0 is (about to save a checkpoint|collecting)|did not come within 0.3 s") as error:
        run(2, alone, form, when, timeout=20)
    assert "all ranks must read them, save and step together" in str(error.value)
