"""``lightning-zero doctor``: whether this machine is ready, and what it has."""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.torch_version import TorchVersion

from lightning_zero import disk, ops
from lightning_zero.formulas import short_bytes
from lightning_zero.offload.threads import make_threads, physical_cores, short_list, usable_cores
from lightning_zero.planner import host_bytes, host_bytes_free
from lightning_zero.tables import WIDTH

_PINNED_BYTES = 256 * 2**20
_SMALL_SHM_BYTES = 1e9
_DISK_TEST_BYTES = 512 * 2**20

REQUIRED = {
    "torch": "2.6", "lightning": "2.5", "fsspec": "2023.6", "torchmetrics": "1.0", "psutil": "5.9", "rich": "12.3",
}  # fmt: skip


@dataclass
class Report:
    """What was found."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What keeps training from working."""
    notes: list[str] = field(default_factory=list)
    """What works, but slower or with less."""

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        text = [f"{name:<{width}}  {value}" for name, value in self.lines]
        text += [_wrapped("note", note) for note in self.notes]
        text += [_wrapped("PROBLEM", problem) for problem in self.problems] or ["No problem found."]
        return "\n".join(text)


def _wrapped(kind: str, text: str) -> str:
    return textwrap.fill(f"{kind}: {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def run(path: str | None = None, ranks: int = 1) -> int:
    """Print the report; returns 1 if there is a problem."""
    report = examine(path, ranks)
    print(report)
    return 1 if report.problems else 0


def examine(path: str | None = None, ranks: int = 1) -> Report:
    """Look at this machine, on which ``ranks`` are to run, and at the speed of the disk under the folder ``path``."""
    report = Report()
    report.lines.append(("lightning_zero", version("lightning_zero") or "not installed, run from its source"))
    report.lines.append(("python", platform.python_version()))
    _look_at_versions(report)
    _look_at_backends(report)
    _look_at_kernels(report)
    _look_at_host(report, ranks)
    _look_at_surroundings(report)
    if path is not None:
        _look_at_disk(report, Path(path))
    return report


def version(package: str) -> str | None:
    """The installed version; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look_at_versions(report: Report) -> None:
    for package, least in REQUIRED.items():
        found = version(package)
        report.lines.append((package, found or "missing"))
        if found is None or TorchVersion(found) < TorchVersion(least):
            report.problems.append(f"{package} {least} or newer is needed: pip install '{package}>={least}'")


def _look_at_backends(report: Report) -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if device is not None else 0
    report.lines.append(
        ("accelerator", "none, training runs on the CPU" if device is None else f"{count} x {device.type}")
    )
    if not dist.is_available():
        report.lines.append(("backends", "none"))
        report.problems.append("this torch was built without torch.distributed: more than one rank cannot work")
        return
    backends = [name for name in ("gloo", "nccl", "xccl", "mpi") if dist.is_backend_available(name)]
    report.lines.append(("backends", ", ".join(backends) or "none"))
    if "gloo" not in backends:
        report.problems.append("this torch was built without the gloo backend, which control messages and CPUs need")
    if device is not None and device.type == "cuda" and "nccl" not in backends:
        report.notes.append("this torch was built without NCCL: GPUs have to talk through another backend")


def _look_at_kernels(report: Report) -> None:
    isas = ops.available_isas()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the kernels are missing is said below
            chosen = ops.native_isa()
    except ValueError as error:
        report.lines.append(("CPU kernels", "none can be chosen"))
        report.problems.append(str(error))
        return
    others = [isa for isa in isas if isa != chosen]
    built = f"{chosen} (also built: {', '.join(others)})" if others else chosen
    report.lines.append(("CPU kernels", built if isas else "not built"))
    if not isas:
        report.notes.append("without the compiled CPU kernels torch's own operations run in their place; reinstall with"
                            " a C++17 compiler at hand to build them")  # fmt: skip


def _look_at_host(report: Report, ranks: int) -> None:
    cores, threads = usable_cores(), torch.get_num_threads()
    usable, physical = len(cores), len(physical_cores(cores))
    report.lines.append(
        ("threads", f"{threads} used by torch; cores usable: {short_list(cores)} ({usable}, of which physical {physical})")
    )
    if ranks > 1:
        shares = [make_threads([cores] * ranks, index, None, bind=True) for index in range(ranks)]
        most = max(share.count for share in shares)
        report.lines.append(("threads per rank", f"{most} for steps on the host, {ranks} ranks"))
        own = "; ".join(short_list(share.cores) for share in shares[:8] if share.cores) or "none, they have to share"
        report.lines.append(("cores of a rank", own + ("; ..." if ranks > 8 else "") + " (with bind_threads=True)"))
        if ranks > usable:
            report.notes.append(f"{ranks} ranks share {usable} cores and will wait for each other")
        elif threads * ranks > usable and "OMP_NUM_THREADS" in os.environ:
            report.notes.append(
                f"{ranks} ranks with OMP_NUM_THREADS={threads} each are more than {usable} cores; set it to"
                f" {max(1, usable // ranks)}"
            )
    if ranks > 1 and not torch.accelerator.is_available():
        why_not = ops.why_no_neighbours()
        report.lines.append(
            ("between ranks", f"through sockets ({why_not})" if why_not else "from memory to memory on one host")
        )
    free, total = host_bytes_free(), host_bytes()
    report.lines.append(("host memory", f"{short_bytes(free)} free of {short_bytes(total)}"))
    if total < psutil.virtual_memory().total:
        report.notes.append("this process may use less memory than the machine has: a container limits it")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "no limit" if limit == resource.RLIM_INFINITY else f"limit {short_bytes(limit)}"
    report.lines += [("pinned memory", _pinning()), ("locked memory", locked)]


def _pinning() -> str:
    """What pinning as much as a step's staging needs gives."""
    if not torch.accelerator.is_available():
        return "not needed without an accelerator"
    try:
        pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True).is_pinned()
    except RuntimeError as error:
        return f"not possible ({str(error).splitlines()[0]})"
    return f"{short_bytes(_PINNED_BYTES)} can be had" if pinned else "not possible"


