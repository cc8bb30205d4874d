"""Full checkpoints are ordinary Lightning files: DDP's resume here, ours there, at any stage and rank count.

Unless a test says otherwise all ranks train on the same batches, so that the unbroken run is the same one at any rank
count.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero.checkpoint.consolidate import consolidate
from tests.harness import make_trainer, run
from tests.parity import STAGES, RandomData, Recorder, make_strategy, rank

WIDTH = 6
ALL = (0, *STAGES)


class Model(pl.LightningModule):
    """A tie, a half-frozen layer, running statistics, odd shapes, two groups, a schedule per step, hyper-parameters."""

    def __init__(self, rate: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.half_frozen = nn.Linear(WIDTH, WIDTH)
        self.half_frozen.weight.requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.columns = nn.Parameter(torch.randn(WIDTH, 3).t())
        self.rates: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.half_frozen(self.norm(self.first(x)).tanh()) + self.empty.sum()
        return self.last(x + x @ self.columns.T @ self.columns) * self.scalar

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return F.mse_loss(self(batch), batch.roll(1, 1))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", F.mse_loss(self(batch), batch.roll(1, 1)), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        decayed = [self.first.weight, self.half_frozen.weight, self.columns]
        rest = [
            self.first.bias,
            *self.norm.parameters(),
            self.half_frozen.bias,
            self.last.bias,
            self.scalar,
            self.empty,
        ]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 2 * self.hparams["rate"]}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["rate"], eps=1e-3, amsgrad=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader(length: int = 8) -> DataLoader:
    return DataLoader(RandomData(length, WIDTH), batch_size=2)


def trainer_for(stage: int, form: str = "full", **kwargs: Any) -> pl.Trainer:
    settings = {"use_distributed_sampler": False, "num_sanity_val_steps": 0, "max_epochs": 2, **kwargs}
    settings["enable_checkpointing"] = any(isinstance(c, Checkpoint) for c in kwargs.get("callbacks", []))
    strategy = make_strategy(stage, **({} if form == "full" else {"state_dict_type": form}))
    return make_trainer(".", strategy=strategy, **settings)


def fit(
    make: Callable[[], pl.LightningModule], stage: int, ckpt_path: str | None = None, **kwargs: Any
) -> tuple[pl.Trainer, Any, dict[str, Any]]:
    """Train and return what must not depend on how: losses and learning rates by step, weights, the optimizers' state."""
    torch.manual_seed(5 + rank())
    module, recorder = make(), Recorder()
    trainer = trainer_for(stage, callbacks=[recorder, *kwargs.pop("callbacks", [])], **kwargs)
    trainer.fit(module, loader(), loader(4), ckpt_path=ckpt_path)
    left = {
        "losses": recorder.losses,
        "rates": getattr(module, "rates", []),
        "weights": {k: v.detach().clone() for k, v in module.state_dict().items()},
        "step": trainer.global_step,
    }
    return trainer, module, left


def saver(folder: str, **kwargs: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}-{step}", **{"save_top_k": -1, **kwargs})


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves of a checkpoint by their path."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from flat(child, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from flat(child, f"{path}/{index}")
    else:
        yield path, value


def assert_same_content(got: Any, wanted: Any, **tolerance: float) -> None:
    got, wanted = dict(flat(got)), dict(flat(wanted))
    assert got.keys() == wanted.keys()
    for path, value in wanted.items():
        if isinstance(value, Tensor):
            tolerance = tolerance or {"rtol": 0, "atol": 0}
            torch.testing.assert_close(got[path], value, msg=lambda text, path=path: f"{path}: {text}", **tolerance)
        elif isinstance(value, float) and tolerance:
            assert got[path] == pytest.approx(value, rel=1e-5, abs=1e-7), path
        else:
            assert got[path] == value, path


