"""A module from a checkpoint of any form, in one process."""

import os
import tempfile
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch

from lightning_zero.checkpoint.file import FileCheckpointIO
from lightning_zero.checkpoint.folder import FolderCheckpoint, is_folder
from lightning_zero.checkpoint.parts import parts_of
from lightning_zero.checkpoint.reading import check_outline, reading
from lightning_zero.checkpoint.training import from_folder

Module = TypeVar("Module", bound=pl.LightningModule)


def load_from_checkpoint(module_class: type[Module], path: str | os.PathLike, **kwargs: Any) -> Module:
    """``module_class.load_from_checkpoint(path, **kwargs)``, also where ``path`` is a folder of shards.

    Of a folder the weights and hyper-parameters are read, and handed to Lightning through a temporary file. Raises
    ValueError for a folder of model-parallel parts, each of which is a checkpoint of its own.
    """
    if parts_of(path) > 1:
        raise ValueError(
            f"{os.fspath(path)!r} holds the parts of {parts_of(path)} model-parallel ranks: name one of them, such as"
            f" {os.path.join(path, 'mp_rank_00.ckpt')!r}"
        )
    if not (isinstance(module_class, type) and issubclass(module_class, pl.LightningModule)):
        raise TypeError(f"load_from_checkpoint makes a LightningModule of a class, got {module_class!r}")
    if not is_folder(path):
        with reading(path):  # what is wrong with it is said with its name; it is mapped, not copied
            checkpoint = FileCheckpointIO().load_checkpoint(path, weights_only=kwargs.get("weights_only"))
            check_outline(checkpoint)
            if "state_dict" not in checkpoint:
                raise ValueError("it has no 'state_dict'")
        return _loaded(module_class, os.fspath(path), path, kwargs)
    folder = FolderCheckpoint(path, kwargs.get("weights_only"), alone=True)
    meta = folder.meta()
    with tempfile.TemporaryFile() as file:
        torch.save({**meta, "state_dict": from_folder(folder, meta, {})["state_dict"]}, file)
        file.seek(0)
        return _loaded(module_class, file, path, kwargs)


def _loaded(module_class: type[Module], source: Any, path: str | os.PathLike, kwargs: dict[str, Any]) -> Module:
    try:
        return module_class.load_from_checkpoint(source, **kwargs)
    except NotImplementedError as error:
        if "meta tensor" not in str(error):
            raise
        raise RuntimeError(
            f"{module_class.__name__} cannot be made of {os.fspath(path)!r} alone: it builds parameters on the meta device, which"
            " only a strategy fills. Let a Trainer with ZeroStrategy read the checkpoint (`ckpt_path`), or leave"
            " torch.device('meta') out where there is no Trainer."
        ) from error
