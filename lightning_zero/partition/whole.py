"""Whole tensors from shards, one unit at a time: for checkpoints and state dicts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm import Comm
from lightning_zero.partition.buffer import in_memory_order
from lightning_zero.partition.memory import BufferPool
from lightning_zero.partition.rest import WholePlaces, bytes_of
from lightning_zero.partition.shards import TensorShard
from lightning_zero.partition.unit import Unit


class WholeTensors:
    """Gathers what is shaped like the parameters: weights, master weights, optimizer state. All ranks call alike."""

    def __init__(self, units: list[Unit], comm: Comm, pool: BufferPool, places: WholePlaces) -> None:
        self._units = units
        self._comm = comm
        self._pool = pool
        self.copy = places.copy
        """Of what is gathered, for the user to keep."""

    def from_shards(self, unit: Unit, pieces: dict[int, Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Whole tensors, in slot order, from the ranks' 1-D pieces (by slot). They hold until the next call."""
        buffer = self._pool.take(unit.layout, dtype)
        own = unit.buffer.own_slice(buffer.flat)
        for index, piece in pieces.items():
            own[unit.in_shard(index).slice()].copy_(bytes_of(piece))
        self._comm.all_gather(buffer.flat, own, 2 * unit.index).wait()
        views = list(buffer.views)
        self._pool.give(unit.layout, buffer)
        return views

    def state_dict(self, state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
        """Replace the parameters in ``state`` by whole copies in host memory; without ``keep`` leave them as they are."""
        where = {id(p): (unit, i) for unit in self._units for i, p in enumerate(unit.tensors)}
        whole = dict(state)
        wanted: dict[int, list[tuple[str, int]]] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                if id(value) in where:
                    unit, index = where[id(value)]
                    wanted.setdefault(unit.index, []).append((key, index))
                else:
                    whole[key] = value.detach()
        for unit_index, keys in sorted(wanted.items()):
            tensors = self._of(self._units[unit_index], self._units[unit_index].face.shard)
            copies: dict[int, Tensor] = {}  # tied weights stay tied
            for key, i in keys if keep else ():
                copies[i] = copies[i] if i in copies else self.copy(tensors[i])
                whole[key] = copies[i]
        return whole

    def masters(self, keep: bool) -> dict[str, Tensor]:
        """Whole master weights, by name, that the module's state dict does not show; empty unless ``keep``."""
        whole: dict[str, Tensor] = {}
        for unit in self._units:
            if unit.hides_master:
                tensors = self._of(unit, unit.main)
                if keep:
                    whole.update((name, self.copy(tensor)) for name, tensor in zip(unit.names, tensors))
        return whole

    def load_masters(self, masters: Mapping[str, Tensor | TensorShard]) -> None:
        """Take over saved master weights, whole or sharded, wherever they round to the weights that the module has now."""
        for unit in self._units:
            for i, name in enumerate(unit.names):
                if unit.master is not None and name in masters:
                    local = unit.in_shard(i).slice()
                    value = masters[name]
                    if isinstance(value, TensorShard):
                        saved = bytes_of(value.data)
                    else:
                        flat = in_memory_order(value, unit.layout.slots[i].stride)
                        saved = flat[unit.in_tensor(i).slice()]
                    saved = saved.to(unit.master)
                    fits = saved.to(unit.dtype) == unit.buffer.shard[local].to(saved.device)
                    unit.master[local] = torch.where(fits, saved, unit.master[local])
            unit.put_away()

    def _of(self, unit: Unit, shard: Tensor) -> list[Tensor]:
        shard = bytes_of(shard)
        pieces = {i: shard[unit.in_shard(i).slice()] for i in range(len(unit.tensors))}
        return self.from_shards(unit, pieces, shard.dtype)
