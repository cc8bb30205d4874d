"""ZeRO beside model-parallel groups: a Megatron-style pair of linear layers on 2 x 2 ranks is one process's."""

import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_zero import MemoryMonitor, ZeroStrategy
from lightning_zero.activations import offload as activation_offload
from lightning_zero.activations.partitioned import PartitionedInputs
from lightning_zero.comm import Comm
from lightning_zero.topology import make_topology
from tests.harness import make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, PlainStrategy, RandomData, Recorder
from tests.slow_link import FarStrategy

WIDTH, HIDDEN, BLOCKS = 6, 10, 2
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
}


class Copied(torch.autograd.Function):
    """The same forward; backward adds up what the ranks' parts want of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Added(torch.autograd.Function):
    """Adds up the parts' outputs; backward hands the gradient to each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Parallel(nn.Module):
    """A residual block: a column-parallel linear layer, GELU, a row-parallel one. Without a group, whole."""

    def __init__(self, group: Any, marked: bool = True) -> None:
        super().__init__()
        self.group, self.size = group, 1 if group is None else dist.get_world_size(group)
        place = 0 if group is None else dist.get_rank(group)
        self.norm = nn.LayerNorm(WIDTH)
        first, second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)  # the same on all ranks
        self.first = nn.Parameter(first.weight.detach().chunk(self.size)[place].clone())
        self.first_bias = nn.Parameter(first.bias.detach().chunk(self.size)[place].clone())
        self.second = nn.Parameter(second.weight.detach().chunk(self.size, 1)[place].clone())
        self.second_bias = nn.Parameter(second.bias.detach().clone())
        for part in (self.first, self.first_bias, self.second) if marked and group is not None else ():
            part.tensor_model_parallel = True
        self.seen: list[weakref.ref] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(weakref.ref(x.untyped_storage()))
        y = self.norm(x)
        if self.group is not None:
            y = Copied.apply(y, self.group)
        y = F.linear(F.gelu(F.linear(y, self.first, self.first_bias)), self.second)
        if self.group is not None:
            y = Added.apply(y, self.group)
        return x + y + self.second_bias


class Net(pl.LightningModule):
    def __init__(self, group: Any, optimizer: str = "adam", marked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Parallel(group, marked) for _ in range(BLOCKS))
        self.optimizer_name = optimizer
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x * 1.0)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch), batch.roll(1, 1))
        self.alive.append(sum(seen() is not None for block in self.blocks for seen in block.seen))
        for block in self.blocks:
            block.seen.clear()
        self.log("loss", loss, sync_dist=True)
        self.log("samples", float(len(batch)), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](self.parameters())


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "clipped, accumulated": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
}


def fit(module: Net, strategy: Any, batch_size: int, **kwargs: Any) -> dict[str, Any]:
    recorder = Recorder()
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, callbacks=[recorder], **kwargs)
    trainer.fit(module, DataLoader(RandomData(24, WIDTH), batch_size=batch_size))
    norm = getattr(strategy, "last_grad_norm", None)
    return {
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "losses": [float(loss) for loss in recorder.losses],
        "samples": float(trainer.callback_metrics["samples"]),
        "norm": None if norm is None else float(norm),
        "alive": module.alive,
    }


def reference(optimizer: str) -> dict[str, dict[str, Any]]:
    """One process with whole layers and the batches of both data-parallel ranks."""
    found = {}
    for name, kwargs in VARIANTS.items():
        # In the order in which two ranks take them.
        found[name] = fit(Net(None, optimizer), PlainStrategy(), 4, use_distributed_sampler=True, **kwargs)
    return found


