"""The one ordinary Lightning file: streamed to disk, read by memory map."""

import os
import uuid
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from fsspec.core import url_to_fs
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_zero.checkpoint.beside import Beside, describe, os_error, remove, standing
from lightning_zero.checkpoint.reading import reading


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written without a copy in memory and never half, and read as they are needed."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` beside ``path`` and rename it; raises OSError with path and bytes where it cannot."""
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` needs a `CheckpointIO` that knows them: the default"
                " one of ZeroStrategy does not."
            )
        beside = Beside(path, uuid.uuid4().hex)
        try:
            if beside.is_local:
                with beside.begin_file() as file:
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())
                beside.commit()
            else:
                # Most remote file systems cannot rename, but show a file only when it is complete.
                beside.fs.makedirs(os.path.dirname(beside.destination), exist_ok=True)
                with beside.fs.transaction, beside.fs.open(beside.destination, "wb") as file:
                    torch.save(checkpoint, file)
        except BaseException as error:
            cause, written = os_error(error), beside.written()
            beside.abandon()
            if cause is not None:
                raise describe(cause, path, written) from error
            raise

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike,
        map_location: Callable | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load; of a local file only those tensors take memory that are copied, and only then."""
        path = str(standing(path))
        fs, place = url_to_fs(path)
        if fs.isdir(place):
            raise ValueError(
                f"{path!r} is a folder, but not a whole checkpoint of torch.distributed.checkpoint: it has no .metadata."
            )
        with reading(path):
            if "file" in fs.protocol and zipfile.is_zipfile(place):
                return torch.load(place, map_location=map_location, mmap=True, weights_only=weights_only)
            return super().load_checkpoint(path, map_location, weights_only)

    @override
    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        remove(path, uuid.uuid4().hex)
