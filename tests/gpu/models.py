"""What the tests on a device train, and how."""

import gc
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import GPT, Block

CONTEXT = 256


class LitGPT(pl.LightningModule):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.gpt = GPT(width, blocks, heads=width // 64, vocabulary=1024, context=CONTEXT)
        self.ends: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.gpt(batch[0])

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].item())  # after which the device has done all of the step but the transfers
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def tokens(steps: int, batch_size: int) -> Tensor:
    return torch.randint(1024, (steps * batch_size, CONTEXT + 1), generator=torch.Generator().manual_seed(1))


def train(width: int, blocks: int, strategy: Any, steps: int, batch_size: int, folder: Path) -> LitGPT:
    torch.manual_seed(0)
    module = LitGPT(width, blocks)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision="bf16-mixed", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens(steps, batch_size)), batch_size=batch_size))
    return module


def fits(width: int, blocks: int, strategy: Any, cap_bytes: int, folder: Path) -> bool:
    """Whether a few steps train in ``cap_bytes`` of the device's memory."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
    try:
        train(width, blocks, strategy, steps=2, batch_size=1, folder=folder)
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def fsdp2_losses_and_seconds(width: int, blocks: int, steps: int, batch_size: int) -> tuple[list[float], float]:
    """Losses, and the median time of a step, of torch's own sharding with parameters, gradients and AdamW on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = GPT(width, blocks, heads=width // 64, vocabulary=1024, context=CONTEXT)
    mesh = init_device_mesh("cuda", (1,))
    policies: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(),
    }
    for block in model.blocks:
        if not isinstance(block, Block):
            raise AssertionError("the model has other blocks than this was written for")
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses, times = [], []
    for batch in tokens(steps, batch_size).split(batch_size):
        start = time.perf_counter()
        loss = model(batch.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    return losses, median(times)


def median(times: list[float]) -> float:
    """Without the first three, which make state, pin memory and try things out."""
    return sorted(times[3:])[len(times[3:]) // 2]


def count(width: int, blocks: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(width, blocks, heads=width // 64, vocabulary=1024, context=CONTEXT).parameters())