def parallel(optimizer: str, cases: list[tuple[str, int, dict[str, Any]]]) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for name, stage, kwargs in cases:
        given = {"mesh": mesh, "dimension": mesh["tp"], "group": mesh["tp"].get_group(), "number": 2}
        chosen = given[kwargs.get("model_parallel", "mesh")]
        strategy = ZeroStrategy(stage=stage, unit_size_mb=TINY_UNIT_MB, **{**kwargs, "model_parallel": chosen})
        found.append(fit(Net(mesh["tp"].get_group(), optimizer), strategy, 2, **VARIANTS[name]))
    return found


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weights of one process from those of a model-parallel group."""
    dims = {"first": 0, "first_bias": 0, "second": 1}
    found = {}
    for name in parts[0]:
        dim = dims.get(name.rpartition(".")[2])
        if dim is None or not name.startswith("blocks") or "norm" in name:
            assert torch.equal(parts[0][name], parts[1][name]), name
            found[name] = parts[0][name]
        else:
            found[name] = torch.cat([part[name] for part in parts], dim)
    return found


PARTED = {"activation_checkpointing_policy": {Parallel}, "partition_activations": True}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_two_by_two_ranks_are_one_process(optimizer: str) -> None:
    [expected] = run(1, reference, optimizer)
    cases: list[tuple[str, int, dict[str, Any]]] = [("clipped", stage, {}) for stage in STAGES]
    cases += [("clipped, accumulated", stage, PARTED) for stage in STAGES]
    cases += [("plain", 3, {**PARTED, "shard_group_size": 1, "contiguous_activations": True}), ("clipped", 2, {"shard_group_size": 1, "offload": True})]
    if optimizer == "sgd":
        cases = cases[:3] + cases[6:]
    else:
        cases += [("plain", 2, {"model_parallel": how}) for how in ("dimension", "group", "number")]
    results = run(4, parallel, optimizer, cases)
    for number, (name, stage, kwargs) in enumerate(cases):
        where, wanted = f"{name}, stage {stage}, {kwargs}", expected[name]
        for data_rank in (0, 1):
            ranks = [results[2 * data_rank + place][number] for place in (0, 1)]
            weights = whole([rank["weights"] for rank in ranks])
            assert weights.keys() == wanted["weights"].keys()
            for key, value in wanted["weights"].items():
                torch.testing.assert_close(
                    weights[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, at=f"{where}: {key}": f"{at}: {text}"
                )
            # Samples of both data-parallel ranks, each counted once.
            assert [rank["samples"] for rank in ranks] == [24.0, 24.0]
            # Inputs of the blocks are not kept whole where they are kept in parts.
            alive = {rank_alive for rank in ranks for rank_alive in rank["alive"]}
            assert alive == ({0} if kwargs.get("partition_activations") else {BLOCKS}), where
        norms = {rank[number]["norm"] for rank in results}
        assert len(norms) == 1
        losses = torch.tensor([rank[number]["losses"] for rank in results])
        assert torch.equal(losses[0], losses[1])
        torch.testing.assert_close(losses[::2].mean(0), torch.tensor(wanted["losses"]), rtol=1e-5, atol=1e-6)


# -- one data-parallel rank ------------------------------------------------------------------------------------------


class Built(Net):
    """Builds its blocks from the mesh that the strategy has made; the parts are of 3, 3, 3 and 1 rows."""

    def __init__(self) -> None:
        super().__init__(None)
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            torch.manual_seed(1)
            group = self.device_mesh["tensor_parallel"].get_group()
            self.blocks = nn.ModuleList(Parallel(group) for _ in range(BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 3:
            loss = loss + self.blocks[-1].second.sum() * float("inf")  # only the gradient of this rank's part
        return loss


class Scales(pl.Callback):
    """The loss scale by step and, in the third step, a stop signal to one rank."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 2:
            trainer.strategy.engine.stop_wanted = True

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


def overflow() -> tuple[list[float], float, float, int, list[str]]:
    scales, strategy = Scales(), ZeroStrategy(stage=3, model_parallel=4, unit_size_mb=TINY_UNIT_MB)
    trainer = make_trainer(
        ".", strategy=strategy, max_epochs=1, callbacks=[scales, MemoryMonitor(2)], precision="16-mixed",
        gradient_clip_val=1e-3,
    )  # fmt: skip
    with pytest.raises(SIGTERMException):
        trainer.fit(Built(), DataLoader(RandomData(16, WIDTH), batch_size=2))
    total = float(strategy.reduce(torch.tensor(2.0), reduce_op="sum"))
    return scales.seen, float(strategy.last_grad_norm), total, strategy.data_parallel_size, list(strategy.comm_stats())


def test_model_parallel_ranks_alone_agree_on_overflows_norms_and_stops(capfd: pytest.CaptureFixture[str]) -> None:
    results = run(4, overflow)
    assert "predicted: ZeRO stage 3, 1 rank\n" in capfd.readouterr().out
    scale = results[0][0][0]
    for seen, norm, total, size, collectives in results:
        assert seen == [scale, scale / 2, scale / 2]
        assert norm == results[0][1] > 0
        assert (total, size) == (2.0, 1)
        assert collectives == ["control"]  # nothing to gather or to reduce


# -- inputs in parts -------------------------------------------------------------------------------------------------


