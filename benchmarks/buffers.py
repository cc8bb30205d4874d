"""Buffers of constant size (C_B of the ZeRO paper, section 6.2), and memory that does not go to pieces over many steps.

    python benchmarks/buffers.py --steps 200

One rank of eight in this process (torch's fake process group: collectives return at once). A stack of layers of 1M parameters,
as deep as 10M to 300M parameters. Reported are the peak of the engine's flat buffers, how many are made anew in a step once
their number is known, and for one stack (--deep), as training goes on: the calls of torch's allocator in a step, and the peak
of the process over the bytes in use. There every layer is recomputed, with its input where autograd keeps it and in one region
(contiguous_activations).
"""

import argparse
import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_zero.activations.checkpointing import Recomputation, checked_policy
from lightning_zero.activations.contiguous import ContiguousInputs, Region
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.estimate import short_count
from lightning_zero.partition import memory
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.tables import new_table, render

sys.path.insert(0, str(Path(__file__).parent))
from paper_table import fake_world

WIDTH, RANKS, SETTLED, ROWS = 1024, 8, 5, 64


class Run:
    """A model in training."""

    def __init__(self, layers: int, stage: int) -> None:
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), foreach=True)
        config = EngineConfig(stage, unit_bytes=4 * WIDTH**2)
        self.engine = ZeroEngine(self.module, Comm(0, RANKS, torch.device("cpu")), config, [self.optimizer])
        self.batch = torch.randn(ROWS, WIDTH)

    def recompute(self, contiguous: bool) -> None:
        region = Region(torch.device("cpu"), self.engine.ledger.add)
        Recomputation(self.module, checked_policy(nn.Linear), ContiguousInputs(region) if contiguous else None)

    def step(self) -> None:
        with self.engine.step("train", backward_follows=True):
            loss = self.module(self.batch).square().mean()
        self.optimizer.zero_grad()
        with self.engine.backward():
            loss.backward()
        self.optimizer.step()

    @property
    def live(self) -> int:
        """Bytes that the engine holds between steps."""
        return sum(self.engine.memory_stats()["now"].values())


def made_anew(run: Run) -> int:
    """Buffers that one step allocates."""
    made, code = 0, memory.allocate.__code__

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal made
        made += event == "call" and frame.f_code is code

    sys.setprofile(note)
    try:
        run.step()
    finally:
        sys.setprofile(None)
    return made


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1])  # type: ignore[index]


def allocations(run: Run) -> int:
    """Calls of torch's allocator that give out memory, in one step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run.step()
    events = profiler.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)


def over_steps(layers: int, steps: int, contiguous: bool) -> dict[int, tuple[int, float]]:
    """By the number of steps: allocations in one, and what the process has grown by at its peak over what is in use."""
    before, found = status("VmRSS"), {}
    run = Run(layers, 3)
    run.recompute(contiguous)
    for step in range(1, steps + 1):
        measured = step in {SETTLED, steps // 4, steps // 2, steps}
        if measured:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        run.step()
        if measured:
            peak = status("VmHWM") - before
            found[step] = allocations(run), peak / run.live
    run.engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 30, 100, 300], help="of 1M parameters each")
    parser.add_argument("--deep", type=int, default=30, help="layers of the stack that is trained for long, at stage 3")
    parser.add_argument("--steps", type=int, default=200, help="of that stack")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes, rows = new_table("stage 1", "stage 2", "stage 3"), []
    with fake_world(RANKS):
        runs = {}
        for name, contiguous in (("kept by autograd", False), ("in one region", True)):
            runs[name] = over_steps(args.deep, args.steps, contiguous)
        for layers in args.layers:
            cells = []
            for stage in (1, 2, 3):
                run = Run(layers, stage)
                for _ in range(SETTLED):
                    run.step()
                peak, anew = run.engine.memory_stats()["peak"].get("buffers", 0), made_anew(run)
                rows.append({"layers": layers, "stage": stage, "buffers": peak, "made_anew": anew})
                cells.append(f"{peak / 1e6:.1f} MB, {anew} anew")
                run.engine.close()
            sizes.add_row(short_count(layers * WIDTH**2), *cells)
        print(render(sizes, [f"Buffers on one of {RANKS} ranks at their peak, and those made anew in a step"]))
    table = new_table(*(f"after\n{step} steps" for step in next(iter(runs.values()))))
    for name, found in runs.items():
        table.add_row(name, *(f"{calls}, {ratio:.2f}" for calls, ratio in found.values()))
    print(render(table, ["Allocations in a step, and the process' peak over the bytes in use; inputs of recomputed layers"]))
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "buffers": rows, "over_steps": runs}, indent=2))


if __name__ == "__main__":
    main()
