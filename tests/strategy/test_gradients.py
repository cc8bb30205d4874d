"""What users do with gradients: the update is DDP's, and where DDP has none, the one worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import run
from tests.parity import STAGES, Outcome, all_stages, assert_same, trained

WIDTH = 6
# Every linear layer of that width is a unit of its own.
UNIT = {"unit_size_mb": 2e-4}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, eps=1e-3),
}


class Net(pl.LightningModule):
    """Three layers; the first two are also reached on their own."""

    optimizer_name = "sgd"
    settings: dict[str, Any] = {}
    exact = True
    """Whether sums are formed in DDP's order."""
    joined = False
    """DDP does not reduce these: the reference is one process that trains on the joined batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](self.parameters())


CASES: list[type[Net]] = []


def case(cls: type[Net]) -> type[Net]:
    CASES.append(cls)
    return cls


# -- accumulation ------------------------------------------------------------------------------------------------------


@case
class Accumulated(Net):
    """With a rest at the end of the epoch."""

    settings = {"accumulate_grad_batches": 4}
    exact = False


@case
class AccumulatedAdam(Accumulated):
    optimizer_name = "adam"


@case
class Rescheduled(Net):
    exact = False

    def configure_callbacks(self) -> list[pl.Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]

    settings = {"max_epochs": 3}

    def on_train_end(self) -> None:
        self.extra = {"steps": self.trainer.global_step}


@case
class ZeroedNotDropped(Net):
    """Zeros stay in ``p.grad``: momentum and weight decay move also what has no gradient."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx % 2 == 0 else self.body(batch).square().mean()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@case
class SkippedSteps(Net):
    """The pattern of Lightning's documentation: not every batch steps."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 3 == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


# -- clipping ----------------------------------------------------------------------------------------------------------


@case
class ClippedByNorm(Net):
    settings = {"gradient_clip_val": 0.1}
    exact = False  # the square of a norm is summed in another order


@case
class ClippedByNormAccumulated(ClippedByNorm):
    settings = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}


@case
class ClippedByValue(Net):
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@case
class ClippedByGroup(Net):
    exact = False

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.body.parameters(), "clip": 0.05},
            {"params": self.head.parameters(), "clip": 0.2, "lr": 0.01},
        ]
        return OPTIMIZERS["sgd"](groups)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], group["clip"])


@case
class ClippedTwice(Net):
    """Lightning's own helper, with values of the user's, and torch's functions in a hook."""

    exact = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5, norm_type=float("inf"))
        self.log("largest", norm)
        torch.nn.utils.clip_grad_value_(self.head.parameters(), 0.1)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05 * (self.global_step + 1), gradient_clip_algorithm="norm")


# -- seeing and changing gradients -------------------------------------------------------------------------------------


@case
class Watched(Net):
    """Whole gradients, and Lightning's norms of them, in every hook that has them."""

    def keep(self, where: str) -> None:
        for name, p in self.named_parameters():
            self.log(f"{where}/{name}", p.grad.flatten()[-1] + 3 * p.grad.sum())

    def on_after_backward(self) -> None:
        self.keep("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.keep("before step")
        self.log_dict(grad_norm(self, norm_type=2))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step:
            self.keep("before zero")


@case
class Rewritten(Net):
    """In place, by a new tensor, and removed."""

    def on_after_backward(self) -> None:
        self.head.weight.grad *= 2
        self.body[0].weight.grad[1] = 0
        with torch.no_grad():
            self.body[0].bias.grad.add_(self.body[0].bias, alpha=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.body[2].weight.grad = self.body[2].weight.grad * 0.5
        self.body[2].bias.grad = None
        if self.global_step % 2:
            self.head.bias.grad = torch.full_like(self.head.bias, 0.25)


@case
class HookedParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body[0].weight.register_hook(lambda g: g * 3)
        self.head.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))

    def on_train_start(self) -> None:
        self.body[2].weight.register_hook(lambda g: -g)


@case
class ScaledLoss(Net):
    """The loss as a dict, with what does not take part in backward; and anomaly detection."""

    settings = {"detect_anomaly": True}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": 0.3 * self.loss(batch), "seen": batch.detach()}


# -- graphs of unusual form --------------------------------------------------------------------------------------------


@case
class CalledTwice(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self(batch) - self(-batch)).square().mean() + self.loss(2 * batch)