def kept() -> dict[str, Any]:
    number, found = dist.get_rank(), {}
    comm = Comm(number, 2, torch.device("cpu"), topology=make_topology(number, 2, None, [[0, 1]]))
    inputs = PartitionedInputs(comm.model)
    same = torch.Generator().manual_seed(3)
    image = torch.randn(2, 3, 5, 7, generator=same).to(memory_format=torch.channels_last)
    cases = {
        "odd": torch.randn(7, 3, generator=same),
        "sixteen bits, channels last": image.bfloat16(),
        "flags": torch.rand(9, generator=same) > 0.5,
        "one element": torch.tensor(2.5),
        "double": torch.randn(3, generator=same, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "this rank's own": torch.full((8,), float(number)),
        "every other": torch.randn(8, generator=same)[::2],
    }
    for name, tensor in cases.items():
        pack, unpack = inputs.hooks(name)
        packed = pack(tensor)
        back = unpack(packed)
        whole = torch.equal(back, tensor) and back.stride() == tensor.stride() and back.dtype == tensor.dtype
        found[name] = (whole, packed is tensor or packed.kept.numel())
    pack, unpack = inputs.hooks("odd")
    try:
        unpack(pack(torch.full((7, 3), float(number))))
    except RuntimeError as error:
        found["message"] = str(error)
    return found


def test_what_is_the_same_is_kept_in_parts() -> None:
    for found in run(2, kept):
        message = found.pop("message")
        assert message.startswith("An input of 'odd' is not the same on all ranks of its model-parallel group"), message
        assert found == {
            "odd": (True, 11),  # of 21
            "sixteen bits, channels last": (True, 105),  # of 210
            "flags": (True, 5),
            "one element": (True, 1),
            "double": (True, 2),
            "empty": (True, 0),
            "this rank's own": (True, True),
            "every other": (True, True),
        }


def far() -> list[tuple[dict[str, Tensor], int]]:
    """In parts, near and on a host far away."""
    activation_offload.MIN_BYTES = 16
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    for cls, parts in ((ZeroStrategy, False), (FarStrategy, False), (FarStrategy, True)):
        strategy = cls(
            stage=3, unit_size_mb=TINY_UNIT_MB, model_parallel=mesh, activation_checkpointing_policy={Parallel},
            partition_activations=parts, activation_offload=cls is FarStrategy,
        )  # fmt: skip
        outcome = fit(Net(mesh["tp"].get_group()), strategy, 2)
        found.append((outcome["weights"], strategy.link.down if cls is FarStrategy else 0))
    return found


def test_parts_wait_in_host_memory() -> None:
    for (near, _), (whole_far, all_down), (parts_far, half_down) in run(4, far):
        for name, value in near.items():
            assert torch.equal(value, whole_far[name])
            assert torch.equal(value, parts_far[name])
        # 6 steps, of which each moves the inputs of two blocks, 2 x 6 fp32 elements, or half of them.
        assert all_down - half_down == 6 * BLOCKS * 2 * WIDTH * 4 // 2


# -- what is refused -------------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group, found = mesh["tp"].get_group(), {}

    def attempt(name: str, act: Any) -> None:
        try:
            act()
            found[name] = "no error"
        except (RuntimeError, ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def train(module: Net | None = None, model_parallel: Any = mesh) -> None:
        trainer = make_trainer(".", strategy=ZeroStrategy(model_parallel=model_parallel), max_steps=2)
        trainer.fit(module or Net(group), DataLoader(RandomData(24, WIDTH), batch_size=2))

    half = Net(group)
    for block in half.blocks:
        del block.second.tensor_model_parallel
    attempt("nothing marked", lambda: train(Net(group, marked=False)))
    attempt("one not marked", lambda: train(half))
    attempt("three", lambda: train(model_parallel=3))
    attempt("irregular", lambda: make_topology(0, 4, None, [[0, 3], [1, 2]]))
    attempt("uneven", lambda: make_topology(0, 3, None, [[0, 1], [2]]))
    unnamed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    attempt("no name", lambda: ZeroStrategy(model_parallel=unnamed))
    return found


def test_what_is_refused() -> None:
    wanted = {
        "nothing marked": "RuntimeError: No parameter is marked as a part of a tensor-parallel layer",
        "one not marked": "RuntimeError: Parameters differ over a model-parallel group and are not marked as parts:"
        " 'blocks.0.second', 'blocks.1.second' (this is rank ",
        "three": "ValueError: model_parallel=3 does not divide the 4 ranks",
        "irregular": "ValueError: model_parallel: the groups [[0, 3], [1, 2]] do not cover 4 ranks in groups of one size",
        "uneven": "ValueError: model_parallel: the groups [[0, 1], [2]] do not cover 3 ranks",
        "no name": "ValueError: model_parallel: the DeviceMesh has the dimensions ('a', 'b')",
    }
    for found in run(4, refusals):
        assert found.keys() == wanted.keys()
        for name, message in found.items():
            assert message.startswith(wanted[name]), (name, message)


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="partition_activations=True needs model_parallel"):
        ZeroStrategy(partition_activations=True, activation_checkpointing_policy={Parallel})
    with pytest.raises(ValueError, match="partition_activations=True needs model_parallel"):
        ZeroStrategy(partition_activations=True, model_parallel=2)
    with pytest.raises(ValueError, match="stage='auto' does not count"):
        ZeroStrategy(stage="auto", model_parallel=2)
    with pytest.raises(TypeError, match="model_parallel must be a number of ranks, a DeviceMesh or a process group"):
        ZeroStrategy(model_parallel="tp")
    with pytest.raises(ValueError, match="model_parallel must be at least 1 rank, got 0"):
        ZeroStrategy(model_parallel=0)


def test_who_is_data_parallel_to_whom() -> None:
    topology = make_topology(5, 8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert topology.columns == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert (topology.rank, topology.world_size, topology.members) == (2, 4, (1, 3, 5, 7))
    assert topology.model_group == [4, 5]
    # Data-parallel ranks 2 and 3 share shards, 0 and 2 are replicas.
    assert topology.as_global(topology.shard_group) == [5, 7]
    assert topology.as_global(topology.replica_group) == [1, 5]
