"""Checkpoints of model-parallel groups: a folder with an ordinary checkpoint of each model-parallel rank's part.

::

    last.ckpt/
      model_parallel.json     {"model_parallel_size": 2}
      mp_rank_00.ckpt         what data-parallel ranks at the first place of their groups save: a file, or a folder of shards
      mp_rank_01.ckpt

All parts are written beside the destination and take its place together.
"""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.core import url_to_fs
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from lightning_zero.checkpoint.beside import PARTS_FILE, Beside, standing
from lightning_zero.checkpoint.file import FileCheckpointIO
from lightning_zero.comm import Comm

_SIZE = "model_parallel_size"


def check_writes_parts(io: CheckpointIO | None) -> None:
    """Raise NotImplementedError for a plugin that would not write where it is told to, when it is told to."""
    if io is not None and type(io) not in (FileCheckpointIO, TorchCheckpointIO):
        raise NotImplementedError(
            f"Checkpoints with model_parallel are written by the ranks together and not through a {type(io).__qualname__}:"
            " leave it out."
        )


@contextmanager
def saving_parts(path: str | os.PathLike, comm: Comm) -> Iterator[str]:
    """Around the saving of this rank's part, to the path that is given; ``path`` then has all parts, or what it had.

    All ranks come here, and what fails on one fails on all.
    """
    answers = comm.all_gather_object((os.fspath(path), uuid.uuid4().hex))
    destination, token = answers[0] if comm.model is None else comm.model.all_gather_object(answers[0])[0]
    beside, is_first = Beside(destination, token), comm.rank == 0
    try:
        with _failing_everywhere(comm):
            if is_first:
                beside.begin_folder()
        with _failing_everywhere(comm):
            yield f"{beside.url}/{_part_name(comm.topology.model_group.index(comm.rank))}"
        with _failing_everywhere(comm):
            if is_first:
                with beside.fs.open(f"{beside.partial}/{PARTS_FILE}", "w") as file:
                    json.dump({_SIZE: comm.topology.model_parallel_size}, file)
                beside.commit()
    except BaseException:
        if is_first:
            beside.abandon()
        raise


def part_to_load(path: str | os.PathLike, place: int, size: int) -> str | os.PathLike:
    """Where the part of the ``place``-th of ``size`` model-parallel ranks is; with one, ``path``. Raises ValueError if it was
    saved with another number."""
    saved = parts_of(path)
    if saved == size == 1:
        return path
    if saved != size:
        have = f"has the parts of {saved} model-parallel ranks" if saved > 1 else "is of no model-parallel run"
        raise ValueError(
            f"The checkpoint {os.fspath(path)!r} {have}, and this run's groups have {size}: a part fits only the layers it"
            " was saved from. Use the same model_parallel; the number of data-parallel ranks may differ."
        )
    return f"{os.fspath(standing(path)).rstrip('/')}/{_part_name(place)}"


def parts_of(path: str | os.PathLike) -> int:
    """Of how many model-parallel ranks ``path`` has parts; 1 for every other checkpoint. Raises ValueError if that cannot
    be read."""
    fs, place = url_to_fs(os.fspath(standing(path)))
    marker = f"{place.rstrip('/')}/{PARTS_FILE}"
    if not fs.exists(marker):
        return 1
    with fs.open(marker, "r") as file:
        try:
            found: Any = json.load(file)[_SIZE]
        except (ValueError, KeyError, TypeError):
            found = None
    if type(found) is not int or found < 1:
        raise ValueError(f"The checkpoint's file {marker!r} does not say of how many ranks there are parts")
    return found


def _part_name(place: int) -> str:
    return f"mp_rank_{place:02d}.ckpt"


@contextmanager
def _failing_everywhere(comm: Comm) -> Iterator[None]:
    """What fails on one rank fails on all, those of other model-parallel places too; and nobody leaves before all have
    come."""
    failed: Exception | None = None
    try:
        with comm.failing_together("save a checkpoint"):
            yield
    except Exception as error:
        failed = error
    reasons = [None] if comm.model is None else comm.model.all_gather_object(None if failed is None else str(failed))
    if failed is not None:
        raise failed
    for place, reason in enumerate(reasons):
        if reason is not None:
            raise RuntimeError(f"Model-parallel rank {place} could not save its part of the checkpoint. {reason}")
