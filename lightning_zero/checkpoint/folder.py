"""A folder of shards, as Lightning's FSDPStrategy and ModelParallelStrategy write and read it.

``meta.pt`` holds what plain Lightning keeps in a checkpoint, except weights and optimizer state. Those are tensors of
torch.distributed.checkpoint under their logical names and shapes: ``model.<name>`` (and the same bytes once more as
``state_dict.<name>``: the two strategies differ in this), ``optimizer_<i>.state.<name>.<entry>``,
``optimizer_<i>.param_groups...``, and what plain Lightning has no place for under ``lightning_zero``.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_zero.checkpoint.beside import METADATA_FILE, Beside, describe, is_folder_checkpoint, os_error, standing
from lightning_zero.checkpoint.metadata import read_metadata
from lightning_zero.checkpoint.planners import IntoLoadPlanner, Path, ShardSavePlanner, any_rests
from lightning_zero.checkpoint.reading import check_outline, reading
from lightning_zero.partition.shards import TensorShard

META_FILE = "meta.pt"
WEIGHTS = ("model", "state_dict")
"""Under which of these names weights are found; written under both."""




def save_folder(
    state: Mapping[str, Any], meta: Mapping[str, Any], path: str | os.PathLike, token: str, group: Any = None
) -> None:
    """Write the ranks' shards in ``state`` and rank 0's ``meta`` to a folder that then takes the place of ``path``.

    ``state`` is nested, its first level are the folder's names; weights are under ``model``. All ranks call it, with the
    same ``token``; all raise OSError if one of them cannot write.
    """
    beside = Beside(path, token)
    planner = ShardSavePlanner(*WEIGHTS)
    # Where something is fetched to be written, one tensor after the other; else torch copies a few ahead from a device.
    ahead = {"per_thread_copy_ahead": 0} if any_rests(state) else {}
    writer = (_LocalWriter if beside.is_local else _RemoteWriter)(path, beside, meta, planner, **ahead)
    try:
        with _quiet():
            dcp.save(dict(state), storage_writer=writer, planner=planner, process_group=group)
    except BaseException as error:
        writer.abandon()
        raise _cause(error, f"The checkpoint {os.fspath(path)!r} could not be written") from error


class FolderCheckpoint:
    """A folder to read from, written by this package or by Lightning.

    All ranks of ``group`` (None: all there are) read it together, and all raise if one of them cannot; or one process reads
    it ``alone``.
    """

    def __init__(
        self, path: str | os.PathLike, weights_only: bool | None = None, alone: bool = False, group: Any = None
    ) -> None:
        self.path = standing(path)
        self._alone, self._group = alone, group
        self._weights_only = weights_only is not False
        with reading(self.path), self._open(METADATA_FILE) as stream:
            self._metadata = read_metadata(stream, trusted=not self._weights_only)
            if alone or not (dist.is_available() and dist.is_initialized()):  # of several, each may see its own files only
                self._check_sizes()
        stored, named = self._metadata.state_dict_metadata, self._metadata.planner_data or {}
        # In the order of the state that was saved, as far as it is known.
        self._paths: dict[Path, str] = {tuple(path): key for key, path in named.items() if key in stored}
        self._paths.update({(key,): key for key in stored if key not in named})

    def meta(self) -> dict[str, Any]:
        """What is neither weights nor optimizer state."""
        try:
            stream = self._open(META_FILE)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{os.fspath(self.path)!r} has no {META_FILE}: it is a folder of torch.distributed.checkpoint, but not one"
                " of Lightning's checkpoints."
            ) from error
        with reading(os.path.join(self.path, META_FILE)), stream:
            meta = torch.load(stream, map_location="cpu", weights_only=self._weights_only)
            check_outline(meta)
            return meta

    def below(self, *path: str | int) -> dict[Path, str]:
        """The keys of what stands below ``path``, by the rest of their own."""
        return {own[len(path) :]: key for own, key in self._paths.items() if own[: len(path)] == path}

    def tensor(self, key: str) -> Tensor | None:
        """A tensor of the saved shape and dtype, without memory; None for what is not a tensor."""
        stored = self._metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        return torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")

    def place(self, key: str) -> Any:
        """Equal for keys of the same bytes."""
        stored = self._metadata.state_dict_metadata[key]
        chunks = stored.chunks[:1] if isinstance(stored, TensorStorageMetadata) else []
        index = MetadataIndex(key, chunks[0].offsets) if chunks else MetadataIndex(key)
        info = self._metadata.storage_data.get(index)
        return key if info is None else (info.relative_path, info.offset, info.length)

    def read(self, targets: Mapping[str, Tensor | TensorShard | None], alone: bool = False) -> dict[str, Any]:
        """Fill the tensors and shards in ``targets``; the plain values among them are returned. ``alone``: the other ranks
        do not."""
        planner, reader = IntoLoadPlanner(targets, self._weights_only), self._reader()
        if self._alone or alone:
            with reading(self.path):
                planner.set_up_planner({}, self._metadata, True)
                reader.set_up_storage_reader(self._metadata, True)
                reader.read_data(planner.create_local_plan(), planner).wait()
            return planner.values
        try:
            with _quiet():
                dcp.load({}, storage_reader=reader, planner=planner, process_group=self._group)
        except BaseException as error:
            raise _cause(error, f"The checkpoint {os.fspath(self.path)!r} could not be read") from error
        return planner.values

    def _check_sizes(self) -> None:
        """Raise unless the files are as long as ``.metadata`` says."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        fs, place = url_to_fs(os.fspath(self.path))
        for name, end in ends.items():
            if not fs.exists(os.path.join(place, name)):
                raise FileNotFoundError(f"The checkpoint {os.fspath(self.path)!r} is not whole: its file {name!r} is missing.")
            if (size := fs.size(os.path.join(place, name))) < end:
                raise ValueError(f"{name!r} has {size} bytes, of {end} that are read according to .metadata")

    def _open(self, name: str) -> IO[bytes]:
        fs, place = url_to_fs(os.fspath(self.path))
        return fs.open(os.path.join(place, name), "rb")

    def _reader(self) -> "_LocalReader | _RemoteReader":
        fs, place = url_to_fs(os.fspath(self.path))
        reader = _LocalReader(place) if isinstance(fs, LocalFileSystem) else _RemoteReader(self.path)
        reader.checked = self._metadata
        return reader


