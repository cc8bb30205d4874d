"""Weights loaded into a module that is sharded already: the shards, and one unit at a time."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig, ZeroStrategy, load_pretrained
from lightning_zero.partition.handle import Sharded
from tests.harness import make_trainer, run
from tests.parity import RandomData

WIDTH, LAYERS = 32, 9
LAYER = WIDTH * WIDTH + WIDTH
FORMS = ("full", "sharded")


class Net(pl.LightningModule):
    """On the meta device until it is sharded, with a weight that is used by two modules."""

    def __init__(self, device: str, weights: str | None = None) -> None:
        super().__init__()
        self.device_name, self.weights = device, weights
        self.layers: nn.Sequential | None = None
        self.held: Tensor | None = None

    def configure_model(self) -> None:
        if self.layers is None:
            with torch.device(self.device_name):
                self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
                self.layers.append(nn.Linear(WIDTH, WIDTH))
                self.layers[-1].weight = self.layers[0].weight

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What waits in a folder is read by whoever looks, alone too, and keeps what he does to it."""
        state = checkpoint["state_dict"]
        if dist.get_rank() == 0:
            assert state["layers.3.bias"].abs().sum() > 0
        state["layers.2.bias"][1:].fill_(5.0)

    def on_fit_start(self) -> None:
        if self.weights is not None:
            self.held = self.layers[1].weight.data  # whoever has read a parameter may hold on to it
            load_pretrained(self, self.weights)
            self.trainer.strategy.note_peak()  # type: ignore[attr-defined]
            self.held[0, 0] = 7.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0)


class Noting(ZeroStrategy):
    """Remembers what was held when weights had been loaded."""

    read_bytes = buffers = unit = 0

    def note_peak(self) -> None:
        self.buffers = self.memory_stats()["peak"].get("buffers", 0)
        sizes = [unit.layout.padded_numel * unit.face.dtype.itemsize for unit in self.engine.units]  # type: ignore[union-attr]
        self.unit = max(sizes)
        assert sum(sizes) > 4 * self.unit

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            waiting = [v for v in checkpoint["state_dict"].values() if isinstance(v, Sharded)]
            self.read_bytes = sum(v.untyped_storage().nbytes() for v in waiting) if waiting else -1
        return checkpoint

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super().load_model_state_dict(*args, **kwargs)
        self.note_peak()


SETTINGS: dict[str, tuple[int, str, OffloadConfig | None]] = {
    "stage 3": (3, "32-true", None),
    "stage 2, masters shown": (2, "bf16-mixed", None),
    "stage 3, half": (3, "bf16-true", None),
    "in files": (3, "bf16-mixed", OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path="files")),
}


def fit(name: str, device: str, weights: str | None = None, path: str | None = None, form: str = "full") -> tuple[Any, Any]:
    stage, precision, offload = SETTINGS[name]
    strategy = Noting(stage=stage, offload=offload or False, unit_size_mb=LAYER * 4 / 2**20, state_dict_type=form)  # type: ignore[arg-type]
    trainer = make_trainer(".", strategy=strategy, max_steps=1, precision=precision)
    module = Net(device, weights)
    data = DataLoader(RandomData(3 * dist.get_world_size(), WIDTH), batch_size=1)
    trainer.fit(module, data, ckpt_path=path)
    return strategy, module


def loaded(names: list[str]) -> list[tuple[str, int, int, int, list[str]]]:
    """By case: the bytes of an unsharded unit, the most in buffers, bytes read before they were wanted, wrong weights."""
    found = []
    for name in names:
        torch.manual_seed(3)
        source = Net("cpu")
        source.configure_model()
        if SETTINGS[name][1] == "bf16-true":
            source.bfloat16()
        wanted = {key: value.detach().clone() for key, value in source.state_dict().items()}
        torch.save(wanted, f"{dist.get_rank()}.bin")
        edited = {
            **wanted, "layers.2.bias": torch.cat([wanted["layers.2.bias"][:1], torch.full((WIDTH - 1,), 5.0)]).to(wanted["layers.2.bias"])
        }
        for form in FORMS:
            path = os.path.abspath(f"{name}-{form}.ckpt") if dist.get_rank() == 0 else None
            box = [path]
            dist.broadcast_object_list(box)
            save(source, name, form, box[0])  # type: ignore[arg-type]
            torch.manual_seed(4)
            strategy, module = fit(name, "meta", path=box[0], form=form)
            wrong = [key for key, value in edited.items() if not torch.equal(value, module.state_dict()[key])]
            found.append((f"{name}, {form}", strategy.unit, strategy.buffers, strategy.read_bytes, wrong))
        strategy, module = fit(name, "meta", weights=f"{dist.get_rank()}.bin")
        wanted["layers.1.weight"][0, 0] = 7.0
        wrong = [key for key, value in wanted.items() if not torch.equal(value, module.state_dict()[key])]
        found.append((f"{name}, load_pretrained", strategy.unit, strategy.buffers, 0, wrong))
    return found


def save(source: Net, name: str, form: str, path: str) -> None:
    """A checkpoint from before the first step."""
    stage, precision, _ = SETTINGS[name]
    class Start(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trainer.save_checkpoint(path)

    trainer = make_trainer(
        ".", strategy=ZeroStrategy(stage=stage, state_dict_type=form), max_steps=1, precision=precision, callbacks=[Start()]  # type: ignore[arg-type]
    )
    trainer.fit(source, DataLoader(RandomData(dist.get_world_size(), WIDTH), batch_size=1))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_loading_takes_one_unit_at_a_time(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    names = list(SETTINGS) if world == 2 else ["stage 3", "in files"]
    for rank, results in enumerate(run(world, loaded, names, timeout=120)):
        assert len(results) == 3 * len(names)
        for name, unit, buffers, read, wrong in results:
            where = f"rank {rank} of {world}, {name}"
            assert wrong == [], where
            # One that is held by its reader, one that is being loaded, one that is idle.
            assert unit <= buffers <= 3.5 * unit, f"{where}: {buffers / unit:.1f} units"
            if "sharded" in name:
                assert 0 < read < LAYER, f"{where}: {read} bytes read"
