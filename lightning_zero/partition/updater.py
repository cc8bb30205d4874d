"""What it takes to carry out updates of shards in an optimizer's place."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.partition.elementwise import probe
from lightning_zero.partition.rest import Rested, bytes_of
from lightning_zero.partition.unit import Unit
from lightning_zero.transfer import Link


@dataclass
class UpdateItem:
    """One parameter's shard with what its update needs; all tensors are 1-D of one length."""

    unit: Unit
    index: int
    start: int
    """Where it lies in the unit's main shard."""
    shard: nn.Parameter
    grad: Tensor
    """In the dtype of reduced gradients, which may be narrower than the shard's. It may rest elsewhere: all that do are
    the part of the unit's ``gradient_place`` from ``start`` on."""
    state: dict[str, Any]


@dataclass
class UpdateGroup:
    """One param group: settings as they are now, and its shards that have a gradient."""

    settings: dict[str, Any]
    items: list[UpdateItem]


class Updater(Protocol):
    """Who carries out updates in the optimizer's place, and publishes them."""

    link: Link | None
    """The way to the host memory where masters and state are; None where that is the device's own."""
    has_changed: bool
    """Whether the update under way, or the last one, has changed anything."""
    is_early: bool
    """Whether it wants to hear of gradients before the step (:meth:`run_early`)."""

    def prepare(self, optimizers: Iterable[Optimizer], locate: Callable[[Any], Any]) -> None:
        """Take the room for the state of ``optimizers``; ``locate`` is the engine's. Raises OSError if there is too little."""

    def run(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> Future | None:
        """Update the shards in ``groups``; a future where the update goes on beside the next step, to be published when
        that is over."""

    def run_early(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> None:
        """The gradients of one unit are there, and a step will follow, as far as one can tell."""

    def room(self, optimizer: Optimizer, unit: Unit, index: int, name: str, dtype: torch.dtype) -> Rested | None:
        """Where the state ``name`` of a unit's parameter rests; None for in memory."""

    def keep(self, optimizer: Optimizer, unit: Unit, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter's shard as it is kept: what is element-wise may rest elsewhere from now on."""

    def put_away(self) -> None:
        """Let the state that users have looked at rest again, with their changes."""

    def revoke(self) -> None:
        """Undo what has been updated early: somebody looks, or the step does not come."""

    def close(self) -> None: ...


def stand_in(optimizer: Optimizer, groups: list[UpdateGroup]) -> Optimizer:
    """An optimizer of the same class whose step updates the given shards with the given settings."""
    other = probe(optimizer, {}, [])
    for group in groups:
        for item in group.items:
            item.shard.grad = bytes_of(item.grad).to(item.shard.dtype)
    other.param_groups = [{**group.settings, "params": [item.shard for item in group.items]} for group in groups]
    other.state = defaultdict(dict, {item.shard: item.state for group in groups for item in group.items})
    return other
