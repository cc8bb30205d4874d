"""Modules that people write although no manual says so: trained at every stage as under DDP."""

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from tests.harness import run
from tests.parity import STAGES, Outcome, all_stages, assert_same

WIDTH = 6

CASES: list[type["Case"]] = []


def case(cls: type["Case"]) -> type["Case"]:
    CASES.append(cls)
    return cls


class Case(pl.LightningModule):
    exact = True
    settings: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {}
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self(batch), batch.flip(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def note(self, name: str, value: Any) -> None:
        self.extra.setdefault(name, []).append(value)


@case
class AverageInside(Case):
    """torch's own average of weights as a submodule, whose parameters the optimizer holds as well; used to validate."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, use_buffers=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.net)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("average", F.mse_loss(self.head(self.average(batch)), batch.flip(1)), sync_dist=True)


@case
class NoOptimizer(Case):
    """The update is written by hand in a hook."""

    def configure_optimizers(self) -> Any:
        return None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p in self.parameters():
                p -= 0.1 * p.grad
                p.grad = None


@case
class OptimizerOfTheSecondEpoch(Case):
    """The user puts another optimizer in the first one's place."""

    settings = {"max_epochs": 2}

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)]


@case
class Contrastive(Case):
    """Compares with the other ranks' samples, with gradients through the gathering."""

    exact = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        mine = F.normalize(self(batch), dim=-1)
        everybodys = self.all_gather(mine, sync_grads=True).flatten(0, 1)
        return F.cross_entropy(F.normalize(self.net(batch), dim=-1) @ everybodys.T, torch.arange(len(batch)))


@case
class Quantised(Case):
    """Straight-through rounding, stacked weights, and a penalty on singular values."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.head.weight
        rounded = weight + ((weight * 8).round() / 8 - weight).detach()
        stacked = torch.cat([self.net[0].weight, self.net[2].weight.T]).chunk(2)
        return F.linear(self.net(x), rounded, self.head.bias) + (x @ stacked[1].T) @ stacked[0]

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + 0.01 * torch.linalg.svdvals(self.head.weight)[0]


@case
class CurvaturePenalty(Case):
    exact = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        _, product = torch.autograd.functional.hvp(
            lambda x: self(x).pow(2).sum(), batch, torch.ones_like(batch), create_graph=True
        )
        return self.loss(batch) + 0.01 * product.pow(2).mean()


@case
class LayersComeAndGo(Case):
    """Stochastic depth by putting an identity in a layer's place for a step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        head = self.head
        if batch_idx % 2:
            self.head = nn.Identity()  # type: ignore[assignment]
        loss = self.loss(batch)
        self.head = head
        return loss


@case
class NobodysParameter(Case):
    """Trainable, but in no optimizer: its gradients add up over the steps."""

    exact = False  # DDP averages the sum, here the averages are summed

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift

    def on_train_batch_end(self, *args: Any) -> None:
        self.note("shift", self.shift.grad.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net.parameters(), *self.head.parameters()], lr=0.05)


@case
class LooksThroughOtherDoors(Case):
    """numpy, dlpack, lists, histograms, C++ containers, copies of the whole LightningModule."""

    def on_train_batch_end(self, *args: Any) -> None:
        weight, grad = self.head.weight, self.net[0].bias.grad
        self.note("numpy", float(np.asarray(weight.detach()).sum() + weight.detach().cpu().numpy()[0, 0]))
        self.note("dlpack", torch.from_dlpack(weight.detach()).sum().item())
        self.note("list", [weight.tolist()[0], [float(v) for v in self.head.bias], max(weight[1]).item()])
        self.note("tensor", torch.tensor(weight[0].tolist()).sum().item() + torch.as_tensor(weight).std().item())
        self.note("histogram", torch.histc(weight.detach(), 4).tolist())
        self.note("format", f"{self.head.bias[0]:.4f} {self.head.bias}")
        self.note("storage", len(bytes(weight.detach().untyped_storage()[: 4 * 4])))
        self.note("bool", bool((weight > 0).any()) and weight.isfinite().all().item() and 0.0 not in self.head.bias)
        self.note("flat", nn.utils.parameters_to_vector(self.parameters()).norm().item())
        self.note("grad", None if grad is None else np.array(grad).tolist())

    def on_train_epoch_end(self) -> None:
        trainer, self._trainer = self._trainer, None
        fabric, self._fabric = self._fabric, None
        twin = pickle.loads(pickle.dumps(copy.deepcopy(self)))
        self._trainer, self._fabric = trainer, fabric
        self.note("twin", [p.sum().item() for p in twin.parameters()])


