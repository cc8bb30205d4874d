"""Which cores a rank's step gets: on machines that are described in files, and what this one makes of it."""

import os
import threading
from pathlib import Path

import pytest
import torch

from lightning_zero.offload.threads import Threads, make_threads, physical_cores, short_list, usable_cores
from lightning_zero.ops import AdamOptions, adam_step_, native_isa

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Eight cores with two hyper-threads each, numbered as Linux does on many servers: node 0 has cores 0-3 and their second
    hyper-threads 8-11, node 1 has 4-7 and 12-15."""
    for node, listed in enumerate(("0-3,8-11", "4-7,12-15")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(listed + "\n")
    for core in range(16):
        (tmp_path / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    return tmp_path


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)


def shares(usable: list[range | set[int]], system: Path, count: int | None = None) -> list[tuple[str, int]]:
    """Cores and number of threads of each rank."""
    masks = [frozenset(cores) for cores in usable]
    threads = [make_threads(masks, index, count, True, system) for index in range(len(masks))]
    return [("as it is" if each.cores is None else short_list(each.cores), each.count) for each in threads]


@pytest.mark.usefixtures("many_threads")
@needs_affinity
def test_ranks_share_out_physical_cores_by_node(two_sockets: Path) -> None:
    everything = range(16)
    assert shares([everything], two_sockets) == [("as it is", 8)]
    assert shares([everything] * 2, two_sockets) == [("0-3, 8-11", 4), ("4-7, 12-15", 4)]
    assert shares([everything] * 4, two_sockets) == [("0-1, 8-9", 2), ("2-3, 10-11", 2), ("4-5, 12-13", 2), ("6-7, 14-15", 2)]
    assert shares([everything] * 3, two_sockets) == [("0-1, 8-9", 2), ("2-4, 10-12", 3), ("5-7, 13-15", 3)]
    # More ranks than physical cores: hyper-threads; more than those: nothing of one's own.
    assert shares([everything] * 16, two_sockets)[:3] == [("0", 1), ("8", 1), ("1", 1)]
    assert shares([everything] * 17, two_sockets) == [("as it is", 1)] * 17
    assert shares([everything] * 2, two_sockets, count=3) == [("0-3, 8-11", 3), ("4-7, 12-15", 3)]


@pytest.mark.usefixtures("many_threads")
@needs_affinity
def test_what_a_launcher_has_bound_stays_so(two_sockets: Path) -> None:
    """Each rank on cores of its own: all of them are its own. A job on half of the machine: its ranks share that half."""
    assert shares([{0, 1, 8, 9}, {2, 3, 10, 11}], two_sockets) == [("as it is", 2)] * 2
    assert shares([range(4, 8)] * 2, two_sockets) == [("4-5", 2), ("6-7", 2)]
    assert shares([range(4)] * 2 + [range(4, 8)] * 2, two_sockets) == [("0-1", 2), ("2-3", 2), ("4-5", 2), ("6-7", 2)]


@pytest.mark.usefixtures("many_threads")
@needs_affinity
def test_without_a_description_each_core_is_a_physical_one(tmp_path: Path) -> None:
    assert shares([range(4)] * 2, tmp_path) == [("0-1", 2), ("2-3", 2)]
    (tmp_path / "cpu/cpu1/topology").mkdir(parents=True)
    (tmp_path / "cpu/cpu1/topology/thread_siblings_list").write_text("nonsense")
    assert physical_cores(frozenset(range(3)), tmp_path) == [[0], [1], [2]]


def test_no_more_threads_than_torch_uses(two_sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert make_threads([frozenset(range(16))] * 2, 0, None, False, two_sockets) == Threads(1, None)


def affinity_of(task: str) -> str:
    status = Path(f"/proc/self/task/{task}/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
@pytest.mark.skipif(len(usable_cores()) < 2 or native_isa() == "torch", reason="needs two cores and the kernels")
def test_the_threads_of_a_kernel_are_bound_and_no_others() -> None:
    core = min(usable_cores())
    numel, before = 1 << 22, usable_cores()
    tensors = [torch.zeros(numel) for _ in range(4)]
    others, seen, over = set(os.listdir("/proc/self/task")), {}, threading.Event()

    def work() -> None:
        with Threads(2, frozenset([core])).bound():
            for _ in range(20):
                adam_step_(*tensors, AdamOptions(), step=1, num_threads=2)
        seen["after"] = short_list(usable_cores())
        over.set()

    thread = threading.Thread(target=work)
    thread.start()
    mine = str(thread.native_id)
    while not over.is_set():
        for task in set(os.listdir("/proc/self/task")) - others - {mine}:
            try:
                seen[task] = affinity_of(task)
            except (OSError, StopIteration):
                continue  # it has ended
    thread.join()
    assert seen.pop("after") == short_list(before)
    assert set(seen.values()) == {str(core)}
    assert usable_cores() == before
