"""The largest GPT that trains inside a fixed amount of resident memory: plain Lightning, DDP, stage 3, and files.

    python -m benchmarks.capacity --cap-gb 3 --folder /tmp --json result.json
    python -m benchmarks.capacity --cap-gb 3 --folder /tmp --modes all-nvme --blocks 24 --width 2048

The first is the whole table: about 20 runs, and half an hour on a disk of 1.5 GB/s.

Each run is a process group of its own: one batch of one short sequence, a few steps of AdamW, to the end of ``fit``. Its
memory is watched, and it is killed when it has more than the cap. What counts is the resident memory of all its processes
together, mapped files with the rest; not the page cache beside them. The search begins with what should just fit, goes on
where memory, as it was seen to grow, meets the cap, and ends when the largest model that passes is known to ``--tolerance``,
after ``--tries`` runs, or at ``--most`` million parameters, beyond which nothing is tried. A run that takes longer than
``--seconds`` is killed as well.

With ``--blocks`` one size is run instead of searching. Seconds of a step are those of the last one; of these, ``I/O`` is when
the disk was busy, and ``waiting`` when nothing else was. Beside it is what the disk gives to four threads of which two read
while two write, measured just before each run.
"""

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.models import GPT
from lightning_zero import OffloadConfig, ZeroStrategy

VOCABULARY = 256
POLL_SECONDS = 0.02
DISK_BLOCK, DISK_FILE = 4 * 2**20, 2**28
"""Bytes that are read or written at once, and those of each of four files."""
BASE_BYTES = 0.55e9
"""Of a rank without a model."""


class Training(pl.LightningModule):
    def __init__(self, width: int, blocks: int, context: int) -> None:
        super().__init__()
        self.model = GPT(width, blocks, width // 64, VOCABULARY, context)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Mode:
    """A way to train."""

    name: str
    ranks: int
    bytes_per_parameter: float
    """That all ranks together may be expected to take: where the search begins."""
    strategy: dict[str, Any] | None
    """Arguments of ZeroStrategy; None for Lightning's own."""

    def make(self, folder: str) -> Any:
        if self.strategy is None:
            return "auto" if self.ranks == 1 else "ddp"
        arguments = dict(self.strategy)
        if "offload" in arguments:
            arguments["offload"] = OffloadConfig(**arguments["offload"], nvme_path=folder)
        return ZeroStrategy(**arguments)


MODES = {
    mode.name: mode
    for mode in (
        Mode("plain", 1, 18, None),
        Mode("ddp", 2, 40, None),
        Mode("stage3", 2, 18, {"stage": 3}),
        Mode("nvme", 2, 10, {"stage": 3, "offload": {"optimizer": "nvme"}}),
        Mode("all-nvme", 2, 0.5, {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}}),
        Mode("all-nvme-1", 1, 0.5, {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}}),
    )
}


# -- inside a run ------------------------------------------------------------------------------------------------------


