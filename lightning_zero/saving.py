"""The hooks of the strategy that save and load checkpoints, each a line or two into the engine and `checkpoint`."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint.file import FileCheckpointIO
from lightning_zero.checkpoint.folder import FolderCheckpoint, is_folder
from lightning_zero.checkpoint.parts import part_to_load, saving_parts
from lightning_zero.checkpoint.reading import check_outline, reading
from lightning_zero.checkpoint.saving import FolderSaver, failing_together, saves_in_background
from lightning_zero.checkpoint.training import OWN_KEY, from_folder, load_optimizers
from lightning_zero.checkpoint.waiting import read_as_loaded
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.partition.optimizer_state import StateForm


class SavesShards(DDPStrategy):
    """Collects and cuts what a checkpoint holds; ``state_dict_type`` says whether that is a file or a folder."""

    state_dict_type: Literal["full", "sharded"]
    config: EngineConfig
    engine: ZeroEngine | None
    _optimizer_engine: ZeroEngine | None
    _comm: Comm | None
    _folders: FolderSaver
    _make_comm: Callable[[], Comm]

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        engine, sharded = self.engine, self.state_dict_type == "sharded"
        if engine is None or not engine.units or (engine.closed and not sharded):
            return super().lightning_module_state_dict()
        module = self.lightning_module
        try:
            state = module.state_dict(keep_vars=True)  # type: ignore[union-attr]
        except TypeError:  # an override with a narrower signature
            state = module.state_dict()  # type: ignore[union-attr]
        if not sharded:
            return engine.whole_state_dict(state, keep=self._state_form() is StateForm.WHOLE)
        engine.meet("collecting shards of the module's weights")
        return state  # cut when it is written: until then hooks may look

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        engine = self._optimizer_engine
        if engine is None or engine.binding(optimizer) is None:
            return super().optimizer_state(optimizer)
        with engine.state_as(self._state_form()):
            return optimizer.state_dict()

    def _state_form(self) -> StateForm:
        """One rank writes a file; hooks of the user, if there are any, look into the checkpoint on every rank."""
        if self.state_dict_type == "sharded":
            return StateForm.SHARDS
        hooked = (self.lightning_module, *self._trainer.callbacks)  # type: ignore[attr-defined]
        keeps = self._writes_file or any(is_overridden("on_save_checkpoint", one) for one in hooked)
        return StateForm.WHOLE if keeps else StateForm.NOTHING

    @property
    def _writes_file(self) -> bool:
        """Whether this is the rank that writes the one file, or a model-parallel part's."""
        return self.is_global_zero if self._comm is None else self._comm.is_first

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._comm is None or self._comm.model is None:
            self._save(checkpoint, filepath, storage_options)
            return
        self._comm.exchange("about to save a checkpoint", timeout=self.config.read_timeout)
        with saving_parts(filepath, self._comm) as part:
            self._save(checkpoint, part, storage_options)

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if self._comm is None or self.lightning_module is None:
            if self.state_dict_type == "sharded":
                raise RuntimeError("a checkpoint of shards was saved before ZeroStrategy.setup")
            super().save_checkpoint(checkpoint, filepath, storage_options)  # nothing is sharded yet
            return
        engine = self._optimizer_engine
        with failing_together(self._comm, self.config.read_timeout, "save a checkpoint"):
            if self.state_dict_type == "full":
                if engine is not None and "optimizer_states" in checkpoint:
                    # Half precision: the file's weights are 16-bit, training goes on from the masters beside them.
                    engine.drain()
                    masters = engine.whole.masters(keep=self._writes_file)
                    if masters:
                        checkpoint = {**checkpoint, OWN_KEY: {"masters": masters}}
                if self._writes_file:
                    self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
                return
            if storage_options is not None:
                raise TypeError("`save_checkpoint(..., storage_options=...)` does not go with state_dict_type='sharded'")
        engine = self.engine or engine
        if engine is not None:
            engine.meet("saving shards")  # hooks may have read parameters
        background = saves_in_background(self._checkpoint_io)
        self._folders.save(checkpoint, filepath, self.lightning_module, engine, self.optimizers, self._comm, background)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._folders.then(partial(super().remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._folders.wait()
        # A file that only one rank cannot read ends all of them, and at once.
        comm = self._make_comm()
        with failing_together(comm, self.config.read_timeout, "load a checkpoint"):
            group = comm.topology.model_group
            checkpoint_path = part_to_load(checkpoint_path, group.index(comm.rank), len(group))
            if not is_folder(checkpoint_path):
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
                with reading(checkpoint_path):
                    check_outline(checkpoint)
                return checkpoint
            folder = FolderCheckpoint(checkpoint_path, weights_only, group=None if comm.model is None else comm.storage_group)
            meta = folder.meta()
        # What is sharded already takes over one unit at a time.
        into = None if self._is_sharded else {} if self.lightning_module is None else self.lightning_module.state_dict()
        with reading(checkpoint_path):
            return from_folder(folder, meta, into)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # A rank may fail to read what waits in a folder while the others go on.
        together = failing_together(self._make_comm(), self.config.read_timeout, "load weights")
        with reading(self._loaded_path, failed="does not fit the module"), together if self._is_sharded else nullcontext():
            with read_as_loaded(self.lightning_module):  # type: ignore[arg-type]
                super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with reading(self._loaded_path, failed="does not fit the optimizers"):
            load_optimizers(checkpoint, self.optimizers, self._trainer.lightning_module, self.engine, self.root_device)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = FileCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = FileCheckpointIO()  # unless it has one
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def _is_sharded(self) -> bool:
        return self.engine is not None and bool(self.engine.units) and not self.engine.closed

    @property
    def _loaded_path(self) -> str:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return "" if trainer is None else str(trainer.ckpt_path)

    @property
    def _trainer(self) -> "pl.Trainer":
        if self.lightning_module is None:
            raise RuntimeError("the strategy is not connected to a LightningModule")
        return self.lightning_module.trainer
