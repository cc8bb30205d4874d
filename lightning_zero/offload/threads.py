"""Which cores the threads of a rank's step run on.

[Note: cores of a rank]
The ranks of a host share its cores, and each one's step has cores of its own. A launcher may have seen to that (SLURM,
``taskset`` for each rank): ranks whose processes may run on different cores use exactly those. Ranks that may run on the same
ones share them out: whole physical cores with their hyper-threads, side by side in the order of NUMA nodes; hyper-threads
where there are more ranks than that.

A step is bound to its cores as a set: inside it the system places threads as it likes, so that a core that somebody else is
busy on holds up nobody. What is bound is the thread that the background updates run on, and a thread that runs a kernel for as
long as it does, with the threads that the kernel starts. Affinity is inherited, so nothing else may be started meanwhile:
neither torch's threads nor a user's processes are bound.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_zero.comm import Comm

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Threads:
    """The threads of a rank's step."""

    count: int
    """At most this many at once."""
    cores: frozenset[int] | None = None
    """What they are bound to; None for nothing."""

    def bind(self) -> None:
        """Bind the calling thread for good."""
        if self.cores is not None:
            with suppress(OSError):  # what this process may use has changed since
                os.sched_setaffinity(0, self.cores)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Around work that starts no threads but its own: the calling thread is bound meanwhile."""
        before = None if self.cores is None else os.sched_getaffinity(0)
        if before is None or before == self.cores:
            yield
            return
        self.bind()
        try:
            yield
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, before)


def usable_cores() -> frozenset[int]:
    """The logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def agreed_threads(comm: Comm, count: int | None, bind: bool) -> Threads:
    """The threads of this rank; all ranks call it. See :func:`make_threads`."""
    mine = (comm.rank, _host(), usable_cores())
    ranks = comm.all_gather_object(mine)
    if comm.model is not None:
        ranks = [rank for column in comm.model.all_gather_object(ranks) for rank in column]
    here = sorted((rank, cores) for rank, host, cores in ranks if host == mine[1])
    return make_threads([cores for _, cores in here], [rank for rank, _ in here].index(mine[0]), count, bind)


def _host() -> str:
    """A name of this machine: host names may be the same on several."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()


def make_threads(
    usable: Sequence[frozenset[int]], index: int, count: int | None, bind: bool, system: Path = SYSTEM
) -> Threads:
    """The threads of one of a host's ranks. ``usable`` are the cores that each of them may run on; ``count`` is the number
    asked for. See [Note: cores of a rank]."""
    alike = [number for number, cores in enumerate(usable) if cores == usable[index]]
    own, physical = share_of(usable[index], len(alike), alike.index(index), system)
    can_bind = bind and hasattr(os, "sched_setaffinity") and own < usable[index]
    return Threads(count or max(1, min(torch.get_num_threads(), physical)), own if can_bind else None)


def share_of(cores: frozenset[int], ranks: int, index: int, system: Path = SYSTEM) -> tuple[frozenset[int], int]:
    """The part of ``cores`` that is one of ``ranks``' own, and how many physical ones that is; all of them if there are
    more ranks."""
    places = [frozenset(place) for place in physical_cores(cores, system)]
    if ranks > len(places):
        places = [frozenset([core]) for place in places for core in sorted(place)]
    if ranks > len(places):
        return cores, 1
    mine = places[len(places) * index // ranks : len(places) * (index + 1) // ranks]
    return frozenset().union(*mine), len(mine)


def physical_cores(cores: frozenset[int], system: Path = SYSTEM) -> list[list[int]]:
    """Logical cores by physical one, those of a NUMA node together; each its own where the system does not tell."""
    nodes = {}
    for path in sorted(system.glob("node/node[0-9]*/cpulist")):
        nodes.update(dict.fromkeys(_listed(path), int(path.parent.name.removeprefix("node"))))
    places: dict[tuple[int, int], list[int]] = {}
    for core in sorted(cores):
        siblings = _listed(system / f"cpu/cpu{core}/topology/thread_siblings_list") or [core]
        places.setdefault((nodes.get(core, 0), min(siblings)), []).append(core)
    return [places[place] for place in sorted(places)]


def _listed(path: Path) -> list[int]:
    """Numbers written like ``0-3,8``; none if the file cannot be read."""
    try:
        parts = path.read_text().strip().split(",")
        ends = [[int(end) for end in part.split("-")] for part in parts if part]
    except (OSError, ValueError):
        return []
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


def short_list(cores: Sequence[int] | frozenset[int]) -> str:
    """Numbers as ``0-3, 8``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
