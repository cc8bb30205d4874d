"""The ``.metadata`` of a folder, which torch.distributed.checkpoint pickles: read without running code, and checked."""

import pathlib
import pickle
from collections.abc import Mapping
from math import prod
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from typing_extensions import override

from lightning_zero.checkpoint.reading import is_inside

_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
}  # fmt: skip
_TRUST = "If you trust who wrote it, load with weights_only=False."


class _Unpickler(pickle.Unpickler):
    """Knows what torch.distributed.checkpoint writes, which is data, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()) or (module, name) == ("torch", "Size"):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name in ("Path", "PosixPath", "WindowsPath", "PurePath"):
            return pathlib.PurePath  # where it was written; of no use here
        raise pickle.UnpicklingError(f"its .metadata would run {module}.{name}, which no checkpoint needs. {_TRUST}")


def read_metadata(stream: IO[bytes], trusted: bool = False) -> Metadata:
    """Read and check. With ``trusted`` it may hold anything that can be pickled.

    Raises pickle.UnpicklingError for what would run code, ValueError for what cannot be right.
    """
    found = pickle.load(stream) if trusted else _Unpickler(stream).load()
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, Mapping):
        raise ValueError(f"its .metadata is wrong: it holds {type(found).__name__}")
    if not isinstance(found.storage_data, Mapping) or not isinstance(found.planner_data or {}, Mapping):
        raise ValueError("its .metadata is wrong: it does not say where the tensors are")
    for key, stored in found.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            _check_tensor(key, stored, found.storage_data)
        elif not isinstance(stored, BytesStorageMetadata):
            raise ValueError(f"its .metadata is wrong: {key!r} is {type(stored).__name__}")
        elif MetadataIndex(key) not in found.storage_data:
            raise ValueError(f"its .metadata is wrong: it does not say where {key!r} is")
    for index, info in found.storage_data.items():
        if not is_inside(info.relative_path):
            raise ValueError(
                f"its .metadata is wrong: {index.fqn!r} is said to be in {info.relative_path!r}, which is not inside the folder"
            )
        if not _are_counts((info.offset, info.length)):
            raise ValueError(
                f"its .metadata is wrong: {index.fqn!r} is said to take {info.length!r} bytes from {info.offset!r}"
            )
    for key, path in (found.planner_data or {}).items():
        if not isinstance(path, (tuple, list)) or not path or not all(isinstance(part, (str, int)) for part in path):
            raise ValueError(f"its .metadata is wrong: {key!r} is said to stand at {path!r}")
    return found


def _check_tensor(key: str, stored: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]) -> None:
    """Its boxes lie inside of it, make up all of it, and are in the files."""
    dtype = getattr(stored.properties, "dtype", None)
    if not isinstance(dtype, torch.dtype) or not _are_counts(stored.size):
        raise ValueError(f"its .metadata is wrong: {key!r} is said to have shape {stored.size!r} and dtype {dtype!r}")
    elements = 0
    for chunk in stored.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        fits = len(offsets) == len(sizes) == len(stored.size) and _are_counts((*offsets, *sizes))
        if not fits or any(start + size > end for start, size, end in zip(offsets, sizes, stored.size)):
            raise ValueError(
                f"its .metadata is wrong: {key!r} has shape {tuple(stored.size)}, and a box of {sizes} at {offsets} outside of it"
            )
        info = places.get(MetadataIndex(key, offsets))
        if info is None:
            raise ValueError(f"its .metadata is wrong: it does not say where {key!r} at {tuple(offsets)} is")
        if not info.transform_descriptors and info.length < prod(sizes) * dtype.itemsize:
            raise ValueError(
                f"its .metadata is wrong: a box of {key!r} has {prod(sizes)} elements of {dtype} in {info.length} bytes"
            )
        elements += prod(sizes)
    if elements != prod(stored.size):
        raise ValueError(
            f"its .metadata is wrong: {key!r} has shape {tuple(stored.size)}, but boxes of {elements} elements"
        )


def _are_counts(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(type(value) is int and value >= 0 for value in values)
