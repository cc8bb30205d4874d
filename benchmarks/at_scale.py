"""Time of a training step on clusters that nobody here has: a model on paper, from constants that are stated.

    python -m benchmarks.at_scale
    python -m benchmarks.at_scale --billions 30 --tokens 16384

A step has three phases, in each of which sending and computing go on side by side, and the longer one counts::

    forward    2 flops for each parameter and token        units gathered: all stages (1 and 2 their updated weights)
    backward   4                                           gathered again at stage 3; gradients reduced: all stages
    update     32 bytes of memory moved for each owned parameter

and the host must have launched it all: so many microseconds for each unit and pass, as measured. A collective over whole
nodes takes ``max(bytes / bandwidth of a GPU inside, bytes / bandwidth of a node outside) + latency * log2(ranks)``: every
byte enters each node once, through all of its adapters. What cannot be hidden, the first gather and the last reduction, is
added. Efficiency is the share of the step in which a GPU computes forward and backward.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_zero.settings import DEFAULT_UNIT_SIZE_MB

RANKS = (64, 256, 1024, 4096)
HOST_MICROSECONDS = 110.0
"""Of Python for a unit and pass at stage 3, as measured by benchmarks/overhead.py. All else here is assumed."""


@dataclass(frozen=True)
class Cluster:
    name: str
    per_node: int
    flops: float
    """Of one GPU, at which kernels run: half of a data sheet's figure for H100 in 16 bit."""
    memory: float
    """Bytes per second of a GPU's memory."""
    inside: float
    """Bytes per second into a GPU inside a node."""
    outside: float
    """Bytes per second into a node, nine tenths of the wire's."""
    latency: float
    """Seconds for one hop of a collective."""


CLUSTERS = (
    Cluster("NVLink, 8 x 400 Gb/s InfiniBand a node", 8, 495e12, 2.5e12, 300e9, 0.9 * 400e9, 5e-6),
    Cluster("NVLink, 2 x 200 Gb/s Ethernet a node", 8, 495e12, 2.5e12, 300e9, 0.9 * 50e9, 20e-6),
    Cluster("NVLink, 100 Gb/s Ethernet a node", 8, 495e12, 2.5e12, 300e9, 0.9 * 12.5e9, 20e-6),
)
PAPER = Cluster("16 V100, 800 Gb/s a node", 16, 0.5 * 125e12, 0.8e12, 120e9, 0.9 * 100e9, 5e-6)
"""Of the ZeRO paper's section on evaluation; half of the peak is assumed here as well."""
PAPER_REPORTS = (("13B, stage 2, no model parallelism", 13e9, 2, 128, 40.0),)
"""Parameters, stage, GPUs, and teraflops for each GPU that the paper reports ("over 40")."""


@dataclass(frozen=True)
class Step:
    """Seconds."""

    total: float
    computing: float

    @property
    def efficiency(self) -> float:
        return self.computing / self.total


def step(cluster: Cluster, stage: int, parameters: float, tokens: float, ranks: int) -> Step:
    """16-bit weights and gradients on the wire, units of the default size, Adam in fp32."""
    nbytes = 2 * parameters
    units = max(1, math.ceil(nbytes / (DEFAULT_UNIT_SIZE_MB * 2**20)))
    computing = 6 * parameters * tokens / cluster.flops
    send = collective(cluster, nbytes / units, ranks)
    host = units * HOST_MICROSECONDS * 1e-6
    forward = max(computing / 3, units * send, host)
    backward = max(2 * computing / 3, units * send * (2 if stage == 3 else 1), host)
    update = 32 * parameters / ranks / cluster.memory
    return Step(forward + backward + update + 2 * send, computing)


def collective(cluster: Cluster, nbytes: float, ranks: int) -> float:
    """Of a gather, or a reduce-scatter, of a buffer of ``nbytes``."""
    share = nbytes * (ranks - 1) / ranks
    outside = share / cluster.outside if ranks > cluster.per_node else 0.0
    return max(share / cluster.inside, outside) + cluster.latency * math.log2(ranks)


def rows(parameters: float, tokens: float) -> Iterator[tuple[str, ...]]:
    for cluster in CLUSTERS:
        for stage in (2, 3):
            steps = [step(cluster, stage, parameters, tokens, ranks) for ranks in RANKS]
            yield cluster.name, str(stage), *(f"{it.total:.2f} s, {100 * it.efficiency:.0f}%" for it in steps)


def table(parameters: float = 7.5e9, tokens: float = 8192) -> str:
    return markdown(("cluster", "stage", *(f"{ranks} GPUs" for ranks in RANKS)), rows(parameters, tokens))


def paper_table() -> str:
    found = []
    for text, parameters, stage, ranks, reported in PAPER_REPORTS:
        it = step(PAPER, stage, parameters, 2 * 1024, ranks)
        model = 6 * parameters * 2 * 1024 / it.total / 1e12
        found.append((text, str(ranks), f"over {reported:g}, {100 * reported / 125:.0f}%", f"{model:.0f}, {100 * model / 125:.0f}%"))
    return markdown(("ZeRO paper, V100", "GPUs", "TFLOP/s for each, of 125: reported", "this model"), found)


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("|  |", "| |")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.at_scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--billions", type=float, default=7.5, help="parameters")
    parser.add_argument("--tokens", type=float, default=8192, help="on each GPU")
    options = parser.parse_args()
    print(table(1e9 * options.billions, options.tokens))
    print(paper_table())


if __name__ == "__main__":
    main()
