"""Modules built on the meta device: the values, and the training, of an eager build under DDP."""

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, load_pretrained
from lightning_zero import strategy as strategy_module
from lightning_zero.progress import LateBar
from tests.harness import make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, Outcome, RandomData, assert_same, make_strategy, trained

WIDTH = 8


class Body(nn.Module):
    """Made in all the ways in which modules are made."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)  # copies of one layer
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.position = nn.Parameter(torch.randn(4, WIDTH) * 0.02)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("frequencies", 10.0 ** -(torch.arange(WIDTH) / WIDTH), persistent=False)
        self.register_buffer("offset", torch.rand(WIDTH, dtype=torch.bfloat16))
        self.rates = [rate.item() for rate in torch.linspace(0.1, 0.2, 3)]
        self.mask = torch.ones(4, 4).tril().bool()  # neither parameter nor buffer
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.normalised = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.rotation = nn.Linear(WIDTH, WIDTH)
        self.lazy = nn.LazyLinear(WIDTH)
        self.lazy(torch.zeros(1, WIDTH))
        self.images = nn.Conv2d(3, WIDTH, 3).to(memory_format=torch.channels_last)  # never used
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.embedding.weight
        self.apply(self.initialise)
        if torch.get_default_dtype() == torch.float32:  # there is no decomposition in 16 bit
            nn.utils.parametrizations.orthogonal(self.rotation)
            nn.init.orthogonal_(self.frozen.weight)
        with torch.no_grad():
            self.head.bias.copy_(self.position[0].repeat(2)[:11])
            self.frozen.weight[0] *= 0.5

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
        elif isinstance(module, nn.Linear) and not nn.utils.parametrize.is_parametrized(module):
            nn.init.trunc_normal_(module.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 5).long().clamp(max=10)
        y = self.embedding(tokens) * self.frequencies * self.scale + self.position + self.offset
        y = self.encoder(y, mask=~self.mask)
        with torch.autocast("cpu", enabled=False):  # there is no LSTM in fp16
            y = self.lstm(y.to(self.lstm.weight_hh_l0.dtype))[0]
        y = self.rotation(self.normalised(self.frozen(self.lazy(y)))) + y * self.rates[1]
        return self.head(self.norm(y.transpose(1, 2)).transpose(1, 2))


class Built(pl.LightningModule):
    """Builds its body in ``configure_model``, on the meta device or, for the reference, without."""

    device_context: Callable[[], Any] = staticmethod(lambda: torch.device("meta"))

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.body: Body | None = None
        self.extra: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.body is None or self.again:
            with self.device_context():
                self.body = Body()

    def on_fit_start(self) -> None:
        self.extra["begin"] = {name: value.clone() for name, value in self.state_dict().items()}
        self.extra["random"] = torch.rand(3)
        self.extra["kept"] = [self.body.mask, self.body.frequencies, self.body.offset]
        self.extra["tied"] = self.body.head.weight is self.body.embedding.weight

    def step(self, batch: Tensor) -> Tensor:
        logits = self.body(batch)
        return F.cross_entropy(logits.flatten(0, 1), torch.arange(logits.shape[:2].numel()) % 11)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, fused=True)


class Eager(Built):
    device_context = staticmethod(lambda: torch.device("cpu"))


ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
DATA = {"data": (24, 4), "batch_size": 2, "max_epochs": 1}


def fits(precision: str) -> dict[int, Outcome]:
    kwargs = {**DATA, "precision": precision, "limit_train_batches": 3, "limit_val_batches": 1}
    return {0: trained(Eager, 0, **kwargs), **{stage: trained(Built, stage, **kwargs) for stage in STAGES}}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_and_training_are_those_of_an_eager_build(world: int) -> None:
    results = run(world, fits, "32-true", timeout=120)
    assert_same(
        results, atol=5e-5, metrics_tolerance=ROUNDING
    )  # batch norm makes more of what rounds apart at three ranks
    for by_stage in results:
        for stage in STAGES:
            ours, theirs = by_stage[stage].extra, by_stage[0].extra
            assert ours["begin"].keys() == theirs["begin"].keys()
            for name, value in theirs["begin"].items():
                assert torch.equal(ours["begin"][name], value), name
                assert ours["begin"][name].dtype == value.dtype, name
            assert torch.equal(ours["random"], theirs["random"])  # the generator stands where it would stand
            assert all(map(torch.equal, ours["kept"], theirs["kept"]))
            assert ours["tied"]


def half_precision(precision: str) -> dict[int, tuple[Outcome, Outcome]]:
    kwargs = {**DATA, "precision": precision, "limit_train_batches": 2, "limit_val_batches": 1}
    reference = trained(Eager, 0, **kwargs)
    found = {stage: (trained(Eager, stage, **kwargs), trained(Built, stage, **kwargs)) for stage in (2, 3)}
    return {0: (reference, reference), **found}


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_precision(precision: str) -> None:
    for by_stage in run(2, half_precision, precision, timeout=120):
        begin = by_stage[0][0].extra["begin"]
        for stage in (2, 3):
            eager, ours = by_stage[stage]
            for name, value in begin.items():
                assert torch.equal(ours.extra["begin"][name], value), name
                assert ours.extra["begin"][name].dtype == value.dtype, name
                assert torch.equal(ours.weights[name], eager.weights[name]), name
            assert ours.losses == eager.losses


# -- other ways to come to the meta device -----------------------------------------------------------------------------


class UnderInitModule(Built):
    def configure_model(self) -> None:
        with self.trainer.init_module(empty_init=True):
            self.body = Body()


class RealOnRank0(Built):
    """What only rank 0 has is sent to the others, buffers too."""

    def configure_model(self) -> None:
        if dist.get_rank() == 0:
            self.body = Body()
        else:
            torch.manual_seed(99)
            with torch.device("meta"):
                self.body = Body()


class BuiltBefore(Built):
    """In ``__init__``, under ``trainer.init_module``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()


