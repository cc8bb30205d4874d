"""Tiers: master weights, optimizer state and parameters that rest in files change no bit and leave nothing behind."""

import copy
import gc
import io
import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig, ZeroStrategy
from lightning_zero.estimate import KINDS, estimate_engine
from lightning_zero.offload import streamed
from tests.harness import make_trainer, run
from tests.parity import TINY_UNIT_MB, RandomData, rank, trained
from tests.slow_link import FarStrategy
from tests.strategy import test_gradients as gradients
from tests.strategy.test_edits import Constrained, FollowingTeacher, Swapping
from tests.strategy.test_modules import Gan
from tests.strategy.test_offload import Net

FILES = "files"
"""In the folder of the world."""
PAIRS = [
    OffloadConfig(optimizer=optimizer, parameters=parameters, nvme_path=FILES if "nvme" in (optimizer, parameters) else None)
    for optimizer in ("cpu", "nvme")
    for parameters in (None, "cpu", "nvme")
]
IN_FILES = OffloadConfig(optimizer="nvme", nvme_path=FILES)
ALL_IN_FILES = OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path=FILES)


def own_files() -> list[str]:
    return [name for name in os.listdir(FILES) if f"rank{rank()}-" in name] if os.path.isdir(FILES) else []


def differences(cases: list[tuple[Any, int, OffloadConfig, dict[str, Any]]]) -> list[tuple[str, list[str]]]:
    """What differs from the same training with all of it in host memory, by case; and what is left in the folder."""
    found = []
    for factory, stage, offload, kwargs in cases:
        kwargs = {"data": (24, 6), **kwargs}
        more = {"unit_size_mb": TINY_UNIT_MB, **kwargs.pop("strategy", {})}
        memory, files = (
            trained(factory, stage, strategy_kwargs={"offload": one, **more}, **kwargs) for one in (True, offload)
        )
        wrong = [name for name, value in memory.weights.items() if not torch.equal(value, files.weights[name])]
        wrong += ["losses"] * (memory.losses != files.losses) + ["not plain"] * (not files.plain) + own_files()
        found.append((f"{factory} at stage {stage} with {offload}, {kwargs}", wrong))
    return found


def check(world: int, cases: list[tuple[Any, int, OffloadConfig, dict[str, Any]]]) -> None:
    for found in run(world, differences, cases, timeout=180):
        assert len(found) == len(cases)
        for case, wrong in found:
            assert wrong == [], case


@pytest.fixture(autouse=True)
def shards_at_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is nothing to shard and nothing in files, so that what files are compared with is our kernel."""
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")


def net(optimizer: str) -> Any:
    return partial(Net, optimizer)


def test_optimizer_in_files() -> None:
    check(2, [(net(name), stage, IN_FILES, {}) for name, stage in (("adam", 1), ("adam", 2), ("adam", 3), ("sgd", 2))])
    check(1, [(net("adamw_fused"), 3, IN_FILES, {})])
    check(3, [(net("cpu_adam"), 2, IN_FILES, {}), (net("nadam"), 3, IN_FILES, {})])


class Wide(Net):
    """Several chunks to a unit, some without gradients in every other batch."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.first, self.second, self.third = nn.Linear(6, 90), nn.Linear(90, 51), nn.Linear(51, 51)
        self.sometimes = nn.Linear(90, 90)


def in_chunks(cases: list[Any]) -> list[Any]:
    streamed.CHUNK_BYTES = 4096
    return differences(cases)


@pytest.mark.parametrize("isa", ["", "torch"])
def test_units_of_many_chunks(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ISA", isa)
    cases = [(1, {}), (3, {}), (2, {"precision": "bf16-mixed"}), (3, {"precision": "bf16-true"})]
    checked = OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path=FILES, checksums=True)
    cases = [(Wide, stage, IN_FILES, {"strategy": {"unit_size_mb": 1.0}, **kwargs}) for stage, kwargs in cases]  # type: ignore[misc]
    cases += [(Wide, 3, ALL_IN_FILES, {"strategy": {"unit_size_mb": 1.0}, "precision": flag}) for flag in ("32-true", "bf16-true")]  # type: ignore[misc]
    cases += [(Wide, 3, checked, {"strategy": {"unit_size_mb": 1.0}, "precision": "bf16-true"})]  # type: ignore[misc]
    for found in run(2, in_chunks, cases):
        for case, wrong in found:
            assert wrong == [], case


class Unfreezing(Net):
    """A layer is frozen at first, another one later."""

    def __init__(self) -> None:
        super().__init__("adamw_fused")
        self.second.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.second.requires_grad_(batch_idx > 1)
        self.first.requires_grad_(batch_idx < 4)


