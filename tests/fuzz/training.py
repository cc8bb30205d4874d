"""A run drawn at random: a module, settings of the Trainer and the strategy, and what a user's hooks do."""

import random
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.fuzz.modules import WIDTH, Builder
from tests.harness import make_trainer
from tests.parity import STAGES, Outcome, RandomData, Recorder, assert_same, make_strategy, outcome

# eps keeps a gradient that is zero but for rounding from becoming a step.
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, maximize=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, eps=1e-2, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, eps=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.005, eps=1e-3),
}
HOOKS = ("clamp", "mask", "norms", "read", "noise", "assign")


@dataclass
class Plan:
    """What one seed stands for."""

    seed: int
    optimizer: str = ""
    groups: int = 1
    hooks: tuple[str, ...] = ()
    manual: bool = False
    resumed: str = ""
    """The form of the checkpoint from which the second epoch goes on, at the next stage; none if it is one run."""
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.optimizer = draw.choice(list(OPTIMIZERS))
        self.groups = draw.choice([1, 1, 2])
        self.hooks = tuple(hook for hook in HOOKS if draw.random() < 0.25)
        self.manual = draw.random() < 0.15
        if not self.manual:
            self.trainer["accumulate_grad_batches"] = draw.choice([1, 1, 2, 3])
            if draw.random() < 0.4:
                self.trainer |= draw.choice(
                    [{"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
                )
        self.strategy["unit_size_mb"] = draw.choice([1e-4, 5e-4, 1e-3, 1e-2, 32.0])
        self.strategy["prefetch"] = draw.choice([0, 1, 1, 3])
        self.strategy["offload"] = draw.random() < 0.25
        self.resumed = draw.choice(["", "", "full", "sharded"])

    @property
    def exact(self) -> bool:
        """Whether the arithmetic is DDP's. Sums of three are in the backend's order; reentrant recompute adds up in another order, and on the host Adam
        rounds as torch's fused one does."""
        builder = Builder(self.seed, statistics=not self.resumed)
        builder.build()
        if dist.get_world_size() > 2 or builder.recomputes or (self.strategy["offload"] and self.optimizer.startswith("adam")):
            return False
        return self.trainer.get("accumulate_grad_batches", 1) == 1 and self.trainer.get("gradient_clip_val") != 0.5


class Drawn(pl.LightningModule):
    def __init__(self, plan: Plan, reentrant: bool) -> None:
        super().__init__()
        self.plan = plan
        builder = Builder(plan.seed, reentrant, statistics=not plan.resumed)
        self.layers = builder.build()
        self.automatic_optimization = not plan.manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Reentrant recompute of what has no gradient coming in gives none to the parameters either.
        x = batch.detach().requires_grad_()
        loss = F.mse_loss(self.layers(x).mean(1), batch[:, 0, :3])
        self.log("loss", loss)
        if self.plan.manual:
            optimizers = self.optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.layers(batch).pow(2).mean(), sync_dist=True)

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad and p.numel()]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if "read" in self.plan.hooks and batch_idx % 2:
            self.log("mean", sum(p.detach().abs().sum() for p in self._trained()[:3]))

    def on_train_batch_end(self, *args: Any) -> None:
        trained = self._trained()
        if "clamp" in self.plan.hooks:
            for p in trained[:2]:
                p.data.clamp_(-0.3, 0.3)
        if "assign" in self.plan.hooks:
            with torch.no_grad():
                trained[-1][0] = 0.125

    def on_after_backward(self) -> None:
        if "mask" in self.plan.hooks and not self.plan.manual:
            for p in self._trained()[::2]:
                if p.grad is not None and p.dim():
                    p.grad[0] = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if "norms" in self.plan.hooks:
            self.log_dict({k: v for k, v in grad_norm(self, norm_type=2).items() if "total" in k})
        if "noise" in self.plan.hooks:
            for p in self._trained()[:2]:
                if p.grad is not None:
                    p.grad.add_(torch.full_like(p.grad, 1e-3))

    def configure_optimizers(self) -> Any:
        parameters, make = list(self.parameters()), OPTIMIZERS[self.plan.optimizer]
        half = len(parameters) // 2
        if self.plan.manual and self.plan.groups == 2:
            return [make(parameters[:half]), make(parameters[half:])]
        groups = [{"params": parameters}] if self.plan.groups == 1 else [
            {"params": parameters[:half], "lr": 0.004}, {"params": parameters[half:]}]  # fmt: skip
        optimizer = make(groups)
        if self.plan.manual:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trained(plan: Plan, stage: int) -> Outcome:
    losses: list[float] = []
    path = None
    for part in (1, 2) if stage and plan.resumed else (2,):
        torch.manual_seed(plan.seed)
        module = Drawn(plan, reentrant=stage > 0)
        settings = {**plan.strategy, "state_dict_type": plan.resumed or "full"} if stage else {}
        trainer = make_trainer(
            ".", strategy=make_strategy(stage if path is None else stage % 3 + 1, **settings), max_epochs=part,
            callbacks=[recorder := Recorder()], num_sanity_val_steps=0, **plan.trainer,
        )  # fmt: skip
        loaders = [DataLoader(RandomData(n, 4, WIDTH), batch_size=2) for n in (12, 8)]
        trainer.fit(module, *loaders, ckpt_path=path, weights_only=True)
        losses += recorder.losses
        trainer.save_checkpoint(path := f"{plan.seed}-{stage}-{part}.ckpt")
    return outcome(trainer, module, losses)


def differences(seeds: list[int]) -> dict[int, str]:
    """Inside a rank: by seed what went wrong, if anything did."""
    found = {}
    for seed in seeds:
        plan = Plan(seed)
        try:
            results = {stage: trained(plan, stage) for stage in (0, *STAGES)}
            assert_same([results], exact=plan.exact, atol=1e-5)
        except Exception as error:
            found[seed] = f"{plan}: {type(error).__name__}: {error}"
    return found
