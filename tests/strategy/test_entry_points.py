"""All entry points of the Trainer, in any order and twice; what is left of the module when they end, however they end."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops import utilities
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.harness import make_trainer, run
from tests.parity import STAGES, RandomData, make_strategy

WIDTH = 6
ALL = (0, *STAGES)


class Model(pl.LightningModule):
    """A tied weight, a frozen layer, a buffer, dropout; every step method."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.dropout(self.frozen(self.first(x).tanh())))) * self.scale

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self(batch), batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(("train", float(loss)))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(("validate", float(self.loss(batch))))
        self.log("validation", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def loader() -> DataLoader:
    return DataLoader(RandomData(12, WIDTH), batch_size=2)


def seeded(make: Callable[[], pl.LightningModule] = Model) -> Any:
    # Ranks may build different weights: rank 0's count, in whichever entry point comes first.
    torch.manual_seed(dist.get_rank())
    return make()


def left_over(module: nn.Module) -> list[str]:
    """What a module that no Trainer holds any more must not have."""
    found = []
    for name, p in module.named_parameters():
        if type(p) is not nn.Parameter or p.untyped_storage().nbytes() != p.numel() * p.element_size():
            found.append(f"{name} is a {type(p).__name__} of {p.untyped_storage().nbytes()} bytes")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            found.append(f"{name} has hooks")
        if not p.detach().isfinite().all():
            found.append(f"{name} is not finite")
    for name, m in module.named_modules():
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks:
            found.append(f"{name} has hooks")
    return found


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


def same_on_all_stages(results: list[dict[int, Any]]) -> None:
    for rank, by_stage in enumerate(results):
        assert list(by_stage) == list(ALL)
        for stage in STAGES:
            assert by_stage[stage] == by_stage[0], f"rank {rank}, stage {stage}"


def next_trainer(strategy: Strategy, **kwargs: Any) -> pl.Trainer:
    """Another Trainer around a strategy that has been through one. Lightning refuses its own in this place."""
    if not isinstance(strategy, ZeroStrategy):
        return make_trainer(".", strategy=make_strategy(0), **kwargs)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **quiet, **kwargs)


# -- any order -------------------------------------------------------------------------------------------------------

ORDERS = [
    ["predict"],
    ["test", "test"],
    ["validate", "fit"],
    ["fit", "test", "fit", "predict"],
    ["fit", "fit"],
    ["predict", "fit", "validate", "validate", "fit", "test", "predict"],
]


def call(trainer: pl.Trainer, what: str, module: pl.LightningModule) -> Any:
    """Call one entry point; fit trains for another epoch."""
    torch.manual_seed(7 + dist.get_rank())
    if what == "fit":
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module, loader(), loader())
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
    if what == "predict":
        return [output.tolist() for output in trainer.predict(module, loader())]
    return getattr(trainer, what)(module, loader(), verbose=False)


def in_order(order: list[str], strategy: Strategy) -> list[Any]:
    module = seeded()
    parameters = list(module.parameters())
    trainer = make_trainer(".", strategy=strategy, num_sanity_val_steps=1)
    done = []
    for what in order:
        output = call(trainer, what, module)
        done.append((what, output, weights(module), left_over(module)))
    done.append((module.seen, module.last.weight is module.first.weight, trainer.global_step))
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    return done


def all_orders() -> dict[int, Any]:
    return {stage: [in_order(order, make_strategy(stage)) for order in ORDERS] for stage in ALL}


def test_any_order() -> None:
    results = run(2, all_orders)
    same_on_all_stages(results)
    for by_stage in results:
        for done in by_stage[3]:
            assert [left for *_, left in done[:-1]] == [[]] * (len(done) - 1)


def test_any_order_on_one_rank_that_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    same_on_all_stages(run(1, all_orders))


def all_orders_in_inference_mode() -> dict[int, Any]:
    """What Lightning does where the backend is not Gloo: evaluation runs in real inference mode."""
    utilities._distributed_is_initialized = lambda: False
    results = all_orders()
    module = seeded(NotesInference)
    call(make_trainer(".", strategy=make_strategy(3)), "predict", module)
    assert module.seen == [True] * 3
    return results


class NotesInference(Model):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(torch.is_inference_mode_enabled())
        return self(batch)


def test_any_order_in_inference_mode() -> None:
    same_on_all_stages(run(2, all_orders_in_inference_mode))


# -- one strategy, several trainers ----------------------------------------------------------------------------------


def two_trainers(stage: int) -> Any:
    strategy, one, other = make_strategy(stage), seeded(), seeded()
    trainer, done = make_trainer(".", strategy=strategy, max_epochs=1), []
    for module, what in [(one, "fit"), (other, "fit"), (one, "fit"), (other, "test"), (one, "predict")]:
        trainer = next_trainer(strategy, max_epochs=1) if done else trainer
        done.append((call(trainer, what, module), weights(one), weights(other), left_over(module)))
    return done


def every_two_trainers() -> dict[int, Any]:
    return {stage: two_trainers(stage) for stage in ALL}


def test_one_strategy_in_several_trainers() -> None:
    same_on_all_stages(run(2, every_two_trainers))


def precisions() -> list[str]:
    strategy, given = ZeroStrategy(), ZeroStrategy(precision_plugin=HalfPrecision("bf16-true"))
    seen = []
    for one, settings in [(strategy, {"precision": "bf16-mixed"}), (strategy, {}), (given, {}), (given, {})]:
        seen.append(next_trainer(one, **settings).precision_plugin.precision)
    return seen


