"""gather_dtype=torch.int8: steps compute with rounded weights, the same on all ranks, and nothing else sees them.

The reference is DDP of a module that rounds its own weights before each use.
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig, ZeroStrategy
from lightning_zero.estimate import estimate_engine
from lightning_zero.ops import BLOCK_NUMEL, decode_blocks_, encode_blocks_
from tests.harness import make_trainer, run
from tests.parity import TINY_UNIT_MB, Outcome, RandomData, make_strategy, trained
from tests.slow_link import FarStrategy
from tests.strategy.test_hybrid import OPTIMIZERS, Three
from tests.wire import handed_over

CODED = {"gather_dtype": torch.int8}
WORDS, WIDTH = 41, 24


def rounded(weight: Tensor) -> Tensor:
    """What blocks of 256, counted from the start of the tensor, come back as; other dtypes are sent as they are."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return weight.clone()
    blocks = -(-weight.numel() // BLOCK_NUMEL)
    flat = weight.new_zeros(blocks * BLOCK_NUMEL)
    flat[: weight.numel()] = weight.flatten()
    codes, scales = torch.empty(len(flat), dtype=torch.int8), torch.empty(blocks, dtype=torch.float32)
    encode_blocks_(codes, scales, flat)
    decode_blocks_(flat, codes, scales)
    return flat[: weight.numel()].view_as(weight)


class Rounded(torch.autograd.Function):
    """The rounded weight, whose gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return rounded(weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Body(nn.Module):
    """Tied and frozen weights, odd sizes, one module used twice, norms, a scalar and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 61), nn.Linear(61, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for _ in range(2):
            x = self.norm(x + self.frozen(self.down(torch.tanh(self.up(x))))) * self.scale
        return self.head(x.roll(int(self.shift[1]), -1))


class Model(pl.LightningModule):
    def __init__(self, optimizer: str = "adam", rounds: bool = False, edits: bool = False) -> None:
        super().__init__()
        self.body = Body()
        self.optimizer_name, self.rounds, self.edits = optimizer, rounds, edits

    def loss(self, batch: Tensor) -> Tensor:
        tokens = (batch.abs() * 20).long() % WORDS
        if not self.rounds:
            return F.cross_entropy(self.body(tokens).flatten(0, 1).float(), tokens.flatten())
        weights = {name: self.used(p) for name, p in self.body.named_parameters()}
        logits = torch.func.functional_call(self.body, weights, (tokens,))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    def used(self, parameter: Tensor) -> Tensor:
        return Rounded.apply(parameter) if parameter.requires_grad else rounded(parameter)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.edits:
            self.body.up.weight.data.mul_(0.97)
            with torch.no_grad():
                self.body.frozen.weight[3].add_(0.01)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](p for p in self.parameters() if p.requires_grad)


# -- training is that of rounded weights -----------------------------------------------------------------------------


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adam": ({}, {}),
    "sgd": ({"optimizer": "sgd"}, {}),
    "edits, clipped": ({"edits": True}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    "average, recomputed": ({}, {"callbacks": "average"}),
}
RECOMPUTED = {"activation_checkpointing_policy": ["body.up", "body.frozen"]}


def both(names: list[str]) -> dict[str, tuple[Outcome, Outcome]]:
    found = {}
    for name in names:
        settings, kwargs = VARIANTS[name]
        pair = []
        for stage in (0, 3):
            more = {**kwargs, "callbacks": [EMAWeightAveraging(decay=0.8, use_buffers=False)]} if "callbacks" in kwargs else kwargs
            model = partial(Model, rounds=stage == 0, **settings)
            coded = {**CODED, **RECOMPUTED} if "recomputed" in name else CODED
            pair.append(trained(model, stage, data=(24, 5), strategy_kwargs=coded if stage else None, **more))
        found[name] = (pair[0], pair[1])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_training_is_that_of_a_module_that_rounds_its_weights(world: int) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if world == 2 else {"rtol": 1e-4, "atol": 1e-4}
    for number, found in enumerate(run(world, both, list(VARIANTS) if world == 2 else ["adam", "sgd"])):
        for name, (reference, coded) in found.items():
            where = f"rank {number}, {name}"
            assert coded.plain, where
            torch.testing.assert_close(torch.tensor(coded.losses), torch.tensor(reference.losses), **tolerance)
            torch.testing.assert_close(coded.metrics["validation"], reference.metrics["validation"], **tolerance)
            for key, value in reference.weights.items():
                torch.testing.assert_close(
                    coded.weights[key], value, **tolerance, msg=lambda text, at=f"{where}, {key}": f"{at}: {text}"
                )
                assert value.numel() == 1 or not value.is_floating_point() or not torch.equal(rounded(value), value), key