def test_freezing_and_unfreezing() -> None:
    pairs = [PAIRS[2], PAIRS[3], PAIRS[5]]
    check(2, [(Unfreezing, 3, pair, {"precision": flag}) for pair in pairs for flag in ("32-true", "bf16-mixed")])


def test_in_every_precision() -> None:
    flags = [("bf16-mixed", 1), ("bf16-mixed", 3), ("bf16-true", 2), ("16-true", 1), ("16-mixed", 3), ("64-true", 2)]
    clipped = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    check(2, [(net("adamw_fused"), stage, IN_FILES, {"precision": flag, **clipped}) for flag, stage in flags])


def test_parameters_in_files() -> None:
    check(2, [(net("adam"), 3, ALL_IN_FILES, {"precision": flag}) for flag in ("32-true", "bf16-mixed", "bf16-true")])
    check(1, [(net("adam"), 3, ALL_IN_FILES, {}), (net("sgd"), 3, ALL_IN_FILES, {"precision": "bf16-true"})])


# What reads, adds to, edits and replaces gradients, which rest in files with the rest.
GRADIENTS = (
    gradients.Rescheduled, gradients.ClippedByNormAccumulated, gradients.ClippedByValue, gradients.ClippedTwice,
    gradients.Watched, gradients.Rewritten, gradients.ZeroedNotDropped, gradients.ExtraBackward, gradients.NeverZeroed,
    gradients.HandMadeGradients, gradients.GradientsOnTop, gradients.Adversaries,
)  # fmt: skip


def differences_of_gradients(names: list[str], optimizer: str) -> list[tuple[str, list[str]]]:
    cases: list[Any] = []
    for base in GRADIENTS:
        settings = gradients.settings_of(base)
        settings["strategy"] = settings.pop("strategy_kwargs")
        module = type(base.__name__, (base,), {"optimizer_name": optimizer})
        cases += [(module, 3, ALL_IN_FILES, settings)] if not names or base.__name__ in names else []
    return differences(cases)


@pytest.mark.parametrize(
    ("world", "names", "optimizer"),
    [(1, ["Rescheduled", "Rewritten"], "sgd"), (2, [], "adam"), (3, ["ClippedByNormAccumulated", "Rewritten"], "adam")],
)
def test_gradients_in_files(world: int, names: list[str], optimizer: str) -> None:
    for found in run(world, differences_of_gradients, names, optimizer, timeout=120):
        assert len(found) == (len(names) or len(GRADIENTS))
        for case, wrong in found:
            assert wrong == [], case


def test_gradients_in_files_in_every_precision() -> None:
    clipped = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    flags = ["bf16-mixed", "bf16-true", "16-true", "16-mixed", "64-true"]
    check(2, [(net("adamw_fused"), 3, ALL_IN_FILES, {"precision": flag, **clipped}) for flag in flags])


def test_every_pair_of_tiers() -> None:
    check(3, [(net("adamw_fused"), 3, pair, {"precision": "bf16-mixed"}) for pair in PAIRS])


def test_parameters_in_files_with_late_and_early_updates() -> None:
    early = OffloadConfig(parameters="nvme", nvme_path=FILES, early_update=True)
    late = {"strategy": {"delayed_update": 2}}
    cases = [(PAIRS[2], {**late, "precision": "bf16-true"}), (early, {"precision": "bf16-mixed"}), (PAIRS[2], late)]
    check(2, [(net("cpu_adam"), 3, offload, kwargs) for offload, kwargs in cases])


def test_edited_weights() -> None:
    """Of masters in files the engine notices edits without reading them."""
    cases = [(Constrained, stage, IN_FILES, "bf16-mixed") for stage in (1, 2, 3)]
    cases += [(Constrained, 2, IN_FILES, "bf16-true"), (Swapping, 1, IN_FILES, "bf16-true")]
    cases += [(Constrained, 3, ALL_IN_FILES, "32-true"), (FollowingTeacher, 3, ALL_IN_FILES, "bf16-mixed")]
    check(2, [(*case, {"data": (16, 6), "precision": flag, **case[0].settings}) for *case, flag in cases])


class Overflowing(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 2 and rank() == 0 else 1.0)


def test_several_optimizers_and_skipped_steps() -> None:
    skipping = {"precision": "16-mixed"}
    cases = [(Gan, stage, IN_FILES, {}) for stage in (1, 3)]
    check(2, [*cases, (Overflowing, 2, IN_FILES, skipping), (Overflowing, 3, ALL_IN_FILES, skipping)])


