"""What users read and change in hooks, callbacks and steps: kept, seen and trained on as under DDP."""

import copy
import io
import pickle
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness import run
from tests.parity import STAGES, Outcome, all_stages, assert_same, trained

WIDTH = 6

CASES: list[type["Case"]] = []


def case(cls: type["Case"]) -> type["Case"]:
    """Train this module at two ranks and all stages."""
    CASES.append(cls)
    return cls


class Case(pl.LightningModule):
    """A student that learns to follow a teacher of the same form, both in units of their own."""

    callbacks: tuple[type[pl.Callback], ...] = ()
    settings: dict[str, Any] = {}
    exact = True

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {}
        self.student = self.net()
        self.teacher = self.net().requires_grad_(False)

    def net(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch)
        return F.mse_loss(self(batch), wanted + 0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [callback() for callback in self.callbacks]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.05, momentum=0.9)

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.student.parameters(), self.teacher.parameters(), strict=True))


# -- reading ---------------------------------------------------------------------------------------------------------


def numbers(module: pl.LightningModule) -> list[Any]:
    """What a curious user looks at: values, shapes, gradients, flags."""
    return [
        (name, float(p.detach().double().sum()), tuple(p.shape), p.requires_grad, p.is_leaf, p.grad_fn)
        + (None if p.grad is None else (float(p.grad.norm()), tuple(p.grad.shape), p.grad.dtype),)
        for name, p in module.named_parameters()
    ]


class ReadsEverywhere(pl.Callback):
    """Looks at every parameter in every hook that there is."""


def _reading_hook(name: str) -> Any:
    def hook(self: pl.Callback, trainer: pl.Trainer, module: Case, *args: Any, **kwargs: Any) -> None:
        module.extra.setdefault(name, []).append(numbers(module))

    return hook


READ_HOOKS = [
    name
    for name in dir(pl.Callback)
    if name in ("setup", "teardown") or (name.startswith("on_") and name not in ("on_exception", "on_load_checkpoint"))
]
for _name in READ_HOOKS:
    if _name != "on_save_checkpoint":
        setattr(ReadsEverywhere, _name, _reading_hook(_name))


@case
class Reading(Case):
    callbacks = (ReadsEverywhere,)

    def on_after_backward(self) -> None:
        self.extra.setdefault("norms", []).append({k: float(v) for k, v in grad_norm(self, 2).items()})

    def on_fit_start(self) -> None:
        summary = summarize(self, max_depth=-1)
        self.extra["summary"] = summary.total_parameters, summary.trainable_parameters, summary.param_nums, str(summary)

    def on_train_end(self) -> None:
        groups = self.trainer.optimizers[0].param_groups
        self.extra["same objects"] = all(a is b for a, b in zip(groups[0]["params"], self.student.parameters()))


class CallsTheModel(pl.Callback):
    def outputs(self, module: Case, name: str) -> None:
        generator = torch.Generator().manual_seed(len(name))
        with torch.no_grad():
            out = module(torch.randn(3, WIDTH, generator=generator)), module.teacher[2].forward(torch.ones(WIDTH))
        with torch.inference_mode():
            again = module.student(torch.ones(1, WIDTH))
        module.extra.setdefault(name, []).append([o.tolist() for o in (*out, again)])

    def on_sanity_check_end(self, trainer: Any, module: Case) -> None:
        self.outputs(module, "sanity check")

    def on_train_batch_start(self, trainer: Any, module: Case, *args: Any) -> None:
        self.outputs(module, "batch start")

    def on_before_zero_grad(self, trainer: Any, module: Case, *args: Any) -> None:
        self.outputs(module, "zero grad")

    def on_validation_end(self, trainer: Any, module: Case) -> None:
        self.outputs(module, "validation")

    def on_train_end(self, trainer: Any, module: Case) -> None:
        self.outputs(module, "train end")

    def on_fit_end(self, trainer: Any, module: Case) -> None:
        self.outputs(module, "fit end")


@case
class Calling(Case):
    callbacks = (CallsTheModel,)


