"""Writing beside and renaming: what stands at a checkpoint's path is whole at every moment.

A checkpoint is written to ``.lightning_zero-<token>.partial`` in the folder of its destination, and takes the
destination's place in one step. Its writer holds a lock on it, which a process loses however it ends: what lies there
without a lock is the rest of a save that was killed, and the next save into the folder removes it.
"""

import ctypes
import os
import re
import shutil
import time
from pathlib import Path
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

try:
    import fcntl
except ImportError:  # not on Windows: leftovers stay there
    fcntl = None  # type: ignore[assignment]

METADATA_FILE = ".metadata"
"""What makes a folder a checkpoint of torch.distributed.checkpoint; written last."""
PARTS_FILE = "model_parallel.json"
"""What makes a folder a checkpoint of model-parallel parts (``parts``)."""
_PARTIAL = re.compile(r"\.lightning_zero-[0-9a-f]+\.partial$")
_YOUNG_SECONDS = 1.0  # its writer may be about to lock it
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Beside:
    """A file or folder that is written beside ``destination`` (a path, or a URL that fsspec knows) and then replaces it.

    Ranks that write one folder together have the same ``token``, of hexadecimal digits.
    """

    def __init__(self, destination: str | os.PathLike, token: str) -> None:
        self.fs, self.destination = _locate(destination)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self._parent = os.path.dirname(self.destination)
        self.partial = os.path.join(self._parent, f".lightning_zero-{token}.partial")
        self._lock: int | None = None

    @property
    def url(self) -> str:
        """Where to write, in a form that says on which file system."""
        return self.partial if self.is_local else self.fs.unstrip_protocol(self.partial)

    def begin_file(self) -> IO[bytes]:
        """Remove leftovers and open the file to write to (local paths only)."""
        self._begin()
        file = open(self.partial, "xb")
        self._lock = _lock(os.dup(file.fileno()))
        return file

    def begin_folder(self) -> None:
        """Remove leftovers and make the folder to write to. One rank does."""
        self._begin()
        self.fs.makedirs(self.partial, exist_ok=True)
        if self.is_local and fcntl is not None:
            self._lock = _lock(os.open(self.partial, os.O_RDONLY))

    def written(self) -> int:
        """Bytes so far, of all ranks."""
        return int(self.fs.du(self.partial)) if self.fs.exists(self.partial) else 0

    def commit(self) -> None:
        """Put what was written at the destination, in the place of what stood there."""
        if self.is_local:
            _replace(self.partial, self.destination)
            _sync(self._parent)
        else:
            old = retired_path(self.destination)
            if self.fs.exists(self.destination):
                if self.fs.exists(old):
                    self.fs.rm(old, recursive=True)
                self.fs.mv(self.destination, old, recursive=True)
            self.fs.mv(self.partial, self.destination, recursive=True)
            if self.fs.exists(old):
                self.fs.rm(old, recursive=True)
        self._unlock()

    def abandon(self) -> None:
        """Remove what was written so far."""
        if self.is_local:
            _remove(self.partial)
        elif self.fs.exists(self.partial):
            self.fs.rm(self.partial, recursive=True)
        self._unlock()

    def _begin(self) -> None:
        marked = any(self.fs.exists(os.path.join(self.destination, name)) for name in (METADATA_FILE, PARTS_FILE))
        if self.fs.isdir(self.destination) and not marked:
            if self.fs.ls(self.destination, detail=False):
                raise IsADirectoryError(f"The checkpoint path {self.destination!r} is a folder that is no checkpoint.")
        if self._parent:
            self.fs.makedirs(self._parent, exist_ok=True)
        if self.is_local:
            remove_leftovers(self._parent or ".")

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_folder_checkpoint(path: str | os.PathLike, fs: AbstractFileSystem | None = None) -> bool:
    """Whether ``path`` is a folder that torch.distributed.checkpoint has written to the end."""
    if fs is None:
        fs, path = _locate(path)
    return bool(fs.exists(os.path.join(path, METADATA_FILE)))


def standing(path: str | os.PathLike) -> str | os.PathLike:
    """Where the checkpoint of ``path`` is: there, or beside it if a save was killed between two renames.

    That can be only where a file system cannot exchange two names in one step.
    """
    fs, place = _locate(path)
    if fs.exists(place):
        return path
    old = retired_path(place)
    if not fs.exists(old):
        return path
    return old if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(old))


def retired_path(path: str) -> str:
    """Where a checkpoint waits while another takes its place."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.previous")


def remove(path: str | os.PathLike, token: str) -> None:
    """Remove a checkpoint, which is gone at once for everybody who looks."""
    fs, place = _locate(path)
    if not isinstance(fs, LocalFileSystem):
        if fs.exists(place):
            fs.rm(place, recursive=True)
    elif os.path.lexists(place):
        partial = Beside(place, token).partial
        os.rename(place, partial)
        _remove(partial)


def remove_leftovers(folder: str) -> None:
    """Remove what saves that were killed have left in ``folder``."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if fcntl is None or not _PARTIAL.match(name):
            continue
        try:
            if time.time() - os.stat(path).st_mtime < _YOUNG_SECONDS:
                continue
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # another process was faster
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        except OSError:
            pass  # its writer is alive
        finally:
            os.close(descriptor)


def describe(error: OSError, path: str | os.PathLike, written: int) -> OSError:
    """The error of a write that failed, with what the user needs to know."""
    fs, place = _locate(path)
    free = ""
    if isinstance(fs, LocalFileSystem):
        free = f" The file system has {shutil.disk_usage(os.path.dirname(place) or '.').free} bytes free."
    return OSError(
        error.errno,
        f"The checkpoint {os.fspath(path)!r} could not be written: {error.strerror or error} after {written} bytes.{free}"
        " What stood there before is as it was.",
    )


def os_error(error: BaseException) -> OSError | None:
    """The error of the file system behind ``error``: torch.save raises one of its own on top of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return None if isinstance(cause, IsADirectoryError) else cause


def _locate(path: str | os.PathLike) -> tuple[AbstractFileSystem, str]:
    fs, place = url_to_fs(os.fspath(path))
    return fs, place.rstrip("/") or "/"


def _lock(descriptor: int) -> int:
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass  # a file system without locks: nobody else can take it for a leftover either
    return descriptor


def _replace(source: str, destination: str) -> None:
    """Rename, whichever of the two is a file and which a folder; what stood at ``destination`` is removed."""
    old = retired_path(destination)
    if not os.path.lexists(destination) or not (os.path.isdir(source) or os.path.isdir(destination)):
        os.replace(source, destination)
    elif _exchange(source, destination):
        _remove(source)
    else:
        _remove(old)
        os.rename(destination, old)
        os.rename(source, destination)
    _remove(old)


def _exchange(a: str, b: str) -> bool:
    """Let two names change places in one step; False where this is not possible."""
    rename: Any = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def _sync(folder: str) -> None:
    descriptor = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