@case
class OwnState(Case):
    """Extra state, hooks of the state dict and loaded state in mid-run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._register_state_dict_hook(lambda module, state, *args: state.update(sum=state["head.weight"].sum()))
        self._register_load_state_dict_pre_hook(lambda state, *args: state.pop("sum", None))

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        if batch_idx == 1:
            self.kept = copy.deepcopy(self.state_dict())
        if batch_idx == 3:
            self.load_state_dict(self.kept)
            self.note("count", self.count)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state.pop("_extra_state", None)
        return state

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({**state, "_extra_state": {"count": self.count}}, strict=strict)


@case
class WeightsMadeInHooks(Case):
    """Weight standardisation by a hook that sets the attribute that the layer reads."""

    def __init__(self) -> None:
        super().__init__()
        raw = self.head.weight
        del self.head.weight
        self.head.register_parameter("raw", raw)
        self.head.register_forward_pre_hook(self.standardise)

    @staticmethod
    def standardise(layer: Any, args: Any) -> None:
        layer.weight = (layer.raw - layer.raw.mean(1, keepdim=True)) / (layer.raw.std(1, keepdim=True) + 1e-5)


@case
class Plateau(Case):
    settings = {"max_epochs": 3}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", -self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RAdam(self.parameters(), lr=0.05, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validation"}}

    def on_train_epoch_end(self) -> None:
        self.note("rate", self.trainer.optimizers[0].param_groups[0]["lr"])


@case
class StepHooks(Case):
    """Hooks of the optimizer, from before the run and from in the middle of it, see the module's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.optimizer.step()  # without the closure that Lightning hands over

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.register(optimizer, "early", 0.05)
        return optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.register(self.trainer.optimizers[0], "late", 0.02)

    def register(self, optimizer: torch.optim.Optimizer, name: str, most: float) -> None:
        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                self.note(f"{name}, before", list(parameter.shape))
                parameter.grad.clamp_(-most, most)

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            parameters = optimizer.param_groups[0]["params"]
            self.note(name, [(list(p.shape), p.sum().item()) for p in parameters])
            with torch.no_grad():
                parameters[0].mul_(0.99)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


@case
class TracedInside(Case):
    """torch.jit.trace in a validation step: nothing that is gathered meanwhile becomes part of the trace."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        traced = torch.jit.trace(self.net, batch, check_trace=False)
        self.log("traced", traced(batch).sum() + F.mse_loss(traced(batch * 2), self.net(batch * 2)), sync_dist=True)


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__)
def test_same_as_ddp(module: type[Case]) -> None:
    results = run(2, all_stages, module, {"data": (16, WIDTH), **module.settings})
    check(results, module)


def check(results: list[dict[int, Outcome]], module: type[Case]) -> None:
    assert_same(results, None if module.exact else False)
    for by_stage in results:
        for stage in STAGES:
            got, expected = by_stage[stage].extra, by_stage[0].extra
            if module.exact:
                assert got == expected
            elif expected:
                torch.testing.assert_close(torch.tensor(got["shift"]), torch.tensor(expected["shift"]), rtol=0, atol=1e-6)


def one_rank() -> list[dict[int, Outcome]]:
    return [all_stages(module, {"data": (8, WIDTH), **module.settings}) for module in CASES]


def test_one_rank_that_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    [results] = run(1, one_rank)
    for module, result in zip(CASES, results, strict=True):
        check([result], module)