def alone() -> tuple[Outcome, Outcome]:
    exact = trained(Model, 0, data=(24, 5))
    return exact, trained(Model, 3, data=(24, 5), strategy_kwargs=CODED)


def test_one_rank_gathers_nothing_and_says_so(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for always in ("0", "1"):  # with units, too
        monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", always)
        ((exact, coded),) = run(1, alone)
        assert coded.losses == exact.losses
        for key, value in exact.weights.items():
            assert torch.equal(coded.weights[key], value), key
        said = "".join(capfd.readouterr())
        assert "gather_dtype=torch.int8) does nothing: a rank that shards with no other gathers nothing" in said


# -- who sees what ---------------------------------------------------------------------------------------------------


class Looks(Model):
    """Compares what steps show with what hooks show."""

    def __init__(self) -> None:
        super().__init__()
        self.exact: dict[str, Tensor] = {}
        self.wrong: list[str] = []
        self.seen: dict[str, Tensor] = {}
        self.compute: dict[str, torch.dtype] = {}

    def on_train_batch_start(self, *args: Any) -> None:
        self.exact = {name: p.detach().clone() for name, p in self.named_parameters()}
        state = {name: value for name, value in self.state_dict().items() if name in self.exact}
        self.note("state dict", {name: value.clone() for name, value in state.items()}, self.exact)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start

    def note(self, what: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        self.wrong += [
            f"{what}: {name}" for name, value in wanted.items() if not torch.equal(found[name].nan_to_num(7), value.nan_to_num(7))
        ]

    def look(self, what: str) -> None:
        self.seen = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.note(what, self.seen, {name: rounded(v.to(self.seen[name].dtype)) for name, v in self.exact.items()})
        self.compute = {name: value.dtype for name, value in self.seen.items()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.look("training")
        loss = super().training_step(batch, batch_idx)
        self.look("after a forward")
        return loss

    def on_after_backward(self) -> None:
        self.note("after backward", {name: p.detach() for name, p in self.named_parameters()}, self.exact)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.look("validation")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.look("test")
        self.loss(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.look("predict")
        return self.body((batch.abs() * 20).long() % WORDS)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # what is not a number is told to the others, and what is in another block is left alone
            with torch.no_grad():
                self.body.up.weight[0, 0], self.body.up.weight[20, 0] = float("nan"), float("inf")
        if batch_idx == 2:
            with torch.no_grad():
                self.body.up.weight.nan_to_num_(0.5, 0.5, 0.5)


FEW = {"limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1, "num_sanity_val_steps": 0}


def looked(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[list[str], dict[str, torch.dtype]]]:
    found = []
    for precision, kwargs in cases:
        kwargs = {**kwargs}
        strategy_class = kwargs.pop("strategy_class", ZeroStrategy)
        torch.manual_seed(0)
        module = Looks()
        strategy = strategy_class(stage=3, unit_size_mb=TINY_UNIT_MB, **CODED, **kwargs)
        trainer = make_trainer(".", strategy=strategy, max_steps=4, precision=precision, val_check_interval=4, **FEW)
        loader = DataLoader(RandomData(48, 5), batch_size=2)
        trainer.fit(module, loader, DataLoader(RandomData(24, 5), batch_size=2))
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        for evaluate in (trainer.test, trainer.predict):
            evaluate(module, DataLoader(RandomData(24, 5), batch_size=2))
        module.note("after the end", {name: p.detach() for name, p in module.named_parameters()}, before)
        found.append((module.wrong, module.compute))
    return found


PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


def test_steps_see_rounded_weights_and_everybody_else_exact_ones() -> None:
    cases = [(precision, {}) for precision in PRECISIONS]
    cases += [("bf16-mixed", {"offload": True})]
    cases += [("32-true", {"offload": True, "delayed_update": 1}), ("bf16-mixed", {"offload": OffloadConfig(early_update=True)})]
    # Over a slow link new weights are NaN until they have come.
    cases += [(p, {"offload": True, "strategy_class": FarStrategy}) for p in ("32-true", "bf16-true")]
    files = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": "."}
    cases += [(p, {"offload": OffloadConfig(**files)}) for p in ("32-true", "bf16-true")]
    cases.append(("32-true", {"prefetch": 3}))
    for number, found in enumerate(run(2, looked, cases)):
        for case, (wrong, _) in zip(cases, found, strict=True):
            assert not wrong, (number, case, wrong[:5])
        dtypes = [{dtype for name, dtype in seen.items() if "up" in name} for _, seen in found[: len(PRECISIONS)]]
        half = [torch.bfloat16, torch.float16]
        assert dtypes == [{torch.float32}, {torch.float64}, *[{dtype} for dtype in half], *[{dtype} for dtype in half]]


def test_with_three_ranks_and_in_groups() -> None:
    groups = [("32-true", {"shard_group_size": 2}), ("bf16-mixed", {"shard_group_size": 2, "offload": True})]
    for world, cases in ((3, [("32-true", {})]), (4, groups)):
        for number, found in enumerate(run(world, looked, cases)):
            for case, (wrong, _) in zip(cases, found, strict=True):
                assert not wrong, (world, number, case, wrong[:5])


def late_and_exact() -> list[list[float]]:
    late = {"offload": True, "delayed_update": 2}
    return [
        trained(Model, 3, data=(48, 5), strategy_kwargs=kwargs).losses for kwargs in (late, {**late, **CODED}, {"offload": True, **CODED})
    ]


def test_delayed_updates_of_rounded_weights() -> None:
    for exact, coded, in_time in run(2, late_and_exact):
        assert coded != exact
        assert coded != in_time
        assert coded == pytest.approx(exact, rel=0.02)


# -- edits inside steps ----------------------------------------------------------------------------------------------


class Edits(Model):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        weight = self.body.down.weight
        if self.how == "in place":
            with torch.no_grad():
                weight.mul_(0.5)
        elif self.how == "bound":
            weight.data = torch.ones_like(weight)
        elif self.how == "one element" and batch_idx == 1:
            weight.data[-1, -1] += 1
        elif self.how == "the same values":
            weight.data.copy_(weight.data.clone())
        return super().training_step(batch, batch_idx)


def edited(how: str) -> str:
    trainer = make_trainer(".", strategy=make_strategy(3, read_timeout=1.0, **CODED), max_steps=3)
    try:
        trainer.fit(Edits(how), DataLoader(RandomData(12, 5), batch_size=2))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_edits_inside_steps_are_refused_by_name() -> None:
    for how in ("in place", "bound"):
        for number, message in enumerate(run(2, edited, how)):
            assert message.startswith(f"'body.down.weight' of 'body.down' was edited inside a step (rank {number})."), message
            assert "Edit parameters outside of steps, in a hook such as `on_train_batch_end`" in message
    # Of one element only its owner knows; the other rank learns that it is gone.
    messages = run(2, edited, "one element")
    assert messages[1].startswith("'body.down.weight' of 'body.down' was edited inside a step (rank 1)."), messages
    assert messages[0] != "no error"
    assert run(2, edited, "the same values") == ["no error"] * 2


# -- what is sent, and held ------------------------------------------------------------------------------------------


class Wider(Three):
    """Three units, of 180 * 120, 120 * 80 and 80 * 50 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(180, 120, bias=False), nn.Linear(120, 80, bias=False)
        self.last = nn.Linear(80, 50, bias=False)


class Predicts(pl.Callback):
    buffers = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.buffers = estimate_engine(trainer.strategy.engine, trainer.world_size, "32-true").buffers


def sent(precision: str) -> tuple[dict[str, tuple[int, int]], int, dict[str, int], int]:
    module, predicts = Wider(), Predicts()
    strategy = ZeroStrategy(stage=3, unit_policy={nn.Linear}, **CODED)
    trainer = make_trainer(
        ".", strategy=strategy, max_steps=4, use_distributed_sampler=False, precision=precision, callbacks=[predicts]
    )
    with handed_over(lambda: len(module.stats)) as handed:
        trainer.fit(module, DataLoader(RandomData(8, 180), batch_size=2))
    before, after = module.stats[2:4]
    step = {
        name: (after[name]["calls"] - before[name]["calls"], after[name]["bytes"] - before[name]["bytes"])
        for name in ("all_gather", "reduce_scatter")
    }
    return step, sum(nbytes for number, nbytes in handed if number == 3), strategy.memory_stats()["peak"], predicts.buffers


def test_bytes_are_one_for_each_element_and_four_for_each_block() -> None:
    for world, precision, itemsize in ((2, "32-true", 4), (3, "32-true", 4), (2, "bf16-true", 2)):
        for step, handed, peak, predicted in run(world, sent, precision):
            # Shards are whole blocks of 256 elements, messages whole 64 bytes.
            numels = [-(-numel // world // 256) * 256 for numel in (180 * 120, 120 * 80, 80 * 50)]
            messages = [-(-(numel + 4 * numel // 256) // 64) * 64 for numel in numels]
            # All three are gathered in forward and the second again in backward, as without codes.
            assert step["all_gather"] == (4, (world - 1) * (sum(messages) + messages[1]))
            assert step["reduce_scatter"] == (3, (world - 1) * itemsize * sum(numels))
            assert handed == sum(nbytes for _, nbytes in step.values())
            exact = (world - 1) * itemsize * (sum(numels) + numels[1])
            assert step["all_gather"][1] < (0.26, 0.52)[itemsize == 2] * exact
            assert peak["parameters"] == itemsize * sum(numels)
            # So few units may all be under way: their codes, parameters and gradients, and what is received of these.
            flat = world * itemsize * sum(numels)
            assert predicted == pytest.approx(world * sum(messages) + (2 + (world - 1) / world) * flat, abs=3)
            assert flat < peak["buffers"] <= predicted


# -- checkpoints -----------------------------------------------------------------------------------------------------


def saved(folder: str, form: str) -> list[dict[str, Tensor]]:
    """The unbroken run, what it saves half-way, and one that goes on from there."""
    kwargs = {"strategy_kwargs": {"state_dict_type": form, **CODED}, "data": (24, 5)}

    def fit(epochs: int, path: str | None = None) -> tuple[pl.Trainer, Model]:
        torch.manual_seed(0)
        module = Model()
        trainer = make_trainer(".", strategy=make_strategy(3, **kwargs["strategy_kwargs"]), max_epochs=epochs)
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(RandomData(24, 5), batch_size=2), ckpt_path=path)
        return trainer, module

    path = f"{folder}/{form}.ckpt"
    _, unbroken = fit(2)
    trainer, half = fit(1)
    trainer.save_checkpoint(path)
    _, resumed = fit(2, path)
    return [{name: p.detach().clone() for name, p in module.named_parameters()} for module in (unbroken, half, resumed)]


def test_checkpoints_are_exact(tmp_path: Path) -> None:
    for form in ("full", "sharded"):
        for unbroken, half, resumed in run(2, saved, str(tmp_path), form):
            for name, value in unbroken.items():
                assert torch.equal(resumed[name], value), (form, name)
            if form == "full":
                written = torch.load(tmp_path / "full.ckpt", weights_only=False)["state_dict"]
                assert all(torch.equal(written[name], value) for name, value in half.items())


# -- arguments -------------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    for value in (torch.int8, "int8", "torch.int8"):
        assert ZeroStrategy(stage=3, gather_dtype=value).config.gather_dtype is torch.int8
    assert ZeroStrategy(stage=3).config.gather_dtype is None
    for wrong in ("int4", torch.bfloat16, 8):
        with pytest.raises(ValueError, match=r"gather_dtype must be None or torch\.int8 \(in YAML 'int8'\), got"):
            ZeroStrategy(stage=3, gather_dtype=wrong)
    for stage in (1, 2, "auto"):
        with pytest.raises(ValueError, match=rf"gather_dtype=torch\.int8 needs stage=3, got stage={stage!r}"):
            ZeroStrategy(stage=stage, **CODED)
