"""Train a small module as a user's script does: ``python -m tests.launch.fit START_METHOD FOLDER``.

Started by the tests through Lightning's own launchers and by torchrun. Each rank writes what it saw to FOLDER, and the
process that goes on after ``fit`` writes the trained module.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.parity import RandomData


class Net(pl.LightningModule):
    def __init__(self, folder: str = ".") -> None:
        super().__init__()
        self.folder = folder
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - 1).pow(2).mean()
        self.log("loss", loss)
        return loss

    def on_train_start(self) -> None:
        if self.folder != ".":
            sampler = self.trainer.train_dataloader.sampler
            seen = {"replicas": sampler.num_replicas, "rank": sampler.rank, "weight": type(self.net[0].weight).__name__}
            Path(self.folder, f"rank{self.global_rank}.json").write_text(json.dumps(seen))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(start_method: str, folder: str) -> None:
    torch.manual_seed(0)
    module = Net(folder)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=ZeroStrategy(stage=3, unit_size_mb=1e-3, start_method=start_method),
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(RandomData(16, 4), batch_size=2))
    if trainer.is_global_zero:
        plain = all(type(p) is nn.Parameter for p in module.parameters())
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"weights": module.state_dict(), "plain": plain, "metrics": metrics}, Path(folder, "trained.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
