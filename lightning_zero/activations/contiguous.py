"""The inputs of recomputed modules, kept in one preallocated region (ZeRO-R, SC 20 section 6.3, M_D).

[Note: the region]
What is kept from forward to backward lives long between tensors that live for a moment, and leaves an allocator with
holes. Here it is copied into a region of its own, at the lowest place that is free, and the place is free again when
autograd lets go of it. How much is needed is learnt as modules are used: what finds no room has memory of its own, and when
nothing is kept any more the region is made as large as would have been needed.

A recompute gets views of the region, and its module may keep one. A place is used again only while nobody can see into the
region but who is known to; until then new tensors lie above all that were handed out, and a region that is seen when
nothing is kept in it is left to who sees it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.activations.inputs import Hooks, Keeper, flat_view, is_dense, is_parameter
from lightning_zero.formulas import short_bytes
from lightning_zero.transfer import Account, count_nowhere

KIND = "activations"
# Of CUDA's allocator: kernels find what they would find without the region.
_ALIGNMENT = 512


class ContiguousInputs:
    """Keeps the inputs of modules with ``keeper``, each whole (see ``PartitionedInputs`` for parts)."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def hooks(self, name: str) -> Hooks:
        def unpack(saved: Any) -> Tensor:
            try:
                return self._keeper.unpack(saved)
            except RuntimeError as error:
                raise RuntimeError(f"The inputs of {name!r} for its recompute: {error}") from None

        return lambda tensor: tensor if is_parameter(tensor) else self._keeper.pack(tensor), unpack


class Region:
    """Keeps tensors of ``device`` in memory that is used again (a ``Keeper``). See [Note: the region]."""

    def __init__(self, device: torch.device, account: Account = count_nowhere) -> None:
        self._device, self._account = device, account
        self._memory = self._allocate(0)
        self._slots: list[_Slot] = []
        """Ordered by place; those outside of the region have a place as if it were larger."""
        self._same: WeakValueDictionary[tuple, _Kept] = WeakValueDictionary()
        """What is kept already: one tensor is often given to many modules."""
        self._needed = self._top = 0
        """Bytes: the most at once, and the end of all that was handed out since nobody saw it."""

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def pack(self, tensor: Tensor) -> Any:
        if not self._takes(tensor):
            return tensor if tensor.is_inference() else _Kept(tensor)
        source = StorageWeakRef(tensor.untyped_storage())
        # The weak reference pins the address, which is then nobody else's, also if the storage is gone.
        key = source.cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor._version
        kept = self._same.get(key)
        if kept is None:
            kept = self._same[key] = self._copy(tensor, source)
        return kept

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Kept):
            return saved
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that was kept for a recompute has been changed in place since."
                " Change a copy, or leave the module that does so out of activation_checkpointing_policy."
            )
        return saved.tensor

    def close(self) -> None:
        """Let go of the region."""
        self._account(KIND, -self._memory.nbytes)
        self._memory = self._allocate(0)
        self._needed = 0

    def _takes(self, tensor: Tensor) -> bool:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device == self._device
        return plain and tensor.numel() > 0 and not tensor.is_inference() and is_dense(tensor) and not tensor.is_conj()

    def _copy(self, tensor: Tensor, source: StorageWeakRef) -> "_Kept":
        slot = self._place(tensor.nbytes)
        try:
            return _Kept(self._fill(slot, tensor), source, slot, self._free)
        except BaseException:  # out of memory, which somebody may catch
            slot.is_free = True
            raise

    def _fill(self, slot: "_Slot", tensor: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            if slot.stop <= self._memory.nbytes:
                storage, offset = self._memory.untyped_storage(), slot.start // tensor.element_size()
                # No view in autograd's sense: each has a version of its own.
                copy = torch.empty(0, dtype=tensor.dtype, device=self._device).set_(
                    storage, offset, tensor.size(), tensor.stride()
                )
            else:
                copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
                slot.is_outside = True
                self._account(KIND, slot.nbytes)
            flat_view(copy).copy_(flat_view(tensor))
        return copy

    def _free(self, slot: "_Slot") -> None:
        slot.is_free = True  # no more: this runs wherever something is collected
        if slot.is_outside:
            self._account(KIND, -slot.nbytes)

    def _place(self, nbytes: int) -> "_Slot":
        """The lowest place of that many bytes that may be written to."""
        self._slots = [slot for slot in self._slots if not slot.is_free]
        is_seen = self._is_seen()
        if not self._slots and (is_seen or self._needed > self._memory.nbytes):
            self._renew()
            is_seen = False
        numel = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        start, index = 0, 0
        if is_seen:
            start, index = self._top, len(self._slots)
        else:
            while index < len(self._slots) and self._slots[index].start - start < numel:
                start, index = self._slots[index].stop, index + 1
        slot = _Slot(start, start + numel, nbytes)
        self._slots.insert(index, slot)
        self._top = max(self._top, slot.stop) if is_seen else self._slots[-1].stop
        self._needed = max(self._needed, slot.stop)
        return slot

    def _is_seen(self) -> bool:
        """Whether anybody sees into the region beside those for whom something is kept."""
        storage = self._memory.untyped_storage()
        known = sum(not slot.is_outside for slot in self._slots)
        # Ours: the region itself, and the Python storage object just made.
        return torch._C._storage_Use_Count(storage._cdata) > 2 + known

    def _renew(self) -> None:
        before, needed = self._memory.nbytes, self._needed
        if needed > before > 0:
            needed += needed // 4  # shapes differ: the next ones may be larger again
            rank_zero_info(
                f"ZeroStrategy(contiguous_activations=True): recomputed modules keep more than before, so the region for"
                f" their inputs grows from {short_bytes(before)} to {short_bytes(needed)}."
            )
        self._account(KIND, max(needed, before) - before)
        self._memory = self._allocate(max(needed, before))
        self._top = 0

    def _allocate(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


@dataclass(eq=False)
class _Slot:
    """Bytes ``[start, stop)``, of which a tensor of ``nbytes`` uses the first."""

    start: int
    stop: int
    nbytes: int
    is_free: bool = False
    is_outside: bool = False
    """Its tensor has memory of its own."""


class _Kept:
    """Stands in autograd's graph for a tensor, which is freed with it."""

    def __init__(
        self, tensor: Tensor, source: StorageWeakRef | None = None, slot: _Slot | None = None,
        free: Callable[[_Slot], None] = lambda slot: None,
    ) -> None:  # fmt: skip
        self.tensor, self.version = tensor, tensor._version
        self._source, self._slot, self._free = source, slot, free

    def __del__(self) -> None:
        if self._slot is not None:
            self._free(self._slot)
