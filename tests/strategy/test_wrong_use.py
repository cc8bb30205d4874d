"""More mistakes than those of modules and optimizers (test_bad_input.py): settings, order of calls, environment, files."""

import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import CPUAdam, MemoryMonitor, OffloadConfig, ZeroStrategy, estimate_memory, load_from_checkpoint
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.migration import ADVICE
from lightning_zero.ops import FusedCrossEntropyLoss
from lightning_zero.pretrained import load_pretrained
from tests.harness import make_trainer, run
from tests.parity import RandomData
from tests.strategy import test_bad_input
from tests.strategy.test_bad_input import WIDTH, Model

PARAMETERS = [nn.Parameter(torch.ones(2))]


class ForeignEnvironment:
    """What a plugin of the other package looks like."""


ForeignEnvironment.__module__ = "pytorch_lightning.plugins.environments"

# what is called -> the error
CALLS: dict[str, tuple[Callable[[], Any], type[BaseException], str]] = {
    "offload by name": (lambda: ZeroStrategy(offload="cpu"), TypeError, "offload must be True, False or an OffloadConfig"),  # type: ignore[arg-type]
    "optimizer on a gpu": (lambda: OffloadConfig(optimizer="gpu"), ValueError, "optimizer must be 'cpu' or 'nvme', got 'gpu'"),  # type: ignore[arg-type]
    "parameters on a disk": (lambda: OffloadConfig(parameters="disk"), ValueError, "parameters must be None, 'cpu' or 'nvme'"),  # type: ignore[arg-type]
    "files without a folder": (lambda: OffloadConfig(optimizer="nvme"), ValueError, "needs nvme_path, a folder on a local"),
    "a folder without files": (lambda: OffloadConfig(nvme_path="x"), ValueError, "nothing to put there: set optimizer='nvme'"),
    "no threads": (lambda: OffloadConfig(num_threads=0), ValueError, "num_threads must be an integer of at least 1, got 0"),
    "threads as text": (lambda: OffloadConfig(num_threads="4"), ValueError, "num_threads must be an integer of at least 1, got '4'"),  # type: ignore[arg-type]
    "early as a number": (lambda: OffloadConfig(early_update=1), TypeError, "early_update must be True or False, got 1"),  # type: ignore[arg-type]
    "a number for a folder": (lambda: OffloadConfig(optimizer="nvme", nvme_path=3), TypeError, "nvme_path must be the path of a folder, got 3"),  # type: ignore[arg-type]
    "a number for a picture": (lambda: MemoryMonitor(plot=3), TypeError, "must name a .png file, got 3"),  # type: ignore[arg-type]
    "a plan for no ranks": (lambda: ZeroStrategy.plan(nn.Linear(9, 9), 0), ValueError, "world_size must be an integer of at least 1, got 0"),
    "a plan for a text": (lambda: ZeroStrategy.plan("many", 2), ValueError, "'many' is not a number of parameters such as 7.5B"),
    "a module that is none": (lambda: load_from_checkpoint(nn.Linear, "x.ckpt"), TypeError, "makes a LightningModule of a class, got <class"),  # type: ignore[type-var]
    "early as text": (lambda: OffloadConfig(early_update="no"), TypeError, "early_update must be True or False, got 'no'"),  # type: ignore[arg-type]
    "pinned as text": (lambda: OffloadConfig(pin_memory="no"), TypeError, "pin_memory must be True or False, got 'no'"),  # type: ignore[arg-type]
    "early in files": (
        lambda: OffloadConfig(optimizer="nvme", nvme_path="x", early_update=True), ValueError, "Leave early_update out",
    ),
    "parameters away at stage 2": (
        lambda: ZeroStrategy(stage=2, offload=OffloadConfig(parameters="cpu")), ValueError, "needs stage=3, got stage=2",
    ),
    "delay without offload": (lambda: ZeroStrategy(delayed_update=True), ValueError, "delayed_update=True needs offload=True"),
    "delay from -1": (lambda: ZeroStrategy(offload=True, delayed_update=-1), ValueError, r"delayed_update must be .* got -1"),
    "delay as text": (lambda: ZeroStrategy(offload=True, delayed_update="soon"), ValueError, "delayed_update .* got 'soon'"),  # type: ignore[arg-type]
    "delay of files": (
        lambda: ZeroStrategy(offload=OffloadConfig(optimizer="nvme", nvme_path="x"), delayed_update=3), ValueError,
        r"delayed_update=3 does not go with OffloadConfig\(optimizer='nvme'\)",
    ),
    "activations as text": (lambda: ZeroStrategy(activation_offload="yes"), TypeError, "activation_offload must be True"),  # type: ignore[arg-type]
    "policy as a number": (lambda: ZeroStrategy(activation_checkpointing_policy=3), TypeError, "must hold module classes or names"),
    "backend": (lambda: ZeroStrategy(process_group_backend="nccl2"), ValueError, "process_group_backend must be one of .* 'nccl2'"),
    "groups of none": (lambda: ZeroStrategy(shard_group_size=0), ValueError, "shard_group_size must be .* got 0"),
    "parallel as text": (lambda: ZeroStrategy(model_parallel="two"), TypeError, "model_parallel must be a number of ranks"),
    "seconds for a limit": (lambda: ZeroStrategy(timeout=5), TypeError, r"timeout must be .* got 5: write timedelta"),  # type: ignore[arg-type]
    "a negative limit": (lambda: ZeroStrategy(timeout=timedelta(seconds=-1)), ValueError, "timeout must be positive"),
    "a limit of NaN": (lambda: ZeroStrategy(read_timeout=float("nan")), ValueError, "read_timeout must be positive seconds, got nan"),
    "a limit as text": (lambda: ZeroStrategy(read_timeout="1"), ValueError, "read_timeout must be positive seconds, got '1'"),  # type: ignore[arg-type]
    "storage as text": (lambda: ZeroStrategy(checkpoint_io="s3"), TypeError, "checkpoint_io must be a .*CheckpointIO, got 's3'"),  # type: ignore[arg-type]
    "cluster as text": (lambda: ZeroStrategy(cluster_environment="slurm"), TypeError, "cluster_environment must be a .*'slurm'"),  # type: ignore[arg-type]
    "another package's cluster": (
        lambda: ZeroStrategy(cluster_environment=ForeignEnvironment()), TypeError,  # type: ignore[arg-type]
        r"must be a lightning\..* of pytorch_lightning\.",
    ),
    "devices as a number": (lambda: ZeroStrategy(parallel_devices=2), TypeError, "parallel_devices must be a list, got 2"),  # type: ignore[arg-type]
    "a stage that is none": (lambda: pl.Trainer(strategy="zero_4"), ValueError, "invalid strategy name: `strategy='zero_4'`"),
    "a negative rate": (lambda: CPUAdam(PARAMETERS, lr=-1), ValueError, "lr must not be negative, got -1"),
    "betas of one": (lambda: CPUAdam(PARAMETERS, betas=(1, 2)), ValueError, r"betas must be in \[0, 1\), got \(1, 2\)"),
    "a negative eps": (lambda: CPUAdam(PARAMETERS, eps=-1), ValueError, "eps must not be negative"),
    "half parameters": (
        lambda: CPUAdam([nn.Parameter(torch.ones(2).half())]), TypeError, "needs torch.float32 parameters; parameter 0 is",
    ),
    "parameters of another device": (
        lambda: CPUAdam([nn.Parameter(torch.ones(2, device="meta"))]), ValueError, "dense CPU tensors; parameter 0 .* meta",
    ),
    "never": (lambda: MemoryMonitor(every_n_steps=0), ValueError, "every_n_steps must be an integer of at least 1"),
    "a drawing of another kind": (lambda: MemoryMonitor(plot="x.bmp"), ValueError, r"must name a .png file, got 'x.bmp'"),
    "stage 4": (lambda: estimate_memory(10, 2, 4), ValueError, r"stage must be 0 .* got 4"),  # type: ignore[arg-type]
    "no ranks": (lambda: estimate_memory(10, 0, 2), ValueError, "world_size must be an integer of at least 1"),
    "a precision that is none": (lambda: estimate_memory(10, 2, 2, precision="int4"), ValueError, "precision must be one of"),
    "a sum that is none": (lambda: FusedCrossEntropyLoss(reduction="max"), ValueError, "reduction must be one of"),
    "no weights there": (lambda: load_pretrained(nn.Linear(2, 2), "no.bin"), FileNotFoundError, "'no.bin' does not exist"),
    "weights of another kind": (lambda: load_pretrained(nn.Linear(2, 2), __file__), ValueError, "must end in .safetensors"),
    "weights too late": (
        lambda: load_pretrained(nn.Linear(2, 2, device="meta"), "x.bin"), RuntimeError, "call load_pretrained where it is built",
    ),
    "no folder of shards": (lambda: consolidate("tests", "x.ckpt"), ValueError, "'tests' is not a folder of shards"),
    "a file of another kind": (lambda: consolidate("tests", "x.bin"), ValueError, "must end in .ckpt, .pt, .pth or .safetens"),
    "saved before fit": (
        lambda: pl.Trainer(strategy=ZeroStrategy(), accelerator="cpu", logger=False, devices=1).save_checkpoint("x"),
        AttributeError, r"Did you call `Trainer.save_checkpoint\(\)` before calling `Trainer.\{fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call, kind, text = CALLS[name]
    with pytest.raises(kind, match=text):
        call()


class Late(Model):
    """Does at the first step what belongs elsewhere."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.act = act

    def on_train_batch_start(self, *args: Any) -> None:
        self.act(self)


def adds_layer(module: Any) -> None:
    module.extra = nn.Linear(WIDTH, WIDTH)


def names_unknown_kernels(module: Any) -> None:
    os.environ["LIGHTNING_ZERO_ISA"] = "sse9"


def is_no_folder(name: str) -> str:
    """Something that stands where a folder is to be made: root may write wherever there is one."""
    Path(name).touch()
    return name


def with_adam(module: Any) -> Any:
    module.optimizer = lambda: torch.optim.Adam(module.parameters())
    return module


# strategy, module, further settings of the Trainer -> the error; all in fit
RUNS: dict[str, tuple[Callable[[], tuple[dict[str, Any], Any, dict[str, Any]]], str]] = {
    "groups that do not divide": (lambda: ({"shard_group_size": 3}, Model(), {}), "shard_group_size=3 does not divide the 2 ranks"),
    "parallel groups that do not divide": (lambda: ({"model_parallel": 3}, Model(), {}), "model_parallel=3 does not divide the 2"),
    "a layer that comes late": (lambda: ({}, Late(adds_layer), {}), "'extra.weight' has been added.*Build it before"),
    "files where there is no folder": (
        lambda: (
            {"stage": 3, "offload": OffloadConfig(optimizer="nvme", nvme_path=is_no_folder("a file"))}, with_adam(Model()), {},
        ),
        "nvme_path|a file",
    ),
    "checkpoints where there is no folder": (
        lambda: ({}, Model(), {"callbacks": [ModelCheckpoint(is_no_folder("another"))], "enable_checkpointing": True}),
        "another",
    ),
    "unknown kernels": (
        lambda: (names_unknown_kernels(None), ({"offload": True}, with_adam(Model()), {}))[1],
        "LIGHTNING_ZERO_ISA='sse9' is not available here.*choose one of",
    ),
    "nowhere to go on from": (lambda: ({}, Model(), {"ckpt_path": "nowhere.ckpt"}), "nowhere.ckpt"),
}  # fmt: skip


def fit_all() -> dict[str, str]:
    found = {}
    for name, (make, _) in RUNS.items():
        try:
            settings, module, more = make()
            path = more.pop("ckpt_path", None)
            trainer = make_trainer(".", strategy=ZeroStrategy(**{"read_timeout": 2.0, **settings}), max_epochs=1, **more)
            trainer.fit(module, DataLoader(RandomData(8, WIDTH), batch_size=2), ckpt_path=path)
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        os.environ.pop("LIGHTNING_ZERO_ISA", None)
    return found


def test_runs() -> None:
    for found in run(2, fit_all):
        for name, message in found.items():
            assert re.search(f"(?s){RUNS[name][1]}", message), f"{name}: {message}"


def test_that_there_are_many() -> None:
    """At least 60 of our own, and an answer to every argument of another strategy."""
    options = next(m for m in test_bad_input.test_unknown_options.pytestmark if m.name == "parametrize").args[1]
    tables = (CALLS, RUNS, options, test_bad_input.BAD_MODULES, test_bad_input.BAD_OPTIMIZERS)
    assert sum(map(len, tables)) >= 60
    assert len(ADVICE) >= 40
