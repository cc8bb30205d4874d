"""A single rank trains as a Trainer without a strategy does, also while it releases parameters as many ranks would."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from lightning_zero import ZeroStrategy
from tests.harness import make_trainer, run

STAGES = (1, 2, 3)
DATA = [torch.linspace(-1, 1, 6).roll(i) * (i + 1) / 8 for i in range(8)]


class Net(pl.LightningModule):
    def __init__(self, make_optimizer: Callable[[nn.Module], Any] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1))
        self.make_optimizer = make_optimizer or (lambda module: torch.optim.Adam(module.parameters(), lr=0.05))
        self.seen: list[float] = []
        self.modes: set[bool] = set()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch[:, 0].tolist()
        return self.body(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.modes.add(torch.is_inference_mode_enabled())
        gathered = self.all_gather(self.body(batch).mean())
        self.log("shape", float(gathered.dim()))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def fitted(root: Path, strategy: Strategy, factory: Callable[[], pl.LightningModule] = Net, **kwargs: Any) -> pl.Trainer:
    torch.manual_seed(4)
    module, trainer = factory(), make_alone(root, strategy, **kwargs)
    torch.manual_seed(5)  # seeding again, as launched ranks do, would undo this
    trainer.fit(module, DataLoader(DATA, batch_size=2), DataLoader(DATA, batch_size=4))
    return trainer


def make_alone(root: Path, strategy: Strategy, **kwargs: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, default_root_dir=root, **(quiet | {"max_epochs": 2} | kwargs)
    )


def assert_same_weights(module: nn.Module, reference: nn.Module) -> None:
    for name, value in reference.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@pytest.fixture(autouse=True)
def releasing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


@pytest.mark.parametrize("stage", STAGES)
def test_same_as_without_a_strategy(tmp_path: Path, stage: int) -> None:
    reference = fitted(tmp_path, SingleDeviceStrategy()).lightning_module
    trainer = fitted(tmp_path, ZeroStrategy(stage=stage))
    module = trainer.lightning_module
    assert_same_weights(module, reference)
    assert module.seen == reference.seen == [float(x[0]) for x in DATA] * 2
    assert isinstance(trainer.train_dataloader.sampler, SequentialSampler)
    module.modes.clear()
    trainer.validate(module, DataLoader(DATA), verbose=False)
    assert module.modes == {True}
    assert trainer.callback_metrics["shape"] == 0
    assert trainer.strategy.launcher is None
    assert not dist.is_initialized()
    [optimizer] = trainer.optimizers
    assert optimizer.state[module.body[0].weight]["exp_avg"].shape == (6, 6)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_process_group_is_made_where_a_backend_is_named(tmp_path: Path) -> None:
    try:
        trainer = fitted(tmp_path, ZeroStrategy(stage=3, process_group_backend="gloo"))
        assert dist.get_world_size() == trainer.world_size == 1
    finally:
        dist.destroy_process_group()


def test_a_scheduler_that_started_more_processes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ValueError, match=r"devices=1.*world size \(2\)|world size.*2"):
        fitted(tmp_path, ZeroStrategy(stage=3))


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


NOT_SHARDED: dict[str, Callable[[nn.Module], Any]] = {
    "line search": lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3),
    "factored": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.1),
    "a parameter of nobody's": lambda module: torch.optim.SGD([*module.parameters(), *Foreign().parameters()], lr=0.1),
}


@pytest.mark.parametrize("kind", NOT_SHARDED)
def test_what_cannot_be_sharded_is_trained_as_it_is(tmp_path: Path, kind: str) -> None:
    reference, trainer = (
        fitted(tmp_path, strategy, partial(Net, NOT_SHARDED[kind]))
        for strategy in (SingleDeviceStrategy(), ZeroStrategy(stage=3))
    )
    assert trainer.strategy.engine.units == []  # type: ignore[attr-defined]
    assert_same_weights(trainer.lightning_module, reference.lightning_module)


@pytest.mark.parametrize("kind", ["line search", "factored"])
def test_what_is_trained_as_it_is_resumes(tmp_path: Path, kind: str) -> None:
    make = partial(Net, NOT_SHARDED[kind])
    fitted(tmp_path, ZeroStrategy(stage=3), make).save_checkpoint(tmp_path / "last.ckpt")
    modules = [make(), make()]
    for module, strategy in zip(modules, (SingleDeviceStrategy(), ZeroStrategy(stage=3)), strict=True):
        torch.manual_seed(6)
        trainer = make_alone(tmp_path, strategy, max_epochs=3)
        trainer.fit(module, DataLoader(DATA, batch_size=2), ckpt_path=tmp_path / "last.ckpt")
        assert trainer.global_step == 12
    assert_same_weights(modules[1], modules[0])


class CountsSteps(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        CountsSteps.steps += 1
        return super().step(closure)


def test_an_optimizer_is_not_tried_out(tmp_path: Path) -> None:
    CountsSteps.steps = 0
    trainer = fitted(tmp_path, ZeroStrategy(stage=3), partial(Net, lambda module: CountsSteps(module.parameters(), lr=0.1)))
    assert CountsSteps.steps == trainer.global_step == 8


class Growing(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(1)
            self.body.append(nn.Linear(1, 1))
            self.optimizers().optimizer.add_param_group({"params": list(self.body[-1].parameters())})  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_come_later(tmp_path: Path, stage: int) -> None:
    reference, trainer = (
        fitted(tmp_path, strategy, Growing) for strategy in (SingleDeviceStrategy(), ZeroStrategy(stage=stage))
    )
    assert_same_weights(trainer.lightning_module, reference.lightning_module)
    for mine, plain in zip(
        trainer.optimizers[0].state_dict()["state"].values(), reference.optimizers[0].state_dict()["state"].values(), strict=True
    ):
        assert torch.equal(mine["exp_avg_sq"], plain["exp_avg_sq"])


def halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class HalvesGradients(Net):
    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(halve_gradient)


def test_gradients_edited_as_they_are_accumulated(tmp_path: Path) -> None:
    sgd = partial(HalvesGradients, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    plain = fitted(tmp_path, SingleDeviceStrategy(), sgd).lightning_module
    for stage in STAGES:
        assert_same_weights(fitted(tmp_path, ZeroStrategy(stage=stage), sgd).lightning_module, plain)


class Counting(Precision):
    calls = 0

    def backward(self, *args: Any, **kwargs: Any) -> None:
        Counting.calls += 1
        super().backward(*args, **kwargs)


def test_backward_is_lightnings_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [], Strategy.backward
    monkeypatch.setattr(Strategy, "backward", lambda self, *args, **kwargs: calls.append(1) or original(self, *args, **kwargs))
    trainer = fitted(tmp_path, ZeroStrategy(stage=3), plugins=[Counting()])
    assert len(calls) == Counting.calls == trainer.global_step == 8
    assert_same_weights(trainer.lightning_module, fitted(tmp_path, SingleDeviceStrategy()).lightning_module)


def test_save_before_any_run(tmp_path: Path) -> None:
    module, trainer = Net(), make_alone(tmp_path, ZeroStrategy(stage=3))
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    assert_same_weights(Net.load_from_checkpoint(tmp_path / "early.ckpt"), module)


def test_resume_without_optimizer_states(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, ZeroStrategy(stage=3))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    for empty in ([], {}):
        torch.save({**saved, "optimizer_states": empty, "lr_schedulers": empty}, tmp_path / "last.ckpt")
        module = Net()
        resumed = make_alone(tmp_path, ZeroStrategy(stage=3), max_epochs=2)
        resumed.fit(module, DataLoader(DATA), ckpt_path=tmp_path / "last.ckpt")
        assert_same_weights(module, trainer.lightning_module)


def test_weights_are_loaded_into_a_module_without_a_trainer(tmp_path: Path) -> None:
    trained = fitted(tmp_path, ZeroStrategy(stage=3)).lightning_module
    trainer, module = make_alone(tmp_path, ZeroStrategy(stage=3)), Net()
    trainer.strategy.connect(module)
    trainer.strategy.load_model_state_dict({"state_dict": trained.state_dict()})
    assert_same_weights(module, trained)


class ForgetsTheClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step()


def forgotten_closure(root: str) -> str:
    module = Net(lambda module: ForgetsTheClosure(module.parameters(), lr=0.1))
    try:
        make_trainer(root, strategy=ZeroStrategy(stage=3), max_steps=1).fit(module, DataLoader(DATA, batch_size=2))
    except MisconfigurationException as error:
        return str(error)
    return "nothing was said"


def test_a_forgotten_closure_is_told_by_lightning(tmp_path: Path) -> None:
    for ranks in (1, 2):
        for message in run(ranks, forgotten_closure, str(tmp_path)):
            assert "The closure hasn't been executed" in message
