"""Reads and writes of files while the program goes on: on threads of the native library, or of Python without it."""

import ctypes
import errno
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from lightning_zero.ops._native import kernels

BLOCK_BYTES = 4096
"""Offsets, lengths and memory in multiples of this pass a file to the disk without a copy."""


class OpenFile:
    """A file to read and write at offsets, past the page cache where its file system can do that."""

    def __init__(self, path: str, checksums: bool = False) -> None:
        """Make the file. With ``checksums`` what is read is compared with what was written. Raises OSError."""
        self.path = path
        self.sums: Any = None
        """Of the blocks that :meth:`allocate` has made."""
        if checksums:
            self.sums = _PythonSums() if kernels is None else kernels.BlockSums()
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._plain = self.descriptor
        if kernels is not None and hasattr(os, "O_DIRECT"):
            try:
                self.descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
            except OSError:
                pass  # some network and memory file systems

    @property
    def is_direct(self) -> bool:
        return self.descriptor != self._plain

    def allocate(self, start: int, nbytes: int) -> None:
        """Take the room on the disk, which then reads as zeros. Raises OSError if there is not enough."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._plain, start, nbytes)
            else:
                os.ftruncate(self._plain, start + nbytes)
        except OSError as error:
            free = os.statvfs(os.path.dirname(self.path))
            raise _error(
                error.errno, f"there is no room for {nbytes} bytes, {free.f_bavail * free.f_frsize} are free", self.path
            ) from error
        if self.sums is not None:
            self.sums.extend(start // BLOCK_BYTES, nbytes // BLOCK_BYTES)

    def close(self) -> None:
        for descriptor in {self.descriptor, self._plain}:
            os.close(descriptor)


class FileTransfer:
    """One range of a file on its way to or from a tensor, which it keeps alive."""

    def __init__(self, queue: "FileQueue", file: OpenFile, what: str, tensor: Tensor, offset: int, transfer: Any) -> None:
        self._queue, self._file, self._what, self._offset = queue, file, what, offset
        self._tensor: Tensor | None = tensor
        self._nbytes = tensor.nbytes
        self._transfer = transfer

    def wait(self) -> None:
        """Return when it is done. Raises OSError with the path, and how many bytes went through, if it failed; or with the
        block that is not as it was written."""
        if self._transfer is None:
            return
        start = time.perf_counter()
        number, done, changed = self._transfer.wait()
        self._queue.waited_seconds += time.perf_counter() - start
        self._transfer = self._tensor = None
        if changed >= 0:
            raise _error(
                errno.EIO,
                f"{self._what} {self._nbytes} bytes at offset {self._offset}: the bytes {changed} to"
                f" {changed + BLOCK_BYTES} of the file are not those that were written (checksum). The disk has changed"
                " them, or another program has",
                self._file.path,
            )
        if number or done != self._nbytes:
            raise _error(
                number or errno.EIO,
                f"{self._what} {self._nbytes} bytes at offset {self._offset} ended after {done}",
                self._file.path,
            )

    synchronize = wait


class FileQueue:
    """Carries out transfers on ``threads`` threads, in about the order of their coming.

    On a file with direct access two writes under way may not touch the same block of BLOCK_BYTES. ``read_bytes`` and
    ``written_bytes`` count what was asked for, ``waited_seconds`` how long somebody stood still for it.
    """

    def __init__(self, threads: int) -> None:
        self._queue: Any = _PythonQueue(threads) if kernels is None else kernels.FileQueue(threads)
        self.read_bytes = self.written_bytes = 0
        self.waited_seconds = 0.0

    @property
    def busy_seconds(self) -> float:
        """How long there has been something to do, whoever waited for it or not."""
        return self._queue.busy_seconds()

    def read(self, file: OpenFile, offset: int, into: Tensor) -> FileTransfer:
        """Start filling a contiguous CPU tensor from ``offset`` on."""
        self.read_bytes += into.nbytes
        return self._submit(file, False, into, offset)

    def write(self, file: OpenFile, offset: int, values: Tensor) -> FileTransfer:
        """Start writing a contiguous CPU tensor, which must not change meanwhile, to ``offset``."""
        self.written_bytes += values.nbytes
        return self._submit(file, True, values, offset)

    def _submit(self, file: OpenFile, write: bool, tensor: Tensor, offset: int) -> FileTransfer:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise AssertionError(f"files take contiguous CPU tensors, not {tensor.device} with strides {tensor.stride()}")
        align = BLOCK_BYTES if file.is_direct or file.sums is not None else 1
        transfer = self._queue.submit(file.descriptor, write, tensor.data_ptr(), tensor.nbytes, offset, align, file.sums)
        return FileTransfer(self, file, "writing" if write else "reading", tensor, offset, transfer)


class _PythonQueue:
    """The native queue's twin, through the page cache."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "lightning_zero-file")
        self._lock = threading.Lock()
        self._under_way, self._since, self._busy = 0, 0.0, 0.0

    def busy_seconds(self) -> float:
        with self._lock:
            return self._busy + (time.perf_counter() - self._since if self._under_way else 0.0)

    def submit(
        self, file: int, write: bool, buffer: int, nbytes: int, offset: int, align: int, sums: "_PythonSums | None"
    ) -> "_PythonTransfer":
        self._count(1)
        return _PythonTransfer(self._pool.submit(self._carry_out, file, write, buffer, nbytes, offset, sums))

    def _carry_out(
        self, file: int, write: bool, buffer: int, nbytes: int, offset: int, sums: "_PythonSums | None"
    ) -> tuple[int, int, int]:
        memory = memoryview((ctypes.c_char * nbytes).from_address(buffer)).cast("B")
        try:
            if sums is not None:
                return sums.move(file, write, memory, offset)
            return (*_move(file, write, memory, offset), -1)
        finally:
            self._count(-1)  # before anybody who waits goes on

    def _count(self, change: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._under_way:
                self._busy += now - self._since
            self._under_way, self._since = self._under_way + change, now


class _PythonTransfer:
    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self) -> tuple[int, int, int]:
        return self._future.result()


