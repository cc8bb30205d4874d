"""How the cost of a step grows: with parameters, with units, with ranks.

    python -m benchmarks.scaling             # in about ten minutes on two cores
    python -m benchmarks.scaling --update    # and write results/scaling.json and docs/scaling.md

Parameters and ranks: real steps over Gloo, beside DDP, all competitors in turn (see ``python -m benchmarks``). Units and
large worlds: what the host does beside the model's own operations (see benchmarks/overhead.py), as one rank of a process
group whose collectives return at once.
"""

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import overhead, pages
from benchmarks.run import Case, machine, run

RESULTS = pages.RESULTS / "scaling.json"
SIZES = ("10M", "30M", "100M", "300M")
RANKS = (1, 2, 4, 8)
UNITS = (10, 50, 100, 250, 500)
WORLDS = (2, 64, 1024)
COMPETITORS = ("stage 1", "stage 2", "stage 3")
WIDE = 128
"""Of the blocks in large worlds: a shard is at least 64 bytes, so smaller ones would grow with the world."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted steps of each competitor")
    parser.add_argument("--only", nargs="*", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--update", action="store_true", help="keep the results, and write the page that shows them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine()}
    for name in options.only or PARTS:
        results[name] = PARTS[name](options.rounds)
        if options.update:
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps({**kept, **results}, indent=1) + "\n")
            pages.write()


def of_parameters(rounds: int) -> dict[str, Any]:
    return {size: of_steps(Case(f"gpt {size}", competitors=few(size)), rounds) for size in SIZES}


def of_ranks(rounds: int) -> dict[str, Any]:
    alone = {1: "plain"}
    lines = {ranks: (alone.get(ranks, "DDP"), *COMPETITORS) for ranks in RANKS}
    return {str(ranks): of_steps(Case("gpt 10M", ranks, competitors=lines[ranks]), rounds) for ranks in RANKS}


def few(size: str) -> tuple[str, ...]:
    """Copies of the largest model do not all fit: what is whole on every rank is left out."""
    return ("stage 3",) if size == "300M" else ("DDP", *COMPETITORS)


def of_steps(case: Case, rounds: int) -> dict[str, Any]:
    """Seconds of each competitor's steps."""
    found = run(case, rounds)
    print(pages.as_text(case.task, found), flush=True)
    return found


def of_python(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds for a unit and pass, and for a parameter and step, by ranks and competitor."""
    found: dict[str, dict[str, list[float]]] = {}
    for ranks in (1, 64):
        with overhead.fake_world(ranks):
            costs = overhead.measure(ranks, 4 * rounds, peers=ranks > 1)
            print(overhead.table(costs, ranks), flush=True)
        found[str(ranks)] = {name: [cost.per_pass, cost.per_parameter_and_step] for name, cost in costs.items()}
    return found


def of_units(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of the host for each unit, by number of units and competitor; two parameters each, one rank."""
    with overhead.fake_world(1):
        return {str(units): host_time(units, rounds) for units in UNITS}


def of_worlds(rounds: int) -> dict[str, dict[str, float]]:
    """The same for 20 units, by number of ranks, without the calls of the collectives themselves: the fake process group
    copies a gathered shard to every rank's place, one by one."""
    found = {}
    for ranks in WORLDS:
        with overhead.fake_world(ranks):
            gather, reduce = of_fake_collectives(2 * WIDE**2, ranks, 4 * rounds)
            print(f"{ranks} ranks: {gather:.0f} us for a gather, {reduce:.0f} us for a reduction", flush=True)
            costs = host_time(20, rounds, WIDE)
            # At stage 3 backward begins with the last unit of forward, which is kept.
            gathers = {"stage 1": 1.0, "stage 2": 1.0, "stage 3": 2 - 1 / 20}
            found[str(ranks)] = {name: cost - gathers[name] * gather - reduce for name, cost in costs.items()}
    return found


def of_fake_collectives(numel: int, ranks: int, rounds: int) -> tuple[float, float]:
    """Microseconds of a call of each, the least of all rounds."""
    full, shard = torch.zeros(numel), torch.zeros(numel // ranks)
    calls = [
        lambda: dist.all_gather_single(full, shard, async_op=True),
        lambda: dist.reduce_scatter_single(shard, full, async_op=True),
    ]
    found = []
    for call in calls:
        times = [time.thread_time()]
        for _ in range(rounds):
            call()
            times.append(time.thread_time())
        found.append(1e6 * min(b - a for a, b in pairwise(times)))
    return found[0], found[1]


def host_time(units: int, rounds: int, width: int = overhead.WIDTH) -> dict[str, float]:
    makers = {"plain": overhead.plain, **{f"stage {stage}": overhead.ours(stage) for stage in (1, 2, 3)}}
    phases = overhead.fastest(makers, (units, 2), 4 * rounds, width)
    seconds = {name: sum(each) for name, each in phases.items()}
    costs = {name: 1e6 * (seconds[name] - seconds["plain"]) / units for name in COMPETITORS}
    print(f"{units} units of 2 x {width} x {width}:", {name: round(cost) for name, cost in costs.items()}, flush=True)
    return costs


PARTS = {"overhead": of_python, "units": of_units, "worlds": of_worlds, "parameters": of_parameters, "ranks": of_ranks}


if __name__ == "__main__":
    main()
