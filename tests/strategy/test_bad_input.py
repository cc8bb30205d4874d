"""Mistakes of users: each gives an error that names the thing, on every rank, and before training where it can."""

import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.migration import ADVICE
from tests.harness import make_trainer, run
from tests.parity import STAGES, RandomData, all_stages, assert_same, rank, trained

WIDTH = 4


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stage": 0}, ValueError, "stage must be 1, 2, 3 or 'auto', got 0"),
        ({"stage": 4}, ValueError, "stage must be 1, 2, 3 or 'auto', got 4"),
        ({"stage": "3"}, ValueError, "stage must be 1, 2, 3 or 'auto', got '3'"),
        ({"stage": True}, ValueError, "stage must be 1, 2, 3 or 'auto', got True"),
        ({"stage": 2.0}, ValueError, r"stage must be 1, 2, 3 or 'auto', got 2\.0"),
        ({"stages": 3}, TypeError, "stages"),
        ({"unit_size_mb": 0}, ValueError, "unit_size_mb must be a positive number"),
        ({"unit_size_mb": -1.5}, ValueError, "unit_size_mb must be a positive number"),
        ({"unit_size_mb": float("nan")}, ValueError, "unit_size_mb must be a positive number"),
        ({"unit_size_mb": "big"}, ValueError, "unit_size_mb must be a positive number, got 'big'"),
        ({"prefetch": -1}, ValueError, "prefetch must be a non-negative integer, got -1"),
        ({"prefetch": 1.5}, ValueError, "prefetch"),
        ({"read_timeout": 0}, ValueError, "read_timeout must be positive"),
        ({"reduce_dtype": "bf17"}, ValueError, "reduce_dtype .* 'bf17'"),
        ({"reduce_dtype": "int64"}, ValueError, "reduce_dtype must be a floating-point dtype .* 'int64'"),
        ({"state_dict_type": "whole"}, ValueError, "state_dict_type must be 'full' or 'sharded', got 'whole'"),
        ({"start_method": "thread"}, ValueError, "start_method must be .* got 'thread'"),
        ({"unit_policy": 3}, TypeError, "unit_policy must hold module classes or be a callable, got 3"),
        ({"unit_policy": ["Linear"]}, TypeError, r"unit_policy must hold module classes .* \['Linear'\]"),
        ({"precision_plugin": "bf16"}, TypeError, "precision_plugin .* 'bf16'"),
    ],
)
def test_unknown_options(options: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        ZeroStrategy(**options)


def arguments(cls: type) -> set[str]:
    return set(inspect.signature(cls.__init__).parameters) - {"self", "args", "kwargs"}  # type: ignore[misc]


@pytest.mark.parametrize(
    "cls", [DDPStrategy, FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, DistributedDataParallel, FullyShardedDataParallel]
)
def test_arguments_of_other_strategies_are_answered(cls: type) -> None:
    """Each that the installed versions have, and one that says which argument to use instead says an existing one."""
    foreign = arguments(cls) - arguments(ZeroStrategy)
    assert foreign <= ADVICE.keys()
    for name in foreign:
        with pytest.raises(TypeError, match=rf"ZeroStrategy does not take {name}.* {name}: (Use|Not needed|Not supported)"):
            ZeroStrategy(**{name: True})
        known = arguments(ZeroStrategy) | {"the", "this", "devices", "Trainer"}
        if ADVICE[name].startswith("Use "):
            assert re.match(r"Use (\w+)", ADVICE[name])[1] in known, name  # type: ignore[index]


def test_subclasses_may_have_arguments_of_their_own() -> None:
    class Own(ZeroStrategy):
        def __init__(self, find_unused_parameters: bool, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    assert Own(find_unused_parameters=True, stage=3).config.stage == 3
    with pytest.raises(TypeError, match="Own does not take static_graph"):
        Own(find_unused_parameters=True, static_graph=True)


class ForeignPrecision:
    """What a plugin of the other package looks like."""


ForeignPrecision.__module__ = "pytorch_lightning.plugins.precision.precision"


class BitsandbytesPrecision(Precision):
    """Known by its name."""


def test_foreign_plugins() -> None:
    with pytest.raises(TypeError, match="pytorch_lightning"):
        ZeroStrategy(precision_plugin=ForeignPrecision())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"BitsandbytesPrecision.*quantised"):
        ZeroStrategy(precision_plugin=BitsandbytesPrecision())


# -- modules and optimizers ------------------------------------------------------------------------------------------


class Model(pl.LightningModule):
    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.odd = layer
        self.last = nn.Linear(WIDTH, WIDTH)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        return F.mse_loss(self(batch), batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer()

    def optimizer(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_error(make: Callable[[], Model], stage: int, **options: Any) -> tuple[str, int]:
    """Inside a rank: the error of ``fit`` and how many training steps came before it."""
    module = make()
    trainer = make_trainer(".", strategy=ZeroStrategy(stage=stage, **options), max_epochs=1)
    try:
        trainer.fit(module, DataLoader(RandomData(8, WIDTH), batch_size=2))
    except Exception as error:
        return f"{type(error).__name__}: {error}", module.steps
    return "no error", module.steps


class Tagged(Tensor):
    """A tensor whose bytes are its own business, like a quantised weight."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Tagged":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Tagged(args[0].inner)
        raise NotImplementedError(str(func))


def holder(parameter: Tensor, trainable: bool = True) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(parameter, requires_grad=trainable)
    return layer


def shares_memory() -> Model:
    model = Model(nn.Linear(WIDTH, WIDTH))
    model.odd.weight = nn.Parameter(model.first.weight.data)  # type: ignore[union-attr]
    return model


def buffer_shares_memory() -> Model:
    model = Model()
    model.register_buffer("shown", model.last.weight.detach())
    return model


BAD_MODULES: dict[str, tuple[Callable[[], Model], tuple[int, ...], str]] = {
    "lazy": (lambda: Model(nn.LazyLinear(3)), STAGES, "ValueError.*'odd.weight' is not initialised.*lazy"),
    "meta": (
        lambda: Model(holder(torch.empty(2, 2, device="meta"))),
        STAGES,
        "'odd.weight' is on the meta device and nothing gives it values: .* has no reset_parameters",
    ),
    "subclass": (lambda: Model(holder(Tagged(torch.ones(2)), False)), STAGES, "ValueError.*'odd.weight' is a"),
    "sparse": (lambda: Model(holder(torch.eye(3).to_sparse())), STAGES, "ValueError.*'odd.weight'.*sparse"),
    "scripted": (lambda: Model(torch.jit.script(nn.Linear(2, 2))), STAGES, "ValueError.*'odd' is a TorchScript module"),
    "frozen scripted": (
        lambda: Model(torch.jit.script(nn.Linear(2, 2).requires_grad_(False))),
        (3,),
        "ValueError.*'odd' is a TorchScript module",
    ),
    "shared memory": (shares_memory, STAGES, "'first.weight' and 'odd.weight' share memory"),
    "shared with a buffer": (buffer_shares_memory, STAGES, "'last.weight' and 'shown' share memory"),
}


class RowNorm(torch.optim.Optimizer):
    """Scales each row of a matrix by its norm: an update that shards cannot see."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(F.normalize(p.grad, dim=-1), alpha=group["lr"])
        return loss


class Outer(torch.optim.Optimizer):
    """Wraps another optimizer, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def with_optimizer(make_optimizer: Callable[[Model], Any]) -> Callable[[], Model]:
    def make() -> Model:
        model = Model()
        model.optimizer = lambda: make_optimizer(model)  # type: ignore[method-assign]
        return model

    return make


def knows_a_stranger(model: Model) -> Any:
    groups = [{"params": [model.first.weight]}, {"params": [model.last.bias, nn.Parameter(torch.ones(2, 5))]}]
    return torch.optim.Adam(groups)


def knows_what_was_replaced(model: Model) -> Any:
    optimizer = torch.optim.Adam(model.parameters())
    model.last = nn.Linear(WIDTH, WIDTH)
    return optimizer


BAD_OPTIMIZERS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "stranger": (knows_a_stranger, r"Adam holds a parameter of shape \(2, 5\) \(param_groups\[1\]\['params'\]\[1\]\)"),
    "replaced": (knows_what_was_replaced, r"Adam holds a parameter of shape \(4, 4\)"),
    "lbfgs": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS cannot be sharded: it evaluates the loss"),
    "adafactor": (lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor cannot be sharded: it factors"),
    "sparse adam": (lambda m: torch.optim.SparseAdam(list(m.parameters())), "SparseAdam cannot be sharded"),
    "row norm": (lambda m: RowNorm(m.parameters()), r"RowNorm \(param_groups\[0\]\) cannot be sharded"),
    "wrapper": (lambda m: Outer(torch.optim.SGD(m.parameters(), lr=0.1)), "Outer wraps another one .*SGD"),
}


def all_bad_input() -> dict[str, tuple[str, int]]:
    found = {}
    for name, (make, stages, _) in BAD_MODULES.items():
        found.update({f"{name}, stage {stage}": fit_error(make, stage) for stage in stages})
    for name, (make_optimizer, _) in BAD_OPTIMIZERS.items():
        found.update({f"{name}, stage {s}": fit_error(with_optimizer(make_optimizer), s) for s in STAGES})
    # And what is good beside it: no optimizer but an odd parameter that nobody trains.
    scripted, _, _ = BAD_MODULES["frozen scripted"]
    found.update({f"good, stage {stage}": fit_error(scripted, stage) for stage in (1, 2)})
    return found


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    expected = {name: text for name, (_, _, text) in BAD_MODULES.items()}
    expected |= {name: text for name, (_, text) in BAD_OPTIMIZERS.items()}
    for found in run(2, all_bad_input):
        for case, (message, steps) in found.items():
            name = case.partition(",")[0]
            if name == "good":
                assert (message, steps) == ("no error", 2), case
            else:
                assert re.search(f"(?s){expected[name]}", message), f"{case}: {message}"
                assert steps == 0, f"{case} trained before it was refused"


# -- ranks that do not agree -----------------------------------------------------------------------------------------


def wider_on_rank_1() -> Model:
    return Model(nn.Linear(2, 2 + rank()))


def more_on_rank_1() -> Model:
    return Model(nn.BatchNorm1d(2) if rank() else None)


def frozen_on_rank_1() -> Model:
    return Model(nn.Linear(2, 2).requires_grad_(rank() == 0))


def different_modules() -> list[str]:
    makers = [wider_on_rank_1, more_on_rank_1, frozen_on_rank_1]
    return [fit_error(make, stage)[0] for stage in STAGES for make in makers]


def test_ranks_with_different_modules() -> None:
    results = run(2, different_modules)
    for this, found in enumerate(results):
        for i, message in enumerate(found):
            assert message.startswith("RuntimeError: The ranks do not have the same parameters and buffers: rank 0 has")
            assert message.endswith(f"This is rank {this}.")
            wanted = [
                "rank 0 has 'odd.weight' ((2, 2), torch.float32, trainable); rank 1 has 'odd.weight' ((3, 2),",
                "rank 0 has 'last.weight' ((4, 4), torch.float32, trainable); rank 1 has 'odd.weight' ((2,),",
                "torch.float32, trainable); rank 1 has 'odd.weight' ((2, 2), torch.float32, frozen)",
            ]
            assert wanted[i % 3] in message


def another_size(devices: int) -> list[str]:
    if devices == 1:
        os.environ["LOCAL_RANK"] = "0"  # each rank takes itself for the only one
    found = []
    for stage in STAGES:
        trainer = pl.Trainer(
            accelerator="cpu", devices=devices, strategy=ZeroStrategy(stage=stage), logger=False, max_epochs=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        try:
            trainer.fit(Model(), DataLoader(RandomData(8, WIDTH)))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("devices", [1, 3])
def test_a_process_group_of_another_size(devices: int) -> None:
    for found in run(2, another_size, devices):
        assert len(found) == len(STAGES)
        assert all(f"initialised with 2 ranks, the Trainer asks for {devices}" in message for message in found)


class Edited(Model):
    """Edits weights wrongly before the second step."""

    def __init__(self, edit: Callable[[Model], Any]) -> None:
        super().__init__()
        self.edit = edit

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.edit(self)


def narrow(model: Model) -> None:
    model.first.weight.data = model.first.weight.data[:, :2]


def own_noise(model: Model) -> None:
    model.last.weight.data += rank()


def only_here(model: Model) -> None:
    if rank() == 1:
        with torch.no_grad():
            model.last.weight.mul_(2)


def swapped_here(model: Model) -> None:
    """The same numbers in other places."""
    weight = model.last.weight.data
    if rank() == 0:
        weight.copy_(weight.flip(0))


class EditedLate(Edited):
    """After the last step, before the checkpoint or the end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_end(self) -> None:
        self.edit(self)


def edits() -> dict[str, list[str]]:
    return {
        edit.__name__: [fit_error(lambda edit=edit: Edited(edit), stage)[0] for stage in stages]  # type: ignore[misc]
        for edit, stages in {narrow: STAGES, pl.LightningModule.double: STAGES}.items()
    } | {
        f"apart {edit.__name__} {cls.__name__}": [
            fit_error(lambda edit=edit, cls=cls: cls(edit), stage)[0]  # type: ignore[misc]
            for stage in (STAGES if edit is own_noise else (1, 2))  # at stage 3 a read on one rank is an error already
        ]
        for edit in (own_noise, only_here, swapped_here)
        for cls in (Edited, EditedLate)
    }


def test_edits_that_cannot_be_kept() -> None:
    for found in run(2, edits):
        assert all("from torch.float32 of shape (4, 4) to torch.float32 of shape (4, 2)" in m for m in found["narrow"])
        assert all("from torch.float32 of shape (4, 4) to torch.float64" in m for m in found["double"])
        apart = {name: messages for name, messages in found.items() if name.startswith("apart")}
        assert len(apart) == 6
        for name, messages in apart.items():
            text = "Parameters were edited differently on the ranks: 'last.weight' .this is rank [01]"
            assert all(re.search(text, message) for message in messages), (name, messages)
        assert not any("no error" in messages for messages in found.values())


def new_layer(model: Model) -> None:
    model.last = nn.Linear(WIDTH, WIDTH)


def new_parameter(model: Model) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def one_more(model: Model) -> None:
    model.odd = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))


def harmless(model: Model) -> None:
    """Nothing of this takes part in training."""
    model.odd = nn.Linear(1, 1).requires_grad_(False)
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    model.first = model.first
    bias = model.last.bias
    del model.last.bias
    model.last.register_parameter("bias", bias)


def replaced() -> dict[str, list[tuple[str, int]]]:
    edits = (new_layer, new_parameter, one_more, harmless)
    return {e.__name__: [fit_error(lambda e=e: Edited(e), stage) for stage in STAGES] for e in edits}  # type: ignore[misc]


def test_parameters_that_come_later_are_refused_at_the_next_step() -> None:
    names = {"new_layer": "last.weight", "new_parameter": "first.weight", "one_more": "odd.1.weight"}
    for found in run(2, replaced):
        assert found.pop("harmless") == [("no error", 2)] * 3
        for case, name in names.items():
            for message, steps in found[case]:
                assert f"RuntimeError: Parameter '{name}' has been added to the module" in message
                assert "configure_model" in message
                assert steps == 1


class Functional(Model):
    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.first.named_parameters())
        grads = torch.func.grad(lambda w: torch.func.functional_call(self.first, w, (x,)).sum())(weights)
        return self.last(x) + grads["bias"]


