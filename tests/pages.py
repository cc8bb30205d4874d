"""Runs the code blocks of a page inside a rank, one after another in one namespace, as a reader would."""

import os
import traceback
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from tests.parity import RandomData


class Block(nn.Sequential):
    """What a page calls a block of the model."""


class Model(pl.LightningModule):
    """What a page calls ``model``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Data(pl.LightningDataModule):
    """What a page calls ``data``."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomData(8, 8), batch_size=2)


class QuietTrainer(Trainer):
    """Few steps and no files, and what this machine has in place of GPUs."""

    def __init__(self, **kwargs: Any) -> None:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        if kwargs.get("accelerator") in ("gpu", "cuda"):
            kwargs["accelerator"] = "cpu"
        super().__init__(**{"max_steps": 2, "enable_checkpointing": False, **quiet, **kwargs})


def run_page(name: str, code: list[tuple[int, str]]) -> str:
    """The traceback of the first block that fails; empty if all run."""
    namespace: dict[str, Any] = {"__name__": f"page {name}", "pl": pl, "torch": torch, "nn": nn, "Trainer": QuietTrainer}
    namespace |= {public: getattr(lightning_zero, public) for public in lightning_zero.__all__}
    namespace |= {"model": Model(), "data": Data(), "Model": Model, "Block": Block}
    os.environ.pop("WORLD_SIZE", None)  # as a reader's shell has it
    trainer, pl.Trainer = pl.Trainer, QuietTrainer
    try:
        for line, source in code:
            exec(compile("\n" * (line - 1) + source, name, "exec"), namespace)
    except Exception:
        return traceback.format_exc()
    finally:
        pl.Trainer = trainer
    return ""