@case
class CalledTwiceRecomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))

    training_step = CalledTwice.training_step


@case
class SharedModule(Net):
    """One module under two names, one weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.body[2]
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.again(self.body(x))))


@case
class GradientPenalty(Net):
    """Gradients of gradients, with respect to the input and to weights."""

    exact = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = batch.clone().requires_grad_()
        [by_input] = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        loss = self.loss(batch)
        by_weights = torch.autograd.grad(loss, [self.head.weight, self.body[2].weight], create_graph=True)
        return loss + (by_input.norm(dim=1) - 1).square().mean() + sum(g.square().sum() for g in by_weights)


@case
class GradientPenaltyAdam(GradientPenalty):
    optimizer_name = "adam"


@case
class FrozenMiddlePenalty(GradientPenalty):
    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)


@case
class AdversarialBatch(Net):
    """A gradient of the input alone makes the batch, in training and in validation."""

    def attacked(self, batch: Tensor) -> Tensor:
        with torch.enable_grad():
            x = batch.clone().requires_grad_()
            [direction] = torch.autograd.grad(self.loss(x), x)
        return batch + 0.1 * direction.sign()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(self.attacked(batch))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("attacked", self.loss(self.attacked(batch)), sync_dist=True)


@case
class OwnBackward(Net):
    """The ``backward`` hook runs several of them over one graph."""

    exact = False
    joined = True

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()


@case
class ExtraBackward(Net):
    """A hook adds the gradient of a penalty after the step's own backward."""

    exact = False
    joined = True

    def on_after_backward(self) -> None:
        (0.1 * sum(p.square().sum() for p in self.parameters())).backward()


@case
class TokenMean(Net):
    """A mean over all ranks' tokens where the ranks hold different numbers of them: DDP's mean over ranks is undone."""

    exact = False
    joined = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        chosen = (batch > 0.3).float()
        total = self.trainer.strategy.reduce(chosen.sum(), reduce_op="sum")
        return ((self(batch) - batch).square() * chosen).sum() * self.trainer.world_size / total


# -- manual optimization -----------------------------------------------------------------------------------------------


class Manual(Net):
    exact = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def updated(self, *losses: Tensor, direct: bool = False) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for i, loss in enumerate(losses):
            retain = {"retain_graph": True} if i < len(losses) - 1 else {}
            if direct:
                loss.backward(**retain)
            else:
                self.manual_backward(loss, **retain)
        optimizer.step()


