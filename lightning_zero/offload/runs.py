"""What an Adam step on the host is made of: runs of shards that lie side by side, by unit."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_zero.offload.cpu_adam import CPUAdam, options_of
from lightning_zero.offload.threads import Threads
from lightning_zero.ops import AdamOptions, adam_step_
from lightning_zero.partition.rest import resting
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.updater import UpdateGroup, UpdateItem

STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

Part = tuple[dict[str, Any], list[UpdateItem]]
"""Settings of a param group, and its items in one unit."""


class AdamRun:
    """Shards that one kernel call updates, or several, each for some of their elements."""

    def __init__(self, items: list[UpdateItem], settings: dict[str, Any]) -> None:
        first, last = items[0], items[-1]
        self.items = items
        self.start, self.stop = first.start, last.start + last.shard.numel()
        """Elements of the unit's shard; there may be padding among them."""
        self.amsgrad = bool(settings.get("amsgrad", False))
        self.names = states_of(settings)
        for item in items:
            if not item.state:
                item.state["step"] = torch.zeros((), dtype=torch.float32)
        self.steps: list[Tensor] = [item.state["step"] for item in items]
        self._options: AdamOptions = options_of(settings)
        self._grad: Tensor | None = None
        """Of all elements; None if it rests where the unit's gradients do."""
        if resting(first.grad) is None:
            self._grad = first.grad if len(items) == 1 else range_of(first.grad, self.stop - self.start)

    @property
    def grad_rests(self) -> bool:
        return self._grad is None

    def step(
        self, start: int, stop: int, main: Tensor, states: list[Tensor], copy: Tensor | None, threads: Threads,
        fetched: Tensor | None = None, undo: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Update the elements ``[start, stop)`` of the unit's shard, which are what the tensors hold; ``fetched`` is their
        gradient, if that rests elsewhere. ``undo``, one row for each tensor that is written, gets the old values."""
        grad = fetched if self._grad is None else self._grad[start - self.start : stop - self.start]
        if grad is None:
            raise AssertionError("an update whose gradient was not fetched")
        with threads.bound():
            adam_step_(
                main,
                grad,
                states[0],
                states[1],
                self._options,
                step=int(self.steps[0]) + 1,
                max_exp_avg_sq=states[2] if self.amsgrad else None,
                param_copy=copy,
                undo=undo,
                num_threads=threads.count,
            )

    def count(self, updates: int = 1) -> None:
        """All elements are updated; by -1, back to what they were."""
        for step in self.steps:
            step += updates


def states_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """The names of the element-wise state that Adam keeps in a param group of these settings."""
    return STATES[: 3 if settings.get("amsgrad", False) else 2]


def by_unit(groups: list[UpdateGroup]) -> list[tuple[Unit, list[Part]]]:
    """The same items by unit, in the order of units, which is that of the next forward."""
    parts: dict[int, tuple[Unit, list[Part]]] = {}
    for group in groups:
        for item in group.items:
            _, of_unit = parts.setdefault(item.unit.index, (item.unit, []))
            if not of_unit or of_unit[-1][0] is not group.settings:
                of_unit.append((group.settings, []))
            of_unit[-1][1].append(item)
    return [parts[index] for index in sorted(parts)]


def is_adam(optimizer: Optimizer) -> bool:
    """Whether the kernel knows what its step does."""
    return type(optimizer) in (Adam, AdamW, CPUAdam)


def has_kernel(optimizer: Optimizer, groups: list[UpdateGroup]) -> bool:
    if not is_adam(optimizer):
        return False
    return not any(
        group.settings.get("capturable") or group.settings.get("differentiable") for group in groups
    ) and all(item.shard.dtype == torch.float32 and item.shard.device.type == "cpu" for g in groups for item in g.items)


def runs_of(items: list[UpdateItem]) -> Iterator[list[UpdateItem]]:
    """Neighbours in one unit that are at the same step, as far as their memory goes on in the same way."""
    run: list[UpdateItem] = []
    for item in items:
        if run and not _follows(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _follows(before: UpdateItem, item: UpdateItem) -> bool:
    gap = item.start - before.start
    return (
        item.unit is before.unit
        and gap > 0
        and item.index == before.index + 1
        and item.state.get("step", 0) == before.state.get("step", 0)
        and bool(item.state) == bool(before.state)
        and _gradients_follow(before.grad, item.grad, gap)
    )


def _gradients_follow(before: Tensor, grad: Tensor, gap: int) -> bool:
    rest = resting(before) is not None, resting(grad) is not None
    return rest == (True, True) or (not any(rest) and distance(before, grad) == gap)


def distance(a: Tensor, b: Tensor) -> int | None:
    """Elements between the starts of two 1-D views of one storage."""
    if a.dtype != b.dtype or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return None
    return int(b.storage_offset()) - int(a.storage_offset())


def range_of(first: Tensor, numel: int) -> Tensor:
    return first.as_strided((numel,), (1,))