def other_ways() -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {"reference": {}}
    loader = DataLoader(RandomData(*DATA["data"]), batch_size=2)
    for stage in (0, 2, 3):
        for cls in (Eager,) if stage == 0 else (UnderInitModule, RealOnRank0, BuiltBefore):
            trainer = make_trainer(".", strategy=make_strategy(stage), max_steps=2)
            torch.manual_seed(0)
            with trainer.init_module(empty_init=cls is BuiltBefore):
                module = cls()
            assert cls is not BuiltBefore or module.body.frozen.weight.is_meta
            trainer.fit(module, loader)
            found.setdefault(cls.__name__, {})[stage] = (module.extra["begin"], dict(module.state_dict()))
    return found


def test_other_ways_to_come_to_the_meta_device() -> None:
    for found in run(2, other_ways, timeout=120):
        begin, end = found["Eager"][0]
        for cls in (UnderInitModule, RealOnRank0, BuiltBefore):
            for stage in (2, 3):
                ours = found[cls.__name__][stage]
                for name, value in begin.items():
                    assert torch.equal(ours[0][name], value), (cls, stage, name)
                    if cls is not RealOnRank0:  # whose dropout is drawn by two ways of building
                        assert torch.equal(ours[1][name], end[name]), (cls, stage, name)


# -- more than one run -------------------------------------------------------------------------------------------------


