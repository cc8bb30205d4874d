"""offload=True: the step runs on the host with the same numbers; delayed_update: one step late, to the bit."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import CPUAdam, OffloadConfig, ZeroStrategy
from lightning_zero.offload.threads import usable_cores
from tests.harness import make_trainer, run
from tests.parity import STAGES, Outcome, RandomData, assert_same, trained

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "cpu_adam": lambda p: CPUAdam(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


class Net(pl.LightningModule):
    """Two param groups of different rates, a per-step schedule, a layer that is used on even batches only."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.first, self.second, self.third = nn.Linear(6, 9), nn.Linear(9, 5), nn.Linear(5, 5)
        self.sometimes = nn.Linear(9, 9)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.tanh(self.first(batch))
        if batch_idx % 2 == 0:
            x = x + self.sometimes(x)
        return self.third(torch.tanh(self.second(x))).pow(2).mean()

    def configure_optimizers(self) -> Any:
        others = [*self.second.parameters(), *self.third.parameters(), *self.sometimes.parameters()]
        groups = [{"params": list(self.first.parameters())}, {"params": others, "lr": 5e-3}]
        optimizer = OPTIMIZERS[self.optimizer_name](groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def with_offload(factory: Any, kwargs: dict[str, Any]) -> dict[int, Outcome]:
    reference = trained(factory, 0, **kwargs)
    return {0: reference, **{s: trained(factory, s, strategy_kwargs={"offload": True}, **kwargs) for s in STAGES}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_offload_equals_ddp(optimizer: str) -> None:
    kwargs = {"data": (24, 6)}
    results = run(2, with_offload, partial(Net, optimizer), kwargs)
    # The kernel has the bits of the vector body of torch's fused Adam; its scalar tail and the unfused ones round apart.
    assert_same(results, exact=optimizer not in ("adam", "adamw", "adamw_fused"))


@pytest.mark.parametrize("extra", [{"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}])
def test_offload_with_accumulation_and_clipping(extra: dict[str, Any]) -> None:
    assert_same(run(2, with_offload, partial(Net, "sgd"), {"data": (24, 6), **extra}), exact=False)


@pytest.mark.parametrize("flag", ["bf16-mixed", "bf16-true", "16-true"])
def test_offload_changes_nothing_in_16_bit(flag: str) -> None:
    """The kernel writes masters and 16-bit weights in one pass; without offload torch's fused step and a copy do."""
    for results in run(2, with_and_without, flag):
        for plain, offloaded in results:
            assert plain.keys() == offloaded.keys()
            assert all(torch.equal(plain[name], offloaded[name]) for name in plain)


def with_and_without(flag: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    kwargs: dict[str, Any] = {"data": (24, 6), "precision": flag}
    return [
        tuple(
            trained(partial(Net, "adamw_fused"), s, strategy_kwargs={"offload": offload}, **kwargs).weights
            for offload in (False, True)
        )
        for s in STAGES
    ]


class Late(Net):
    """The reference written by hand: each step applies the gradients of the step before, with that step's rates."""

    def __init__(self, optimizer: str, first: int) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.first_delayed = first
        self.held: list[tuple[list[Tensor | None], list[float]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        now = ([p.grad for p in self.parameters()], [group["lr"] for group in optimizer.param_groups])
        if batch_idx >= self.first_delayed:
            if self.held:
                self.apply_gradients(*self.held.pop())
            self.held.append(now)
        else:
            self.apply_gradients(*now)
        self.lr_schedulers().step()
        return loss

    def on_train_epoch_end(self) -> None:
        while self.held:
            self.apply_gradients(*self.held.pop())

    def apply_gradients(self, gradients: list[Tensor | None], rates: list[float]) -> None:
        optimizer = self.trainer.optimizers[0]
        before = [group["lr"] for group in optimizer.param_groups]
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate


def delayed(optimizer: str, first: int, kwargs: dict[str, Any]) -> dict[int, Outcome]:
    strategy = {"offload": True, "delayed_update": first}
    clip = {"gradient_clip_val": 0.05}
    return {
        0: trained(partial(Late, optimizer, first), 0, **kwargs),
        **{s: trained(partial(Net, optimizer), s, strategy_kwargs=strategy, **clip, **kwargs) for s in STAGES},
    }


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd"])
def test_delayed_update_is_one_step_late(optimizer: str, first: int) -> None:
    results = run(2, delayed, optimizer, first, {"data": (32, 6)})
    assert_same(results, exact=False)


def test_the_first_steps_are_not_delayed() -> None:
    """With more warm-up than steps nothing is late."""
    for results in run(2, warm_up_only):
        for plain, delayed in results:
            assert all(torch.equal(plain[name], delayed[name]) for name in plain)


def warm_up_only() -> list[tuple[dict[str, Tensor], ...]]:
    variants = ({"offload": True}, {"offload": True, "delayed_update": True})
    return [tuple(trained(Net, s, data=(24, 6), strategy_kwargs=v).weights for v in variants) for s in STAGES]


class Watcher(pl.Callback):
    """Reads a weight at the ends of epochs, where a pending update must have been finished."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen.append(module.first.weight.double().sum().item())


def drained(stage: int, path: str | None) -> tuple[list[float], dict[str, Tensor]]:
    def fit(epochs: int, resume: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        module, watcher = Net("adamw_fused"), Watcher()
        trainer = make_trainer(
            ".",
            strategy=ZeroStrategy(stage=stage, unit_size_mb=1e-3, offload=True, delayed_update=2),
            max_epochs=epochs,
            callbacks=[watcher, pl.callbacks.ModelCheckpoint(dirpath="saved", save_last=True)],
            enable_checkpointing=True,
        )
        trainer.fit(module, DataLoader(RandomData(16, 6), batch_size=2), ckpt_path=resume)
        return watcher.seen, {k: v.clone() for k, v in module.state_dict().items()}

    seen, unbroken = fit(2)
    fit(1)
    _, resumed = fit(2, "saved/last.ckpt")
    equal = all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    return seen, {"equal": equal, "last": unbroken["first.weight"].double().sum().item()}


@pytest.mark.parametrize("stage", STAGES)
def test_pending_updates_are_finished_before_anybody_looks(stage: int) -> None:
    """What a callback reads at the end of the last epoch is what training ends with; resuming from a checkpoint equals
    the unbroken run to the bit."""
    for seen, facts in run(2, drained, stage, None):
        assert seen[-1] == facts["last"]
        assert facts["equal"]


class WithEmpty(Net):
    def __init__(self) -> None:
        super().__init__("adamw_fused")
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.empty.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def test_a_parameter_without_elements() -> None:
    assert_same(run(2, with_offload, WithEmpty, {"data": (12, 6)}), exact=False)


def threads_after(stage: int) -> list[str]:
    trained(Net, stage, data=(24, 6), strategy_kwargs={"offload": True, "delayed_update": 1})
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_zero")]


def test_no_thread_outlives_fit() -> None:
    for stage in STAGES:
        assert run(2, threads_after, stage) == [[], []]


@pytest.mark.parametrize("offload", ["yes", "cpu", {"num_threads": 1}, 1.0])
def test_offload_of_another_kind_is_refused(offload: Any) -> None:
    with pytest.raises(TypeError, match="offload must be True, False or an OffloadConfig"):
        ZeroStrategy(offload=offload)


@pytest.mark.parametrize("backend", ["glooo", "cpu:gloo,cuda:ncl"])
def test_unknown_backends_are_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="process_group_backend must be one of"):
        ZeroStrategy(process_group_backend=backend)


def test_known_backends_are_taken() -> None:
    for backend in ("gloo", "nccl", "cpu:gloo,cuda:nccl"):
        assert ZeroStrategy(process_group_backend=backend).process_group_backend == backend


def test_delayed_update_without_offload_is_refused() -> None:
    with pytest.raises(ValueError, match="needs offload=True"):
        ZeroStrategy(delayed_update=True)


def affinity_of(task: str) -> str:
    status = Path(f"/proc/self/task/{task}/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))


def listed_cores(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


class LooksAtThreads(Net):
    """Notes the cores of this process' threads while one of its updates is under way."""

    cores: dict[str, str]

    def on_train_batch_end(self, *args: Any) -> None:
        self.cores = {thread.name: affinity_of(str(thread.native_id)) for thread in threading.enumerate()}
        self.cores["child"] = subprocess.run(
            [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"], capture_output=True, text=True, check=True
        ).stdout.strip()


def cores_in_use(bind: bool) -> tuple[str, str, str]:
    """Of this process, and of the update's thread; and how many a process gets that is started in training."""
    before = affinity_of(str(threading.get_native_id()))
    torch.manual_seed(0)
    module = LooksAtThreads()
    strategy = ZeroStrategy(stage=2, offload=OffloadConfig(bind_threads=bind), delayed_update=1)
    trainer = make_trainer(".", strategy=strategy, max_epochs=1)
    trainer.fit(module, DataLoader(RandomData(16, 6), batch_size=2))
    updates = module.cores["lightning_zero-update"]
    if {module.cores["MainThread"], affinity_of(str(threading.get_native_id()))} != {before}:
        raise AssertionError("the main thread is still bound")
    return before, updates, module.cores["child"]


@pytest.mark.skipif(len(usable_cores()) < 2, reason="two ranks need two cores to have one each")
def test_steps_are_bound_to_cores_of_their_own() -> None:
    """As the system has it. The main thread is as free as before, and so are processes that it starts."""
    (before, first, child), (_, second, _) = run(2, cores_in_use, True)
    half = len(usable_cores()) // 2
    listed = [set(listed_cores(text)) for text in (before, first, second)]
    assert listed[1] | listed[2] == listed[0] == usable_cores()
    assert not listed[1] & listed[2]
    assert len(listed[1]) == half
    assert int(child) == len(usable_cores())
    assert {updates for _, updates, _ in run(2, cores_in_use, False)} == {before}
