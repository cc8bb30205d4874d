"""``lightning-zero doctor``: whether this machine is ready, and what it has."""

import importlib.metadata
import os
import platform
import resource
import warnings
from dataclasses import dataclass, field

import psutil
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from lightning_zero import ops
from lightning_zero.estimate import short_bytes

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
        text += [f"note: {note}" for note in self.notes]
        text += [f"PROBLEM: {problem}" for problem in self.problems] or ["No problem found."]
        return "\n".join(text)


def run() -> int:
    """Print the report; returns 1 if there is a problem."""
    report = examine()
    print(report)
    return 1 if report.problems else 0


def examine() -> Report:
    report = Report()
    report.lines.append(("lightning_zero", version("lightning_zero") or "not installed, run from its source"))
    report.lines.append(("python", platform.python_version()))
    _look_at_versions(report)
    _look_at_backends(report)
    _look_at_kernels(report)
    _look_at_host(report)
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


def _look_at_host(report: Report) -> None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.lines.append(("threads", f"{torch.get_num_threads()} used by torch, {usable} cores usable"))
    memory = psutil.virtual_memory()
    report.lines.append(("host memory", f"{short_bytes(memory.available)} free of {short_bytes(memory.total)}"))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "no limit" if limit == resource.RLIM_INFINITY else f"limit {short_bytes(limit)}"
    report.lines.append(("pinned memory", f"{_pinning()}; locked memory: {locked}"))


def _pinning() -> str:
    if not torch.accelerator.is_available():
        return "not needed without an accelerator"
    try:
        return "possible" if torch.empty(1, pin_memory=True).is_pinned() else "not possible"
    except RuntimeError as error:
        return f"not possible ({str(error).splitlines()[0]})"