def weights_of(folder: FolderCheckpoint) -> dict[Path, str]:
    """The keys of the weights, by their names."""
    return next((found for name in WEIGHTS if (found := folder.below(name))), {})


def is_folder(path: str | os.PathLike) -> bool:
    """Whether a checkpoint folder is to be read for ``path``."""
    return is_folder_checkpoint(standing(path))


def nested(flat: Mapping[Path, Any]) -> Any:
    """Undo the flattening of nested dicts and lists."""
    if () in flat:
        return flat[()]
    children: dict[str | int, dict[Path, Any]] = {}
    for path, value in flat.items():
        children.setdefault(path[0], {})[path[1:]] = value
    made = {key: nested(child) for key, child in children.items()}
    return [made[i] for i in sorted(made)] if all(isinstance(key, int) for key in made) and made else made


class _Committing(FileSystemWriter):
    """Writes beside the destination and puts the folder in its place; the first rank does, when all have written."""

    def __init__(
        self, path: str | os.PathLike, beside: Beside, meta: Mapping[str, Any], planner: ShardSavePlanner, **kwargs: Any
    ) -> None:
        super().__init__(beside.url, **kwargs)
        self._destination = path
        self._beside = beside
        self._meta = meta
        self._planner = planner
        self._is_first = False

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_first = is_coordinator
        with self._describing():
            if is_coordinator:
                self._beside.begin_folder()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    @override
    def write_data(self, plan: Any, planner: Any) -> "Future[list[WriteResult]]":
        with self._describing():
            return super().write_data(plan, planner)

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._describing():
            with self._beside.fs.open(os.path.join(self._beside.partial, META_FILE), "wb") as stream:
                torch.save(dict(self._meta), stream)
                if self._beside.is_local:
                    stream.flush()
                    os.fsync(stream.fileno())
            super().finish(metadata, [*results, self._second_names(metadata, results)])
            self._beside.commit()

    def abandon(self) -> None:
        if self._is_first:
            self._beside.abandon()

    def _second_names(self, metadata: Metadata, results: list[list[WriteResult]]) -> list[WriteResult]:
        """Let further names stand for bytes that are written already."""
        written: dict[str, list[WriteResult]] = {}
        for result in (one for rank in results for one in rank):
            written.setdefault(result.index.fqn, []).append(result)
        again = []
        for alias, key in self._planner.aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            for result in written.get(key, []):
                again.append(replace(result, index=replace(result.index, fqn=alias)))
        return again

    @contextmanager
    def _describing(self) -> Iterator[None]:
        """Say which file could not be written, on the rank that could not."""
        try:
            yield
        except Exception as error:
            cause = os_error(error)
            if cause is None:
                raise
            raise describe(cause, self._destination, self._beside.written()) from error


