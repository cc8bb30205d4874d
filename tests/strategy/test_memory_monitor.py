"""MemoryMonitor: what it logs is what the ranks hold, what it prints is readable and explains itself."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_zero import MemoryMonitor
from lightning_zero.callbacks import memory_report
from lightning_zero.callbacks.measurements import STATE_KINDS, Reading
from lightning_zero.callbacks.memory_report import Forecast
from lightning_zero.estimate import MemoryEstimate, estimate_engine, estimate_memory
from tests.harness import make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, RandomData, make_strategy

KINDS = ("parameters", "gradients", "optimizer", "buffers")


class Net(pl.LightningModule):
    """The last shard of its bias is empty on rank 1, so the ranks hold different amounts of optimizer state."""

    def __init__(self, optimizer: Callable = torch.optim.Adam, unused: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 2))
        self.unused = nn.Linear(64, 64) if unused else None
        self.make_optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.body(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.body(batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters(), lr=0.1)


class Witness(pl.Callback):
    """Asks the strategy itself, on its own rank, wherever the monitor may."""

    def __init__(self) -> None:
        self.stats: dict[int, dict] = {}
        self.sent: dict[int, int] = {}
        self.waited: dict[int, float] = {}
        self.validation_sent = 0

    def _waited(self, trainer: pl.Trainer) -> float:
        return sum(count["seconds"] for count in trainer.strategy.comm_stats().values())

    def _sent(self, trainer: pl.Trainer) -> int:
        stats = trainer.strategy.comm_stats()
        return sum(count["bytes"] for count in stats.values()) - self.validation_sent

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.sent[-1] = self._sent(trainer)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.before = self._sent(trainer)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.validation_sent += self._sent(trainer) - self.before

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.stats[step] = trainer.strategy.memory_stats()
        self.sent[step] = self._sent(trainer)
        self.waited[step] = self._waited(trainer)


class Memory(pl.loggers.logger.DummyLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "memory/total_max" in metrics:
            self.rows[step] = metrics


def fit(
    stage: int,
    module: pl.LightningModule,
    every_n_steps: int = 3,
    data: Dataset | None = None,
    witness: bool = True,
    **kwargs: Any,
) -> tuple[dict[int, dict[str, float]], Witness]:
    logger, witnesses = Memory(), [Witness()] if witness else []
    trainer = make_trainer(
        ".",
        strategy=make_strategy(stage),
        callbacks=[*witnesses, MemoryMonitor(every_n_steps)],
        logger=logger,
        max_epochs=2,
        **kwargs,
    )
    loaders = DataLoader(data or RandomData(20, 16), batch_size=2), DataLoader(RandomData(8, 16), batch_size=2)
    trainer.fit(module, *loaders)
    return logger.rows, witnesses[0] if witnesses else Witness()


def fit_all_stages() -> list[tuple[dict, dict, dict, dict]]:
    outcomes = []
    for stage in STAGES:
        rows, witness = fit(stage, Net(), val_check_interval=2)
        outcomes.append((rows, witness.stats, witness.sent, witness.waited))
    return outcomes


def test_what_is_logged_is_what_the_ranks_hold_and_send() -> None:
    ranks = run(2, fit_all_stages)
    for stage in STAGES:
        rows = ranks[0][stage - 1][0]
        witnesses = [rank[stage - 1][1:] for rank in ranks]
        # Ten steps, of which the third, sixth and ninth are measured.
        assert list(rows) == [2, 5, 8]
        for step, row in rows.items():
            stats = [stats[step] for stats, _, _ in witnesses]
            for kind in KINDS:
                held = [s["now"].get(kind, 0) for s in stats]
                assert (row[f"memory/{kind}_max"], row[f"memory/{kind}_mean"]) == (max(held), sum(held) / 2), kind
            totals = [sum(s["now"].values()) for s in stats]
            assert (row["memory/total_max"], row["memory/total_mean"]) == (max(totals), sum(totals) / 2)
            peaks = [s["peak_total"] for s in stats]
            assert (row["memory/total_peak_max"], row["memory/total_peak_mean"]) == (max(peaks), sum(peaks) / 2)
            sent = [(by_step[step] - by_step[step - 3]) / 3 for _, by_step, _ in witnesses]
            assert (row["step/bytes_sent_max"], row["step/bytes_sent_mean"]) == (max(sent), sum(sent) / 2)
            assert row["memory/other_max"] == row["memory/master_max"] == 0
            assert row["memory/optimizer_max"] > row["memory/optimizer_mean"] > 0
            assert row["memory/rss_max"] >= row["memory/rss_mean"] > 50e6
            assert row["memory/host_available_mean"] >= row["memory/host_available_min"] > 0
            assert row["memory/residual_max"] >= row["memory/residual_mean"] > 50e6
            assert 0 < row["step/seconds_mean"] <= row["step/seconds_max"] < 10
            parts = [row[f"step/{part}_seconds_mean"] for part in ("compute", "wait", "optimizer")]
            assert all(part > 0 for part in parts)
            assert sum(parts) == pytest.approx(row["step/seconds_mean"])
            assert "step/update_pending_max" not in row
            assert row["step/all_gather_bytes_max"] > 0
            assert row["step/reduce_scatter_bytes_max"] > 0


def test_waits_are_what_the_strategy_has_counted() -> None:
    rows, _, _, waited = run(2, fit_one)[0]
    # No validation in between: everything that this rank waited from one measurement to the next.
    assert rows[5]["step/wait_seconds_max"] >= (waited[5] - waited[2]) / 3 > 0


def fit_one() -> tuple[dict, dict, dict, dict]:
    rows, witness = fit(3, Net(), limit_val_batches=0)
    return rows, witness.stats, witness.sent, witness.waited


def fit_delayed() -> dict[int, float]:
    logger = Memory()
    strategy = make_strategy(2, offload=True, delayed_update=3)
    trainer = make_trainer(".", strategy=strategy, callbacks=[MemoryMonitor(1)], logger=logger, max_epochs=1)
    trainer.fit(Net(), DataLoader(RandomData(20, 16), batch_size=2))
    return {step: row["step/update_pending_max"] for step, row in logger.rows.items()}


def test_a_pending_update_is_seen() -> None:
    # The updates of steps 0, 1 and 2 are made at once.
    assert run(2, fit_delayed)[0] == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}


def accumulate() -> list[int]:
    return list(fit(2, Net(), every_n_steps=2, witness=False, accumulate_grad_batches=2)[0])


def test_steps_are_optimizer_steps() -> None:
    # Two epochs of five batches: steps after two, two and the last one.
    assert run(2, accumulate)[0] == [1, 3, 5]


class Various(Net):
    """A weight that steps compute with in fp32 in mixed precision, frozen ones of both kinds, and ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.norm = nn.LayerNorm(16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.norm(self.frozen(batch)), batch_idx)


