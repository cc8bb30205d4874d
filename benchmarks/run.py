"""Step times against peers: every case in one set of processes, in which all competitors take turns.

    python -m benchmarks                     # all cases, in about ten minutes on two cores
    python -m benchmarks --only gpt bf16     # some of them
    python -m benchmarks --update            # and write results/step_time.json, README.md and docs/scaling.md
    python -m benchmarks --pages             # write the pages from the JSON, without running anything

Each rank has a copy of the model for every competitor. In a round each of them takes one step (A B C, B C A, ...), so that
a change of the machine's speed meets all of them; reported are the medians of a competitor's time over the first one's in
the same round, with their quartiles. The first rounds do not count. Each rank computes on one thread.
"""

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import pages
from benchmarks.competitors import KINDS, Competitor, Setting, environment, has_deepspeed
from benchmarks.models import TASKS

OURS = ("stage 1", "stage 2", "stage 3")
FSDP2 = ("FSDP2", "FSDP2, no reshard")
PEERS = ("DDP", *FSDP2, *OURS)
DEEPSPEED = ("DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3")
WARM_UP = 3
RESULTS = pages.RESULTS / "step_time.json"


@dataclass(frozen=True)
class Case:
    """One line-up: the first of the competitors is what the others are divided by."""

    task: str = "gpt"
    ranks: int = 2
    setting: Setting = field(default_factory=Setting)
    competitors: tuple[str, ...] = PEERS
    rounds: int = 10
    kind: str = "train"


CASES = {
    "gpt": Case(competitors=("DDP", "plain", "ZeroRedundancyOptimizer", *FSDP2, *DEEPSPEED, *OURS), rounds=16),
    "bf16": Case(setting=Setting("bf16")),
    "accumulate": Case(setting=Setting(accumulate=4), rounds=6),
    "recompute": Case(setting=Setting(recompute=True)),
    "bf16 all": Case(setting=Setting("bf16", accumulate=4, recompute=True), rounds=6),
    "narrow": Case("narrow", rounds=20),
    "wide": Case("wide"),
    "convolutional": Case("convolutional", rounds=20),
    "one rank": Case(ranks=1, competitors=("plain", *OURS)),
    "four ranks": Case(ranks=4, rounds=6),
    "offload": Case(competitors=tuple(name for stage in OURS for name in (stage, f"{stage}, offload")), rounds=12),
    "compile": Case(competitors=("DDP", "DDP, compiled", "FSDP2", "FSDP2, compiled", "stage 3", "stage 3, compiled")),
    "evaluate": Case(competitors=("FSDP2", "plain", "stage 3"), rounds=20, kind="evaluate"),
    "set up": Case("gpt 300M", competitors=("copy", "FSDP2", *OURS), rounds=3, kind="set up"),
    "fit": Case("small gpt", 1, competitors=("plain", *OURS), rounds=5, kind="fit"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, help="counted steps of each competitor (default: by case)")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--update", action="store_true", help="keep the results, and write the pages that show them")
    parser.add_argument("--pages", action="store_true", help="only write the pages, from the results that are kept")
    options = parser.parse_args()
    if options.pages:
        pages.write()
        return
    start = time.perf_counter()
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    print(results["machine"])
    for name in options.only or CASES:
        results["cases"][name] = found = run(CASES[name], options.rounds)
        print(pages.as_text(name, found), flush=True)
        if options.update:
            keep(results)
    print(pages.targets_as_text(results["cases"]))
    print(f"{time.perf_counter() - start:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def keep(results: dict[str, Any]) -> None:
    """With the cases that were kept before and have not been run again."""
    kept = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
    found = {**kept, **results["cases"]}
    RESULTS.parent.mkdir(exist_ok=True)
    ordered = {**results, "cases": {name: found[name] for name in CASES if name in found}}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    pages.write()


def machine() -> str:
    """The line that goes with every figure."""
    name = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, Gloo, one thread for each rank"


def run(case: Case, rounds: int | None = None) -> dict[str, Any]:
    """The case, with seconds and last losses by competitor; without those of packages that are not installed."""
    left_out = set() if has_deepspeed() else {*DEEPSPEED}
    chosen = tuple(name for name in case.competitors if name not in left_out)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Ranks are forked from a server that has imported everything once.
    os.environ["DS_ACCELERATOR"] = "cpu"
    packages = ["benchmarks.run", "torch.distributed.fsdp", *["deepspeed"] * has_deepspeed()]
    multiprocessing.set_forkserver_preload(packages)
    queue = mp.get_context("forkserver").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (case, chosen, rounds or case.rounds, os.path.join(folder, "store"), queue)
        workers: Any = mp.start_processes(worker, arguments, case.ranks, join=False, start_method="forkserver")
        # Not the queue first: a worker that fails would never be heard of.
        while not workers.join(timeout=0.5) and queue.empty():
            pass
        found = queue.get()
        while not workers.join():
            pass
    return {**asdict(case), "competitors": chosen, "text": TASKS[case.task].text, **found}


def worker(rank: int, case: Case, chosen: tuple[str, ...], rounds: int, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    environment(rank, case.ranks)
    if case.kind != "fit":
        dist.init_process_group("gloo", store=dist.FileStore(store, case.ranks), rank=rank, world_size=case.ranks)
    competitors = {name: make(case, name) for name in chosen}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    losses: dict[str, float] = {}
    generator = torch.Generator().manual_seed(rank)
    for turn in range(WARM_UP + rounds if case.kind != "set up" else 1 + rounds):
        batches = [TASKS[case.task].batch(generator) for _ in range(case.setting.accumulate)]
        for name in chosen[turn % len(chosen) :] + chosen[: turn % len(chosen)]:
            competitors[name].prepare()
            meet()
            start = time.perf_counter()
            losses[name] = competitors[name].step(batches)
            meet()
            times[name].append(time.perf_counter() - start)
    if rank == 0:
        memory = {name: competitors[name].memory() for name in chosen if competitors[name].memory}  # type: ignore[misc]
        queue.put({"seconds": {n: t[-rounds:] for n, t in times.items()}, "losses": losses, "memory": memory})
    meet()
    if dist.is_initialized():
        dist.destroy_process_group()


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def make(case: Case, name: str) -> Competitor:
    def build() -> Any:
        torch.manual_seed(0)
        model = TASKS[case.task].model()
        model.recompute = case.setting.recompute
        return model

    return KINDS[case.kind][name](build, case.setting)