@case
class ManualBackward(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.updated(self.loss(batch))


@case
class DirectBackward(Manual):
    joined = True

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.updated(self.loss(batch), direct=True)


@case
class SeveralBackwards(Manual):
    """Over one graph, and over parts of the module."""

    joined = True

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        hidden = self.body(batch)
        self.updated(hidden.square().mean(), self.head(hidden).mean(), self.head(hidden.detach()).square().mean())
        self.updated(self.loss(batch), self.loss(-batch), direct=True)


@case
class OwnAccumulation(Manual):
    """Two micro-batches of one batch, or of two batches, whichever comes; the last one is left over."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for half in batch.chunk(2):
            self.manual_backward(self.loss(half) / 4)
        if batch_idx % 2:
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            self.optimizers().step()
            self.optimizers().zero_grad()


@case
class BlockedSync(Manual):
    """Lightning's own context for accumulation: the last micro-batch brings the sum of all."""

    joined = True

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        first, *rest, last = batch.chunk(batch.shape[0])
        with self.trainer.strategy.block_backward_sync():
            for one in (first, *rest):
                self.manual_backward(self.loss(one) / len(batch))
        self.manual_backward(self.loss(last) / len(batch))
        self.optimizers().step()


@case
class HandMadeGradients(Manual):
    """``torch.autograd.grad`` does not fill ``p.grad``; what the user puts there is taken as it is."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        parameters = list(self.parameters())
        for p, g in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            p.grad = self.all_gather(g).mean(0)
        self.optimizers().step()
        self.updated(self.loss(batch))


@case
class GradientsOnTop(Manual):
    """A backward adds to what the user has put into ``p.grad``."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        for p in self.head.parameters():
            p.grad = torch.full_like(p, 0.1)
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@case
class NeverZeroed(Manual):
    """Gradients of the whole past; ``zero_grad`` of the module, once."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(0.1 * self.loss(batch))
        self.optimizers().step()
        if batch_idx == 3:
            self.zero_grad()


@case
class SharpnessAware(Manual):
    """Two passes a step: parameters are moved along their gradients and back."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            moves = [(p, 0.05 * p.grad / (p.grad.norm() + 1e-6)) for p in self.parameters()]
            for p, move in moves:
                p.add_(move)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        optimizer.step()


@case
class Adversaries(Manual):
    """Two networks, two optimizers, toggled; the second steps every other time."""

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["sgd"](self.body.parameters()), OPTIMIZERS["adam"](self.head.parameters())

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        self.toggle_optimizer(discriminator)
        self.manual_backward(self.head(self.body(batch).detach()).sigmoid().mean() - self.head(batch).sigmoid().mean())
        if batch_idx % 2:
            self.clip_gradients(discriminator, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            discriminator.step()
            discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)
        self.toggle_optimizer(generator)
        generator.zero_grad()
        self.manual_backward(-self(batch).sigmoid().mean())
        generator.step()
        self.untoggle_optimizer(generator)


def settings_of(module: type[Net]) -> dict[str, Any]:
    return {"data": (28, WIDTH), "batch_size": 2, "strategy_kwargs": UNIT, **module.settings}


def stages_only(module: type[Net], settings: dict[str, Any]) -> dict[int, Outcome]:
    return {stage: trained(module, stage, **settings) for stage in STAGES}


def assert_same_as_joined(
    world: int, module: type[Net], settings: dict[str, Any], reference_settings: dict[str, Any]
) -> None:
    """The reference is one process with the ranks' batches in one; its losses are means of theirs."""
    [reference] = run(1, partial(trained, module, 0, use_distributed_sampler=True, **reference_settings))
    results = run(world, stages_only, module, settings)
    assert_same(
        [
            {stage: replace(got, losses=[], metrics={}) for stage, got in ({0: reference} | by_stage).items()}
            for by_stage in results
        ],
        exact=False,
    )


@pytest.mark.parametrize("module", CASES, ids=lambda cls: cls.__name__)
def test_same_as_ddp(module: type[Net]) -> None:
    settings = settings_of(module)
    if module.joined:
        assert_same_as_joined(2, module, settings, {**settings, "batch_size": 4})
        return
    results = run(2, all_stages, module, settings)
    assert_same(results, exact=module.exact)
    for by_stage in results:
        for stage in STAGES:
            assert by_stage[stage].extra == by_stage[0].extra


# What depends on how shards fall, and on who has them.
SAMPLE = (
    AccumulatedAdam,
    ClippedByNormAccumulated,
    ClippedByGroup,
    Rewritten,
    GradientPenalty,
    SharpnessAware,
    Adversaries,
)


def sample_of_cases() -> dict[str, dict[int, Outcome]]:
    return {module.__name__: all_stages(module, {**settings_of(module), "max_steps": 4}) for module in SAMPLE}


@pytest.mark.parametrize("world", [1, 3])
def test_same_as_ddp_at_other_numbers_of_ranks(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    results = run(world, sample_of_cases)
    for module in SAMPLE:
        assert_same([by_case[module.__name__] for by_case in results], exact=False)


# -- numbers worked out by hand ----------------------------------------------------------------------------------------


class Slope(pl.LightningModule):
    """The gradient of the weight is the rank's number plus one, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 10.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(torch.full_like(batch, self.global_rank + 1.0)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)


@pytest.mark.parametrize(("world", "weight"), [(2, 6.25), (3, 5.0)])
def test_gradients_are_means_over_ranks(world: int, weight: float) -> None:
    # Two ranks: the mean gradient is 1.5. 10 - 1.5 = 8.5, then 8.5 - (0.5 * 1.5 + 1.5) = 6.25.
    # Three ranks: it is 2. 10 - 2 = 8, then 8 - (0.5 * 2 + 2) = 5.
    settings = {"data": (2 * world, 1), "batch_size": 1}
    for by_stage in run(world, stages_only, Slope, settings):
        assert [by_stage[stage].weights["layer.weight"].item() for stage in STAGES] == [weight] * 3


class AdamNet(Net):
    optimizer_name = "adam"


@pytest.mark.parametrize("module", [Net, AdamNet])
def test_accumulated_micro_batches_are_one_large_batch(module: type[Net]) -> None:
    settings = {"data": (32, WIDTH), "strategy_kwargs": UNIT}
    small = {**settings, "batch_size": 1, "accumulate_grad_batches": 4}
    assert_same_as_joined(2, module, small, {**settings, "batch_size": 8})


@pytest.mark.parametrize("module", [Net, AdamNet])
def test_all_stages_agree_over_many_steps(module: type[Net]) -> None:
    assert_same(run(2, all_stages, module, {**settings_of(module), "data": (80, WIDTH)}))


def by_unit_size() -> list[dict[int, Outcome]]:
    """Units of a layer, of an odd size and of everything, with and without prefetch."""
    results = []
    for unit_size_mb, prefetch in ((1e-9, 0), (1e-9, 4), (3.3e-4, 1), (100.0, 2)):
        strategy = {"unit_size_mb": unit_size_mb, "prefetch": prefetch}
        results.append(all_stages(Net, {**settings_of(Net), "strategy_kwargs": strategy}))
    return results


def test_unit_size_and_prefetch_change_nothing() -> None:
    for results in zip(*run(2, by_unit_size), strict=True):
        assert_same(list(results))


class Words(Net):
    """Gradients of the embedding are sparse; as everywhere they are reduced as dense ones."""

    sparse = True

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH, sparse=self.sparse)

    def loss(self, x: Tensor) -> Tensor:
        return self(self.words((x.abs() * 10).long() % 11)).square().mean()


class DenseWords(Words):
    sparse = False


def test_sparse_gradients() -> None:
    for settings in ({}, {"accumulate_grad_batches": 2}):
        assert_same(run(2, all_stages, Words, {**settings_of(Words), **settings}, DenseWords), exact=not settings)


class Silent(Net):
    """Some steps have no loss. Lightning allows that in one process."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else self.loss(batch)


def test_steps_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    for settings in ({}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}):
        assert_same(run(1, all_stages, Silent, {**settings_of(Silent), **settings}), exact=False)


# -- many units, and parts that nobody uses --------------------------------------------------------------------------


class Idle(pl.LightningModule):
    """Each layer has a weight that is trained and one that no rank ever uses: more units than are reduced at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"used": nn.Linear(6, 6), "idle": nn.Linear(2, 2)}) for _ in range(8))
        self.extra: dict[str, Any] = {"with a gradient": []}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer["used"](batch))
        return batch.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.extra["with a gradient"].append([name for name, p in self.named_parameters() if p.grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("world", [1, 2])
def test_what_nobody_uses_has_no_gradient_and_does_not_decay(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    settings = {"data": (16, 6), "strategy_kwargs": {"unit_policy": nn.ModuleDict}}
    results = run(world, idle_everywhere, settings)
    assert_same(results)
    for by_stage in results:
        for found in by_stage.values():
            assert all(names and all("idle" not in name for name in names) for names in found.extra["with a gradient"])
            assert torch.equal(found.weights["layers.0.idle.weight"], by_stage[0].weights["layers.0.idle.weight"])


def idle_everywhere(settings: dict[str, Any]) -> dict[int, Outcome]:
    reference = trained(Idle, 0, data=settings["data"])
    return {0: reference, **{stage: trained(Idle, stage, **settings) for stage in STAGES}}


class WritesOver(pl.LightningModule):
    """Changes what backward needs, which torch refuses."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.a(batch)
        y = self.b(h)
        h.mul_(2)
        return self.c(torch.tanh(y)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AddsToItsInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(super().forward(x.clone()))
        return x


class RecomputesWrittenOver(WritesOver):
    def __init__(self) -> None:
        super().__init__()
        self.b = AddsToItsInput(6, 6)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.c(self.b(self.a(batch))).square().mean()


def message(module: type[WritesOver], stage: int, **kwargs: Any) -> str:
    try:
        trained(module, stage, data=(8, 6), strategy_kwargs=kwargs)
    except RuntimeError as error:
        return str(error)
    return "none"


def messages() -> list[str]:
    found = [message(WritesOver, stage) for stage in (0, *STAGES)]
    return found + [message(RecomputesWrittenOver, s, activation_checkpointing_policy=AddsToItsInput) for s in STAGES]


def test_what_backward_needs_and_is_written_over_is_refused_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    for found in (*run(1, messages), *run(2, messages)):
        for text in found:
            assert "one of the variables needed for gradient computation has been modified by an inplace operation" in text