def test_each_trainer_has_its_own_precision() -> None:
    assert run(1, precisions) == [["bf16-mixed", "32-true", "bf16-true", "bf16-true"]]


class NothingToOptimize(Model):
    def configure_optimizers(self) -> None:
        return None


SETTINGS: list[tuple[type[pl.LightningModule], dict[str, Any]]] = [
    (Model, {"fast_dev_run": 2}),
    (Model, {"barebones": True, "max_epochs": 1}),
    (Model, {"max_steps": 2}),
    (Model, {"overfit_batches": 1, "max_epochs": 2}),
    (Model, {"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": 2}),
    (Model, {"val_check_interval": 2, "max_epochs": 1, "inference_mode": False}),
    (NothingToOptimize, {"max_epochs": 1}),
]


def other_settings() -> dict[int, Any]:
    results: dict[int, Any] = {}
    for stage in ALL:
        results[stage] = []
        for make, settings in SETTINGS:
            module = seeded(make)
            trainer = make_trainer(".", strategy=make_strategy(stage), **settings)
            torch.manual_seed(3)
            trainer.fit(module, loader(), loader())
            results[stage].append((weights(module), module.seen, trainer.global_step, left_over(module)))
    return results


def test_other_ways_to_fit() -> None:
    same_on_all_stages(run(2, other_settings))


# -- the module afterwards -------------------------------------------------------------------------------------------


def afterwards() -> dict[int, Any]:
    fitted = {}
    for stage in ALL:
        fitted[stage] = module = seeded()
        torch.manual_seed(3)
        make_trainer(".", strategy=make_strategy(stage), max_epochs=1).fit(module, loader())
    dist.destroy_process_group()
    results = {}
    for stage, module in fitted.items():
        module.eval()
        file = io.BytesIO()
        torch.save(module, file)
        copies = [
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            torch.load(io.BytesIO(file.getvalue()), weights_only=False),
        ]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            module.loss(torch.ones(4, WIDTH)).backward()
            optimizer.step()
        outputs = [m(torch.ones(2, WIDTH)).tolist() for m in [module, *copies]]
        results[stage] = outputs, weights(module), [left_over(m) for m in [module, *copies]]
    return results


def test_the_module_stands_alone_after_fit() -> None:
    results = run(2, afterwards)
    same_on_all_stages(results)
    assert all(not left for by_stage in results for left in by_stage[3][2])


# -- interrupted -----------------------------------------------------------------------------------------------------

HOOKS = [
    "on_fit_start", "on_sanity_check_end", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "in forward",
    "in backward", "in validation", "in the optimizer", "in the scheduler", "in setup",
]  # fmt: skip


class Interrupt(pl.Callback):
    """Raises at one place on all ranks, the second time around where there is one."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        self.where, self.error, self.times = where, error, 0
        if where.startswith("on_"):
            setattr(self, where, self.interrupt)

    def interrupt(self, *args: Any, **kwargs: Any) -> None:
        self.times += 1
        if self.times == 2 or self.where in ("on_fit_start", "on_sanity_check_end", "on_train_end", "on_fit_end"):
            raise self.error(self.where)


class Interrupted(Model):
    def __init__(self, interrupt: Interrupt) -> None:
        super().__init__()
        self.interrupt = interrupt

    def at(self, where: str) -> None:
        if self.interrupt.where == where:
            self.interrupt.interrupt()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.at("in forward" if self.training else "in validation")
        if self.interrupt.where == "in backward" and x.requires_grad:
            x.register_hook(lambda grad: self.at("in backward"))
        return self.last(self.frozen(x)) * self.scale

    def configure_optimizers(self) -> Any:
        [optimizer], [scheduler] = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *args: self.at("in the optimizer"))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.at("in the scheduler")
        scheduler.step()

    def setup(self, stage: str) -> None:
        self.at("in setup")


def interrupted(where: str, error: type[BaseException], strategy: Strategy) -> Any:
    interrupt = Interrupt(where, error)
    module = seeded(lambda: Interrupted(interrupt))
    if where == "in setup":
        interrupt.times = 1
    trainer = make_trainer(".", strategy=strategy, max_epochs=2, callbacks=[interrupt], num_sanity_val_steps=1)
    text = ""
    try:
        torch.manual_seed(3)
        trainer.fit(module, loader(), loader())
    except (error, SystemExit) as caught:
        text = f"{type(caught).__name__}: {caught}"
    broken_off = weights(module), left_over(module), trainer.global_step
    # And nothing stands in the way of another run.
    interrupt.where = "nowhere"
    again = next_trainer(strategy, max_steps=2, limit_val_batches=1)
    torch.manual_seed(3)
    again.fit(module, loader(), loader())
    return text, broken_off, weights(module), left_over(module)


def interrupted_everywhere(error: type[BaseException], hooks: list[str]) -> dict[int, Any]:
    # Everywhere under DDP and at stage 3, here and there at the others.
    places = {stage: hooks if stage in (0, 3) else hooks[stage::3] for stage in ALL}
    return {stage: {where: interrupted(where, error, make_strategy(stage)) for where in places[stage]} for stage in ALL}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_interrupted(error: type[BaseException]) -> None:
    hooks = HOOKS if error is ValueError else HOOKS[3::4]
    results = run(2, interrupted_everywhere, error, hooks)
    for by_stage in results:
        for stage in STAGES:
            assert by_stage[stage] == {where: by_stage[0][where] for where in by_stage[stage]}, f"stage {stage}"
    for where, (text, (_, left, _), *_) in results[1][3].items():
        assert text == (f"ValueError: {where}" if error is ValueError else "SystemExit: 1")
        assert not left, where
