"""Who takes part in the benchmarks: each is a function that makes, of a model, what is to be timed."""

import contextlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.models import Model
from lightning_zero import ZeroStrategy
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.offload.threads import Threads
from lightning_zero.offload.update import HostUpdate
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.precision import ZeroPrecision

UNIT_BYTES = 32 * 2**20
FIT_STEPS = 20
"""Of a fit by a Trainer."""


@dataclass(frozen=True)
class Setting:
    """How all competitors of a case train."""

    precision: str = "fp32"
    accumulate: int = 1
    recompute: bool = False

    def autocast(self) -> AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else nullcontext()


Step = Callable[[list[Tensor]], float]
"""Takes the micro-batches of one step, returns the last loss."""


@dataclass
class Competitor:
    step: Step
    prepare: Callable[[], None] = lambda: None
    """Called before each step, off the clock."""
    memory: Callable[[], dict[str, Any]] | None = None
    """What it says that it has held, where it does."""


Maker = Callable[[Callable[[], Model], Setting], Competitor]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)


def loop(
    forward: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    setting: Setting,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
    autocast: bool = True,
) -> Step:
    """The loop that one would write by hand. ``no_sync`` is around all micro-batches but the last."""

    def step(batches: list[Tensor]) -> float:
        optimizer.zero_grad()
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            with no_sync() if left else nullcontext():
                with setting.autocast() if autocast else nullcontext():
                    loss = forward(batch) / len(batches)
                loss.backward()
        optimizer.step()
        return float(loss.detach()) * len(batches)

    return step


# -- peers -------------------------------------------------------------------------------------------------------------


def plain(build: Callable[[], Model], setting: Setting) -> Competitor:
    """One process alone: at several ranks what a step would take if nothing had to be sent."""
    model = build()
    return Competitor(loop(model, adamw(model), setting))


def ddp(build: Callable[[], Model], setting: Setting) -> Competitor:
    model = build()
    wrapped = nn.parallel.DistributedDataParallel(model)
    return Competitor(loop(wrapped, adamw(model), setting, wrapped.no_sync))


def zero_redundancy(build: Callable[[], Model], setting: Setting) -> Competitor:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = build()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)
    return Competitor(loop(wrapped, optimizer, setting, wrapped.no_sync))


def sharded_by_fsdp2(model: Model, setting: Setting, reshard: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16) if setting.precision == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def fsdp2(reshard: bool) -> Maker:
    def make(build: Callable[[], Model], setting: Setting) -> Competitor:
        model: Any = build()
        sharded_by_fsdp2(model, setting, reshard)

        @contextlib.contextmanager
        def no_sync() -> Any:
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

        return Competitor(loop(model, adamw(model), setting, no_sync, autocast=False))

    return make


def deepspeed(stage: int) -> Maker:
    def make(build: Callable[[], Model], setting: Setting) -> Competitor:
        import deepspeed as library

        model = build()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setting.accumulate,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": setting.precision == "bf16"},
        }
        engine, *_ = library.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)

        def step(batches: list[Tensor]) -> float:
            for batch in batches:
                loss = engine(batch)
                engine.backward(loss)
                engine.step()
            return float(loss.detach())

        return Competitor(step)

    return make


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


# -- this package ------------------------------------------------------------------------------------------------------


def make_engine(
    model: Model, stage: int, setting: Setting, optimizers: list[torch.optim.Optimizer], offload: bool = False
) -> ZeroEngine:
    world = dist.get_world_size()
    mixed = setting.precision == "bf16"
    config = EngineConfig(
        stage, UNIT_BYTES, wide_sums=mixed and setting.accumulate > 1,
        **{"dtypes": ZeroPrecision("bf16-mixed").parameter_dtypes(model)} if mixed else {},
    )  # fmt: skip
    updater = HostUpdate(lambda: False, Threads(1)) if offload else None
    return ZeroEngine(model, Comm(dist.get_rank(), world, torch.device("cpu")), config, optimizers, updater)


def ours(stage: int, offload: bool = False) -> Maker:
    def make(build: Callable[[], Model], setting: Setting) -> Competitor:
        model = build()
        optimizer = adamw(model)
        engine = make_engine(model, stage, setting, [optimizer], offload)

        def step(batches: list[Tensor]) -> float:
            optimizer.zero_grad()
            for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
                with engine.no_sync() if left else nullcontext():
                    with engine.step("train", backward_follows=True), setting.autocast():
                        loss = model(batch) / len(batches)
                    with engine.backward():
                        loss.backward()
            optimizer.step()
            return float(loss.detach()) * len(batches)

        def memory() -> dict[str, Any]:
            units = [unit.layout.padded_numel * unit.dtype.itemsize for unit in engine.units]
            return {"buffers": engine.memory_stats()["peak"].get("buffers", 0), "largest unit": max(units, default=0)}

        return Competitor(step, memory=memory)

    return make


