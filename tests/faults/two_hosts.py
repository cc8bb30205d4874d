"""``python -m tests.faults.two_hosts``: two network namespaces for two hosts, and a bad link between them that is cut.

Needs root, ``ip`` and /dev/net/tun. Nothing leaves the two namespaces, which are removed however it ends.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.faults.bad_link import BadLink
from tests.faults.host import TIMEOUT_SECONDS, train
from tests.fresh import environment
from tests.harness import run

START_SECONDS = 120.0
DELAY, LOSS = 0.002, 0.01


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """Two namespaces with one link between them."""

    names: tuple[str, str] = field(default_factory=lambda: (f"zero-{os.getpid()}-0", f"zero-{os.getpid()}-1"))
    device: str = "link0"
    addresses: tuple[str, str] = ("10.213.0.1", "10.213.0.2")
    between: BadLink | None = None

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        self.between = BadLink(f"zero{os.getpid()}", DELAY, LOSS)
        for name, end, address in zip(self.names, self.between.names, self.addresses):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", self.device)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", self.device)
            _ip("-n", name, "link", "set", "lo", "up")
        self.link("up")
        self.between.start()

    def remove(self) -> None:
        if self.between is not None:
            self.between.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def link(self, state: str) -> None:
        for name in self.names:
            _ip("-n", name, "link", "set", self.device, state)

    def start(self, host: int, arguments: list[str], output: Path) -> subprocess.Popen:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1"]
        launcher += [f"--master-addr={self.addresses[0]}", "--master-port=29500", "-m", "tests.faults.host"]
        with output.open("w") as stream:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *launcher, *arguments], stdout=stream, stderr=subprocess.STDOUT,
                # There is no name server in a namespace: not to be waited for.
                env={**environment(), "GLOO_SOCKET_IFNAME": self.device, "RES_OPTIONS": "timeout:1 attempts:1"},
            )  # fmt: skip


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Raises OSError or CalledProcessError where there are no namespaces to be had."""
    made = Hosts()
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _end(processes: list[subprocess.Popen], seconds: float) -> list[int | None]:
    """Exit statuses, None for what had to be killed."""
    deadline, statuses = time.monotonic() + seconds, []
    for process in processes:
        try:
            statuses.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            statuses.append(None)
            process.terminate()  # the launcher ends its ranks
            process.wait()
    return statuses


def alone(folder: str) -> dict[str, Any]:
    """The same training on two ranks of one host."""
    return train(folder, [], devices=2)


@dataclass
class Report:
    carried: int = 0
    lost: int = 0
    """Packets on the link before it was cut."""
    statuses: list[int | None] = field(default_factory=list)
    """Of the launchers when the link was cut."""
    outputs: list[str] = field(default_factory=list)
    """What the hosts said then."""
    seconds: float = 0.0
    """From the cut to the end of both."""
    began: int = -1
    """The step that training went on from."""
    same: bool = False
    """Whether it ended with the weights of a run on one host that was left alone."""


def cut_and_resume(folder: Path) -> Report:
    """Train on two hosts, cut the link in the second epoch, and go on when it is there again."""
    report, place = Report(), folder / "run"
    place.mkdir()
    wanted = run(2, alone, str(folder / "alone"))[0]["weights"]
    with hosts() as both:
        outputs = [folder / f"output{host}" for host in range(2)]
        processes = [both.start(host, [str(place), "--wait-for-cut"], outputs[host]) for host in range(2)]
        try:
            deadline = time.monotonic() + START_SECONDS
            while not all((place / f"ready{host}").exists() for host in range(2)):
                if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                    raise RuntimeError("the hosts did not come to train:\n" + "\n".join(o.read_text() for o in outputs))
                time.sleep(0.05)
            report.carried, report.lost = both.between.carried, both.between.lost  # type: ignore[union-attr]
            both.link("down")
            (place / "cut").touch()
            start = time.monotonic()
        except BaseException:
            _end(processes, 0)
            raise
        report.statuses = _end(processes, START_SECONDS)
        report.seconds = time.monotonic() - start
        report.outputs = [output.read_text() for output in outputs]
        both.link("up")
        processes = [both.start(host, [str(place)], outputs[host]) for host in range(2)]
        if _end(processes, START_SECONDS) != [0, 0]:
            raise RuntimeError("they could not go on:\n" + "\n".join(output.read_text() for output in outputs))
    result = torch.load(place / "result.pt", weights_only=True)
    report.began = result["began"]
    report.same = all(torch.equal(result["weights"][name], value) for name, value in wanted.items())
    return report


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed
    with tempfile.TemporaryDirectory() as folder:
        report = cut_and_resume(Path(folder))
    print(f"link: {DELAY * 1e3:g} ms each way, {report.lost} of {report.carried + report.lost} packets lost before it was cut")
    print(f"cut: both hosts ended after {report.seconds:.1f} s (timeout {TIMEOUT_SECONDS} s), statuses {report.statuses}")
    for host, output in enumerate(report.outputs):
        errors = [line for line in output.splitlines() if "Error: " in line and "rank" in line]
        print(f"host {host}: {errors[-1] if errors else output[-2000:]}")
    print(f"link up: went on from step {report.began}, weights {'as' if report.same else 'NOT as'} on one host")
    return int(not report.same or None in report.statuses or 0 in report.statuses)


if __name__ == "__main__":
    raise SystemExit(main())