# -- what users see ----------------------------------------------------------------------------------------------------


class Looks(pl.Callback):
    """Reads and edits optimizer state between steps, in place and through ``.data``, and remembers what was there."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        state = trainer.optimizers[0].state
        for parameter in (module.first.weight, module.second.bias):  # type: ignore[union-attr]
            mine = state.get(parameter)  # type: ignore[call-overload]
            if mine:
                self.seen += [float(mine["exp_avg"].sum()), float(mine["exp_avg_sq"].norm()), float(mine["step"])]
                if trainer.global_step == 2:
                    mine["exp_avg"].mul_(0.5)
                    mine["exp_avg_sq"].data.mul_(2.0)
                if trainer.global_step == 4:
                    mine["exp_avg"] = torch.ones_like(mine["exp_avg"])
        whole = trainer.optimizers[0].state_dict()["state"]
        self.seen += [float(one["exp_avg"].sum()) for one in whole.values()]
        self.seen.append(float(module.third.weight.sum()))  # type: ignore[union-attr]


def looked(offload: Any, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    looks = Looks()
    kwargs: dict[str, Any] = {"data": (24, 6), "callbacks": [looks], "precision": precision}
    outcome = trained(partial(Net, "adamw_fused"), 3, strategy_kwargs={"offload": offload}, **kwargs)
    return looks.seen, outcome.weights


def what_users_see(precision: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [looked(offload, precision) for offload in (True, IN_FILES, ALL_IN_FILES)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_state_can_be_read_and_edited(precision: str) -> None:
    for memory, *others in run(2, what_users_see, precision):
        for seen, weights in others:
            assert seen == memory[0]
            assert [name for name in weights if not torch.equal(weights[name], memory[1][name])] == []


# -- after a run -------------------------------------------------------------------------------------------------------


def in_files(tensor: Tensor) -> bool:
    """Whether a tensor's memory is that of a file without a name."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, stop = (int(end, 16) for end in line.split(" ", 1)[0].split("-"))
            if start <= tensor.data_ptr() < stop:
                return line.rstrip().endswith("/whole (deleted)")
    return False


def use_of(module: Any, trainer: pl.Trainer) -> dict[str, Any]:
    """What people do with a module and an optimizer after a run."""
    copied = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module.second.weight, file)
    sizes = file.tell() - module.second.weight.nbytes  # no more than the tensor's own bytes
    saved = torch.load(io.BytesIO(file.getvalue()))
    loss = module.training_step(torch.ones(2, 6), 0)
    loss.backward()
    trainer.optimizers[0].step()
    trainer.optimizers[0].zero_grad()
    plain = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    module.training_step(torch.ones(2, 6), 0).backward()
    plain.step()
    plain.zero_grad()
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(module.second.weight.detach())
    values = {f"mine.{k}": v.clone() for k, v in module.state_dict().items()}
    values |= {f"copy.{k}": v for k, v in copied.state_dict().items()}
    state = trainer.optimizers[0].state_dict()["state"]
    values |= {f"{index}.exp_avg": one["exp_avg"] for index, one in state.items()}
    return {**values, "saved": saved, "sent": queue.get(), "small": torch.tensor(sizes < 4096)}


def after_runs(offload: Any, precision: str) -> tuple[list[bool], dict[str, Any]]:
    strategy = ZeroStrategy(stage=3, offload=offload, unit_size_mb=TINY_UNIT_MB)
    torch.manual_seed(0)
    module, trainer = Wide(), make_trainer(".", strategy=strategy, max_epochs=1, precision=precision)
    data = DataLoader(RandomData(8, 6), batch_size=2)
    trainer.fit(module, data)
    places = [in_files(p) for p in module.parameters() if p.nbytes >= 4096]
    found = use_of(module, trainer)
    again = ZeroStrategy(stage=3, offload=offload, unit_size_mb=TINY_UNIT_MB)
    trainer = make_trainer(".", strategy=again, max_epochs=1, precision=precision)
    trainer.fit(module, data)
    trainer.save_checkpoint("whole.ckpt")
    places += [in_files(p) for p in module.parameters() if p.nbytes >= 4096]
    saved = torch.load("whole.ckpt", weights_only=False)
    found |= {f"file.{k}": v for k, v in saved["state_dict"].items()}
    found |= {f"file.{k}.exp_avg_sq": v["exp_avg_sq"] for k, v in saved["optimizer_states"][0]["state"].items()}
    return places, {**found, "left": torch.tensor(len(own_files()))}


