"""What ranks do with files succeeds on all of them, or ends the run on all of them.

[Note: half an update]
A file can fail in the middle of an update: units before that have new values then, the others old ones, and on the other
ranks all of them are new. To undo it would take a copy of everything that an update changes. So nobody does: at the end of
an update the ranks agree whether it has succeeded on all of them. If not, all raise; and if anything has changed on any of
them, the engine gives out no parameters and no state any more, neither to checkpoints nor to the user nor to another step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lightning_zero.comm import Comm


class Changing(Protocol):
    """What carries out updates."""

    @property
    def has_changed(self) -> bool:
        """Whether the update under way, or the last one, has changed anything."""


class Together:
    """Where a single rank may fail; ``with_files``: whether there are any. All ranks call alike."""

    def __init__(self, comm: Comm, with_files: bool) -> None:
        self._comm = comm
        self._with_files = with_files
        self._half = ""
        """What has left half an update behind."""

    @contextmanager
    def making_files(self) -> Iterator[None]:
        """Around what takes room in files, of which one rank may have too little."""
        if not self._with_files:
            yield
            return
        with self._comm.failing_together("make its files"):
            yield

    @contextmanager
    def updating(self, updater: Changing | None) -> Iterator[None]:
        """Around an update and what publishes it. See [Note: half an update]."""
        if not self._with_files or updater is None:
            yield
            return
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
        except BaseException as error:  # by a signal, on this rank: the others cannot be asked
            self._remember(f"{type(error).__name__} on rank {self._comm.rank}", updater.has_changed)
            raise
        flags = [int(failed is not None), int(failed is None or updater.has_changed)]
        # A rank that takes no step at all is somewhere else, which the exchange tells.
        most, _ = self._comm.exchange("ending an optimizer step", flags)
        is_failed, is_changed = map(self._comm.over_model, most[:2])
        if is_failed:
            reasons = self._comm.all_gather_object(None if failed is None else f"{type(failed).__name__}: {failed}")
            found = ((rank, reason) for rank, reason in zip(self._comm.topology.members, reasons) if reason is not None)
            rank, reason = next(found, (None, "it is in another model-parallel group"))
            where = "A rank" if rank is None else f"Rank {rank}"
            self._remember(f"{where} could not carry out its part: {reason}", bool(is_changed))
            raise failed or RuntimeError(f"{where} could not carry out an optimizer step. {reason}")

    def check(self) -> None:
        """Raise RuntimeError if parameters and state do not belong together any more."""
        if self._half:
            raise RuntimeError(
                f"An optimizer step has ended half-way, so parameters and optimizer state are of two different steps and are"
                f" neither given out nor saved: load a checkpoint. ({self._half})"
            )

    def _remember(self, why: str, has_changed: bool) -> None:
        if has_changed:
            self._half = why
