"""From a folder of shards to one file, in one process that never holds more than one box of one tensor.

The file is laid out first, with room for every tensor, and then filled through a memory map.
"""

import json
import mmap
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options, skip_data

from lightning_zero.checkpoint.beside import Beside, describe, is_folder_checkpoint, os_error
from lightning_zero.checkpoint.folder import FolderCheckpoint, nested, weights_of
from lightning_zero.checkpoint.training import OWN_KEY, optimizers_of

SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def consolidate(
    folder: str | os.PathLike, file: str | os.PathLike, progress: Progress = lambda done, total: None
) -> None:
    """Write the checkpoint in ``folder`` to ``file``: a Lightning checkpoint, or only weights if it is ``.safetensors``.

    Raises ValueError if ``folder`` is no checkpoint, ``file`` exists, or has another ending than ``.ckpt``, ``.pt``,
    ``.pth`` and ``.safetensors``; OSError if it cannot be written.
    """
    layout = {".safetensors": _lay_out_safetensors}.get(os.path.splitext(file)[1], _lay_out_checkpoint)
    if os.path.splitext(file)[1] not in (".ckpt", ".pt", ".pth", ".safetensors"):
        raise ValueError(f"{os.fspath(file)!r} must end in .ckpt, .pt, .pth or .safetensors")
    if not is_folder_checkpoint(folder):
        raise ValueError(f"{os.fspath(folder)!r} is not a folder of shards: it has no .metadata")
    if os.path.lexists(file):
        raise ValueError(f"{os.fspath(file)!r} exists already: remove it, or choose another name")
    saved, beside = FolderCheckpoint(folder, alone=True), Beside(file, uuid.uuid4().hex)
    try:
        with beside.begin_file() as stream:
            targets = layout(saved, stream, beside.partial)
        _fill(saved, targets, progress)
        del targets
        beside.commit()
    except BaseException as error:
        cause, written = os_error(error), beside.written()
        beside.abandon()
        if cause is not None and os.fspath(folder) not in str(cause):
            raise describe(cause, file, written) from error
        raise


def _lay_out_checkpoint(saved: FolderCheckpoint, stream: Any, path: str) -> dict[str, Tensor]:
    """Write everything but the folder's tensors; these, by key, as a map of the file."""
    weights, optimizers = weights_of(saved), optimizers_of(saved)
    masters = saved.below(OWN_KEY, "masters")
    keys = [*weights.values(), *(key for one in optimizers for key in one.below.values()), *masters.values()]
    plain = saved.read({key: None for key in keys if saved.tensor(key) is None})
    holes: dict[Any, Tensor] = {}  # by place: tied weights stay tied
    key_of: dict[int, str] = {}

    def value(key: str) -> Any:
        like = saved.tensor(key)
        if like is None:
            return plain[key]
        hole = holes.setdefault(saved.place(key), torch.empty_like(like, device="cpu"))
        key_of[id(hole)] = key
        return hole

    checkpoint = saved.meta()
    checkpoint["state_dict"] = nested({path: value(key) for path, key in weights.items()})
    if optimizers:
        checkpoint["optimizer_states"] = [one.state_dict(value) for one in optimizers]
    if masters:
        checkpoint[OWN_KEY] = {"masters": {path[0]: value(key) for path, key in masters.items()}}
    with skip_data():
        torch.save(checkpoint, stream)
    stream.flush()
    _take_room(stream)
    with set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, mmap=True, weights_only=False)
    targets = {}
    for ours, theirs in zip(_tensors(checkpoint), _tensors(mapped), strict=True):
        if id(ours) in key_of:
            targets[key_of[id(ours)]] = theirs
        else:
            theirs.detach().copy_(ours.detach())
    return targets


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(child)


def _lay_out_safetensors(saved: FolderCheckpoint, stream: Any, path: str) -> dict[str, Tensor]:
    """The same for weights in the format of safetensors, whose every name has bytes of its own."""
    tensors: list[tuple[str, str, Tensor]] = []
    for (name, *rest), key in weights_of(saved).items():
        like = saved.tensor(key)
        if rest or like is None or like.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{name!r} is not a tensor that safetensors can hold: consolidate to a .ckpt file.")
        tensors.append((str(name), key, like))
    tensors.sort(key=lambda one: -one[2].itemsize)  # so that each starts at a multiple of its own
    header, start = {}, 0
    for name, _, like in tensors:
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[like.dtype], "shape": list(like.shape), "data_offsets": [start, start + like.nbytes]
        }  # fmt: skip
        start += like.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    stream.flush()
    stream.truncate(8 + len(text) + start)
    _take_room(stream)
    data = torch.from_file(path, shared=True, size=8 + len(text) + start, dtype=torch.uint8)[8 + len(text) :]
    return {
        key: data[slice(*header[name]["data_offsets"])].view(like.dtype).view(like.shape) for name, key, like in tensors
    }


def _take_room(stream: Any) -> None:
    """Take the disk space now: a map that finds the disk full kills the process."""
    if hasattr(os, "posix_fallocate"):
        size = os.fstat(stream.fileno()).st_size
        if size:
            os.posix_fallocate(stream.fileno(), 0, size)


def _fill(saved: FolderCheckpoint, targets: dict[str, Tensor], progress: Progress) -> None:
    total, done = sum(tensor.nbytes for tensor in targets.values()), 0
    progress(done, total)
    for batch in _batches(targets.items()):
        saved.read(dict(batch))
        done += sum(tensor.nbytes for _, tensor in batch)
        progress(done, total)


def _batches(items: Iterable[tuple[str, Tensor]], limit: int = 2**24) -> Iterable[list[tuple[str, Tensor]]]:
    """Small tensors together: opening a file for each takes longer than reading it."""
    batch: list[tuple[str, Tensor]] = []
    for item in items:
        batch.append(item)
        if sum(tensor.nbytes for _, tensor in batch) >= limit:
            yield batch
            batch = []
    if batch:
        yield batch
