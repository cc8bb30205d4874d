"""Reads and writes of files on threads, against plain reading; the folders of runs that live, end and are killed."""

import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.offload import store
from lightning_zero.offload.store import Store, aligned
from lightning_zero.ops import BLOCK_BYTES, FileQueue, OpenFile, files
from tests.harness import run


@pytest.fixture(params=["native", "python"])
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FileQueue:
    if request.param == "python":
        monkeypatch.setattr(files, "kernels", None)
    elif files.kernels is None:
        pytest.skip("the kernels were not built")
    return FileQueue(3)


def random_bytes(count: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("checksums", [False, True])
def test_any_range_from_any_memory(queue: FileQueue, tmp_path: Path, checksums: bool) -> None:
    """Offsets, lengths and addresses with and without alignment, over several pieces of 1 MiB."""
    file = OpenFile(str(tmp_path / "file"), checksums)
    size = 3 * 2**20 + 5 * BLOCK_BYTES
    file.allocate(0, size)
    expected = torch.zeros(size, dtype=torch.uint8)
    chance = random.Random(0)
    memory = aligned(size + 64)
    for number in range(60):
        offset = chance.choice([0, BLOCK_BYTES, 2**20 - 3, chance.randrange(size)])
        count = min(size - offset, chance.choice([1, 17, BLOCK_BYTES, 2**20 + 1, 2 * 2**20, chance.randrange(1, size)]))
        start = chance.choice([0, 4, 63])
        values = memory[start : start + count].copy_(random_bytes(count, number))
        expected[offset : offset + count] = values
        queue.write(file, offset, values).wait()
        into = torch.full((count + 8,), 7, dtype=torch.uint8)[chance.choice([0, 5]) :][:count]
        queue.read(file, offset, into).wait()
        assert torch.equal(into, values), (offset, count, start)
    on_disk = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.uint8)
    assert torch.equal(on_disk, expected)
    file.close()


def test_many_at_once(queue: FileQueue, tmp_path: Path) -> None:
    file = OpenFile(str(tmp_path / "file"))
    parts = [random_bytes(3 * BLOCK_BYTES, number) for number in range(64)]
    file.allocate(0, 64 * 3 * BLOCK_BYTES)
    writes = [queue.write(file, number * 3 * BLOCK_BYTES, part) for number, part in enumerate(parts)]
    for transfer in writes:
        transfer.wait()
    intos = [torch.empty_like(part) for part in parts]
    for transfer in [queue.read(file, number * 3 * BLOCK_BYTES, into) for number, into in enumerate(intos)]:
        transfer.wait()
        transfer.wait()  # again does nothing
    assert all(map(torch.equal, intos, parts))
    assert queue.read_bytes == queue.written_bytes == 64 * 3 * BLOCK_BYTES
    file.close()


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x80]))
        stream.flush()
        os.fsync(stream.fileno())


def test_what_the_disk_has_changed_is_noticed(queue: FileQueue, tmp_path: Path) -> None:
    """A flipped bit, half a block of before, a block of before, a block of zeros; read, or beside what is written."""
    path = tmp_path / "file"
    file = OpenFile(str(path), checksums=True)
    size = 2 * 2**20 + 4 * BLOCK_BYTES
    file.allocate(0, size)
    old, new = random_bytes(size, 0), random_bytes(size, 1)
    queue.write(file, 0, old).wait()
    before = path.read_bytes()
    queue.write(file, 0, new).wait()
    into = torch.empty_like(new)
    block = 2**20 + 2 * BLOCK_BYTES
    stale = before[block : block + BLOCK_BYTES]
    for start, content in ((block, b""), (block, stale[:2048]), (block, stale), (block, bytes(BLOCK_BYTES))):
        if content:
            with open(path, "r+b") as stream:
                stream.seek(start)
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        else:
            flip(path, start + 77)
        told = f"reading {size} bytes at offset 0: the bytes {block} to {block + BLOCK_BYTES} of the file are not those"
        with pytest.raises(OSError, match=f"{told} that were written .*'{path}'"):
            queue.read(file, 0, into).wait()
        with pytest.raises(OSError, match="reading 8 bytes at offset"):
            queue.read(file, block + 1000, into[:8]).wait()
        with pytest.raises(OSError, match="writing 5 bytes at offset"):
            queue.write(file, block + 3000, old[:5]).wait()
        queue.read(file, 0, into[:block]).wait()  # what is whole can be read
        queue.write(file, block, new[block : block + BLOCK_BYTES]).wait()
        queue.read(file, 0, into).wait()
        assert torch.equal(into, new)
    file.close()


def test_neighbours_in_a_block_are_written_while_others_are_read(queue: FileQueue, tmp_path: Path) -> None:
    file = OpenFile(str(tmp_path / "file"), checksums=True)
    file.allocate(0, BLOCK_BYTES)
    values = random_bytes(1000, 0)
    queue.write(file, 2000, values).wait()
    for number in range(300):
        write = queue.write(file, 0, random_bytes(1000, number))
        into = torch.empty_like(values)
        queue.read(file, 2000, into).wait()
        write.wait()
        assert torch.equal(into, values)
    file.close()


