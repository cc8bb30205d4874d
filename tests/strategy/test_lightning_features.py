"""Lightning's own callbacks, tools and flags around the strategy.

Each case is a set of Trainer arguments under which one module is trained, under DDP and at each stage, in the same two
ranks: weights, losses, metrics and what the case records must be DDP's.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_avg_fn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.flop_counter import FlopCounterMode

from lightning_zero import ZeroStrategy
from lightning_zero.partition.engine import ZeroEngine
from tests.harness import WorldError, make_trainer, run
from tests.parity import STAGES, Outcome, RandomData, assert_same, make_strategy, outcome, rank, trained

WIDTH = 6
ALL = (0, *STAGES)


class Net(pl.LightningModule):
    """A backbone with batch norm, a head, and a bare parameter of the root; two parameter groups of different rates."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.extra: dict[str, Any] = {}
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) * self.scale)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self(batch) - 1).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", (self(batch) - 1).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        rest = [*self.head.parameters(), self.scale]
        groups = [{"params": list(self.backbone.parameters()), "lr": self.lr}, {"params": rest, "weight_decay": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=self.lr / 2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# -- cases -----------------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[], dict[str, Any]]] = {}


def case(fn: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Train with these Trainer arguments (made anew for every run) at two ranks and all stages."""
    CASES[fn.__name__] = fn
    return fn


class Record(pl.Callback):
    """Keep what ``read(trainer)`` gives when training ends."""

    def __init__(self, read: Callable[[pl.Trainer], Any]) -> None:
        self.read = read

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.extra["read"] = self.read(trainer)


def saved(trainer: pl.Trainer) -> Any:
    """The last checkpoint, which only rank 0 needs to look at."""
    path = trainer.checkpoint_callback.best_model_path
    return torch.load(path, weights_only=True) if rank() == 0 else None


def checkpoint() -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=Path("saved").absolute(), save_top_k=1, every_n_epochs=1)


def with_file(*callbacks: pl.Callback, **settings: Any) -> dict[str, Any]:
    return {"callbacks": [*callbacks, checkpoint(), Record(saved)], "enable_checkpointing": True, **settings}


@case
def ema() -> dict[str, Any]:
    return with_file(EMAWeightAveraging(decay=0.8), max_epochs=2)


@case
def ema_every_second_step_without_buffers() -> dict[str, Any]:
    averaging = EMAWeightAveraging(decay=0.8, update_every_n_steps=2, use_buffers=False)
    return with_file(averaging, max_epochs=2, accumulate_grad_batches=2)


class OncePerEpoch(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_swa_avg_fn())

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


@case
def mean_of_the_epochs_weights() -> dict[str, Any]:
    return with_file(OncePerEpoch(), max_epochs=3)


@case
def stochastic_weight_averaging() -> dict[str, Any]:
    # Swaps the schedule, sums weights at the end of epochs, and runs one more epoch for the batch norm statistics.
    return with_file(StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2), max_epochs=4)


@case
def accumulation_schedule() -> dict[str, Any]:
    steps = Record(lambda trainer: trainer.global_step)
    return {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4}), steps], "max_epochs": 3}


class RecordRates(LearningRateMonitor):
    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.extra["rates"] = {name: list(values) for name, values in self.lrs.items()}


@case
def learning_rate_monitor() -> dict[str, Any]:
    monitor = RecordRates(logging_interval="step", log_momentum=True, log_weight_decay=True)
    return {"callbacks": [monitor], "logger": CSVLogger("."), "log_every_n_steps": 1}


@case
def pruning_with_rewinding() -> dict[str, Any]:
    # Once only: the callback makes parameters share memory with its copy of the first weights, so that without sharding
    # it rewinds to trained weights from the second time on.
    callback = ModelPruning(
        "l1_unstructured", amount=0.3, use_global_unstructured=True, use_lottery_ticket_hypothesis=lambda epoch: epoch == 0
    )
    return with_file(callback, max_epochs=3)


@case
def pruning_without_rewinding() -> dict[str, Any]:
    callback = ModelPruning("l1_unstructured", amount=2, use_lottery_ticket_hypothesis=False, parameter_names=["weight"])
    return {"callbacks": [callback], "max_epochs": 3}


@case
def early_stopping() -> dict[str, Any]:
    # The loss falls, so every epoch is one without improvement: training ends after three of ten.
    stopping = EarlyStopping("validation", mode="max", patience=2)
    return {"callbacks": [stopping, Record(lambda trainer: trainer.current_epoch)], "max_epochs": 10}


@case
def timer() -> dict[str, Any]:
    return {"callbacks": [Timer(duration={"hours": 1}, interval="step")], "max_epochs": 2}


@case
def timer_that_has_run_out() -> dict[str, Any]:
    ended = Record(lambda trainer: trainer.global_step)
    return {"callbacks": [Timer(duration={"seconds": 0}, interval="step"), ended], "max_epochs": 2}


@case
def device_stats() -> dict[str, Any]:
    return {"callbacks": [DeviceStatsMonitor(cpu_stats=True)], "logger": CSVLogger("."), "log_every_n_steps": 1}


@case
def overfit_batches() -> dict[str, Any]:
    return {"overfit_batches": 2, "max_epochs": 3}


@case
def clip_by_norm() -> dict[str, Any]:
    return {"gradient_clip_val": 0.1}


@case
def clip_by_value() -> dict[str, Any]:
    return {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@case
def validation_between_batches() -> dict[str, Any]:
    return {"val_check_interval": 2, "accumulate_grad_batches": 3, "max_epochs": 2}


@case
def inference_mode_off() -> dict[str, Any]:
    return {"inference_mode": False}


@case
def detect_anomaly() -> dict[str, Any]:
    return {"detect_anomaly": True}


@case
def simple_profiler() -> dict[str, Any]:
    return {"profiler": "simple"}


@case
def advanced_profiler() -> dict[str, Any]:
    return {"profiler": "advanced"}


@case
def pytorch_profiler() -> dict[str, Any]:
    return {"profiler": "pytorch"}


@case
def learning_rate_finder() -> dict[str, Any]:
    # With few points the suggestion may be None: what was found is part of the comparison.
    finder = LearningRateFinder(num_training_steps=30, attr_name="lr")
    return {"callbacks": [finder, Record(lambda trainer: finder.optimal_lr.results)]}


def at_all_stages(name: str, factory: Callable[[], pl.LightningModule] = Net) -> dict[int, Outcome]:
    return {stage: trained(factory, stage, data=(32, WIDTH), **CASES[name]()) for stage in ALL}


def differences(got: Any, expected: Any, exact: bool = True, where: str = "") -> Iterator[str]:
    """Where two nested records differ."""
    if isinstance(expected, Mapping):
        if got.keys() != expected.keys():
            yield f"{where}: keys {sorted(map(str, got))} instead of {sorted(map(str, expected))}"
        else:
            for key, value in expected.items():
                yield from differences(got[key], value, exact, f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        if len(got) != len(expected):
            yield f"{where}: {len(got)} entries instead of {len(expected)}"
        else:
            for i, pair in enumerate(zip(got, expected, strict=True)):
                yield from differences(*pair, exact, f"{where}/{i}")
    elif isinstance(expected, Tensor):
        same = got.dtype == expected.dtype and got.shape == expected.shape
        if not same or not (torch.equal(got, expected) if exact else torch.allclose(got, expected, atol=1e-6)):
            yield f"{where}: another tensor"
    elif got != expected and not (got != got and expected != expected):
        yield f"{where}: {got!r} instead of {expected!r}"


def without_paths(extra: Any) -> Any:
    """A record without the state of the checkpoint callback: the file's own name depends on how often it was written."""
    if isinstance(extra, Mapping):
        return {k: without_paths(v) for k, v in extra.items() if not str(k).startswith("ModelCheckpoint")}
    return extra


# Stages 2 and 3 reduce every micro-batch, and a norm over shards adds the squares in another order.
ROUNDED = {"ema_every_second_step_without_buffers", "accumulation_schedule", "validation_between_batches", "clip_by_norm"}


@pytest.mark.parametrize("name", CASES)
def test_same_as_ddp(name: str) -> None:
    exact = name not in ROUNDED
    results = run(2, at_all_stages, name)
    assert_same(results, exact)
    for number, by_stage in enumerate(results):
        for stage in STAGES:
            got, expected = without_paths(by_stage[stage].extra), without_paths(by_stage[0].extra)
            assert not list(differences(got, expected, exact)), f"rank {number}, stage {stage}"


class HeadFirst(Net):
    """The optimizer starts with the head; the finetuning callback adds the backbone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.head.parameters(), self.scale], lr=self.lr, momentum=0.9)


class Unfreeze(BackboneFinetuning):
    def __init__(self, stage: int) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5, verbose=False)
        self.for_ddp = stage == 0

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if not self.for_ddp:
            super().setup(trainer, module, stage)

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.for_ddp:
            # DDP never averages gradients of what was frozen when it wrapped the module.
            self.freeze_before_training(module)
        super().on_fit_start(trainer, module)


def finetuned(stage: int, resumed: bool) -> Outcome:
    torch.manual_seed(0)
    loader = DataLoader(RandomData(24, WIDTH), batch_size=2)
    path = None
    for epochs in (2, 4) if resumed else (4,):
        module = HeadFirst()
        strategy = make_strategy(stage)
        trainer = make_trainer(".", strategy=strategy, max_epochs=epochs, callbacks=[Unfreeze(stage)])
        trainer.fit(module, loader, ckpt_path=path)
        path = Path(f"finetuned{stage}.ckpt").absolute()
        trainer.save_checkpoint(path)
        torch.manual_seed(0)
    return outcome(trainer, module, [])


def finetuned_at_all_stages(resumed: bool) -> dict[int, Outcome]:
    # The callback itself leaves the backbone frozen after resuming, so the reference must resume as well.
    return {stage: finetuned(stage, resumed) for stage in ALL}


@pytest.mark.parametrize("resumed", [False, True])
def test_backbone_finetuning(resumed: bool) -> None:
    assert_same(run(2, finetuned_at_all_stages, resumed))


# -- parameter groups and where parameters come from ------------------------------------------------------------------


class OfTheTrainersModel(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=self.lr)


class OfTheStrategysModel(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.strategy.model.parameters(), lr=self.lr)


@case
def nothing_special() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("factory", [OfTheTrainersModel, OfTheStrategysModel])
def test_optimizer_over_the_trainers_model(factory: type[Net]) -> None:
    assert_same(run(2, at_all_stages, "nothing_special", factory))


class DecayGroups(Net):
    """Two decays and three rates."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.backbone.parameters() if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
            {"params": [p for p in self.backbone.parameters() if p.ndim == 1], "lr": 0.02, "weight_decay": 0.0},
            {"params": [*self.head.parameters(), self.scale], "lr": 0.03, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, eps=1e-3)


def decay_groups(offload: bool) -> dict[int, Outcome]:
    settings: dict[str, Any] = {"data": (32, WIDTH), "gradient_clip_val": 0.5}
    offloaded = {"offload": True} if offload else {}
    return {s: trained(DecayGroups, s, strategy_kwargs=offloaded if s else {}, **settings) for s in ALL}


@pytest.mark.parametrize("offload", [False, True])
def test_decay_groups_with_clipping(offload: bool) -> None:
    assert_same(run(2, decay_groups, offload), exact=False)


class NestedStep(torch.optim.AdamW):
    """A subclass whose step calls the one of its base: torch runs the step hooks twice."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.mul_(0.99)
        return loss


class OwnStep(Net):
    def configure_optimizers(self) -> Any:
        return NestedStep(self.parameters(), lr=0.02, eps=1e-3)


def test_optimizer_subclass_with_a_step_of_its_own() -> None:
    assert_same(run(2, at_all_stages, "nothing_special", OwnStep))


class FitTwice(Net):
    """The optimizer is the user's, and outlives the first fit."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def fit_twice_and_go_on_by_hand(stage: int) -> Outcome:
    torch.manual_seed(0)
    module = FitTwice()
    data = DataLoader(RandomData(32, WIDTH), batch_size=2)
    for _ in range(2):
        trainer = make_trainer(".", strategy=make_strategy(stage), max_epochs=1)
        trainer.fit(module, data)
    for _ in range(2):
        module.optimizer.zero_grad()
        (module(data.dataset.samples) - 1).pow(2).mean().backward()
        module.optimizer.step()
    shapes = {n: tuple(module.optimizer.state[p]["exp_avg"].shape) for n, p in module.named_parameters()}
    assert shapes == {n: tuple(p.shape) for n, p in module.named_parameters()}
    return outcome(trainer, module, [])


def both_fits() -> dict[int, Outcome]:
    return {stage: fit_twice_and_go_on_by_hand(stage) for stage in ALL}


def test_the_users_optimizer_outlives_fit() -> None:
    assert_same(run(2, both_fits))


# -- loaders ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Batches as they come, no length and no batch size."""

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(rank())
        for _ in range(6):
            yield torch.randn(3 + rank(), WIDTH, generator=generator)


class SortedBatches(BatchSampler):
    """A batch sampler of one's own, with another batch size than it was asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield sorted(batch)[: max(2, len(batch) - 1)]


def loaders(kind: str) -> DataLoader:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=None)
    data = RandomData(32, WIDTH)
    return DataLoader(data, batch_sampler=SortedBatches(RandomSampler(data), batch_size=4, drop_last=False))


class TakesTheIterator(Net):
    """``training_step`` fetches its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return (self(batch) - 1).pow(2).mean()


def with_loader(kind: str, factory: type[Net]) -> dict[int, Outcome]:
    results = {}
    for stage in ALL:
        torch.manual_seed(0)
        module = factory()
        trainer = make_trainer(".", strategy=make_strategy(stage), max_epochs=2)
        torch.manual_seed(1)
        trainer.fit(module, loaders(kind))
        assert trainer.global_step == 2 * (6 if kind == "stream" else 4)
        results[stage] = outcome(trainer, module, [])
    return results


@pytest.mark.parametrize("factory", [Net, TakesTheIterator])
@pytest.mark.parametrize("kind", ["stream", "batch_sampler"])
def test_loaders_without_a_batch_size(kind: str, factory: type[Net]) -> None:
    assert_same(run(2, with_loader, kind, factory))


# -- compiled modules -------------------------------------------------------------------------------------------------


class CompiledPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.compile(backend="aot_eager")


class CompiledWrapper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.compile(self.backbone, backend="aot_eager")



def compiled(factory: Callable[[], Net]) -> dict[int, Outcome]:
    return {stage: trained(factory, stage, data=(16, WIDTH)) for stage in ALL}


@pytest.mark.parametrize("factory", [CompiledPart, CompiledWrapper])
def test_compiled_submodule(factory: Callable[[], Net]) -> None:
    # Tracing may fuse differently with and without the hooks in between.
    assert_same(run(2, compiled, factory, timeout=240), exact=False)


class Silent(Net):
    """Without logging, which this version of torch does not trace."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.extra.setdefault("validation", []).append((self(batch) - 1).pow(2).mean())


def compiled_whole() -> dict[int, Outcome]:
    results = {}
    for stage in ALL:
        torch.manual_seed(0)
        module = Silent()
        trainer = make_trainer(".", strategy=make_strategy(stage), max_epochs=1)
        loader = DataLoader(RandomData(16, WIDTH), batch_size=2)
        trainer.fit(torch.compile(module, backend="aot_eager"), loader, loader)
        results[stage] = outcome(trainer, module, [])
    return results


def test_compiled_lightning_module() -> None:
    results = run(2, compiled_whole, timeout=240)
    assert_same(results, exact=False)
    for by_stage in results:
        for stage in STAGES:
            torch.testing.assert_close(by_stage[stage].extra["validation"], by_stage[0].extra["validation"])


# -- tools ------------------------------------------------------------------------------------------------------------


class Summarised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, WIDTH)
        self.head.bias.requires_grad_(False)

    def on_train_start(self) -> None:
        summary = ModelSummary(self, max_depth=-1)
        self.extra["summary"] = (
            summary.total_parameters, summary.trainable_parameters, summary.param_nums, summary.in_sizes,
            summary.out_sizes, summary.total_flops, str(summary),
        )  # fmt: skip


def test_model_summary() -> None:
    results = run(2, at_all_stages, "nothing_special", Summarised)
    assert_same(results)
    total, trainable, *_ = results[0][0].extra["summary"]
    assert (total, trainable) == (WIDTH + (9 * WIDTH + 9) + 2 * 9 + (9 * WIDTH + WIDTH) + (3 * WIDTH + 3), total - 3)
    for by_stage in results:
        for stage in STAGES:
            assert by_stage[stage].extra["summary"] == by_stage[0].extra["summary"], f"stage {stage}"


def tuned(stage: int) -> Any:
    torch.manual_seed(0)
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer(".", strategy=make_strategy(stage), max_epochs=1)
    loader = DataLoader(RandomData(64, WIDTH), batch_size=2)
    finder = Tuner(trainer).lr_find(module, loader, num_training=40, attr_name="lr")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    trainer.fit(module, loader)
    return finder.results, module.lr, outcome(trainer, module, [])


def tuned_at_all_stages() -> dict[int, Any]:
    return {stage: tuned(stage) for stage in ALL}


def test_learning_rate_finder_of_the_tuner() -> None:
    results = run(2, tuned_at_all_stages)
    assert_same([{stage: got[2] for stage, got in by_stage.items()} for by_stage in results])
    for by_stage in results:
        for stage in STAGES:
            assert not list(differences(by_stage[stage][:2], by_stage[0][:2]))


class Sized(Net):
    batch_size = 2

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomData(32, WIDTH), batch_size=self.batch_size)


def finds_batch_size(stage: int, by_callback: bool) -> tuple[str, bool]:
    engines = []
    original = ZeroEngine.__init__

    def counting(self: ZeroEngine, *args: Any, **kwargs: Any) -> None:
        engines.append(self)
        original(self, *args, **kwargs)

    ZeroEngine.__init__ = counting  # type: ignore[method-assign]
    callbacks = [BatchSizeFinder(max_trials=2)] if by_callback else []
    trainer = make_trainer(".", strategy=make_strategy(stage), max_epochs=1, callbacks=callbacks)
    find = trainer.fit if by_callback else Tuner(trainer).scale_batch_size
    with pytest.raises((ValueError, MisconfigurationException)) as error:
        find(Sized())
    return str(error.value), bool(engines)


@pytest.mark.parametrize("by_callback", [False, True])
def test_batch_size_finder_is_refused_by_lightning(by_callback: bool) -> None:
    for message, sharded in run(2, finds_batch_size, 3, by_callback):
        assert "not supported with distributed strategies" in message
        assert not sharded


def barebones(stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Net()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    # make_trainer's arguments say what barebones says already.
    trainer = pl.Trainer(
        barebones=True, accelerator="cpu", devices=2, strategy=make_strategy(stage), max_epochs=1, default_root_dir="."
    )
    trainer.fit(module, DataLoader(RandomData(16, WIDTH), batch_size=2))
    return {name: value.clone() for name, value in module.state_dict().items()}


def barebones_at_all_stages() -> dict[int, dict[str, Tensor]]:
    return {stage: barebones(stage) for stage in ALL}


def test_barebones() -> None:
    for by_stage in run(2, barebones_at_all_stages):
        for stage in STAGES:
            assert not list(differences(by_stage[stage], by_stage[0]))


def synced_norm(stage: int, by_hand: bool) -> str:
    module: Any = nn.SyncBatchNorm.convert_sync_batchnorm(Net()) if by_hand else Net()
    trainer = make_trainer(".", strategy=make_strategy(stage), max_steps=1, sync_batchnorm=not by_hand)
    with pytest.raises(ValueError, match="SyncBatchNorm") as error:
        trainer.fit(module, DataLoader(RandomData(8, WIDTH), batch_size=2))
    return f"{trainer.global_step} {error.value}"


def synced_norm_everywhere() -> list[str]:
    return [synced_norm(stage, by_hand) for stage in STAGES for by_hand in (False, True)]


def test_synced_batch_norm_on_cpu_is_refused_by_name() -> None:
    # Under DDP torch itself raises, at the first step and without a name.
    for messages in run(2, synced_norm_everywhere):
        assert len(messages) == 6
        for message in messages:
            assert message.startswith("0 Module 'backbone.1' is a SyncBatchNorm")
            assert "sync_batchnorm=False" in message


class CountsWork(pl.Callback):
    """Operations of one forward and backward, counted by torch between steps."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Tensor, *args: Any) -> None:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(batch)
        module.extra.setdefault("operations", []).append(counter.get_total_flops())


@case
def operations() -> dict[str, Any]:
    return {"callbacks": [CountsWork()]}


# -- exceptions -------------------------------------------------------------------------------------------------------


class Breaks(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            raise ArithmeticError("enough")
        return loss


def saves_on_exception(stage: int) -> Any:
    torch.manual_seed(0)
    module = Breaks()
    kept = Path(f"stage{stage}").absolute()
    callback = OnExceptionCheckpoint(kept)
    callback.teardown = lambda *args, **kwargs: None  # type: ignore[method-assign]  # it would remove the file
    trainer = make_trainer(
        ".", strategy=make_strategy(stage), max_epochs=1, callbacks=[callback], enable_checkpointing=True
    )
    with pytest.raises(ArithmeticError, match="enough"):
        trainer.fit(module, DataLoader(RandomData(32, WIDTH), batch_size=2))
    file = torch.load(callback.ckpt_path, weights_only=True) if rank() == 0 else None
    return file, {name: value.clone() for name, value in module.state_dict().items()}


def saves_on_exception_at_all_stages() -> dict[int, Any]:
    return {stage: saves_on_exception(stage) for stage in ALL}


def test_checkpoint_on_exception() -> None:
    for by_stage in run(2, saves_on_exception_at_all_stages):
        for stage in STAGES:
            assert not list(differences(by_stage[stage], by_stage[0])), f"stage {stage}"


class BreaksOnOneRank(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3 and rank() == 1:
            raise ArithmeticError("only here")
        return super().training_step(batch, batch_idx)


def saves_on_exception_of_one_rank(stage: int) -> None:
    callback = OnExceptionCheckpoint(Path("saved").absolute())
    strategy = ZeroStrategy(stage=stage, read_timeout=2.0)
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    trainer.fit(BreaksOnOneRank(), DataLoader(RandomData(32, WIDTH), batch_size=2))


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_on_exception_of_one_rank_ends(stage: int) -> None:
    # The other rank cannot take part in saving; what must not happen is that both wait for each other.
    with pytest.raises(WorldError) as error:
        run(2, saves_on_exception_of_one_rank, stage, timeout=40)
    assert "only here" in str(error.value)
    assert "hung" not in str(error.value)


# -- the command line -------------------------------------------------------------------------------------------------


def built_by(*args: str) -> LightningCLI:
    return LightningCLI(Net, run=False, args=["--trainer.accelerator=cpu", "--trainer.devices=1", *args])


def test_command_line_builds_the_strategy(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  strategy:\n    class_path: lightning_zero.ZeroStrategy\n"
        "    init_args: {stage: 2, unit_size_mb: 0.5, prefetch: 2, reduce_dtype: bfloat16}\n"
    )
    by_file = built_by(f"--config={config}").trainer.strategy
    by_flags = built_by(
        "--trainer.strategy=lightning_zero.ZeroStrategy", "--trainer.strategy.init_args.stage=2",
        "--trainer.strategy.init_args.unit_size_mb=0.5", "--trainer.strategy.init_args.prefetch=2",
        "--trainer.strategy.init_args.reduce_dtype=bfloat16",
    ).trainer.strategy  # fmt: skip
    by_name = built_by("--trainer.strategy=zero_2").trainer.strategy
    for strategy in (by_file, by_flags, by_name):
        assert type(strategy) is ZeroStrategy
        assert strategy.config.stage == 2
    assert by_file.config == by_flags.config
    assert by_file.config.reduce_dtype is torch.bfloat16
    assert math.isclose(by_file.config.unit_bytes, 0.5 * 2**20)
    assert by_name.config.unit_bytes == ZeroStrategy().config.unit_bytes


def test_command_line_shows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        built_by("--trainer.strategy.help=lightning_zero.ZeroStrategy")
    shown = " ".join(capsys.readouterr().out.split())
    for option in ("stage", "offload", "unit_size_mb", "prefetch", "reduce_dtype", "gather_dtype", "state_dict_type", "read_timeout"):
        assert f"--trainer.strategy.init_args.{option}" in shown or f"--trainer.strategy.{option}" in shown
    # The help is the docstring's.
    assert "shards optimizer state over the ranks" in shown


def test_command_line_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    cli = LightningCLI(
        Loading,
        args=["fit", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=zero_3", "--trainer.logger=false",
              "--trainer.max_steps=2", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"],
    )  # fmt: skip
    assert cli.trainer.global_step == 2
    assert not torch.distributed.is_initialized()  # one rank needs none


class Loading(Net):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomData(16, WIDTH), batch_size=2)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(RandomData(8, WIDTH), batch_size=2)
