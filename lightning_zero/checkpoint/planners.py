"""What torch.distributed.checkpoint writes and reads: shards as boxes of logical tensors."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import override

from lightning_zero.checkpoint.boxes import Box, boxes_of
from lightning_zero.partition.rest import Rested, bytes_of, resting
from lightning_zero.partition.shards import TensorShard

Path = tuple[str | int, ...]
"""Where a value stands in nested state."""


class ShardSavePlanner(DefaultSavePlanner):
    """Writes nested state whose tensors may be shards; what is not a shard is written by the first rank that has it.

    ``aliases`` are further names, the values of ``{"alias": "name"}``, under which the same bytes are found. Tied weights
    become aliases, and ``also`` is a second name for what stands under ``first`` at the first level.
    """

    def __init__(self, first: str, also: str) -> None:
        super().__init__(flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self.aliases: dict[str, str] = {}
        self._first, self._also = first, also
        self._boxes: dict[MetadataIndex, tuple[TensorShard, Box]] = {}
        self._lent: torch.UntypedStorage | None = None

    @override
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator
        self.state_dict, self.mappings = {}, {}
        seen: dict[Any, str] = {}
        for path, value in _leaves(state_dict):
            key = _key(path)
            self.mappings[key] = path
            name = key
            if path[0] == self._first:
                name = seen.setdefault(_identity(value), key)
                alias = (self._also, *path[1:])
                self.mappings[_key(alias)] = alias
                self.aliases[_key(alias)] = name
            if name == key:
                self.state_dict[key] = value
            else:
                self.aliases[key] = name

    @override
    def create_local_plan(self) -> SavePlan:
        rest = {key: value for key, value in self.state_dict.items() if not isinstance(value, TensorShard)}
        items = create_default_local_save_plan(rest, self.is_coordinator).items
        for key, value in self.state_dict.items():
            if isinstance(value, TensorShard):
                for box in boxes_of(value):
                    item = _write_item(key, value, _chunk(box.offsets, box.sizes))
                    items.append(item)
                    self._boxes[item.index] = value, box
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.index not in self._boxes:
            return super().resolve_data(write_item)
        shard, box = self._boxes[write_item.index]
        # Not before it is written: what rests elsewhere is in memory only as long as that takes.
        elements = bytes_of(shard.data)[box.elements.slice()]
        if not rests(shard):
            return box.view_of(_in_own_storage(elements))
        # What is written is kept until the file is complete. The writer asks for one after the other (see its set-up).
        if self._lent is not None:
            self._lent.resize_(0)
        elements = elements.clone()
        self._lent = elements.untyped_storage()
        return box.view_of(elements)


class IntoLoadPlanner(LoadPlanner):
    """Reads into ``targets``: by key in the folder a tensor of the saved shape, a shard, or None for a plain value.

    Plain values are then found in ``values``.
    """

    def __init__(self, targets: Mapping[str, Tensor | TensorShard | None], weights_only: bool = True) -> None:
        self._targets = targets
        self._weights_only = weights_only
        self._boxes: dict[tuple[str, tuple[int, ...]], Box] = {}
        self.values: dict[str, Any] = {}

    @override
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        if metadata is None:
            raise AssertionError("the folder's metadata has not been read")
        self._metadata = metadata

    @override
    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, target in self._targets.items():
            stored = self._metadata.state_dict_metadata[key]
            if not isinstance(stored, TensorStorageMetadata):
                nowhere = torch.Size((0,))
                index = MetadataIndex(key)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere))
                continue
            chunks = []
            if isinstance(target, TensorShard):
                for box in boxes_of(target):
                    chunks.append(_chunk(box.offsets, box.sizes))
                    self._boxes[key, box.offsets] = box
            elif target is not None:
                chunks.append(_chunk((0,) * target.dim(), tuple(target.shape)))
            items += create_read_items_for_chunk_list(key, stored, chunks)
        return LoadPlan(items)

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [replace(plan) for plan in global_plan]

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        target = self._targets[index.fqn]
        if isinstance(target, TensorShard):
            data = target.data.bring() if isinstance(target.data, Rested) else target.data
            box = self._boxes[index.fqn, tuple(index.offset or ())]
            view = box.view_of(data[box.elements.slice()])
        elif target is not None:
            view = target.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The tensor was filled in place; one that rests elsewhere goes there."""
        target = self._targets[read_item.dest_index.fqn]
        if isinstance(target, TensorShard) and isinstance(target.data, Rested):
            target.data.put_away()


def rests(value: Any) -> bool:
    """Whether it is a shard that has to be fetched."""
    return isinstance(value, TensorShard) and (isinstance(value.data, Rested) or resting(value.data) is not None)


def any_rests(state: Mapping[str, Any]) -> bool:
    return any(rests(value) for _, value in _leaves(state))


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What becomes an entry of the folder, as torch.distributed.checkpoint's own flattening has it."""
    if isinstance(value, Mapping) and value and len(path) < 4:
        for key, child in value.items():
            yield from _leaves(child, (*path, str(key)))
    elif isinstance(value, list) and value and all(isinstance(child, Mapping) for child in value):
        for index, child in enumerate(value):
            yield from _leaves(child, (*path, index))
    else:
        yield path, value


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _identity(value: Any) -> Any:
    """Equal for tied weights."""
    if isinstance(value, Tensor) and value.numel():
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return id(value)


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _write_item(key: str, shard: TensorShard, chunk: ChunkStorageMetadata) -> WriteItem:
    data = TensorWriteData(chunk, TensorProperties(dtype=shard.data.dtype), torch.Size(shard.shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _in_own_storage(elements: Tensor) -> Tensor:
    """The same memory as a storage of its own. What shares a storage with more is copied before it is written, and the
    copies are kept until the file is complete."""
    if elements.device.type != "cpu":
        return elements
    return torch.from_numpy(elements.view(torch.uint8).numpy()).view(elements.dtype)
