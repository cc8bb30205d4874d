"""Train as a user's script does until one rank fails: ``python -m tests.launch.fail HOW FOLDER``.

Each rank leaves its process id in FOLDER.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.launch.fit import Net
from tests.parity import RandomData


class Failure(pl.Callback):
    def __init__(self, how: str, folder: str) -> None:
        self.how, self.folder = how, folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        Path(self.folder, f"rank{trainer.global_rank}.pid").write_text(str(os.getpid()))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.how.startswith("stop") and trainer.global_rank == 1:
            time.sleep(1.0)  # the other rank waits for this one's shards by now
            if self.how == "stop":
                os.kill(int(Path(self.folder, "rank0.pid").read_text()), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        text = f"{type(exception).__name__} after {trainer.global_step} steps"
        Path(self.folder, f"rank{trainer.global_rank}.end").write_text(text)
        if isinstance(exception, SystemExit):
            trainer.save_checkpoint(Path(self.folder, "stopped.ckpt"))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        if self.how == "raise" and trainer.global_rank == 1:
            raise ValueError("broken on purpose")
        if self.how == "kill" and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "read" and trainer.global_rank == 0:
            float(module.net[0].weight.sum())


def main(how: str, folder: str) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=ZeroStrategy(stage=3, unit_size_mb=1e-3, read_timeout=1.0),
        callbacks=[Failure(how, folder)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(RandomData(16, 4), batch_size=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