def compiled(maker: Maker) -> Maker:
    """The same, of a model whose blocks are compiled."""

    def make(build: Callable[[], Model], setting: Setting) -> Competitor:
        def with_compiled_blocks() -> Model:
            model = build()
            for block in model.blocks:
                block.compile()
            return model

        return maker(with_compiled_blocks, setting)

    return make


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluated(forward: Callable[[Tensor], Tensor], engine: ZeroEngine | None = None) -> Competitor:
    def step(batches: list[Tensor]) -> float:
        for batch in batches:
            with torch.no_grad(), nullcontext() if engine is None else engine.step("validate"):
                loss = forward(batch)
        return float(loss)

    return Competitor(step)


def plain_evaluation(build: Callable[[], Model], setting: Setting) -> Competitor:
    return evaluated(build())


def fsdp2_evaluation(build: Callable[[], Model], setting: Setting) -> Competitor:
    model = build()
    sharded_by_fsdp2(model, setting, reshard=True)
    return evaluated(model)


def our_evaluation(build: Callable[[], Model], setting: Setting) -> Competitor:
    model = build()
    return evaluated(model, make_engine(model, 3, setting, []))


# -- set-up ------------------------------------------------------------------------------------------------------------


_held: dict[str, Any] = {}
"""The last model that was set up, and what came of it: there is no memory for one of every competitor."""


def set_up(shard: Callable[[Model, Setting], Any]) -> Maker:
    """Times ``shard`` of a model whose memory is there."""

    def make(build: Callable[[], Model], setting: Setting) -> Competitor:
        def prepare() -> None:
            _held.clear()
            with torch.device("meta"):
                model = build()
            _held["model"] = model.to_empty(device="cpu")
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.01)

        def step(batches: list[Tensor]) -> float:
            _held["result"] = shard(_held["model"], setting)
            return 0.0

        return Competitor(step, prepare)

    return make


def copied(model: Model, setting: Setting) -> Any:
    return [parameter.detach().clone() for parameter in model.parameters()]


def our_set_up(stage: int) -> Maker:
    return set_up(lambda model, setting: make_engine(model, stage, setting, []))


def fsdp2_set_up(model: Model, setting: Setting) -> None:
    sharded_by_fsdp2(model, setting, True)


# -- fits by a Trainer -------------------------------------------------------------------------------------------------


class Fitted(pl.LightningModule):
    """A model as a LightningModule."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def fit(stage: int | None = None) -> Maker:
    """Times a whole fit of ``FIT_STEPS`` steps, with what comes before and after."""

    def make(build: Callable[[], Model], setting: Setting) -> Competitor:
        module = Fitted(build())

        def step(batches: list[Tensor]) -> float:
            quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
            trainer = pl.Trainer(
                accelerator="cpu", devices=1, max_steps=FIT_STEPS, use_distributed_sampler=False,
                strategy="auto" if stage is None else ZeroStrategy(stage=stage), **quiet,
            )  # fmt: skip
            trainer.fit(module, DataLoader(batches * FIT_STEPS, batch_size=None))
            return float(trainer.callback_metrics.get("loss", 0.0))

        return Competitor(step)

    return make


TRAINING: dict[str, Maker] = {
    "plain": plain,
    "DDP": ddp,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "FSDP2": fsdp2(True),
    "FSDP2, no reshard": fsdp2(False),
    **{f"DeepSpeed {stage}": deepspeed(stage) for stage in (1, 2, 3)},
    **{f"stage {stage}": ours(stage) for stage in (1, 2, 3)},
    **{f"stage {stage}, offload": ours(stage, offload=True) for stage in (1, 2, 3)},
}
COMPILED = ("DDP", "FSDP2", "stage 1", "stage 2", "stage 3")
TRAINING |= {f"{name}, compiled": compiled(TRAINING[name]) for name in COMPILED}
EVALUATION: dict[str, Maker] = {"plain": plain_evaluation, "FSDP2": fsdp2_evaluation, "stage 3": our_evaluation}
SET_UP: dict[str, Maker] = {
    "copy": set_up(copied),
    "FSDP2": set_up(fsdp2_set_up),
    **{f"stage {stage}": our_set_up(stage) for stage in (1, 2, 3)},
}
FIT: dict[str, Maker] = {"plain": fit(), **{f"stage {stage}": fit(stage) for stage in (1, 2, 3)}}
KINDS = {"train": TRAINING, "evaluate": EVALUATION, "set up": SET_UP, "fit": FIT}


def environment(rank: int, world: int) -> None:
    """What DeepSpeed and Lightning's launchers look for."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
