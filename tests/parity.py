"""Train one LightningModule under DDP and under ZeroStrategy in the same ranks, and compare.

``trained`` runs one of them inside a rank (harness.run) and returns what the parent asserts on. Data depends on the
rank through Lightning's own distributed sampler.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_zero import ZeroStrategy
from tests.harness import make_trainer

STAGES = (1, 2, 3)
# Small enough that every test model is cut into several units.
TINY_UNIT_MB = 1e-3


@dataclass
class Outcome:
    """What one training run leaves behind on one rank."""

    weights: dict[str, Tensor]
    losses: list[float]
    metrics: dict[str, float]
    plain: bool
    extra: dict[str, Any] = field(default_factory=dict)


class RandomData(Dataset):
    """``length`` samples of normal noise of ``shape``, the same for everybody."""

    def __init__(self, length: int, *shape: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.samples = torch.randn(length, *shape, generator=generator)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


class Recorder(pl.Callback):
    """Keeps the loss of every training batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.losses.append(float(loss))


class PlainStrategy(DDPStrategy):
    """DDP's order of samples without its reducer, which does not know several backwards of one forward."""

    def configure_ddp(self) -> None:
        pass


def make_strategy(stage: int, **kwargs: Any) -> Strategy:
    """Stage 0 is the reference: DDP, and in one process plain training."""
    if stage == 0:
        return DDPStrategy(find_unused_parameters=True) if dist.get_world_size() > 1 else PlainStrategy()
    return ZeroStrategy(stage=stage, **{"unit_size_mb": TINY_UNIT_MB, **kwargs})


def trained(
    module_factory: Callable[[], pl.LightningModule],
    stage: int,
    data: tuple[int, ...] = (24, 8),
    batch_size: int = 2,
    strategy_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    **trainer_kwargs: Any,
) -> Outcome:
    """Inside a rank: fit the module and return weights, losses and logged metrics."""
    torch.manual_seed(seed)
    module = module_factory()
    recorder = Recorder()
    trainer = make_trainer(
        ".",
        strategy=make_strategy(stage, **(strategy_kwargs or {})),
        callbacks=[recorder, *trainer_kwargs.pop("callbacks", [])],
        **{"max_epochs": 1, **trainer_kwargs},
    )
    loaders = [DataLoader(RandomData(*data), batch_size=batch_size)]
    if type(module).validation_step is not pl.LightningModule.validation_step:
        loaders.append(DataLoader(RandomData(data[0] // 2, *data[1:]), batch_size=batch_size))
    torch.manual_seed(seed + 1)
    trainer.fit(module, *loaders)
    return outcome(trainer, module, recorder.losses)


def outcome(trainer: pl.Trainer, module: nn.Module, losses: list[float]) -> Outcome:
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    plain = all(
        not type(p).__module__.startswith("lightning_zero") and p.untyped_storage().nbytes() == p.numel() * p.element_size()
        for p in module.parameters()
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(weights, losses, metrics, plain, dict(getattr(module, "extra", {})))


def all_stages(
    module_factory: Callable[[], pl.LightningModule],
    kwargs: dict[str, Any] | None = None,
    reference_factory: Callable[[], pl.LightningModule] | None = None,
) -> dict[int, Outcome]:
    """Inside a rank: the reference and all three stages, one after the other."""
    kwargs = kwargs or {}
    reference = trained(reference_factory or module_factory, 0, **kwargs)
    return {0: reference, **{stage: trained(module_factory, stage, **kwargs) for stage in STAGES}}


def assert_same(
    results: list[dict[int, Outcome]],
    exact: bool | None = None,
    atol: float = 1e-6,
    metrics_tolerance: dict[str, float] | None = None,
) -> None:
    """Every stage on every rank ends where DDP ends: to the bit at one or two ranks, to rounding above (the order of
    a sum of three is the backend's)."""
    exact = len(results) <= 2 if exact is None else exact
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": atol}
    for rank, by_stage in enumerate(results):
        reference = by_stage[0]
        assert all(torch.isfinite(v).all() for v in reference.weights.values() if v.is_floating_point())
        for stage, got in by_stage.items():
            where = f"rank {rank}, stage {stage}"
            assert got.plain or stage == 0, f"{where}: parameters are not plain after fit"
            assert got.weights.keys() == reference.weights.keys(), where
            for name, value in reference.weights.items():
                torch.testing.assert_close(
                    got.weights[name], value, equal_nan=True, msg=partial(_message, f"{where}: {name}"), **tolerance
                )
            torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(reference.losses), **tolerance)
            assert got.metrics.keys() == reference.metrics.keys(), where
            for name, value in reference.metrics.items():
                torch.testing.assert_close(
                    torch.tensor(got.metrics[name]),
                    torch.tensor(value),
                    equal_nan=True,
                    msg=partial(_message, f"{where}: {name}"),
                    **(metrics_tolerance or tolerance),
                )


def _message(where: str, text: str) -> str:
    return f"{where}: {text}"


def rank() -> int:
    return dist.get_rank()
