"""Buffers of constant size (C_B of the ZeRO paper, section 6.2), and memory that does not go to pieces over many steps.

    python benchmarks/buffers.py --steps 200

One rank of eight in this process (torch's fake process group: collectives return at once). A stack of layers of 1M parameters,
as deep as 10M to 300M parameters. Reported are the peak of the engine's flat buffers, how many are made anew in a step once
their number is known, and for the deepest stack what the process holds over the bytes in use, as training goes on.
"""

import argparse
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from torch import nn

from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.estimate import short_count
from lightning_zero.partition import memory
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.tables import new_table, render

sys.path.insert(0, str(Path(__file__).parent))
from paper_table import fake_world

WIDTH, RANKS, SETTLED = 1024, 8, 5


class Run:
    """A model in training."""

    def __init__(self, layers: int, stage: int) -> None:
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), foreach=True)
        config = EngineConfig(stage, unit_bytes=4 * WIDTH**2)
        self.engine = ZeroEngine(self.module, Comm(0, RANKS, torch.device("cpu")), config, [self.optimizer])
        self.batch = torch.randn(16, WIDTH)

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


def resident_over_live(layers: int, steps: int) -> dict[int, float]:
    """By the number of steps: what the process has grown by over the bytes that the engine holds."""
    process, ratios = psutil.Process(), {}
    before = process.memory_info().rss
    run = Run(layers, 3)
    for step in range(1, steps + 1):
        run.step()
        if step in {SETTLED, steps // 4, steps // 2, steps}:
            ratios[step] = (process.memory_info().rss - before) / run.live
    run.engine.close()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 30, 100, 300], help="of 1M parameters each")
    parser.add_argument("--steps", type=int, default=200, help="of the deepest stack, at stage 3")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes, rows = new_table("stage 1", "stage 2", "stage 3"), []
    with fake_world(RANKS):
        ratios = resident_over_live(args.layers[-1], args.steps)
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
    shown = ", ".join(f"{ratio:.3f} after {step} steps" for step, ratio in ratios.items())
    print(f"Resident memory over bytes in use: {shown}")
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "buffers": rows, "resident_over_live": ratios}, indent=2))


if __name__ == "__main__":
    main()
