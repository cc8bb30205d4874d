"""What one rank owns of logical tensors: it can be written to, and filled from, a checkpoint without the other ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.partition.buffer import in_memory_order
from lightning_zero.partition.layout import Range, Slot
from lightning_zero.partition.rest import Rested, RestingTensor, part_of
from lightning_zero.partition.unit import Unit


@dataclass(frozen=True)
class TensorShard:
    """The elements ``range`` of a logical tensor, counted in the memory order of the dense ``stride``."""

    data: Tensor | Rested
    """1-D, ``range.numel`` elements; :func:`~lightning_zero.partition.rest.bytes_of` has them where they rest."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    range: Range


class LocalShards:
    """This rank's shards of what is shaped like the parameters: weights, master weights, optimizer state."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def state_dict(self, state: Mapping[str, Any], closed: bool) -> dict[str, Any]:
        """Replace the parameters in ``state`` by this rank's shards; once ``closed`` their bytes are the user's."""
        where = {id(p): (unit, i) for unit in self._units for i, p in enumerate(unit.tensors)}
        sharded: dict[str, Any] = {}
        made: dict[int, TensorShard] = {}  # tied weights stay tied
        for key, value in state.items():
            if id(value) in where:
                if id(value) not in made:
                    unit, index = where[id(value)]
                    slot, whole = unit.layout.slots[index], unit.in_tensor(index)
                    data = (
                        in_memory_order(value.detach(), slot.stride)[whole.slice()]
                        if closed
                        else part_of(unit.face.shard, unit.in_shard(index).slice())
                    )
                    made[id(value)] = _shard(data, slot, whole)
                sharded[key] = made[id(value)]
            else:
                sharded[key] = value.detach() if isinstance(value, Tensor) else value
        return sharded

    def masters(self) -> dict[str, TensorShard]:
        """Shards of the master weights, by name, that the module's state dict does not show."""
        return {
            name: _shard(
                part_of(unit.master, unit.in_shard(i).slice()),  # type: ignore[arg-type]
                unit.layout.slots[i],
                unit.in_tensor(i),
            )
            for unit in self._units
            if unit.hides_master
            for i, name in enumerate(unit.names)
        }

    def like(self, unit: Unit, index: int, data: Tensor | Rested) -> TensorShard:
        """Elements that belong to this rank's part of a parameter, such as optimizer state."""
        return _shard(data, unit.layout.slots[index], unit.in_tensor(index))

    def empty_like(self, unit: Unit, index: int, dtype: torch.dtype) -> TensorShard:
        """Room for elements that belong to this rank's part of a parameter."""
        numel = unit.in_tensor(index).numel
        return self.like(unit, index, torch.empty(numel, dtype=dtype, device=unit.main.device))

    def room_for_masters(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, TensorShard]:
        """Room for the master weights among the named parameters."""
        return {
            name: self.empty_like(unit, i, dtypes[name])
            for unit in self._units
            if unit.master is not None
            for i, name in enumerate(unit.names)
            if name in dtypes
        }


def _shard(data: Tensor | Rested, slot: Slot, whole: Range) -> TensorShard:
    if not isinstance(data, (Rested, RestingTensor)):
        data = data.detach()
    return TensorShard(data, slot.shape, slot.stride, whole)