class Copies(pl.Callback):
    """Copies the model in every way; a copy is whole, is independent and can be trained."""

    def on_train_batch_end(self, trainer: Any, module: Case, outputs: Any, batch: Any, batch_idx: int) -> None:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        weights = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        whole = io.BytesIO()
        torch.save(module.student, whole)
        copies = {
            "deepcopy": copy.deepcopy(module.student),
            "deepcopy of all": copy.deepcopy(module).student,
            "pickle": pickle.loads(pickle.dumps(module.student)),
            "torch.save": torch.load(io.BytesIO(whole.getvalue()), weights_only=False),
            "state": {k: v for k, v in module.state_dict().items() if k.startswith("teacher")},
        }
        module.extra[f"empty {batch_idx}"] = [k for k, v in weights.items() if not v.numel() or not v.is_contiguous()]
        module.extra[f"types {batch_idx}"] = {
            type(p).__name__ for c in list(copies.values())[:4] for p in c.parameters()
        }
        module.extra[f"weights {batch_idx}"] = {k: v.tolist() for k, v in weights.items()}
        module.extra[f"copies {batch_idx}"] = copies

    def on_train_end(self, trainer: Any, module: Case) -> None:
        for key, copies in module.extra.items():
            if not key.startswith("copies"):
                continue
            nets = [c for c in copies.values() if isinstance(c, nn.Module)]
            before = [[p.tolist() for p in net.parameters()] for net in nets]
            for net in nets:
                net(torch.ones(2, WIDTH)).sum().backward()
                torch.optim.SGD(net.parameters(), lr=0.1).step()
            after = [[p.tolist() for p in net.parameters()] for net in nets]
            state = {k: v.tolist() for k, v in copies["state"].items()}
            module.extra[key] = before, after, state


@case
class Copying(Case):
    callbacks = (Copies,)


@case
class OptimizerState(Case):
    """The optimizer's state is asked for, and loaded again, in hooks."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers().optimizer
        state = copy.deepcopy(optimizer.state_dict())
        self.extra.setdefault("state", []).append(
            {i: {k: v.tolist() for k, v in entries.items()} for i, entries in state["state"].items()}
        )
        if batch_idx == 1:
            self.kept = state
        if batch_idx == 2:
            optimizer.load_state_dict(self.kept)


# -- changing weights ------------------------------------------------------------------------------------------------


@case
class MomentumEncoder(Case):
    """A teacher that follows the student inside ``training_step``, written in the ways one finds."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for i, (s, t) in enumerate(self.pairs()):
                if (i + batch_idx) % 5 == 0:
                    t.data = t.data * 0.9 + s.data * 0.1
                elif (i + batch_idx) % 5 == 1:
                    t.data.mul_(0.9).add_(s.data, alpha=0.1)
                elif (i + batch_idx) % 5 == 2:
                    t.lerp_(s, 0.1)
                elif (i + batch_idx) % 5 == 3:
                    t.copy_(0.9 * t + 0.1 * s)
                else:
                    t *= 0.9
                    t += 0.1 * s
        return self.loss(batch)


@case
class FollowingTeacher(Case):
    """The same after the step, in other hooks, and by ``load_state_dict``."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.teacher.load_state_dict(self.student.state_dict())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for s, t in self.pairs()[:2]:
            t.data = torch.lerp(t.data, s.data, 0.2)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for s, t in self.pairs()[2:]:
            t.data.copy_(0.8 * t.data + 0.2 * s.data)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            torch._foreach_lerp_([t for _, t in self.pairs()], [s for s, _ in self.pairs()], 0.01)


class Shadow(pl.Callback):
    """The usual home-made average: validate with the average in place of the weights, which wait in ``backup``."""

    def on_fit_start(self, trainer: Any, module: Case) -> None:
        self.average = {name: p.data.clone() for name, p in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Case, *args: Any) -> None:
        for name, p in module.named_parameters():
            self.average[name] = 0.5 * self.average[name] + 0.5 * p.data

    def on_validation_start(self, trainer: Any, module: Case) -> None:
        self.backup = {}
        for name, p in module.named_parameters():
            self.backup[name] = p.data
            p.data = self.average[name]

    def on_validation_end(self, trainer: Any, module: Case) -> None:
        for name, p in module.named_parameters():
            p.data = self.backup[name]


@case
class ShadowWeights(Case):
    callbacks = (Shadow,)
    settings = {"val_check_interval": 2}


class SwapWeights(pl.Callback):
    """Exchanges student and teacher for validation, without a copy."""

    def swap(self, module: Case) -> None:
        for s, t in module.pairs():
            s.data, t.data = t.data, s.data
        first, last = module.student[2].weight, module.student[3].weight
        first.data, last.data = last.data, first.data

    def on_validation_start(self, trainer: Any, module: Case) -> None:
        self.swap(module)

    def on_validation_end(self, trainer: Any, module: Case) -> None:
        self.swap(module)


@case
class Swapping(Case):
    callbacks = (SwapWeights,)
    settings = {"val_check_interval": 3}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        a, b = self.student[0].weight, self.teacher[0].weight
        if batch_idx % 2:
            a.data, b.data = b.data, a.data
        return self.loss(batch)


@case
class Constrained(Case):
    """Constraints kept by editing weights in forward, in hooks and by index."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.student[0].weight.renorm_(2, 0, 0.5)
        self.student[2].weight.data = F.normalize(self.student[2].weight.data, dim=1)
        return super().forward(x)

    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.student.parameters():
            p.data.clamp_(-0.3, 0.3)
        with torch.no_grad():
            self.student[3].weight[0] = 0
            self.student[3].weight.data[:, 1].fill_(0.25)
            self.student[3].bias[torch.arange(WIDTH) > 3] = 0.125


