"""On a real device: the step on the host beside torch's FSDP2 with CPUOffloadPolicy. Times are recorded, not judged."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero import OffloadConfig, ZeroStrategy
from tests.gpu.models import count, fsdp2_losses_and_seconds, median, train

WIDTH, BLOCKS, STEPS, BATCH = 1024, 12, 24, 8


@pytest.mark.skipif(not dist.is_nccl_available(), reason="FSDP2 needs NCCL on a GPU")
def test_beside_fsdp2(tmp_path: Path, record_property: Any) -> None:
    ways = {
        "stage 3, offload": ZeroStrategy(stage=3, offload=True),
        "stage 3, offload, early": ZeroStrategy(stage=3, offload=OffloadConfig(early_update=True)),
        "stage 3, parameters on the host": ZeroStrategy(stage=3, offload=OffloadConfig(parameters="cpu")),
    }
    seconds, losses = {}, {}
    for way, strategy in ways.items():
        module = train(WIDTH, BLOCKS, strategy, STEPS, BATCH, tmp_path)
        losses[way] = module.losses
        seconds[way] = median([end - start for start, end in zip(module.ends, module.ends[1:])])
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            losses["FSDP2, CPUOffloadPolicy"], seconds["FSDP2, CPUOffloadPolicy"] = fsdp2_losses_and_seconds(
                WIDTH, BLOCKS, STEPS, BATCH
            )
        finally:
            dist.destroy_process_group()
    for way, time in seconds.items():
        speed = f"{1e3 * time:.1f} ms a step, {BATCH * 256 / time:.0f} tokens/s, {os.cpu_count()} cores"
        record_property(way, speed)
        print(f"{count(WIDTH, BLOCKS) / 1e6:.0f}M parameters, {way}: {speed}")
    first, *others = losses.values()
    for other in others:
        # All of them compute in bf16, and round sums of gradients apart.
        torch.testing.assert_close(torch.tensor(other), torch.tensor(first), rtol=2e-2, atol=2e-2)