def test_seconds_busy_and_waited(queue: FileQueue, tmp_path: Path) -> None:
    """Busy is when there was anything to do, whatever the number of threads at it; waited when somebody stood still."""
    file = OpenFile(str(tmp_path / "file"))
    size, count = 2**20, 48
    file.allocate(0, count * size)
    part = aligned(size).random_(0, 255)
    assert (queue.busy_seconds, queue.waited_seconds) == (0.0, 0.0)
    for _ in range(2):
        busy, waited = queue.busy_seconds, queue.waited_seconds
        begin = time.perf_counter()
        writes = [queue.write(file, number * size, part) for number in range(count)]
        under_way = queue.busy_seconds
        before_waiting = time.perf_counter()
        assert queue.waited_seconds == waited
        writes[-1].wait()  # on three threads the last to begin may end before others
        for transfer in writes:
            transfer.wait()
        end = time.perf_counter()
        assert busy <= under_way < queue.busy_seconds <= busy + end - begin
        assert waited < queue.waited_seconds <= waited + end - before_waiting
        idle = queue.busy_seconds, queue.waited_seconds
        for transfer in writes:
            transfer.wait()
        assert (queue.busy_seconds, queue.waited_seconds) == idle
    file.close()


def test_errors_name_path_and_bytes(queue: FileQueue, tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = OpenFile(str(path))
    file.allocate(0, 4 * BLOCK_BYTES)
    os.truncate(path, BLOCK_BYTES)
    with pytest.raises(OSError, match=f"reading 8192 bytes at offset 0 ended after 4096: '{path}'"):
        queue.read(file, 0, torch.empty(2 * BLOCK_BYTES, dtype=torch.uint8)).wait()
    os.close(file.descriptor)
    with pytest.raises(OSError, match=f"Bad file descriptor: writing 10 bytes at offset 0 ended after 0: '{path}'"):
        queue.write(file, 0, torch.zeros(10, dtype=torch.uint8)).wait()
    with pytest.raises(FileExistsError):
        OpenFile(str(path))


def test_a_deleted_file_stays_readable(tmp_path: Path) -> None:
    here = Store(tmp_path, 0)
    place = here.place("state", 100, torch.float32)
    place.write(torch.arange(100.0)).wait()
    here.close()
    assert list(tmp_path.iterdir()) == []
    into = torch.empty(100)
    place.part(10, 20).read(into[:10]).wait()
    assert into[:10].tolist() == [float(i) for i in range(10, 20)]


def test_new_room_reads_as_zeros_and_starts_on_a_block(tmp_path: Path) -> None:
    here = Store(tmp_path, 0)
    first, second = here.place("a", 3, torch.float32), here.place("a", 5, torch.bfloat16)
    first.write(torch.ones(3)).wait()
    into = torch.ones(5, dtype=torch.bfloat16)
    second.read(into).wait()
    assert into.tolist() == [0.0] * 5
    assert here.nbytes == 2 * BLOCK_BYTES
    assert os.path.getsize(tmp_path / "lightning_zero-rank0-0" / "a") == 2 * BLOCK_BYTES


def folders(path: str) -> list[str]:
    return sorted(os.listdir(path))


def two_alive(path: str) -> list[list[str]]:
    """Both ranks as two runs of the same rank, one after the other; then one looks for leftovers and ends."""
    seen, here = [], None
    for turn in range(2):
        if dist.get_rank() == turn:
            here = Store(path, 0)
            here.place("a", 10, torch.float32)
        dist.barrier()
    seen.append(folders(path))
    dist.barrier()
    if dist.get_rank() == 1:
        store.remove_leftovers(path)
        seen.append(folders(path))
        here.close()  # type: ignore[union-attr]
    dist.barrier()
    seen.append(folders(path))
    dist.barrier()
    if dist.get_rank() == 0:
        here.close()  # type: ignore[union-attr]
    dist.barrier()
    return [*seen, folders(path)]


def test_living_runs_leave_each_other_alone(tmp_path: Path) -> None:
    first, second = "lightning_zero-rank0-0", "lightning_zero-rank0-1"
    zero, one = run(2, two_alive, str(tmp_path))
    assert zero == [[first, second], [first], []]
    assert one == [[first, second], [first, second], [first], []]


def test_names_are_those_of_the_last_run(tmp_path: Path) -> None:
    for _ in range(3):
        here = Store(tmp_path, 2)
        assert os.path.basename(here.folder) == "lightning_zero-rank2-0"
        here.close()


@pytest.mark.parametrize("path", ["{}/file/below", "/proc/nothing"])
def test_a_path_that_cannot_be_written(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = path.format(tmp_path)
    with pytest.raises(OSError, match=path) as caught:
        Store(path, 0)
    assert caught.value.filename == path


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("lightning_zero", "lightning_zero-rank0-0x", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "lightning_zero-rank1-5").mkdir()  # what a kill has left
    Store(tmp_path, 0).close()
    assert folders(str(tmp_path)) == ["lightning_zero", "lightning_zero-rank0-0x", "mine"]