def runs(cls: type[Built]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    train, validate = DataLoader(RandomData(24, 4), batch_size=2), DataLoader(RandomData(12, 4), batch_size=2)
    for stage, kind in ((2, "full"), (3, "sharded")):
        torch.manual_seed(0)
        strategy = ZeroStrategy(stage=stage, unit_size_mb=TINY_UNIT_MB, state_dict_type=kind)
        trainer = make_trainer(".", strategy=strategy, max_steps=2)
        module = cls()
        trainer.fit(module, train)
        path = trainer.strategy.broadcast(os.path.abspath(f"{cls.__name__}-{stage}-{kind}.ckpt"))
        trainer.save_checkpoint(path)
        fitted = trainer.validate(module, validate, verbose=False)  # configure_model is called again
        other = cls()
        loaded = make_trainer(".", strategy=ZeroStrategy(stage=stage)).validate(other, validate, path, verbose=False)
        torch.manual_seed(5)
        resumed = cls()
        make_trainer(".", strategy=ZeroStrategy(stage=stage), max_steps=4).fit(resumed, train, ckpt_path=path)
        again = cls(again=True)  # builds a new body in every run
        torch.manual_seed(6)
        fresh = make_trainer(".", strategy=ZeroStrategy(stage=stage)).validate(again, validate, verbose=False)
        found[f"{stage} {kind}"] = (fitted, loaded, fresh, dict(resumed.state_dict()))
    return found


def test_more_than_one_run_and_checkpoints() -> None:
    eager, ours = run(2, runs, Eager, timeout=120)[1], run(2, runs, Built, timeout=120)[1]
    assert eager.keys() == ours.keys()
    for case, (fitted, loaded, fresh, resumed) in eager.items():
        assert fitted == loaded
        assert ours[case][:3] == (fitted, loaded, fresh), case
        for name, value in resumed.items():
            assert torch.equal(ours[case][3][name], value), (case, name)


# -- memory ------------------------------------------------------------------------------------------------------------

LAYERS, LAYER_MB = 16, 16
WHOLE_MB = LAYERS * LAYER_MB
SLACK_MB = 24  # what else a process takes in the meantime


class Wide(pl.LightningModule):
    """256 MiB of frozen parameters in layers of 16 MiB, and few that are trained."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device_name = device
        self.trained = nn.Linear(2, 2)

    def configure_model(self) -> None:
        side = int((LAYER_MB * 2**20 / 4) ** 0.5)
        with torch.device(self.device_name):
            layers = [nn.Linear(side, side, bias=False).requires_grad_(False) for _ in range(LAYERS)]
            self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.trained(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.watch.stop()  # set-up is over
        return torch.optim.SGD(self.parameters(), lr=0.1)


def memory() -> float:
    """MiB that only this process has."""
    return psutil.Process().memory_full_info().uss / 2**20


class Watch:
    """The most memory that this process has had, looked at all the time."""

    def __init__(self) -> None:
        self.before = self.most = memory()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()
        self.grown, self.peak = memory() - self.before, self.most - self.before

    def _look(self) -> None:
        while not self._ends.is_set():
            self.most = max(self.most, memory())
            time.sleep(0.002)


def set_up(device: str) -> tuple[float, float]:
    """Growth of memory in MiB at its peak, and after set-up."""
    # Large blocks go back to the system at once, as long as malloc does not learn from them (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 2**16)
    trainer = make_trainer(".", strategy=ZeroStrategy(stage=3, unit_size_mb=LAYER_MB), max_steps=1)
    module = Wide(device)
    module.watch = Watch()
    trainer.fit(module, DataLoader(RandomData(4, 2), batch_size=1))
    return module.watch.peak, module.watch.grown


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_at_set_up_is_shards_and_one_unit(device: str) -> None:
    """On a CPU the device is the host: beside the shards and one unit there is the module itself, where it was built."""
    for peak, after in run(2, set_up, device, timeout=120):
        assert after < WHOLE_MB / 2 + SLACK_MB
        # Rank 0 has the values of one layer beside the unit that they go to.
        assert peak < (WHOLE_MB if device == "cpu" else WHOLE_MB / 2) + 2 * LAYER_MB + SLACK_MB


# -- pretrained weights ------------------------------------------------------------------------------------------------


def save_shards(state: dict[str, Tensor], folder: str, suffix: str) -> None:
    """As transformers does: several files, an index, and one name of tied weights."""
    state = {name: value.contiguous() for name, value in state.items() if name != "head.weight"}
    os.makedirs(folder, exist_ok=True)
    names = list(state)
    files = {name: f"part-{i % 3}{suffix}" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: state[name] for name in names if files[name] == file}
        if suffix == ".bin":
            torch.save(part, f"{folder}/{file}")
        else:
            from safetensors.torch import save_file

            save_file(part, f"{folder}/{file}")
    index = "pytorch_model.bin.index.json" if suffix == ".bin" else "model.safetensors.index.json"
    with open(f"{folder}/{index}", "w") as stream:
        json.dump({"metadata": {}, "weight_map": files}, stream)


class Pretrained(Built):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        with self.device_context():
            self.body = Body()
        load_pretrained(self.body, self.folder)


class PretrainedEagerly(Pretrained):
    device_context = staticmethod(lambda: torch.device("cpu"))


def pretrained(suffix: str) -> dict[int, Outcome]:
    torch.manual_seed(7 + dist.get_rank())  # only rank 0's files are read
    folder = os.path.abspath(f"rank-{dist.get_rank()}")
    save_shards(Body().state_dict(), folder, suffix)
    everybodys = os.path.abspath("rank-0")
    dist.barrier()
    kwargs = {**DATA, "limit_train_batches": 2, "limit_val_batches": 1}
    found = {0: trained(lambda: PretrainedEagerly(everybodys), 0, **kwargs)}
    for stage in STAGES:
        found[stage] = trained(lambda: Pretrained(folder), stage, **kwargs)
    return found


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_pretrained_weights(suffix: str) -> None:
    results = run(2, pretrained, suffix, timeout=120)
    assert_same(results, metrics_tolerance=ROUNDING)
    for by_stage in results:
        for stage in STAGES:
            assert by_stage[stage].extra["tied"]
            for name, value in by_stage[0].extra["begin"].items():
                assert torch.equal(by_stage[stage].extra["begin"][name], value), name


class Vanishing(Pretrained):
    """Its files change on rank 0 between construction and set-up."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.body = Body()
            state = {"bias": torch.ones(WIDTH, device="cpu"), "weight": torch.ones(WIDTH, WIDTH, device="cpu")}
            self.body.frozen.load_state_dict(state)
        if dist.get_rank() == 0:
            state["weight"].zero_()


def vanishing() -> list[str]:
    messages = []
    for stage in (1, 3):
        trainer = make_trainer(".", strategy=make_strategy(stage), max_steps=1)
        try:
            trainer.fit(Vanishing(""), DataLoader(RandomData(4, 4), batch_size=1))
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_a_source_that_fails_on_rank_0_fails_on_all() -> None:
    first, second = run(2, vanishing)
    assert [message.startswith("A tensor of shape (8, 8), from which parameters") for message in first] == [True] * 2
    for message in second:
        assert message.startswith("Rank 0 could not give values to the parameters of 'body")
        assert "RuntimeError: A tensor of shape (8, 8)" in message


class Classifier(pl.LightningModule):
    """``from_pretrained`` in ``configure_model``, with a head that has no weights yet."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        from transformers import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(self.folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch.abs().long(), labels=torch.ones(len(batch)).long()).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FromConfig(Classifier):
    """Weights by :func:`load_pretrained`; on meta, transformers is not to notice, or it would initialise nothing."""

    def __init__(self, folder: str, on_meta: bool) -> None:
        super().__init__(folder)
        self.on_meta = on_meta

    def configure_model(self) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        config = AutoConfig.from_pretrained(self.folder)
        with self.trainer.init_module(empty_init=True) if self.on_meta else nullcontext():
            self.model = AutoModelForSequenceClassification.from_config(config)
        load_pretrained(self.model.bert, self.folder)


def from_hugging_face() -> tuple[dict[int, Outcome], dict[int, Outcome]]:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(dist.get_rank())
    folder = os.path.abspath("model")
    if dist.get_rank() == 0:
        BertModel(BertConfig(**sizes, vocab_size=50)).save_pretrained(folder, max_shard_size="10KB")
    dist.barrier()
    kwargs = {"data": (16, 6), "limit_train_batches": 2}
    theirs = {stage: trained(lambda: Classifier(folder), stage, **kwargs) for stage in (0, 3)}
    ours = {stage: trained(partial(FromConfig, folder, stage > 0), stage, **kwargs) for stage in (0, 3)}
    return theirs, ours


def test_hugging_face() -> None:
    pytest.importorskip("transformers")
    results = run(2, from_hugging_face, timeout=120)
    for which in (0, 1):
        assert_same([result[which] for result in results])


# -- progress ----------------------------------------------------------------------------------------------------------


def test_a_late_bar_comes_up_when_it_takes_long(capfd: pytest.CaptureFixture[str]) -> None:
    for enabled, after, shows in ((True, 0.0, True), (False, 0.0, False), (True, 60.0, False)):
        with LateBar("sharding the module", enabled, after) as bar:
            bar(0, 4_000_000)
            bar(2_000_000, 4_000_000)
            bar(4_000_000, 4_000_000)
        written = capfd.readouterr().err
        assert ("sharding the module" in written and "4.0/4.0 MB" in written) == shows, (enabled, after)


class Spy(LateBar):
    """Says whether it was asked to show up."""

    asked: list[tuple[bool, list[int]]] = []

    def __init__(self, text: str, enabled: bool = True, after: float = 3.0) -> None:
        super().__init__(text, enabled, after=60.0)
        self.asked.append((enabled, []))

    def __call__(self, done: int, total: int) -> None:
        self.asked[-1][1].append(round(100 * done / total))
        super().__call__(done, total)


def reported() -> list[tuple[bool, list[int]]]:
    strategy_module.LateBar = Spy  # type: ignore[misc]
    for enabled in (True, False):
        trainer = make_trainer(".", strategy=make_strategy(3), max_steps=1, enable_progress_bar=enabled)
        trainer.fit(BoringModel(), DataLoader(RandomData(4, 32), batch_size=1))
    return Spy.asked


def test_rank_0_reports_unless_bars_are_off() -> None:
    first, second = run(2, reported)
    assert [enabled for enabled, _ in first] == [True, False]
    assert [enabled for enabled, _ in second] == [False, False]
    assert [done for _, done in first] == [[0, 100]] * 2  # weight and bias are one unit
