"""What one host of two runs: ``torchrun --nnodes=2 ... -m tests.faults.host FOLDER [--wait-for-cut]``."""

import argparse
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.parity import RandomData

EPOCHS = 3
TIMEOUT_SECONDS = 5


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - batch.roll(1, 1)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class WaitForCut(pl.Callback):
    """In the second epoch: say that this rank is there, and go on when the link has been cut."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            (self.folder / f"ready{trainer.global_rank}").touch()
            while not (self.folder / "cut").exists():
                time.sleep(0.05)


def train(folder: str, callbacks: list[pl.Callback], **kwargs: Any) -> dict[str, Any]:
    """Go on from the last checkpoint in ``folder``, if there is one; the weights, and the step that it went on from."""
    began: list[int] = []
    note = pl.callbacks.LambdaCallback(on_train_start=lambda trainer, module: began.append(trainer.global_step))
    torch.manual_seed(0)
    module = Net()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=ZeroStrategy(
            stage=3, unit_size_mb=1e-3, timeout=timedelta(seconds=TIMEOUT_SECONDS), read_timeout=TIMEOUT_SECONDS
        ),
        callbacks=[ModelCheckpoint(folder, save_last=True), note, *callbacks], **kwargs,
    )  # fmt: skip
    trainer.fit(module, DataLoader(RandomData(16, 16), batch_size=2), ckpt_path="last", weights_only=True)
    return {"weights": {name: value.clone() for name, value in module.state_dict().items()}, "began": began[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--wait-for-cut", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    callbacks = [WaitForCut(arguments.folder)] if arguments.wait_for_cut else []
    result = train(arguments.folder, callbacks, devices=1, num_nodes=2)
    if torch.distributed.get_rank() == 0:
        torch.save(result, Path(arguments.folder, "result.pt"))


if __name__ == "__main__":
    main()
