"""On a real device: offload changes no bits, leaves no optimizer state there, and sends 2 bytes each way."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig, ZeroStrategy
from lightning_zero.transfer import StreamLink
from tests.parity import STAGES, RandomData
from tests.slow_link import EarlyStrategy

WIDTH, DEPTH, BATCHES = 1024, 8, 6
PARAMETERS = WIDTH * WIDTH * DEPTH


class Layers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        self.allocated: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).float().square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.allocated.append(torch.get_device_module().memory_allocated())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(folder: Any, precision: str = "bf16-true", cls: Any = ZeroStrategy, **kwargs: Any) -> tuple[Layers, Any]:
    torch.manual_seed(0)
    strategy = cls(**kwargs)
    module = Layers()
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision=precision, max_epochs=1, logger=False,  # type: ignore[arg-type]
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(RandomData(2 * BATCHES, WIDTH), batch_size=2))
    return module, strategy


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_offload_trains_as_the_device_does(tmp_path: Any, stage: int, precision: str) -> None:
    plain, _ = fit(tmp_path, precision, stage=stage)
    at_once, _ = fit(tmp_path, precision, stage=stage, offload=True)
    early, strategy = fit(tmp_path, precision, EarlyStrategy, stage=stage, offload=OffloadConfig(early_update=True))
    assert strategy.updater.early.accepted > 0
    for one, two, three in zip(plain.parameters(), at_once.parameters(), early.parameters(), strict=True):
        # The device's Adam and the host's round apart.
        torch.testing.assert_close(two, one, rtol=1e-2, atol=1e-3)
        assert torch.equal(two, three)


@pytest.mark.parametrize("stage", STAGES)
def test_the_device_holds_no_masters_and_no_moments(tmp_path: Any, stage: int) -> None:
    """16 bytes per parameter are 2 of weights, 2 of gradients and 12 that belong to the host; fp32 local sums at stage 1
    add 2."""
    module, _ = fit(tmp_path, stage=stage, offload=True)
    assert max(module.allocated) < 7 * PARAMETERS


def test_copies_overlap_the_device(tmp_path: Any) -> None:
    """The host returns from starting a copy before it is done."""
    device = torch.device(torch.accelerator.current_accelerator() or "cuda")
    link = StreamLink(device)
    source = torch.ones(1 << 28, dtype=torch.bfloat16, device=device)
    target = link.take(source.numel(), source.dtype)
    assert target.is_pinned()
    transfer = link.download(source, target)
    assert not transfer._done.query()  # type: ignore[attr-defined]
    transfer.synchronize()
    assert bool((target == 1).all())