def functional() -> list[str]:
    return [fit_error(Functional, stage)[0] for stage in STAGES]


def test_reverse_mode_transforms_at_stage_3() -> None:
    for found in run(2, functional):
        assert found[:2] == ["no error", "no error"]
        assert "torch.func's reverse-mode transforms" in found[2]
        assert "torch.autograd.grad" in found[2]


# -- odd, but right --------------------------------------------------------------------------------------------------


class Frozen(Model):
    """Nothing to train: the loop only measures."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def optimizer(self) -> None:
        return None


class NoParameters(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = nn.Identity()


class Tiny(Model):
    """Two numbers, for more ranks than that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x[:, :1])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()


def nothing_to_train() -> list[dict[str, Any]]:
    return [vars(trained(module, stage, data=(8, WIDTH))) for module in (Frozen, NoParameters) for stage in STAGES]


def test_modules_without_trainable_parameters() -> None:
    torch.manual_seed(0)
    untouched = Frozen()
    samples = RandomData(8, WIDTH).samples
    wanted = [float(F.mse_loss(model(samples), samples)) for model in (untouched, NoParameters())]
    for i, ranks in enumerate(zip(*run(2, nothing_to_train))):
        losses = [left["losses"] for left in ranks]
        assert sum(map(sum, losses)) / 4 == pytest.approx(wanted[i // len(STAGES)], abs=1e-6)
        for left in ranks:
            assert left["metrics"]["loss"] == pytest.approx(sum(last for _, last in losses) / 2, abs=1e-6)
            assert left["plain"]
            if i < len(STAGES):
                assert all(torch.equal(left["weights"][k], v) for k, v in untouched.state_dict().items())


def test_more_ranks_than_elements() -> None:
    results = run(4, all_stages, Tiny, {"data": (16, WIDTH)})
    assert_same(results)
    assert len(results[0][3].losses) == 2
