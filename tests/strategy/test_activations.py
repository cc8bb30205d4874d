"""Activations: recomputed where a policy says so, kept in host memory; the same numbers with fewer bytes."""

import copy
import pickle
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.activations import offload as activation_offload
from lightning_zero.activations.checkpointing import Recomputation, checked_policy
from tests.harness import make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, Outcome, RandomData, assert_same, trained
from tests.slow_link import FarStrategy


class Block(nn.Module):
    def __init__(self, width: int, frozen: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)
        self.up.requires_grad_(not frozen)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Own(Block):
    """Recomputes by itself."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return checkpoint(super().forward, x, scale=scale, use_reentrant=False)


class Net(pl.LightningModule):
    """A plain block, one that is called twice, a frozen one, one that recomputes itself, and a compiled one."""

    def __init__(self, width: int = 8, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList([Block(width), Block(width, frozen=True), Own(width), Block(width)])
        self.head = nn.Linear(width, 1)
        self.extra: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(self.blocks[0](x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self(batch).mean(), sync_dist=True)

    def on_train_end(self) -> None:
        self.extra = {"calls": [block.calls for block in self.blocks]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def keep_linear(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    chosen = op in (torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
    return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE


def selective(module: nn.Module) -> Any:
    if isinstance(module, Block):
        return {"context_fn": partial(create_selective_checkpoint_contexts, keep_linear)}
    return False


def by_fsdp_signature(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


POLICIES: dict[str, Any] = {
    "class": Block,
    "classes": {Block, nn.Embedding},
    "names": ["blocks.[0-3]"],
    "callable": lambda module: isinstance(module, Block),
    "selective": selective,
    "FSDP's signature": by_fsdp_signature,
}


def recomputed(name: str, optimizer: str, world: int) -> dict[int, Outcome]:
    strategy = {"activation_checkpointing_policy": POLICIES[name]}
    factory = partial(Net, optimizer=optimizer)
    return {
        0: trained(factory, 0, data=(16, 6)),
        **{s: trained(factory, s, data=(16, 6), strategy_kwargs=strategy) for s in STAGES},
    }


@pytest.mark.parametrize(
    ("world", "name", "optimizer"),
    [(1, "class", "adamw"), (2, "class", "sgd"), (3, "names", "adamw"), (2, "callable", "adamw"), (2, "selective", "adamw")],
)
def test_recomputing_changes_nothing_but_the_number_of_forwards(
    world: int, name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with dropout: the recompute draws the same numbers. A block that already recomputes itself is left to."""
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    results = run(world, recomputed, name, optimizer, world)
    assert_same(results)
    for by_stage in results:
        steps = len(by_stage[0].losses)
        evaluations = by_stage[0].extra["calls"][1] - steps
        for stage in STAGES:
            first, frozen, _, last = by_stage[stage].extra["calls"]
            assert first == 2 * (2 * steps + evaluations)  # called twice per forward
            assert frozen == last == 2 * steps + evaluations


def gathers(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    def calls(policy: Any) -> dict[str, int]:
        torch.manual_seed(0)
        strategy = ZeroStrategy(stage=stage, unit_size_mb=1e-3, activation_checkpointing_policy=policy)
        make_trainer(".", strategy=strategy, max_epochs=1).fit(Net(), DataLoader(RandomData(24, 6), batch_size=2))
        return {name: counted["calls"] for name, counted in strategy.comm_stats().items() if name != "control"}

    return calls(None), calls(Block)


@pytest.mark.parametrize("stage", STAGES)
def test_recomputing_gathers_no_second_time(stage: int) -> None:
    for without, with_policy in run(2, gathers, stage):
        assert with_policy == without


class Attending(pl.LightningModule):
    """Attention that is given one tensor three times, which it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch).unsqueeze(0)
        return self.attention(x, x, x, need_weights=False)[0].square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


def attending() -> dict[int, Outcome]:
    strategy = {"activation_checkpointing_policy": nn.MultiheadAttention}
    return {
        0: trained(Attending, 0, data=(16, 6)),
        **{s: trained(Attending, s, data=(16, 6), strategy_kwargs=strategy) for s in STAGES},
    }


def test_one_tensor_given_several_times_is_one_in_the_recompute() -> None:
    assert_same(run(2, attending))


class Counting(Net):
    """Counts the bytes that autograd saves in a forward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.saved = 0

        def pack(tensor: Tensor) -> Tensor:
            self.saved += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return super().training_step(batch, batch_idx)


def saved_bytes(policy: Any) -> int:
    module = Counting(width=64)
    strategy = ZeroStrategy(stage=2, activation_checkpointing_policy=policy)
    make_trainer(".", strategy=strategy, max_steps=1).fit(module, DataLoader(RandomData(64, 6), batch_size=64))
    return module.saved


def test_recomputing_saves_bytes() -> None:
    """Of each block only its input stays: 64 x 64 floats instead of about ten times as much."""
    plain, recomputing = (run(1, saved_bytes, policy)[0] for policy in (None, Block))
    assert recomputing < plain / 3


def test_a_module_is_its_own_again_after_fit() -> None:
    assert run(1, around_fit) == [[True, True, True, True]]


class Copies(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        copied, pickled = copy.deepcopy(module.blocks[0]), pickle.loads(pickle.dumps(module.blocks[0]))
        x = torch.randn(2, 8)
        for other in (copied, pickled):
            other.eval()
            assert torch.equal(other(x), module.blocks[0].eval()(x))
            assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}
        module.blocks[0].train()


def around_fit() -> list[bool]:
    module = Net()
    names = list(module.state_dict())
    strategy = ZeroStrategy(stage=3, activation_checkpointing_policy=Block)
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, callbacks=[Copies()])
    trainer.fit(module, DataLoader(RandomData(8, 6), batch_size=2))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(RandomData(8, 6), batch_size=2))  # once more
    return [
        all("forward" not in block.__dict__ for block in module.blocks),
        list(module.state_dict()) == names,
        type(module.blocks[0]) is Block,
        module.blocks[3].calls > 0,
    ]