class _PythonSums:
    """The twin of the native checksums, for one transfer of a file at a time."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._lock = threading.Lock()

    def extend(self, first: int, count: int) -> None:
        zeros = zlib.crc32(bytes(BLOCK_BYTES))
        with self._lock:
            self._sums += [zeros] * (first + count - len(self._sums))

    def move(self, file: int, write: bool, memory: memoryview, offset: int) -> tuple[int, int, int]:
        """The errno, the bytes that went through, and the offset of a block that has changed, or -1."""
        stop = offset + len(memory)
        first, last = offset // BLOCK_BYTES * BLOCK_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES
        blocks = memoryview(bytearray(last - first))
        own = blocks[offset - first : stop - first]
        with self._lock:
            # What is beside the range in the blocks at its ends stays as it is.
            partial = [start for start, is_cut in ((first, first < offset), (last - BLOCK_BYTES, stop < last)) if is_cut]
            ends = sorted(set(partial)) if write else [first]
            size = BLOCK_BYTES if write else last - first
            for start in ends:
                error, done = _move(file, False, blocks[start - first :][:size], start)
                changed = self._changed(blocks[start - first :][:done], start)
                if error or changed >= 0:
                    return error or errno.EIO, 0, changed
            if not write:
                memory[:] = own
                return 0, max(0, min(done - (offset - first), len(memory))), -1
            own[:] = memory
            error, done = _move(file, True, blocks, first)
            for start in range(0, done - BLOCK_BYTES + 1, BLOCK_BYTES):
                self._sums[(first + start) // BLOCK_BYTES] = zlib.crc32(blocks[start : start + BLOCK_BYTES])
            return error, max(0, min(done - (offset - first), len(memory))), -1

    def _changed(self, blocks: memoryview, offset: int) -> int:
        for start in range(0, len(blocks) - BLOCK_BYTES + 1, BLOCK_BYTES):
            if zlib.crc32(blocks[start : start + BLOCK_BYTES]) != self._sums[(offset + start) // BLOCK_BYTES]:
                return offset + start
        return -1


def _move(file: int, write: bool, memory: memoryview, offset: int) -> tuple[int, int]:
    done = 0
    while done < len(memory):
        try:
            part = memory[done:]
            now = os.pwrite(file, part, offset + done) if write else os.preadv(file, [part], offset + done)
        except OSError as error:
            return error.errno or errno.EIO, done
        if now == 0:
            break
        done += now
    return 0, done


def _error(number: int | None, what: str, path: str) -> OSError:
    number = number or errno.EIO
    return OSError(number, f"{os.strerror(number)}: {what}", path)
