"""Checkpoints drawn at random, saved by some ranks at some stage and taken over by others: nothing of them may change."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.consolidate import consolidate
from tests.fuzz.modules import WIDTH
from tests.fuzz.training import Drawn, Plan
from tests.harness import WorldError, make_trainer, run
from tests.parity import RandomData

FORMS = ("full", "sharded")


@dataclass
class Move:
    """What one seed stands for: a module and an optimizer, and what saves and takes them over."""

    seed: int
    worlds: tuple[int, int] = (2, 3)
    sides: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        for _ in range(2):
            side = {"stage": draw.choice([1, 2, 3]), "state_dict_type": draw.choice(FORMS)}
            side |= {"unit_size_mb": draw.choice([1e-4, 1e-3, 32.0]), "offload": draw.random() < 0.3}
            self.sides.append(side)
        self.precision = draw.choice(["32-true", "32-true", "bf16-mixed", "bf16-true"])


def path_of(folder: str, move: Move, side: int) -> str:
    return f"{folder}/{move.seed}-{side}"


def fit(folder: str, move: Move, side: int) -> None:
    """One epoch; or, on the second side, none: what was saved is loaded and saved again."""
    plan = Plan(move.seed)
    plan.manual, plan.hooks, plan.trainer, plan.resumed = False, (), {}, "full"
    torch.manual_seed(move.seed + side)
    module = Drawn(plan, reentrant=False)
    trainer = make_trainer(
        ".", strategy=ZeroStrategy(**move.sides[side]), max_epochs=1, precision=move.precision, num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )  # fmt: skip
    data = DataLoader(RandomData(4, 4, WIDTH), batch_size=2)
    trainer.fit(module, data, ckpt_path=path_of(folder, move, 0) if side else None)
    trainer.save_checkpoint(path_of(folder, move, side))


def fit_all(folder: str, moves: list[Move], side: int) -> dict[int, str]:
    """Inside a rank: by seed, what was raised."""
    failed = {}
    for move in moves:
        try:
            fit(folder, move, side)
        except Exception as error:
            failed[move.seed] = f"side {side}: {type(error).__name__}: {error}"
    return failed


def content(path: str) -> dict[str, Any]:
    """Of either form: weights, optimizer state, masters, all else that training goes on from."""
    if Path(path).is_dir():
        consolidate(path, f"{path}.ckpt")
        path += ".ckpt"
    return torch.load(path, weights_only=True)


def differing(got: Any, wanted: Any, place: str = "") -> list[str]:
    """Where two checkpoints differ, bit for bit."""
    if isinstance(wanted, dict):
        if not isinstance(got, dict) or got.keys() != wanted.keys():
            return [f"{place}: {sorted(map(str, got))} instead of {sorted(map(str, wanted))}"]
        return [one for key in wanted for one in differing(got[key], wanted[key], f"{place}/{key}")]
    if isinstance(wanted, (list, tuple)):
        if len(got) != len(wanted):
            return [f"{place}: {len(got)} instead of {len(wanted)}"]
        return [one for i, (a, b) in enumerate(zip(got, wanted)) for one in differing(a, b, f"{place}/{i}")]
    same = torch.equal(got, wanted) and got.dtype == wanted.dtype if isinstance(wanted, Tensor) else got == wanted
    return [] if same else [place]


def changes(folder: str, moves: list[Move]) -> dict[int, str]:
    """By seed, what went wrong; all ``moves`` are between the same numbers of ranks."""
    for side, world in enumerate(moves[0].worlds):
        try:
            failed = {
                seed: text for by_seed in run(world, fit_all, folder, moves, side) for seed, text in by_seed.items()
            }
        except WorldError as error:
            failed = dict.fromkeys((move.seed for move in moves), f"side {side}: {error}")
        if failed:
            return failed
    found = {}
    for move in moves:
        before, after = (content(path_of(folder, move, side)) for side in (0, 1))
        for key in ("state_dict", "optimizer_states", "lightning_zero", "lr_schedulers", "epoch", "global_step"):
            if text := differing(after.get(key), before.get(key), key):
                found[move.seed] = f"{move}: {text[:3]}"
    return found