class Compare(pl.Callback):
    """The prediction of the engine itself."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        engine = trainer.strategy.engine
        self.estimates = [estimate_engine(engine, 2, str(trainer.precision), stage) for stage in (0, None)]


def predict_before_and_after() -> list[tuple[list[MemoryEstimate], list[MemoryEstimate]]]:
    pairs = []
    for precision, stage, late in itertools.product(("32-true", "64-true", "bf16-mixed", "bf16-true"), STAGES, (0, 1)):
        module, compare = Various(), Compare()
        before = [
            estimate_memory(module, 2, at, bool(late and at), precision, unit_size_mb=TINY_UNIT_MB, backend="gloo")
            for at in (0, stage)
        ]
        kwargs = {"offload": True, "delayed_update": 0} if late else {}
        trainer = make_trainer(
            ".", strategy=make_strategy(stage, **kwargs), callbacks=[compare], precision=precision, max_steps=1
        )
        trainer.fit(module, DataLoader(RandomData(4, 16), batch_size=2))
        pairs.append((before, compare.estimates))
    return pairs


def test_a_module_is_predicted_as_its_engine_is() -> None:
    for before, after in run(2, predict_before_and_after)[0]:
        for mine, engines in zip(before, after, strict=True):
            # On a CPU nothing rests elsewhere.
            assert replace(mine, on_host=()) == engines


class ManualNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for _ in range(2):  # as in a GAN: global_step counts twice
            self.optimizers().zero_grad()
            self.manual_backward(self.body(batch).square().mean())
            self.optimizers().step()


def manual() -> list[int]:
    return list(fit(3, ManualNet(), every_n_steps=4, witness=False)[0])


def test_manual_optimization_counts_batches() -> None:
    assert run(2, manual)[0] == [3, 7]


def uneven() -> tuple[list[int], int]:
    data = RandomData(12 if dist.get_rank() else 16, 16)
    rows, witness = fit(3, Net(), every_n_steps=1, data=data, use_distributed_sampler=False)
    return list(rows), len(witness.stats)


def test_ranks_with_different_numbers_of_batches_measure_together() -> None:
    first, second = run(2, uneven)
    assert first[0] == list(range(12))
    assert first[1] == second[1] == 12


def write_csv() -> str:
    logger = CSVLogger(".", version=0)
    trainer = make_trainer(
        ".", strategy=make_strategy(2), callbacks=[MemoryMonitor(2)], logger=logger, max_epochs=1, log_every_n_steps=1
    )
    trainer.fit(Net(), DataLoader(RandomData(16, 16), batch_size=2))
    return open(f"{logger.log_dir}/metrics.csv").read() if dist.get_rank() == 0 else ""


def test_the_trainers_own_loggers_take_it() -> None:
    header, *lines = run(2, write_csv)[0].splitlines()
    position = header.split(",").index("memory/total_max")
    steps = header.split(",").index("step")
    values = {int(line.split(",")[steps]): line.split(",")[position] for line in lines if line.split(",")[position]}
    assert sorted(values) == [1, 3]
    assert all(float(value) > 0 for value in values.values())


def fit_quietly(stage: int, kwargs: dict[str, Any]) -> None:
    fit(stage, Net(**kwargs), witness=False, enable_progress_bar=False)


def tables(output: str) -> list[str]:
    """What the ranks printed, one string per table, each up to the empty line after it."""
    return ["Memory per rank" + text.split("\n\n")[0] for text in output.split("Memory per rank")[1:]]


def cells(table: str, label: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.strip().startswith(label))
    return line.strip()[len(label) :].split()


@pytest.mark.parametrize("stage", STAGES)
def test_tables_are_printed_once_before_and_after(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    run(2, fit_quietly, stage, {})
    opening, closing = tables(capsys.readouterr().out)
    assert opening.startswith(
        f"Memory per rank in kB, predicted: ZeRO stage {stage}, 2 ranks\n629 parameters, 32-true, Adam\n"
    )
    assert closing.startswith(f"Memory per rank in kB, measured over 10 steps: ZeRO stage {stage}, 2 ranks\n")
    assert all(len(line) <= 80 for table in (opening, closing) for line in table.splitlines())
    formula = {1: "8P + 8P/N", 2: "4P + 12P/N", 3: "16P/N"}[stage]
    assert cells(opening, "bytes") == ["16P", *2 * formula.split()]
    # 629 fp32 parameters; padded to 2 * 320, 2 * 336 or so as units are cut.
    plain, by_formula, predicted, *measured = map(float, cells(closing, "parameters"))
    assert (plain, by_formula) == (2.52, 1.26 if stage == 3 else 2.52)
    assert measured == [predicted] * 4
    assert by_formula <= predicted < by_formula * 1.1
    assert float(cells(closing, "total")[0]) == 10.06
    assert len(cells(closing, "process RSS")) == 4
    assert "of plain data parallelism." in closing


def test_a_difference_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    run(2, fit_quietly, 2, {"unused": True})
    closing = " ".join(tables(capsys.readouterr().out)[1].split())
    # Of 4789 parameters 4160 are not used.
    assert "gradients: 86% less than predicted: not every parameter has had a gradient." in closing
    assert "optimizer: 86% less than predicted: parameters that never had a gradient have no state." in closing


def test_plain_data_parallelism_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    run(2, fit_quietly, 0, {"optimizer": torch.optim.SGD})
    opening, closing = tables(capsys.readouterr().out)
    assert "predicted: DDPStrategy, 2 ranks\n629 parameters, 32-true, SGD\n" in opening
    assert cells(opening, "bytes") == ["8P"]
    # Lightning clears the gradients before the validation that ends an epoch.
    assert cells(closing, "gradients") == ["2.52", "0", "0", "2.52", "2.52"]
    assert cells(closing, "total")[0] == "5.03"
    assert "less than" not in closing


def test_a_single_device_is_shown_too(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, default_root_dir=tmp_path, callbacks=[MemoryMonitor(2)], max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(RandomData(8, 16), batch_size=2))
    opening, closing = tables(capsys.readouterr().out)
    assert "SingleDeviceStrategy, 1 rank" in opening
    # The step counters of Adam are the few bytes more.
    assert cells(closing, "optimizer") == ["5.03", "5.05", "5.05", "5.05", "5.05"]


def test_other_strategies_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="MemoryMonitor does not know how FSDPStrategy keeps parameters"):
        MemoryMonitor().setup(SimpleNamespace(strategy=FSDPStrategy()), None, "fit")  # type: ignore[arg-type]


@pytest.mark.parametrize("every_n_steps", [0, -1, 2.5, True])
def test_a_bad_interval_is_refused(every_n_steps: Any) -> None:
    with pytest.raises(ValueError, match="every_n_steps must be an integer of at least 1, got"):
        MemoryMonitor(every_n_steps=every_n_steps)


def test_tables_are_text_in_notebooks_too(forecast: Forecast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "model states" in memory_report.opening_table(forecast)


# -- tables alone ------------------------------------------------------------------------------------------------------


@pytest.fixture
def forecast() -> Forecast:
    predicted, plain = (estimate_memory(7.5e9, 64, stage, precision="bf16-mixed") for stage in (3, 0))
    return Forecast("ZeRO stage 3, 64 ranks", "7.5B parameters, bf16-mixed, AdamW", predicted, predicted, plain)


def readings(forecast: Forecast, **factors: float) -> dict[str, Reading]:
    """As predicted, but for ``factors``; the ranks differ a little."""
    held = {kind: getattr(forecast.predicted, kind, 0) * factors.get(kind, 1) for kind in STATE_KINDS}
    held["total"] = sum(held.values())
    return {kind: Reading(nbytes, 0.9 * nbytes, 0.95 * nbytes) for kind, nbytes in held.items()}


def test_the_widest_table_fits_80_columns(forecast: Forecast) -> None:
    held = readings(forecast)
    rss = Reading(1234e9, 1234e9, 1234e9)
    text = memory_report.closing_table(
        forecast, held, held, {"process RSS": (rss, rss), "device held": (rss, None)}, 10
    )
    assert max(map(len, text.splitlines())) <= 80
    assert cells(text, "total") == ["120.00", "1.88", "2.04", "2.04", "1.94", "2.04", "1.94"]
    assert cells(text, "masters") == ["0", "0.47", "0.47", "0.47", "0.45", "0.47", "0.45"]
    assert cells(text, "device held") == ["1234", "1234"]
    assert text.splitlines()[-1] == "The peak of a rank, buffers included, is 2% of plain data parallelism."


@pytest.mark.parametrize(
    ("kind", "factor", "text"),
    [
        ("parameters", 1.5, "parameters: 50% more than predicted: parameters were added"),
        ("gradients", 0.5, "gradients: 50% less than predicted: not every parameter has had a gradient."),
        ("optimizer", 0.0, "optimizer: 100% less than predicted: the optimizer has made no step."),
        ("optimizer", 2.0, "optimizer: 100% more than predicted: the optimizer keeps more state than a trial step"),
        ("buffers", 2.0, "buffers: 100% more than predicted: reductions were slow to end, more units were unsharded"),
        ("buffers", 0.5, "buffers: 50% less than predicted: fewer units were under way at once"),
    ],
)
def test_every_difference_has_its_reason(forecast: Forecast, kind: str, factor: float, text: str) -> None:
    (line,) = memory_report.differences(forecast.predicted, readings(forecast, **{kind: factor}))
    assert line.startswith(text)


def test_small_differences_need_no_word(forecast: Forecast) -> None:
    assert memory_report.differences(forecast.predicted, readings(forecast, gradients=1.04, optimizer=0.96)) == []


def test_what_rests_on_the_host_is_named(forecast: Forecast) -> None:
    offloaded = replace(forecast, predicted=replace(forecast.predicted, on_host=("master", "optimizer")))
    held = readings(offloaded)
    for text in (memory_report.opening_table(offloaded), memory_report.closing_table(offloaded, held, held, {}, 1)):
        assert "In host memory: masters, optimizer.\n" in text + "\n"
        assert max(map(len, text.splitlines())) <= 80


def test_kinds_that_peak_at_different_times_are_explained(forecast: Forecast) -> None:
    held = readings(forecast)
    held["total"] = Reading(*[0.8 * forecast.predicted.total] * 3)
    (line,) = memory_report.differences(forecast.predicted, held)
    assert line.endswith("less than predicted: the kinds are not all at their peak at once.")


def test_something_not_predicted_is_named(forecast: Forecast) -> None:
    held = readings(forecast)
    predicted = estimate_memory(7.5e9, 64, 3)  # 32-true has no masters
    held["master"] = Reading(1e9, 1e9, 1e9)
    lines = memory_report.differences(predicted, held)
    assert any(line.startswith("masters: 1.00 GB not predicted: ") for line in lines)