def _look_at_surroundings(report: Report) -> None:
    """What is known to go wrong together."""
    if os.environ.get("LIGHTNING_ZERO_ALWAYS_RELEASE", "0") not in ("", "0"):
        report.notes.append("LIGHTNING_ZERO_ALWAYS_RELEASE is set: a single rank gathers and releases for nothing")
    left = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK") if name in os.environ]
    if left and "TORCHELASTIC_RUN_ID" not in os.environ:
        report.notes.append(
            f"{', '.join(left)} set: Lightning takes it that somebody else starts the ranks, and starts none. Outside of a"
            " launcher, unset"
        )
    if "SLURM_NTASKS" in os.environ and "SLURM_PROCID" not in os.environ:
        report.notes.append("inside a SLURM allocation, but not under srun: start with srun, one task for each device")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        report.notes.append(
            f"the name of this machine, {socket.gethostname()!r}, has no address: between machines set GLOO_SOCKET_IFNAME or"
            " NCCL_SOCKET_IFNAME to the interface to use"
        )
    shm = Path("/dev/shm")
    if shm.is_dir() and shutil.disk_usage(shm).total < _SMALL_SHM_BYTES:
        report.notes.append(
            f"/dev/shm has {short_bytes(shutil.disk_usage(shm).total)}: data loaders with workers may run out of it (docker:"
            " --shm-size or --ipc=host)"
        )


def _look_at_disk(report: Report, path: Path) -> None:
    name = f"disk {path}"
    try:
        speed = disk.measure(path, _DISK_TEST_BYTES, _bar)
        usage = shutil.disk_usage(path)
    except OSError as error:
        report.lines.append((name, "cannot be used"))
        report.problems.append(f"{path} cannot hold offloaded state: {error.strerror or error}")
        return
    report.lines.append((name, f"{short_bytes(usage.free)} free of {short_bytes(usage.total)}"))
    report.lines.append(
        ("", f"writes {short_bytes(speed.write)}/s, reads {short_bytes(speed.read)}/s, with {short_bytes(_DISK_TEST_BYTES)}")
    )
    if not speed.direct:
        report.notes.append(f"the file system of {path} has no direct access: its reads may have come from memory")
    # See docs/nvme.md: 12 bytes per parameter and rank in each direction.
    report.lines.append(("", f"a step of 1B parameters in files takes {12e9 / speed.read + 12e9 / speed.write:.1f} s on one rank"))


def _bar(blocks: Iterable[int], what: str) -> Iterable[int]:
    return track(list(blocks), f"{what} the test file", console=Console(stderr=True), transient=True)