@case
class Reinitialised(Case):
    """Whole modules filled anew in mid-run."""

    settings = {"max_epochs": 2}

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(self.current_epoch)
        self.student.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
        nn.init.orthogonal_(self.teacher[0].weight)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            vector = nn.utils.parameters_to_vector(self.student.parameters())
            nn.utils.vector_to_parameters(vector * 0.5, self.student.parameters())
        if batch_idx == 2:
            self.load_state_dict({k: v * 1.5 for k, v in self.state_dict().items()})


@case
class Pruned(Case):
    """Lightning's pruning callback turns weights into masks and originals after each epoch."""

    settings = {"max_epochs": 3}

    def configure_callbacks(self) -> list[pl.Callback]:
        layers = [(self.student[0], "weight"), (self.student[2], "weight")]
        return [
            ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.3, use_lottery_ticket_hypothesis=False)
        ]


# -- changing gradients ----------------------------------------------------------------------------------------------


@case
class EditedGradients(Case):
    """Clipped, scaled, masked, replaced and dropped by the user; hooks on parameters, early and late."""

    exact = False  # the norm is summed in another order

    def __init__(self) -> None:
        super().__init__()
        self.student[0].weight.register_hook(lambda grad: grad * 2)

    def on_fit_start(self) -> None:
        self.student[2].weight.register_hook(lambda grad: grad * 3)

    def on_after_backward(self) -> None:
        for p in self.student.parameters():
            p.grad += 0.01
        self.student[0].bias.grad.data.zero_()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.student[3].weight.grad = self.student[3].weight.grad * 0.5
        self.student[3].bias.grad = None
        self.student[2].weight.grad[1:3] = 0
        norm = nn.utils.clip_grad_norm_(self.student.parameters(), 0.5)
        nn.utils.clip_grad_value_([self.student[2].weight], 0.1)
        self.log("norm", norm)


# -- freezing in mid-run ---------------------------------------------------------------------------------------------


class GradualUnfreezing(Case):
    """One parameter after the other is unfrozen, some within one unit; one is frozen again."""

    def __init__(self) -> None:
        super().__init__()
        self.student.requires_grad_(False)
        self.student[3].bias.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        order = [self.student[3].weight, self.student[0].weight, self.student[2].bias, self.student[0].bias]
        order[batch_idx % 4].requires_grad_(True)
        if batch_idx == 2:
            self.student[3].weight.requires_grad_(False)


class Finetune(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5, verbose=False)


class Finetuned(Case):
    """Lightning's finetuning callback adds a parameter group in mid-run."""

    callbacks = (Finetune,)
    settings = {"max_epochs": 3}

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))