class Phases(pl.Callback):
    """Writes down when something begins, and what the last step has cost."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.step: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{time.time()} {phase}\n")

    def on_fit_start(self, *args: Any) -> None:
        self.begin("set-up")

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.begin("steps")
        self.before = self.counters(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        after = self.counters(trainer)
        self.step = {name: value - self.before[name] for name, value in after.items()}

    def on_train_end(self, *args: Any) -> None:
        self.begin("end")

    def counters(self, trainer: Any) -> dict[str, float]:
        tiers = getattr(trainer.strategy, "_tiers", None)
        counted = {"seconds": time.perf_counter()}
        if tiers is not None:
            queue = tiers.files.queue
            counted |= {"read": queue.read_bytes, "written": queue.written_bytes, "busy": queue.busy_seconds,
                        "waiting": queue.waited_seconds}  # fmt: skip
        return counted


def train(job: dict[str, Any]) -> None:
    mode, folder = MODES[job["mode"]], job["folder"]
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    phases = Phases(os.path.join(folder, f"phases-{rank}"))
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=mode.ranks, strategy=mode.make(folder), max_steps=job["steps"], precision=job["precision"],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[phases], default_root_dir=folder,
    )  # fmt: skip
    with trainer.init_module(empty_init=mode.strategy is not None):
        module = Training(job["width"], job["blocks"], job["context"])
    trainer.fit(module, DataLoader(torch.randint(VOCABULARY, (job["steps"] * mode.ranks, job["context"]))))
    if not all(torch.isfinite(parameter.flatten()[-1]) for parameter in module.parameters()):
        raise RuntimeError("the weights are not finite after fit")
    with open(os.path.join(folder, f"result-{rank}"), "w") as file:
        json.dump({"parameters": sum(p.numel() for p in module.parameters()), "step": phases.step}, file)


# -- outside -----------------------------------------------------------------------------------------------------------


def bandwidth(folder: str) -> float:
    """Bytes per second of two threads that read and two that write, each a file of its own, past the page cache."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="capacity-") as inside, ThreadPoolExecutor(4) as pool:
        block = mmap.mmap(-1, DISK_BLOCK)  # at the beginning of a page, as direct access wants it
        block.write(os.urandom(DISK_BLOCK))
        paths = [os.path.join(inside, str(index)) for index in range(4)]

        def go(path: str, reads: bool) -> None:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            into = mmap.mmap(-1, DISK_BLOCK)
            for _ in range(DISK_FILE // DISK_BLOCK):
                moved = os.readv(file, [into]) if reads else os.write(file, block)
                if moved != DISK_BLOCK:
                    raise OSError(f"{path}: {moved} bytes instead of {DISK_BLOCK}")
            os.close(file)

        list(pool.map(go, paths, [False] * 4))
        start = time.perf_counter()
        list(pool.map(go, paths, [True, True, False, False]))
        return 4 * DISK_FILE / (time.perf_counter() - start)


def resident(session: int) -> dict[str, int]:
    """Bytes of all processes of a session: of their own, and of files."""
    total = {"own": 0, "files": 0}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or os.getsid(int(entry.name)) != session:
                continue
            lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
        except OSError:
            continue  # it is over
        for name, kind in (("RssAnon", "own"), ("RssShmem", "own"), ("RssFile", "files")):
            total[kind] += 1024 * int(lines.get(name, "0").split()[0])
    return total


def attempt(job: dict[str, Any], cap: float) -> dict[str, Any]:
    """Run one size. ``passed`` is whether it came to its end below the cap, ``peaks`` the most resident bytes by phase."""
    disk = bandwidth(job["folder"])
    with tempfile.TemporaryDirectory(dir=job["folder"], prefix="capacity-") as folder:
        given = json.dumps({**job, "folder": folder})
        threads = str(max(1, (os.cpu_count() or 1) // MODES[job["mode"]].ranks))
        # Of all modes: else the C library keeps freed blocks of up to 32 MB, see docs/nvme.md.
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MALLOC_MMAP_THRESHOLD_": "1048576"}
        with open(os.path.join(folder, "output"), "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.capacity", "--run", given], stdout=output, stderr=output, env=environment, start_new_session=True
            )
            seen: list[tuple[float, dict[str, int]]] = []
            killed = False
            while process.poll() is None:
                seen.append((time.time(), resident(process.pid)))
                late = time.time() - seen[0][0] > job["seconds"]
                if (sum(seen[-1][1].values()) > cap or late) and not killed:
                    killed = True
                    if late:
                        print(f"  {job['mode']} with {job['blocks']} blocks takes more than {job['seconds']} s", flush=True)
                    os.killpg(process.pid, signal.SIGKILL)
                time.sleep(POLL_SECONDS)
        if process.returncode and not killed:
            sys.exit(f"{job} has failed:\n{Path(folder, 'output').read_text()[-3000:]}")
        marks = [line.split(" ", 1) for line in Path(folder, "phases-0").read_text().splitlines()]
        peaks: dict[str, dict[str, int]] = defaultdict(lambda: {"own": 0, "files": 0})
        for when, sizes in seen:
            phase = next((name for start, name in reversed(marks) if float(start) <= when), "start")
            peaks[phase] = max(peaks[phase], sizes, key=lambda one: sum(one.values()))
        found = {**job, "disk": disk, "passed": not killed, "peaks": dict(peaks), "peak": max(sum(s.values()) for _, s in seen)}
        if not killed:
            found |= json.loads(Path(folder, "result-0").read_text())
    print(describe(found), flush=True)
    return found


def describe(found: dict[str, Any]) -> str:
    peaks = ", ".join(f"{phase} {sum(s.values()) / 1e9:.2f}" for phase, s in found["peaks"].items())
    return f"  {found['mode']:10} {found['blocks']:4} blocks: {'passed' if found['passed'] else 'too large'} (GB: {peaks})"


def largest(job: dict[str, Any], cap: float, args: argparse.Namespace) -> dict[str, Any]:
    """The largest number of blocks that passes."""
    mode, per_block = MODES[job["mode"]], 12.0 * job["width"] ** 2
    most = max(1, int(1e6 * args.most / per_block))
    expected = (cap - BASE_BYTES * mode.ranks) / (mode.bytes_per_parameter * per_block)
    blocks, fails, best = max(1, min(most, int(expected))), most + 1, None
    for _ in range(args.tries):
        found = attempt({**job, "blocks": blocks}, cap)
        if found["passed"]:
            best = found
            start = sum(found["peaks"]["start"].values())
            growth = max(1.0, (found["peak"] - start) / blocks)
            ahead = int(0.99 * (cap - found["peak"]) / growth)
            next_blocks = min(blocks + ahead, fails - 1)
            if next_blocks <= blocks * (1 + args.tolerance):
                break
        else:
            fails = blocks
            next_blocks = int(0.9 * blocks) if best is None else (best["blocks"] + fails) // 2
            if next_blocks <= (0 if best is None else best["blocks"]):
                break
        blocks = next_blocks
    if best is None:
        sys.exit(f"{fails} blocks of width {job['width']} do not fit into {cap / 1e9:g} GB: choose a smaller --width, or more --tries")
    return best


@dataclass(frozen=True)
class Row:
    """What is told of a mode."""

    mode: str
    ranks: int
    parameters: float
    peak: float
    seconds: float
    waiting: float
    busy: float
    rate: float
    """Bytes per second while the disk was busy."""
    disk: float
    """Bytes per second that it gives, see ``bandwidth``."""


def row_of(found: dict[str, Any]) -> Row:
    mode, step = MODES[found["mode"]], found["step"]
    moved, busy = mode.ranks * (step.get("read", 0) + step.get("written", 0)), step.get("busy", 0.0)
    return Row(
        mode.name, mode.ranks, found["parameters"], found["peak"], step["seconds"], step.get("waiting", 0.0), busy,
        moved / busy if busy else 0.0, found["disk"],
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    plain = next((row.parameters for row in rows if row.mode == "plain"), None)
    lines = ["| | ranks | parameters | of plain | peak | step | compute | waiting for files | I/O | of the disk's |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        ratio = f"{row.parameters / plain:.1f}" if plain else ""
        io = f"{row.waiting:.1f} s | {row.rate / 1e9:.2f} GB/s | {row.rate / row.disk:.0%}" if row.busy else "| |"
        lines.append(
            f"| {row.mode} | {row.ranks} | {row.parameters / 1e6:.0f}M | {ratio} | {row.peak / 1e9:.2f} GB |"
            f" {row.seconds:.1f} s | {row.seconds - row.waiting:.1f} s | {io} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap-gb", type=float, default=3.0, help="resident memory of a run, of all its ranks together")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--context", type=int, default=32, help="tokens in the one sequence of a batch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, help="run this size instead of searching")
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--tries", type=int, default=5, help="runs of a search")
    parser.add_argument("--most", type=float, default=1050, help="million parameters; no larger model is tried")
    parser.add_argument("--seconds", type=float, default=900, help="of a run")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the files: on the disk to use")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return train(json.loads(args.run))
    rows, runs = [], []
    for name in args.modes:
        job = {"mode": name, **{key: getattr(args, key) for key in ("precision", "steps", "context", "width", "folder", "seconds")}}
        cap = 1e9 * args.cap_gb
        if args.blocks:
            found = attempt({**job, "blocks": args.blocks}, cap)
            if not found["passed"]:
                sys.exit(f"{name}: {args.blocks} blocks do not fit")
        else:
            found = largest(job, cap, args)
        runs.append(found)
        rows.append(row_of(found))
    print(table(rows))
    if args.json:
        result = {"arguments": vars(args), "rows": [asdict(row) for row in rows], "runs": runs}
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
