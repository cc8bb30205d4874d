"""Whole tensors in files that are mapped into memory: for a module that has no room there at the end of a run.

[Note: mapped tensors]
To everybody who uses it such a tensor is one in host memory: the system reads a page when it is touched, and writes a page
that was changed when it wants the memory. The bytes are written past the page cache, so making one takes no memory beyond
what it is made from. Its file loses its name at once: nothing is left when the program ends, however that happens, and the
room on the disk is free again when the last tensor over it is gone.
"""

import ctypes
import os

import torch
from torch import Tensor

from lightning_zero.offload.store import Store
from lightning_zero.ops import BLOCK_BYTES, OpenFile

_RESERVE = "reserve"


class MappedTensors:
    """Makes them below the folder of ``store`` (the engine's ``WholePlaces``)."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def reserve(self, nbytes: int) -> None:
        self._store.place(_RESERVE, nbytes, torch.uint8)

    def release(self) -> None:
        self._store.drop(_RESERVE)

    def copy(self, tensor: Tensor) -> Tensor:
        values = tensor.detach()
        flat = values.as_strided((values.numel(),), (1,), values.storage_offset()).to("cpu")
        if flat.nbytes < BLOCK_BYTES:
            memory = flat.clone()  # the least that a file takes
        else:
            memory = self._map(flat)
        return memory.as_strided(values.shape, values.stride())

    def _map(self, flat: Tensor) -> Tensor:
        store = self._store.open()  # optimizers are asked for their state after runs as well
        path = os.path.join(store.folder, "whole")
        nbytes = -(-flat.nbytes // BLOCK_BYTES) * BLOCK_BYTES
        file = OpenFile(path)
        try:
            file.allocate(0, nbytes)  # a page without room on the disk could not be written later
            store.queue.write(file, 0, flat).wait()
            storage = torch.UntypedStorage.from_file(path, True, nbytes)
        finally:
            os.unlink(path)
            file.close()
            if store is not self._store:
                store.close()
        # Over the same memory, but an ordinary storage: one made from a file cannot be sent to another process.
        memory = (ctypes.c_char * nbytes).from_address(storage.data_ptr())
        memory.storage = storage  # type: ignore[attr-defined]  # lives as long as the tensor
        return torch.frombuffer(memory, dtype=flat.dtype, count=flat.numel())