class _LocalWriter(_Committing):
    pass


class _RemoteWriter(_Committing, FsspecWriter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, sync_files=False, **kwargs)


class _ReadsOnce(FileSystemReader):
    """Reads what several boxes need of a saved one only once, and in the order of the file."""

    checked: Metadata
    """What torch would unpickle once more, without a look at it."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.checked

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        infos = {item.storage_index: self.storage_data[item.storage_index] for item in tensors}
        if any(getattr(info, "transform_descriptors", None) for info in infos.values()):
            return super().read_data(plan, planner)  # written with extensions, such as compression
        place = lambda item: (infos[item.storage_index].relative_path, infos[item.storage_index].offset)  # noqa: E731
        for (file, _), items in groupby(sorted(tensors, key=place), place):
            path = self.fs.concat_path(self.path, file)
            with reading(path, "checkpoint's file"), self.fs.create_stream(path, "rb") as stream:
                self._read_tensor(stream, list(items), planner)
        rest = [item for item in plan.items if item.type != LoadItemType.TENSOR]
        named = lambda item: self.storage_data[item.storage_index].relative_path  # noqa: E731
        for file, items in groupby(sorted(rest, key=named), named):
            with reading(self.fs.concat_path(self.path, file), "checkpoint's file"):
                super().read_data(LoadPlan(list(items)), planner)
        return super().read_data(LoadPlan([]), planner)

    def _read_tensor(self, stream: Any, items: list[ReadItem], planner: LoadPlanner) -> None:
        part = self._slice_file(stream, self.storage_data[items[0].storage_index])
        saved = torch.load(part, map_location="cpu", weights_only=True)
        self._check(items[0].storage_index, saved)
        for item in items:
            box = saved
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                box = box.narrow(dim, start, length)
            target = planner.resolve_tensor(item)
            target.copy_(box)
            planner.commit_tensor(item, target)


    def _check(self, index: MetadataIndex, saved: Any) -> None:
        stored = self.checked.state_dict_metadata[index.fqn]
        if not isinstance(stored, TensorStorageMetadata):
            raise AssertionError(f"{index.fqn!r} is read as a tensor")
        sizes = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
        wanted = f"{tuple(sizes)}, {stored.properties.dtype}"
        found = f"{tuple(saved.shape)}, {saved.dtype}" if isinstance(saved, Tensor) else type(saved).__name__
        if found != wanted:
            raise ValueError(f"a box of {index.fqn!r} is {found}, and {wanted} in .metadata")


class _LocalReader(_ReadsOnce):
    pass


class _RemoteReader(_ReadsOnce, FsspecReader):
    pass


def _cause(error: BaseException, what: str) -> BaseException:
    """The error that users are to see of one that torch.distributed.checkpoint has collected from the ranks."""
    if not isinstance(error, CheckpointException):
        return error
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError):
        return cause
    return RuntimeError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}")


@contextmanager
def _quiet() -> Iterator[None]:
    """A single process needs no process group, which torch remarks on."""
    with warnings.catch_warnings():
        if not (dist.is_available() and dist.is_initialized()):
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