def both_after_runs(precision: str) -> list[tuple[list[bool], dict[str, Any]]]:
    return [after_runs(offload, precision) for offload in (True, ALL_IN_FILES)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_with_parameters_in_files_stays_in_files_and_is_ordinary(precision: str) -> None:
    for (places, plain), (mapped_places, mapped) in run(2, both_after_runs, precision):
        assert not any(places)
        assert len(mapped_places) == 6
        assert all(mapped_places)
        assert sorted(plain) == sorted(mapped)
        assert [name for name in plain if not torch.equal(plain[name], mapped[name])] == []
        assert (bool(mapped["small"]), int(mapped["left"])) == (True, 0)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def fit(offload: Any, stage: int, form: str, epochs: int, precision: str, folder: str | None, resume: str | None) -> Any:
    torch.manual_seed(0)
    module = Net("adamw_fused")
    strategy = ZeroStrategy(stage=stage, unit_size_mb=TINY_UNIT_MB, offload=offload, state_dict_type=form)  # type: ignore[arg-type]
    saver = [pl.callbacks.ModelCheckpoint(dirpath=folder, save_last=True)] if folder else []
    trainer = make_trainer(
        ".", strategy=strategy, max_epochs=epochs, precision=precision, callbacks=saver, enable_checkpointing=bool(folder)
    )
    trainer.fit(module, DataLoader(RandomData(16, 6), batch_size=2), ckpt_path=resume)
    return trainer, module


def end_of(trainer: pl.Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Weights and whole state after a fit, when the files have no names any more."""
    state = trainer.optimizers[0].state_dict()["state"]
    flat = {f"{index}.{name}": value for index, own in state.items() for name, value in own.items()}
    return {**{name: value.clone() for name, value in module.state_dict().items()}, **flat}


def resumed(moves: list[tuple[Any, int, Any, int]], precision: str) -> list[tuple[str, list[str], list[str]]]:
    found = []
    unbroken = end_of(*fit(True, 2, "full", 2, precision, None, None))
    for number, (first, stage, second, next_stage) in enumerate(moves):
        for form in ("full", "sharded"):
            folder = f"saved-{number}-{form}"
            fit(first, stage, form, 1, precision, folder, None)
            ended = end_of(*fit(second, next_stage, form, 2, precision, None, f"{folder}/last.ckpt"))
            wrong = [name for name, value in unbroken.items() if not torch.equal(value, ended[name])]
            found.append((f"{first} to {second} as {form}", wrong, sorted(ended.keys() ^ unbroken.keys())))
    return [(case, [*wrong, *own_files()], keys) for case, wrong, keys in found]


MOVES = [(True, 1, IN_FILES, 2), (IN_FILES, 2, True, 3), (ALL_IN_FILES, 3, IN_FILES, 1), (IN_FILES, 3, ALL_IN_FILES, 3)]


@pytest.mark.parametrize(("precision", "moves"), [("bf16-true", MOVES), ("32-true", MOVES[2:3])])
def test_resume_from_any_tier_to_any_other(precision: str, moves: list[Any]) -> None:
    for found in run(2, resumed, moves, precision, timeout=120):
        assert len(found) == 2 * len(moves)
        for case, wrong, keys in found:
            assert (wrong, keys) == ([], []), case


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "parameters at stage 2": (lambda: ZeroStrategy(stage=2, offload=ALL_IN_FILES), "needs stage=3, got stage=2"),
    "parameters at stage auto": (lambda: ZeroStrategy(stage="auto", offload=PAIRS[1]), "needs stage=3"),
    "delayed": (lambda: ZeroStrategy(offload=IN_FILES, delayed_update=True), "does not go with OffloadConfig"),
    "early": (lambda: OffloadConfig(optimizer="nvme", nvme_path="x", early_update=True), "Leave early_update out"),
    "no path": (lambda: OffloadConfig(optimizer="nvme"), "needs nvme_path"),
    "checks nothing": (lambda: OffloadConfig(checksums=True), "checksums=True.* has nothing to check"),
    "path for nothing": (lambda: OffloadConfig(nvme_path="x"), "has nothing to put there"),
    "unknown optimizer": (lambda: OffloadConfig(optimizer="disk"), "must be 'cpu' or 'nvme', got 'disk'"),  # type: ignore[arg-type]
    "unknown parameters": (lambda: OffloadConfig(parameters="gpu"), "None, 'cpu' or 'nvme', got 'gpu'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_at_construction(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()


# -- a device ----------------------------------------------------------------------------------------------------------


class Predicting(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def far(cases: list[tuple[OffloadConfig, int, dict[str, Any]]]) -> list[tuple[str, list[str]]]:
    """The same with a slow link between the host and what computes, as far from each other as a device is."""
    found = []
    for offload, stage, kwargs in cases:
        ends = []
        for cls, tiers in ((ZeroStrategy, True), (FarStrategy, offload)):
            strategy = cls(stage, offload=tiers, unit_size_mb=TINY_UNIT_MB)
            torch.manual_seed(0)
            module = Predicting("adamw_fused")
            trainer = make_trainer(".", strategy=strategy, max_epochs=1, **kwargs)
            trainer.fit(module, DataLoader(RandomData(28, 6), batch_size=2))
            outputs = trainer.predict(module, DataLoader(RandomData(4, 6), batch_size=2))
            ends.append({**module.state_dict(), **{str(i): output for i, output in enumerate(outputs or [])}})
        wrong = [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]
        found.append((f"{offload} at stage {stage}, {kwargs}", wrong + own_files()))
    return found


def test_distance_changes_nothing() -> None:
    bf16 = {"precision": "bf16-true"}
    cases = [*((pair, 3, bf16) for pair in PAIRS[1:]), (ALL_IN_FILES, 3, {})]
    cases += [(IN_FILES, 1, {"precision": "bf16-mixed"}), (IN_FILES, 2, bf16)]
    for found in run(2, far, cases, timeout=120):
        assert len(found) == len(cases)
        for case, wrong in found:
            assert wrong == [], case


# -- memory ------------------------------------------------------------------------------------------------------------


class Measures(pl.Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.stats = trainer.strategy.memory_stats()
        self.predicted = estimate_engine(trainer.strategy.engine, trainer.world_size, str(trainer.precision))


def measured(cases: list[tuple[OffloadConfig, str]]) -> list[tuple[dict[str, int], dict[str, int], tuple, int, int]]:
    found = []
    for offload, precision in cases:
        measures = Measures()
        kwargs: dict[str, Any] = {"data": (8, 6), "callbacks": [measures], "precision": precision}
        trained(partial(Net, "cpu_adam"), 3, strategy_kwargs={"offload": offload}, **kwargs)
        now, predicted = measures.stats["now"], measures.predicted
        expected = {kind: getattr(predicted, kind) for kind in KINDS if kind != "optimizer"}
        files = sum(now.get(kind, 0) for kind in predicted.on_nvme if kind != "optimizer")
        found.append(({kind: now.get(kind, 0) for kind in expected}, expected, predicted.on_nvme, files, measures.stats["nvme"]))
    return found


def test_memory_is_told_wherever_it_rests() -> None:
    cases = [(IN_FILES, "32-true"), (IN_FILES, "bf16-mixed"), (ALL_IN_FILES, "bf16-mixed"), (PAIRS[2], "bf16-mixed")]
    places = [("master", "optimizer"), ("master", "optimizer"), ("parameters", "gradients", "master", "optimizer"), ("parameters",)]
    for found in run(2, measured, cases):
        for (now, expected, on_nvme, files, taken), place in zip(found, places, strict=True):
            assert now == expected
            assert on_nvme == place
            assert taken >= files


class Deep(pl.LightningModule):
    """Units of the same size."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(depth)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Holds(pl.Callback):
    """The most memory that tensors hold, in hooks of the third step."""

    def __init__(self) -> None:
        self.most = 0

    def look(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 2:
            gc.collect()  # of earlier runs
            tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
            storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
            self.most = max(self.most, sum(storages.values()))

    on_before_optimizer_step = on_before_zero_grad = look


def growth(tiers: OffloadConfig, settings: dict[str, Any]) -> float:
    """Units more that a step holds of a module with sixteen units more."""
    streamed.CHUNK_BYTES = 4096
    found = []
    for depth in (12, 28):
        holds = Holds()
        kwargs = {"offload": tiers, "unit_size_mb": 64 * 64 * 4 / 2**20}
        trained(partial(Deep, depth), 3, (12, 64), 2, kwargs, callbacks=[holds], **settings)
        found.append(holds.most / (4 * 64 * 64))
    return found[1] - found[0]


def test_what_a_step_holds_does_not_grow_with_the_model() -> None:
    for settings in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}):
        assert run(1, growth, ALL_IN_FILES, settings)[0] < 1
    [with_gradients] = run(1, growth, OffloadConfig(parameters="nvme", nvme_path=FILES), {})
    assert with_gradients > 16 * 3  # master and Adam's state are in memory as well
