"""How fast a folder's disk reads and writes."""

import contextlib
import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class DiskSpeed:
    """Measured with one file, one block after another."""

    write: float
    """Bytes per second, until they are on the disk."""
    read: float
    """Bytes per second."""
    direct: bool
    """Whether the page cache was passed by; if not, reads may come from memory."""


def measure(
    folder: Path, nbytes: int, progress: Callable[[Iterable[int], str], Iterable[int]] = lambda blocks, _: blocks
) -> DiskSpeed:
    """Write and read a file of ``nbytes`` (rounded down to blocks) in ``folder``, and remove it.

    ``progress`` wraps the blocks, with a word for what is done. Raises OSError where files cannot be made or there is no
    room.
    """
    # Page-aligned, as direct access wants it, and not zeros, which some disks do not write.
    block = mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))
    blocks = range(max(1, nbytes // BLOCK_BYTES))
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < len(blocks) * BLOCK_BYTES:
        raise OSError(errno.ENOSPC, f"only {free} bytes are free", str(folder))
    handle, name = tempfile.mkstemp(dir=folder, prefix=".lightning_zero-")
    os.close(handle)
    try:
        file, direct = _open(name)
        try:
            start = time.perf_counter()
            for _ in progress(blocks, "writing"):
                _all(os.write(file, block))
            os.fsync(file)
            write = time.perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(file, 0, os.SEEK_SET)
            start = time.perf_counter()
            for _ in progress(blocks, "reading"):
                _all(os.readv(file, [block]))
            read = time.perf_counter() - start
        finally:
            os.close(file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    total = len(blocks) * BLOCK_BYTES
    return DiskSpeed(total / write, total / read, direct)


def _open(name: str) -> tuple[int, bool]:
    """The file, past the page cache where its file system can do that."""
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except (OSError, AttributeError):  # tmpfs and some network disks; systems without the flag
        return os.open(name, os.O_RDWR), False


def _all(count: int) -> None:
    if count != BLOCK_BYTES:
        raise OSError(errno.EIO, f"a block of {BLOCK_BYTES} bytes went through in part ({count})")
