"""ZeroStrategy(stage="auto"): what it takes, that all ranks take the same, and that it trains like it."""

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, planner
from lightning_zero.estimate import estimate_memory
from tests.harness import WorldError, make_trainer, run
from tests.parity import TINY_UNIT_MB, RandomData
from tests.strategy.test_memory_monitor import Net

WIDTH = 32
PARAMETERS = 12 * (WIDTH + 1) * WIDTH


class Deep(Net):
    """Deep enough that buffers are small beside what a stage saves."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(12)])


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def free_memory_for(stage: int) -> float:
    """Host memory that two ranks with ``stage`` just fit into, beside a fifth kept free and the modules they have."""
    estimate = estimate_memory(Deep(), 2, stage, unit_size_mb=TINY_UNIT_MB, backend="gloo")
    return 2 * (estimate.total + estimate.buffers) / (1 - planner.RESERVE) - 2 * PARAMETERS * 4 + 1


def fit(stage: Any, **kwargs: Any) -> tuple[int, list[torch.Tensor], list[str]]:
    torch.manual_seed(1)
    log, logger = Log(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(log)
    module, strategy = Deep(), ZeroStrategy(stage=stage, unit_size_mb=TINY_UNIT_MB, **kwargs)
    trainer = make_trainer(".", strategy=strategy, max_steps=2)
    trainer.fit(module, DataLoader(RandomData(8, WIDTH), batch_size=2))
    trainer.validate(module, DataLoader(RandomData(8, WIDTH), batch_size=2), verbose=False)
    logger.removeHandler(log)
    return strategy.config.stage, list(module.state_dict().values()), [line for line in log.lines if line.startswith("ZeroStrategy")]


def fit_into(stages: tuple[int, ...]) -> list[tuple]:
    outcomes = []
    for stage in stages:
        planner.host_bytes_free = lambda stage=stage: free_memory_for(stage)  # a machine as small as that
        outcomes.append((fit("auto"), fit(stage)))
    return outcomes


def test_the_cheapest_stage_that_fits_is_taken() -> None:
    first, second = run(2, fit_into, (1, 2, 3))
    for stage, (chosen, named), (other, _) in zip((1, 2, 3), first, second, strict=True):
        assert chosen[0] == other[0] == named[0] == stage
        assert all(torch.equal(a, b) for a, b in zip(chosen[1], named[1], strict=True))
        (line,) = chosen[2]
        assert line.startswith(f"ZeroStrategy(stage='auto') has chosen stage {stage}. ")
        assert f"stage {stage} fits and leaves " in line
        assert line.count("does not fit: ") == stage - 1
        assert other[2] == named[2] == []


def nothing_fits() -> None:
    planner.host_bytes_free = lambda: 1000.0
    fit("auto")


def test_nothing_that_fits_is_an_error_with_its_reasons() -> None:
    with pytest.raises(WorldError, match=r"stage='auto'\) has found nothing that fits; to try it all the same, name a") as info:
        run(2, nothing_fits)
    assert "stage 3 does not fit: " in str(info.value)


def one_rank_with_offload() -> tuple[int, bool]:
    strategy = ZeroStrategy(stage="auto", offload=True)
    make_trainer(".", strategy=strategy, max_steps=2).fit(Deep(), DataLoader(RandomData(8, WIDTH), batch_size=2))
    return strategy.config.stage, strategy.offload is not None


def test_offload_that_was_asked_for_stays() -> None:
    assert run(1, one_rank_with_offload) == [(1, True)]


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="stage must be 1, 2, 3 or 'auto', got 'best'"):
        ZeroStrategy(stage="best")  # type: ignore[arg-type]


class Evaluation(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.stage = self.trainer.strategy.config.stage


def evaluate() -> int:
    module = Evaluation()
    make_trainer(".", strategy=ZeroStrategy(stage="auto")).test(module, DataLoader(RandomData(4, WIDTH)), verbose=False)
    return module.stage


def test_evaluation_alone_keeps_parameters_whole() -> None:
    assert run(2, evaluate) == [1, 1]