@case
class AlternatingFreeze(Case):
    """Halves of the model take turns, switched inside the step; both train in the end."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.student[0].requires_grad_(batch_idx % 2 == 0)
        self.student[2].requires_grad_(batch_idx % 2 == 1)
        return self.loss(batch)


# -- hooks of the user's own -----------------------------------------------------------------------------------------


@case
class ModuleHooks(Case):
    """Forward and backward hooks on layers, registered before and after sharding, that read and edit weights."""

    def __init__(self) -> None:
        super().__init__()
        self.extra["seen"] = []
        self.add_hooks(self.student[0])

    def on_fit_start(self) -> None:
        self.add_hooks(self.student[2])
        self.add_hooks(self.teacher[0])

    def add_hooks(self, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(lambda m, args: (args[0] * m.weight.detach().mean(),))
        layer.register_forward_hook(lambda m, args, out: out + m.bias.sum() + m.weight[0, 0])
        layer.register_full_backward_pre_hook(lambda m, grad: self.note(m.weight.sum()))
        layer.register_full_backward_hook(lambda m, grad_in, grad_out: self.note(m.bias.sum()))

    def note(self, value: Tensor) -> None:
        self.extra["seen"].append(float(value))


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__)
def test_same_as_ddp(module: type[Case]) -> None:
    settings = {"data": (16, WIDTH), "num_sanity_val_steps": 1, **module.settings}
    results = run(2, all_stages, module, settings)
    assert_same(results, module.exact)
    for by_stage in results:
        for stage in STAGES:
            assert by_stage[stage].extra == by_stage[0].extra


@pytest.mark.parametrize("module", [GradualUnfreezing, Finetuned])
def test_unfreezing_in_mid_run(module: type[Case]) -> None:
    """DDP leaves gradients of parameters that were frozen at the start to each rank: the reference is one process that
    trains on the joined batches."""
    settings = {"data": (32, WIDTH), **module.settings}
    [reference] = run(1, partial(trained, module, 0, batch_size=4, use_distributed_sampler=True, **settings))
    reference = replace(reference, losses=[])
    results = run(2, partial(each_stage, module, settings))
    assert_same([{0: reference, **by_stage} for by_stage in results], exact=False)


def each_stage(module: type[Case], settings: dict[str, Any]) -> dict[int, Outcome]:
    return {stage: replace(trained(module, stage, batch_size=2, **settings), losses=[]) for stage in STAGES}


class GivesUp(pl.Callback):
    """Overwrites a weight in a block without write-back that ends in an exception."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        parameter = next(module.parameters())
        before = parameter.detach().clone()
        try:
            with torch.no_grad(), trainer.strategy.full_parameters():
                parameter.fill_(7.0)
                raise KeyError
        except KeyError:
            pass
        module.extra["kept"] = torch.equal(parameter.detach(), before)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.extra: dict[str, bool] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.linear(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def given_up() -> dict[str, bool]:
    return trained(Plain, 3, data=(4, 8), callbacks=[GivesUp()]).extra


def test_edits_without_write_back_are_dropped_also_after_an_exception() -> None:
    assert run(2, given_up) == [{"kept": True}] * 2


# -- in mixed precision ----------------------------------------------------------------------------------------------


class Follows(Case):
    """A momentum encoder that moves by less than 16 bits can express, and a clamped weight, inside the step."""

    first = True
    optimizer: Any = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    @torch.no_grad()
    def follow(self) -> None:
        for student, teacher in self.pairs():
            teacher.mul_(0.999).add_(student, alpha=0.001)
        self.student[0].weight.clamp_(-0.3, 0.3)
        if self.global_rank == 0:  # the other ranks answer
            self.extra.setdefault("seen", []).append(float(self.teacher[2].weight.sum()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.first:
            self.follow()
        loss = self.loss(batch)
        if not self.first:
            self.follow()
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.student.parameters())


class FollowsWithAdam(Follows):
    optimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


class FollowsAfterForward(Follows):
    """By then the student's weights may be those that backward needs, of 16 bits."""

    first = False


@pytest.mark.parametrize(
    ("world", "module", "precision"),
    [
        (1, Follows, "bf16-mixed"), (2, Follows, "bf16-mixed"), (2, FollowsWithAdam, "16-mixed"),
        (2, FollowsAfterForward, "bf16-mixed"), (3, FollowsWithAdam, "bf16-mixed"),
    ],
)  # fmt: skip
def test_small_edits_inside_a_step_of_mixed_precision(
    world: int, module: type[Follows], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To DDP's bits where master weights are edited. In 16 bits the teacher would not move at all."""
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    settings = {"data": (48, WIDTH), "precision": precision, "strategy_kwargs": {"reduce_dtype": torch.float32}}
    results = [
        {stage: replace(outcome, metrics={}) for stage, outcome in by_stage.items()}
        for by_stage in run(world, all_stages, module, settings)
    ]
    exact = world < 3 and module.first
    torch.manual_seed(0)
    before = module().teacher[2].weight
    for by_stage in results:
        moved = (by_stage[0].weights["teacher.2.weight"] - before).abs().max()
        assert 1e-4 < moved < 2e-2
        for stage in STAGES:
            if exact:
                assert by_stage[stage].extra == by_stage[0].extra
            else:
                apart = by_stage[stage].weights["teacher.2.weight"] - by_stage[0].weights["teacher.2.weight"]
                assert apart.abs().max() < moved / 20
    assert_same(results, exact, atol=1e-6 if exact else 2e-3)


class Scales(Case):
    """Edits weights in 16 bits, since gradients are on: through ``.data``."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.student[2].weight.data.mul_(1.01)
        return loss


def warnings_of_edits(stage: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(Scales, stage, data=(8, WIDTH), precision="bf16-mixed")
    return [str(w.message) for w in caught if "edited inside a step" in str(w.message)]


@pytest.mark.parametrize("stage", STAGES)
def test_edits_that_lose_bits_are_told(stage: int) -> None:
    told = run(2, warnings_of_edits, stage)[0]
    assert len(told) == 1
    assert "edited inside a step, through the bfloat16 weights" in told[0]
    assert "Edit them under torch.no_grad() before the forward, or in a hook" in told[0]
