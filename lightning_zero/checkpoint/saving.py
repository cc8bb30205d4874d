"""How a strategy's checkpoints reach the disk: all ranks together, at once or in the background."""

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.file import FileCheckpointIO
from lightning_zero.checkpoint.folder import save_folder
from lightning_zero.checkpoint.training import to_folder
from lightning_zero.comm import Comm
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.partition.handle import Sharded
from lightning_zero.partition.rest import bytes_of
from lightning_zero.partition.shards import TensorShard
from lightning_zero.worker import Worker


@contextmanager
def failing_together(comm: Comm, timeout: float, doing: str) -> Iterator[None]:
    """What one rank does inside fails on all ranks. All ranks come here within ``timeout`` seconds, or those that did
    raise RuntimeError. ``doing`` goes with "could not"."""
    comm.exchange(f"about to {doing}", timeout=timeout)
    with comm.failing_together(doing):
        yield


class FolderSaver:
    """Saves folders of shards; in the background training waits only for the copy of the shards.

    What comes after a save in the background waits for it on the same thread.
    """

    def __init__(self) -> None:
        self._worker = Worker("lightning_zero-save")
        self._pending: list[Future] = []

    def __reduce__(self) -> tuple:
        return FolderSaver, ()  # the launcher pickles strategies before they save

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike,
        module: nn.Module,
        engine: ZeroEngine | None,
        optimizers: list[Optimizer],
        comm: Comm,
        in_background: bool = False,
    ) -> None:
        """Save Lightning's ``checkpoint`` (see :func:`to_folder`). All ranks call it; raises what a save in the
        background has failed with, or OSError."""
        answers = comm.all_gather_object((os.fspath(path), uuid.uuid4().hex, self._has_failed()))
        if any(failed for *_, failed in answers):
            self.wait()  # raises: a save fails on all ranks, but on one it may still be under way
        place, token, _ = answers[0]
        state, meta = to_folder(checkpoint, module, engine, optimizers)
        meta = apply_to_collection(meta, Sharded, Tensor.detach)  # gathered here: only rank 0 writes them
        group = comm.storage_group
        if in_background:
            state, meta = apply_to_collection((state, meta), (TensorShard, Tensor), _copy)
            self._pending.append(self._worker.submit(lambda: save_folder(state, meta, place, token, group)))
        else:
            self.wait()
            save_folder(state, meta, place, token, group)

    def then(self, task: Callable[[], None]) -> None:
        """Run ``task`` after the saves that are under way; at once if there are none."""
        if any(not future.done() for future in self._pending):
            self._pending.append(self._worker.submit(task))
        else:
            task()

    def wait(self) -> None:
        """Wait for the saves that are under way; raises what one has failed with."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _has_failed(self) -> bool:
        """Whether a save that is over has failed; those that went well are forgotten."""
        self._pending = [one for one in self._pending if not one.done() or one.exception() is not None]
        return any(one.done() for one in self._pending)

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._worker.close()


def saves_in_background(io: CheckpointIO | None) -> bool:
    """Whether the user's plugin asks for it. Raises ValueError for one that stores in another way: a folder does not go
    through it."""
    if isinstance(io, _WrappingCheckpointIO):
        return saves_in_background(io.checkpoint_io) or isinstance(io, AsyncCheckpointIO)
    if io is not None and type(io) not in (FileCheckpointIO, TorchCheckpointIO):
        raise ValueError(
            f"state_dict_type='sharded' writes with torch.distributed.checkpoint and not through a CheckpointIO: leave"
            f" {type(io).__qualname__} out, or use state_dict_type='full'."
        )
    return False


def _copy(value: TensorShard | Tensor) -> TensorShard | Tensor:
    if isinstance(value, TensorShard):
        return replace(value, data=bytes_of(value.data).to("cpu", copy=True))
    return value.detach().to("cpu", copy=True)
