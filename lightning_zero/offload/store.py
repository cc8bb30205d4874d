"""Files of one rank's run: made with all their room, named alike in every run, and gone when it ends.

[Note: who removes files]
A run's files lie in ``<nvme_path>/lightning_zero-rank<rank>-<n>``, with ``n`` the lowest that no living run has. They lose
their names when the run ends, also by an exception or a stop signal; their bytes stay readable through open descriptors
as long as somebody holds them. A run that is killed leaves its folder, whose lock the system lets go: the next run under
the same path, of whatever rank, removes it.
"""

import ctypes
import errno
import os
import re
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import torch
from torch import Tensor

from lightning_zero.ops import BLOCK_BYTES, FileQueue, FileTransfer, OpenFile
from lightning_zero.transfer import FILE_BUFFERS, Account, Link, Transfer, count_nowhere

_FOLDER = re.compile(r"lightning_zero-rank\d+-\d+$")
_LOCK = "lock"
# More than two keep a disk busy while one of them copies an unaligned end.
_THREADS = 4
# Of a unit in use, of the one that is read ahead, and of one that is just given up.
_IDLE = 3
# Locks of one process do not keep itself away.
_living: set[str] = set()


class Store:
    """Room for 1-D tensors in files below ``path``. Raises OSError where they cannot be made."""

    def __init__(self, path: str | os.PathLike, rank: int, account: Account = count_nowhere, checksums: bool = False) -> None:
        if fcntl is None:
            raise NotImplementedError("OffloadConfig(optimizer='nvme') and parameters='nvme' need file locks, which Windows lacks.")
        self._checksums = checksums
        self._path, self._rank = os.path.abspath(path), rank
        self.queue = FileQueue(_THREADS)
        self.account = account
        """Of the host memory that files are read into."""
        self.memory = AlignedPool(account)
        self.nbytes = 0
        """Taken on the disk."""
        self._files: dict[str, OpenFile] = {}
        self._ends: dict[str, int] = {}
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno,
                f"OffloadConfig(nvme_path=...) cannot be made ({error.strerror}): name a folder that can be written",
                os.fspath(path),
            ) from error
        with _alone(os.fspath(path)):
            remove_leftovers(path)
            self.folder, lock = _make_folder(os.path.abspath(path), rank)
        _living.add(self.folder)
        # Also when the interpreter ends without having closed it.
        self._remove = weakref.finalize(self, _remove, self.folder, lock, os.getpid())

    def place(self, name: str, numel: int, dtype: torch.dtype, link: Link | None = None) -> "FilePlace":
        """Room for ``numel`` elements at the end of the file ``name``, zeros at first. Raises OSError if there is none."""
        if name not in self._files:
            self._files[name] = OpenFile(os.path.join(self.folder, name), self._checksums)
            self._ends[name] = 0
        nbytes = -(-numel * dtype.itemsize // BLOCK_BYTES) * BLOCK_BYTES
        self._files[name].allocate(self._ends[name], nbytes)
        place = FilePlace(self, self._files[name], self._ends[name], numel, dtype, link)
        self._ends[name] += nbytes
        self.nbytes += nbytes
        return place

    def drop(self, name: str) -> None:
        """Give up the file ``name``, if there is one, and all its room."""
        if name in self._files:
            file = self._files.pop(name)
            os.unlink(file.path)
            file.close()
            self.nbytes -= self._ends.pop(name)

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is passed by, as far as files have been made."""
        return all(file.is_direct for file in self._files.values())

    def close(self) -> None:
        """Remove the names. What has a place can still be read and written."""
        self._remove()
        self.memory.clear()

    def open(self) -> "Store":
        """Itself, or another one in the same place if this one is closed."""
        return self if self._remove.alive else Store(self._path, self._rank)

    def __del__(self) -> None:
        for file in self.__dict__.get("_files", {}).values():
            file.close()


class FilePlace:
    """A range of a file that holds a 1-D tensor (the engine's ``Place``); with a ``link`` what is read goes to a device."""

    def __init__(
        self, store: Store, file: OpenFile, offset: int, numel: int, dtype: torch.dtype, link: Link | None = None
    ) -> None:
        self.numel, self.dtype = numel, dtype
        self._store, self._file, self._offset, self._link = store, file, offset, link

    def part(self, start: int, stop: int) -> "FilePlace":
        offset = self._offset + start * self.dtype.itemsize
        return FilePlace(self._store, self._file, offset, stop - start, self.dtype, self._link)

    def take(self, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(self.numel, dtype=self.dtype, device=device)
        return self._store.memory.take(self.numel * self.dtype.itemsize).view(self.dtype)

    def give(self, memory: Tensor) -> None:
        if memory.device.type == "cpu":
            self._store.memory.give(memory.view(torch.uint8))

    def read(self, into: Tensor) -> Transfer:
        if self._link is not None:
            host = self._link.take(self.numel, self.dtype)
            return _ToDevice(self._link, host, self._read(host), into)
        return self._read(into)

    def write(self, values: Tensor) -> FileTransfer:
        self._check(values)
        return self._store.queue.write(self._file, self._offset, values)

    def _read(self, into: Tensor) -> FileTransfer:
        self._check(into)
        return self._store.queue.read(self._file, self._offset, into)

    def _check(self, tensor: Tensor) -> None:
        if tensor.numel() != self.numel or tensor.dtype != self.dtype:
            raise AssertionError(f"a place for {self.numel} x {self.dtype} does not hold {tensor.numel()} x {tensor.dtype}")


class _ToDevice:
    """From a file through the link's host memory."""

    def __init__(self, link: Link, host: Tensor, read: FileTransfer, into: Tensor) -> None:
        self._link, self._read = link, read
        self._ends: tuple[Tensor, Tensor] | None = (host, into)
        """Not longer than they are needed: who has waited keeps the transfer."""
        self._sent: Transfer | None = None

    def wait(self) -> None:
        self._send().wait()

    def synchronize(self) -> None:
        self._send().synchronize()

    def _send(self) -> Transfer:
        if self._sent is None and self._ends is not None:
            (host, into), self._ends = self._ends, None
            self._read.synchronize()
            self._sent = self._link.upload(host, into)
            self._link.give(host, after=self._sent)
        if self._sent is None:
            raise AssertionError("a transfer that has failed was waited for again")
        return self._sent


class DeviceFiles:
    """The room of a store, for what a device fetches from it."""

    def __init__(self, store: Store, link: Link) -> None:
        self._store, self._link = store, link

    def place(self, name: str, numel: int, dtype: torch.dtype) -> FilePlace:
        return self._store.place(name, numel, dtype, self._link)


class HostStore:
    """Room for 1-D tensors in host memory, for what a device fetches from there."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def place(self, name: str, numel: int, dtype: torch.dtype) -> "HostPlace":
        return HostPlace(self._link, self._link.take(numel, dtype, kind=None))  # the unit counts it


class HostPlace:
    """Host memory that holds a 1-D tensor (the engine's ``Place``)."""

    def __init__(self, link: Link, tensor: Tensor) -> None:
        self._link, self._tensor = link, tensor
        self.numel, self.dtype = tensor.numel(), tensor.dtype

    def part(self, start: int, stop: int) -> "HostPlace":
        return HostPlace(self._link, self._tensor[start:stop])

    def take(self, device: torch.device) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=device)

    def give(self, memory: Tensor) -> None:
        """The device's own allocator keeps it."""

    def read(self, into: Tensor) -> Transfer:
        return self._link.upload(self._tensor, into)

    def write(self, values: Tensor) -> Transfer:
        self._tensor.copy_(values)
        return _Done()


class _Done:
    def wait(self) -> None:
        return None

    synchronize = wait


class AlignedPool:
    """A little host memory for what is read from files, used again: new memory costs page faults, and what is not aligned a
    copy. Memory that somebody still looks into is not used again."""

    def __init__(self, account: Account = count_nowhere) -> None:
        self._account = account
        self._idle: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Bytes of undefined content."""
        with self._lock:
            for index, memory in enumerate(self._idle):
                if nbytes <= memory.nbytes <= 2 * nbytes:
                    return self._idle.pop(index)[:nbytes]
        return aligned(nbytes, self._account)

    def give(self, memory: Tensor) -> None:
        storage = memory.untyped_storage()
        # The caller's tensor, ours, and the storage object just made.
        if torch._C._storage_Use_Count(storage._cdata) > 3:
            return
        start = memory.storage_offset()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, start, (storage.nbytes() - start,))  # type: ignore[call-overload]
        with self._lock:
            self._idle = [*self._idle, whole][-_IDLE:]

    def clear(self) -> None:
        """Let go of what nobody uses."""
        with self._lock:
            self._idle = []


def aligned(nbytes: int, account: Account = count_nowhere) -> Tensor:
    """Bytes of host memory that pass to a disk without a copy, counted until the last tensor over them is gone."""
    own = torch.empty(nbytes + BLOCK_BYTES, dtype=torch.uint8)
    # Something that the storage holds, and whose end is noticed.
    owner = (ctypes.c_char * own.nbytes).from_address(own.data_ptr())
    owner.memory = own  # type: ignore[attr-defined]
    account(FILE_BUFFERS, own.nbytes)
    weakref.finalize(owner, account, FILE_BUFFERS, -own.nbytes).atexit = False
    memory = torch.frombuffer(owner, dtype=torch.uint8)
    start = -memory.data_ptr() % BLOCK_BYTES
    return memory[start : start + nbytes]


def remove_leftovers(path: str | os.PathLike) -> None:
    """Remove what runs that were killed have left under ``path``."""
    for name in sorted(os.listdir(path)):
        folder = os.path.join(os.path.abspath(path), name)
        if not _FOLDER.match(name) or folder in _living:
            continue
        try:
            lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR)
        except FileNotFoundError:
            shutil.rmtree(folder, ignore_errors=True)  # killed before it had one, or while it was removed
            continue
        except OSError:
            continue  # somebody else's
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its run is alive
        finally:
            os.close(lock)


def _make_folder(path: str, rank: int) -> tuple[str, int]:
    """A folder of our own and the descriptor that holds its lock."""
    number = 0
    while True:
        folder = os.path.join(path, f"lightning_zero-rank{rank}-{number}")
        try:
            os.mkdir(folder, 0o700)
            break
        except FileExistsError:
            number += 1  # of a run that is alive
    lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Not flock: a forked worker of a data loader that outlives its run must not hold it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(
            error.errno, f"{os.strerror(error.errno or errno.EIO)}: the file system has no locks, by which runs tell"
            " each other's files from those of runs that are over", path,
        ) from error  # fmt: skip
    return folder, lock


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """One process at a time between looking for folders and having made one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass  # folders cannot be locked there: mkdir decides
        yield
    finally:
        os.close(descriptor)


def _remove(folder: str, lock: int, process: int) -> None:
    if process != os.getpid():
        return  # a fork
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
    _living.discard(folder)