def without_folder(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without the names of the folders and files it was made in."""
    return {k: v for k, v in checkpoint.items() if k != "callbacks"}


def load(path: str | Path) -> dict[str, Any]:
    """Our own files and DDP's load with safe loading on."""
    return torch.load(path, weights_only=True)


# -- stop and resume -------------------------------------------------------------------------------------------------


def save_at_every_stage(folder: str) -> dict[int, Any]:
    """One epoch of two at each stage, saved from inside fit and after it; and the unbroken run."""
    for stage in ALL:
        trainer, _, _ = fit(Model, stage, max_epochs=1, callbacks=[saver(f"{folder}/{stage}", every_n_train_steps=2)])
        trainer.save_checkpoint(f"{folder}/{stage}/after.ckpt")
        trainer.save_checkpoint(f"{folder}/{stage}/weights.ckpt", weights_only=True)
    return {stage: fit(Model, stage)[2] for stage in ALL}


def resume_at_every_stage(files: list[str], stages: tuple[int, ...] = ALL) -> list[dict[str, Any]]:
    return [fit(Model, stage, file)[2] for file in files for stage in stages]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    for by_stage in (results := run(2, save_at_every_stage, str(folder))):
        for stage in STAGES:
            assert_same_content(by_stage[stage], by_stage[0])
    return folder, results[0][0]


def test_files_equal_those_of_ddp(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    names = sorted(p.name for p in (folder / "0").iterdir())
    assert names == ["after.ckpt", "epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "weights.ckpt"]
    for name in names:
        wanted = load(folder / "0" / name)
        assert ("optimizer_states" in wanted) == (name != "weights.ckpt")
        for stage in STAGES:
            got = load(folder / str(stage) / name)
            assert_same_content(without_folder(got), without_folder(wanted))
            assert list(got["state_dict"]) == list(wanted["state_dict"])
            assert [k for k, v in got["state_dict"].items() if not v.numel()] == ["empty"]
            shared = [got["state_dict"][k].data_ptr() for k in ("first.weight", "last.weight")]
            assert shared[0] == shared[1]
            sizes = [os.path.getsize(folder / str(s) / name) for s in (stage, 0)]
            assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_the_file_loads_in_one_process_with_the_class_s_own_loader(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    for stage in STAGES:
        for name in ("after.ckpt", "weights.ckpt"):
            module = Model.load_from_checkpoint(folder / str(stage) / name, map_location="cpu")
            assert_same_content(module.state_dict(), load(folder / "0" / name)["state_dict"])
            assert module.hparams["rate"] == 0.02
            assert module.last.weight is module.first.weight
            module(torch.ones(2, WIDTH)).sum().backward()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resume_at_any_rank_count_and_stage(world: int, saved: tuple[Path, dict[str, Any]]) -> None:
    folder, unbroken = saved
    files = [str(folder / stage / name) for stage in ("0", "3") for name in ("epoch=0-step=4.ckpt", "after.ckpt")]
    wanted = {**unbroken, "losses": unbroken["losses"][4:], "rates": unbroken["rates"][4:]}
    assert len(wanted["losses"]) == 4
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if world > 2 else {}
    for resumed in run(world, resume_at_every_stage, files):
        for got in resumed:
            assert_same_content(got, wanted, **tolerance)


def test_resume_at_one_rank_that_releases(saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    folder, unbroken = saved
    for got in run(1, resume_at_every_stage, [str(folder / "3" / "after.ckpt")], STAGES)[0]:
        assert_same_content(got, {**unbroken, "losses": unbroken["losses"][4:], "rates": unbroken["rates"][4:]})


def test_resume_in_mid_epoch(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = saved
    for resumed in run(2, resume_at_every_stage, [str(folder / "2" / "epoch=0-step=2.ckpt")]):
        assert len(resumed[0]["losses"]) == 6
        for got in resumed[1:]:
            assert_same_content(got, resumed[0])


# -- other optimizers ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),  # has state from the start
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


class Small(Model):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer_name = optimizer

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](p for p in self.parameters() if p.requires_grad)


class TwoOptimizers(Model):
    """By hand, the second one not in every step; stopped while gradients have accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one, other = self.optimizers()
        loss = F.mse_loss(self(batch), batch)
        self.manual_backward(loss)
        one.step()
        one.zero_grad()
        if batch_idx % 2:
            other.step()
            other.zero_grad()
            for scheduler in [self.lr_schedulers()]:
                scheduler.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        one = torch.optim.Adam([self.first.weight, self.scalar], lr=1e-2, eps=1e-3)
        other = torch.optim.SGD([self.last.bias, self.columns], lr=0.1, momentum=0.9)
        return [one, other], [torch.optim.lr_scheduler.ExponentialLR(other, 0.7)]


def broken_off(makers: list[Callable[[], pl.LightningModule]], folder: str) -> dict[int, Any]:
    results: dict[int, Any] = {}
    for stage in ALL:
        results[stage] = []
        for i, make in enumerate(makers):
            file = f"{folder}/{stage}-{i}.ckpt"
            fit(make, stage, max_epochs=1)[0].save_checkpoint(file)
            resumed = fit(make, stage, file)[2]
            results[stage].append((resumed, fit(make, stage)[2]))
    return results


def test_other_optimizers_resume(tmp_path: Path) -> None:
    makers = [*(partial(Small, name) for name in OPTIMIZERS), TwoOptimizers]
    for by_stage in run(2, broken_off, makers, str(tmp_path)):
        for i, make in enumerate(makers):
            for stage in STAGES:
                resumed, unbroken = by_stage[stage][i]
                # Some update kernels round by where an element stands in a vector.
                assert_same_content(unbroken, by_stage[0][i][1], rtol=1e-6, atol=1e-7)
                assert_same_content(resumed["weights"], unbroken["weights"])
                assert resumed["losses"] == unbroken["losses"][4:], make
                assert torch.tensor(unbroken["losses"]).isfinite().all(), make
            files = [without_folder(load(tmp_path / f"{stage}-{i}.ckpt")) for stage in ALL]
            for file in files[1:]:
                assert_same_content(file, files[0], rtol=1e-6, atol=1e-7)


# -- saving and loading in other places ------------------------------------------------------------------------------


class SavesEverywhere(pl.Callback):
    HOOKS = (
        "on_sanity_check_end", "on_train_start", "on_train_batch_start", "on_after_backward", "on_before_zero_grad",
        "on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end", "on_train_end",
        "on_fit_end",
    )  # fmt: skip

    def __init__(self, folder: str) -> None:
        for name in self.HOOKS:
            setattr(self, name, partial(self.save, f"{folder}/{name}.ckpt"))

    def save(self, path: str, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(path)


KINDS = (*((stage, "full") for stage in ALL), (3, "sharded"))


def save_everywhere(folder: str) -> list[Any]:
    return [
        fit(Model, stage, form=form, callbacks=[SavesEverywhere(f"{folder}/{stage}-{form}")], num_sanity_val_steps=1)[2]
        for stage, form in KINDS
    ]


def load_either(path: Path) -> dict[str, Any]:
    """What a file or a folder holds."""
    if path.is_dir():
        consolidate(path, path.with_suffix(".one.ckpt"))
        path = path.with_suffix(".one.ckpt")
    return load(path)


def test_saving_in_hooks(tmp_path: Path) -> None:
    for results in run(2, save_everywhere, str(tmp_path)):
        for got in results[1:]:
            assert_same_content(got, results[0])
    for name in SavesEverywhere.HOOKS:
        wanted = load(tmp_path / "0-full" / f"{name}.ckpt")
        for stage, form in KINDS[1:]:
            assert_same_content(load_either(tmp_path / f"{stage}-{form}" / f"{name}.ckpt"), wanted)


class Interrupted(Model):
    """Raises half-way through forward, backward or a hook, in the second step."""

    where = "forward"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.at("forward")
        if y.requires_grad:
            y.register_hook(lambda grad: self.at("backward"))
        return y

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("hook")

    def at(self, where: str) -> None:
        if where == self.where and self.training and self.trainer.global_step == 1:
            raise ValueError(where)


def save_on_exception(folder: str) -> None:
    for stage, form in KINDS:
        for Interrupted.where in ("forward", "backward", "hook"):
            callbacks = [OnExceptionCheckpoint(f"{folder}/{stage}-{form}", Interrupted.where)]
            with pytest.raises(ValueError, match=Interrupted.where):
                fit(Interrupted, stage, form=form, callbacks=callbacks)


def test_saving_on_an_exception(tmp_path: Path) -> None:
    run(2, save_on_exception, str(tmp_path))
    for where in ("forward", "backward", "hook"):
        wanted = without_folder(load(tmp_path / "0-full" / f"{where}.ckpt"))
        assert wanted["global_step"] == 1
        for stage, form in KINDS[1:]:
            assert_same_content(without_folder(load_either(tmp_path / f"{stage}-{form}" / f"{where}.ckpt")), wanted)


class FindsRate(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def find_rates() -> list[Any]:
    """The finder saves, trains, and loads the file into the module while it is sharded."""
    results = []
    for stage, form in KINDS:
        torch.manual_seed(5)
        module = FindsRate()
        trainer = trainer_for(stage, form, max_epochs=1)
        finder = Tuner(trainer).lr_find(module, loader(32), num_training=10, max_lr=0.1)
        before = {k: v.clone() for k, v in module.state_dict().items()}
        trainer.fit(module, loader())
        results.append((finder.results, before, {k: v.clone() for k, v in module.state_dict().items()}))
    return results


def test_learning_rate_finder() -> None:
    for results in run(2, find_rates):
        assert len(results[0][0]["loss"]) == 10
        for got in results[1:]:
            assert_same_content(got, results[0])


def evaluate_from_files(folder: str) -> dict[int, Any]:
    results = {}
    for stage in ALL:
        best = saver(f"{folder}/{stage}", monitor="validation", save_top_k=1, save_last=True)
        trainer, module, _ = fit(Model, stage, callbacks=[best])
        results[stage] = [
            trainer.validate(module, loader(4), ckpt_path="best", verbose=False),
            trainer.test(dataloaders=loader(4), ckpt_path="last", verbose=False),
            [p.tolist() for p in trainer.predict(module, loader(4), ckpt_path=best.best_model_path)],
            # A new module in a new trainer that has never trained.
            [p.tolist() for p in trainer_for(stage).predict(Model(), loader(4), ckpt_path=best.last_model_path)],
        ]
    return results


def test_evaluation_from_a_file(tmp_path: Path) -> None:
    for by_stage in run(2, evaluate_from_files, str(tmp_path)):
        for stage in STAGES:
            assert by_stage[stage] == by_stage[0]


class Hooked(Model):
    """Reads and adds to the checkpoint in its hooks, on every rank; has an own state_dict and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = ExtraState()
        self.sums: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["half"] = {k: v.half() for k, v in weights.items() if v.is_floating_point()}
        checkpoint["sums"] = self.sums = [float(v.double().sum()) for k, v in weights.items() if isinstance(v, Tensor)]
        del weights["norm.num_batches_tracked"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["norm.num_batches_tracked"] = torch.tensor(4)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {**state, "doubled": state["columns"] * 2, "scalar": state["scalar"].detach().clone()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({k: v for k, v in state.items() if k != "doubled"}, strict, assign)


class ExtraState(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> Any:
        return torch.tensor(7)

    def set_extra_state(self, state: Any) -> None:
        self.loaded = int(state)


def hooked(folder: str) -> dict[int, Any]:
    results = {}
    for stage in ALL:
        file = f"{folder}/{stage}.ckpt"
        trainer, module, _ = fit(Hooked, stage, max_epochs=1, callbacks=[saver(folder + "/x", every_n_epochs=1)])
        sums = module.sums
        trainer.save_checkpoint(file)
        _, again, left = fit(Hooked, stage, file)
        results[stage] = sums, module.sums, left, again.extra.loaded
    return results


def test_checkpoint_hooks_of_the_user(tmp_path: Path) -> None:
    for by_stage in run(2, hooked, str(tmp_path)):
        for stage in STAGES:
            assert_same_content(by_stage[stage], by_stage[0])
    for stage in STAGES:
        assert_same_content(without_folder(load(tmp_path / f"{stage}.ckpt")), without_folder(load(tmp_path / "0.ckpt")))


# -- modules that change on the way ----------------------------------------------------------------------------------


class BuiltLate(Model):
    """Layers made in ``configure_model``: neither the file nor its loader may need them before."""

    def __init__(self) -> None:
        super().__init__()
        self.late: nn.Module | None = None

    def configure_model(self) -> None:
        if self.late is None:
            self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.late(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-3)


def built_late(folder: str) -> dict[int, Any]:
    results = {}
    for stage in ALL:
        file = f"{folder}/{stage}.ckpt"
        trainer, _, first = fit(BuiltLate, stage, max_epochs=1)
        trainer.save_checkpoint(file)
        reloaded = BuiltLate.load_from_checkpoint(file)
        outcome = fit(lambda: reloaded, stage, max_epochs=1)[2]  # noqa: B023
        results[stage] = first, outcome, fit(BuiltLate, stage, file)[2]
    return results


def test_layers_that_are_built_late(tmp_path: Path) -> None:
    for by_stage in run(2, built_late, str(tmp_path)):
        for stage in STAGES:
            assert_same_content(by_stage[stage], by_stage[0])


class Backbone(Model):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def configure_callbacks(self) -> list[pl.Callback]:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def finetuned(folder: str) -> dict[int, Any]:
    """Stopped before, and again after the backbone is unfrozen."""
    results = {}
    for stage in ALL:
        file = f"{folder}/{stage}"
        fit(Backbone, stage, max_epochs=1)[0].save_checkpoint(f"{file}-1.ckpt")
        fit(Backbone, stage, f"{file}-1.ckpt", max_epochs=3)[0].save_checkpoint(f"{file}-3.ckpt")
        resumed = fit(Backbone, stage, f"{file}-3.ckpt", max_epochs=4)[2]
        results[stage] = resumed, fit(Backbone, stage, max_epochs=4)[2]
        assert len(resumed["losses"]) == 4
    return results


def test_unfreezing_and_resuming(tmp_path: Path) -> None:
    # All ranks train on the same batches, so DDP is right although it does not reduce what was frozen.
    for by_stage in run(2, finetuned, str(tmp_path)):
        for stage in STAGES:
            assert_same_content(by_stage[stage], by_stage[0])
