"""Ranks with different numbers of batches: they end training together, and serve each other in evaluation."""

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm import Comm, fingerprint
from lightning_zero.partition.engine import ZeroEngine


class UnevenBatches:
    """Keeps the ranks together where their numbers of batches differ or are unknown.

    A training epoch ends for all of them with the rank that has the fewest. In evaluation every rank sees all of its own
    batches: before a step it says so, and a rank that is done, or about to do something that all ranks do together, takes
    part in the others' gathers until none has a step to do before that.
    """

    def __init__(self, trainer: "pl.Trainer", comm: Comm, engine: ZeroEngine | None) -> None:
        self._trainer = trainer
        self._comm = comm
        self._engine = engine
        self._training = False
        self._kind: str | None = None
        """Of the evaluation in which the ranks differ."""
        self._was_last = False

    # -- training ----------------------------------------------------------------------------------------------------

    def begin_training_batch(self, batch_idx: int) -> None:
        """Make this the last batch on all ranks if it is the last on one."""
        trainer = self._trainer
        if batch_idx == 0:
            epoch, loop = f"starting training epoch {trainer.current_epoch}", trainer.fit_loop
            self._training = self._differ(epoch, [loop.max_batches], loop._combined_loader)
            if self._training and isinstance(trainer.val_check_batch, int):
                # It was made from this rank's own number of batches; all ranks must validate after the same one.
                _, least = self._comm.exchange(epoch, [trainer.val_check_batch])
                trainer.val_check_batch = least[0]
        if not self._training:
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        mine = progress.is_last_batch
        most, _ = self._comm.exchange("starting a training batch", [int(mine)])
        progress.is_last_batch = bool(most[0])
        if progress.is_last_batch and not mine:
            rank_zero_warn(
                f"The ranks have different numbers of training batches. The epoch ends for all of them after batch"
                f" {batch_idx}, the last one of the rank with the fewest: the rest is not used.",
                category=UserWarning,
            )

    def end_training(self) -> None:
        """Find out on all ranks that one has left early, for example because it had no batch at all."""
        self._comm.exchange("ending training")

    # -- evaluation --------------------------------------------------------------------------------------------------

    def begin_evaluation(self, kind: str) -> None:
        self._was_last, loop = False, self._evaluation_loop()
        differ = self._engine is not None and self._differ(
            f"starting to {kind}", loop.max_batches, loop._combined_loader
        )
        self._kind = kind if differ else None

    def before_step(self) -> None:
        if self._engine is not None and self._kind is not None:
            self._engine.announce_step()

    def after_step(self) -> None:
        if self._kind is not None and self._evaluation_loop().batch_progress.is_last_batch:
            self._after_last_batch()

    def meet(self) -> None:
        """Before something that all ranks do together, such as reducing a metric."""
        if self._engine is not None and self._kind is not None and not self._engine.parameters.computes:
            self._after_last_batch()  # of a rank that had no batch
            self._engine.serve_until_done(self._kind)

    def end_evaluation(self) -> None:
        self.meet()
        self._kind = None

    def _after_last_batch(self) -> None:
        """Once on each rank, whatever it does next: that may be something this package does not know of."""
        if self._engine is not None and self._kind is not None and not self._was_last:
            self._was_last = True
            self._engine.serve_until_done(self._kind)

    def _differ(self, place: str, counts: Sequence[int | float], loaders: Any) -> bool:
        """Whether the ranks' numbers of batches differ or are unknown."""
        if self._comm.world_size == 1:
            return False
        unknown = _any_unsized(loaders.flattened)
        most, least = self._comm.exchange(place, [fingerprint(tuple(counts)), int(unknown)])
        return most != least or unknown

    def _evaluation_loop(self) -> Any:
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING:
            return trainer.fit_loop.epoch_loop.val_loop
        loops = {RunningStage.TESTING: trainer.test_loop, RunningStage.PREDICTING: trainer.predict_loop}
        return loops.get(trainer.state.stage, trainer.validate_loop)  # type: ignore[arg-type]


def _any_unsized(loaders: Iterable[Any]) -> bool:
    """Whether a loader may end before the Trainer's limit is reached: an iterable data set's length is a promise."""
    return any(sized_len(loader) is None or has_iterable_dataset(loader) for loader in loaders)


class MeetsUnevenRanks(DDPStrategy):
    """The hooks of the strategy at which ranks may differ in their number of batches."""

    _uneven: UnevenBatches | None = None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batches.begin_training_batch(batch_idx)

    @override
    def on_train_end(self) -> None:
        self._batches.end_training()

    @override
    def on_validation_start(self) -> None:
        self._batches.begin_evaluation("validate")

    @override
    def on_test_start(self) -> None:
        self._batches.begin_evaluation("test")

    @override
    def on_predict_start(self) -> None:
        self._batches.begin_evaluation("predict")

    @override
    def on_validation_end(self) -> None:
        self._batches.end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._batches.end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._batches.end_evaluation()

    @override
    def reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._uneven is not None:
            self._uneven.meet()
        return super().reduce(*args, **kwargs)

    @override
    def all_gather(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._uneven is not None:
            self._uneven.meet()
        return super().all_gather(*args, **kwargs)

    @property
    def _batches(self) -> UnevenBatches:
        if self._uneven is None:
            raise RuntimeError("a loop was started before ZeroStrategy.setup")
        return self._uneven
