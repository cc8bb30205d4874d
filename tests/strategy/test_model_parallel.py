"""ZeRO beside model-parallel groups: a Megatron-style pair of linear layers on 2 x 2 ranks is one process's."""

import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.topology import make_topology
from tests.harness import make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, PlainStrategy, RandomData, Recorder

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
        found[name] = fit(Net(None, optimizer), PlainStrategy(), 4, **kwargs)
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
    cases += [("plain", 3, {**PARTED, "shard_group_size": 1}), ("clipped", 2, {"shard_group_size": 1, "offload": True})]
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