@pytest.mark.parametrize("policy", [3, [Block, 3], [nn.Module()], {Block: True}])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match="activation_checkpointing_policy must hold module classes or names"):
        ZeroStrategy(activation_checkpointing_policy=policy)


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (lambda module: {"foo": 1}, ValueError, "gives 'foo' for 'embed': known are context_fn"),
        (lambda module: {"use_reentrant": True}, ValueError, "gives 'use_reentrant' for 'embed'"),
        (lambda module: "x", TypeError, "must return True, False or a dict of settings, got 'x' for 'embed'"),
    ],
)
def test_what_a_policy_must_not_return(policy: Any, error: type[Exception], message: str) -> None:
    module = Net()
    late = checked_policy(lambda child: True if isinstance(child, nn.Linear) and child.in_features == 6 else policy(child))
    with pytest.raises(error, match=message):
        Recomputation(module, checked_policy(policy))
    with pytest.raises(error):
        Recomputation(module, late)
    assert "forward" not in module.embed.__dict__  # chosen before the policy raised
    recomputation = Recomputation(Net(), checked_policy(lambda module: {} if isinstance(module, Block) else None))
    assert recomputation.names == [f"blocks.{index}" for index in range(4)]


def chooses_nothing() -> str:
    strategy = ZeroStrategy(activation_checkpointing_policy=nn.LSTM)
    with pytest.raises(ValueError, match="chooses none") as caught:
        make_trainer(".", strategy=strategy, max_steps=1).fit(Net(), DataLoader(RandomData(8, 6)))
    return str(caught.value)


def test_a_policy_that_chooses_nothing_is_refused() -> None:
    assert "chooses none of the module's parts" in run(1, chooses_nothing)[0]


# -- in one region ---------------------------------------------------------------------------------------------------------


def in_a_region(policy: Any) -> dict[int, Outcome]:
    strategy = {"activation_checkpointing_policy": policy, "contiguous_activations": True}
    kwargs: dict[str, Any] = {"data": (20, 6), "accumulate_grad_batches": 2, "val_check_interval": 2}
    return {
        0: trained(Net, 0, **kwargs),
        **{s: trained(Net, s, strategy_kwargs=strategy, **kwargs) for s in STAGES},
    }


@pytest.mark.parametrize(("world", "name"), [(1, "class"), (2, "names"), (3, "selective")])
def test_a_region_for_inputs_changes_nothing(world: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, a frozen block, one called twice, one that recomputes itself, validation in between, micro-batches that
    are summed and a last batch of another size."""
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    assert_same(run(world, in_a_region, POLICIES[name]), exact=False)


def test_what_does_not_go_with_a_region() -> None:
    with pytest.raises(ValueError, match="contiguous_activations=True does not go with activation_offload=True"):
        ZeroStrategy(contiguous_activations=True, activation_offload=True, activation_checkpointing_policy=Block)
    with pytest.raises(ValueError, match="contiguous_activations=True needs an activation_checkpointing_policy"):
        ZeroStrategy(contiguous_activations=True)
    with pytest.raises(TypeError, match="contiguous_activations must be True or False, got 'yes'"):
        ZeroStrategy(contiguous_activations="yes")  # type: ignore[arg-type]


# -- activations in host memory --------------------------------------------------------------------------------------------


def kept_far(world: int, checkpointing: bool) -> list[tuple[dict[str, Tensor], dict[str, Tensor], int, int]]:
    activation_offload.MIN_BYTES = 256
    results = []
    for stage in STAGES:
        weights, links = [], []
        for cls, far in ((ZeroStrategy, False), (FarStrategy, True)):
            torch.manual_seed(0)
            module = Net()
            policy = Block if checkpointing else None
            strategy = cls(
                stage=stage, unit_size_mb=TINY_UNIT_MB, activation_offload=far, activation_checkpointing_policy=policy
            )
            trainer = make_trainer(".", strategy=strategy, max_epochs=1, accumulate_grad_batches=2)
            trainer.fit(module, DataLoader(RandomData(64, 6), batch_size=8))
            weights.append({name: value.detach().clone() for name, value in module.state_dict().items()})
            links.append(strategy)
        link = links[1].link
        results.append((*weights, link.down, link.up))
    return results


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_activations_far_away_change_nothing(world: int, checkpointing: bool) -> None:
    """Over a link whose copies come late and whose memory holds NaN until then; each byte goes and comes back once."""
    moved = []
    for results in run(world, kept_far, world, checkpointing):
        for near, far, down, up in results:
            assert all(torch.equal(near[name], far[name]) for name in near)
            assert down == up > 0
            moved.append(down)
    # Whole weights, sharded ones and buffers never travel: at all stages the same activations do.
    assert len(set(moved)) == 1


def test_activation_offload_says_that_a_cpu_has_nothing_to_offload(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        said = run(1, on_cpu)[0]
    assert said


def on_cpu() -> bool:
    import logging

    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(Handler())
    strategy = ZeroStrategy(activation_offload=True)
    make_trainer(".", strategy=strategy, max_steps=1).fit(Net(), DataLoader(RandomData(8, 6)))
    return any("activation_offload=True) does nothing on a CPU" in message for message in records)
