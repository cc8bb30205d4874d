"""Bytes by kind, and the pool of flat buffers that units share."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.partition.layout import FlatLayout


class Ledger:
    """Model-state bytes held by the engine on this rank, by kind, now and at their peak."""

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self.peak_total = 0
        self.idle = 0
        """Of the buffers: bytes that wait for their next use."""
        self.watcher: Callable[[], None] | None = None
        """Called whenever bytes are held or given up and units change their state."""

    def add(self, kind: str, nbytes: int) -> None:
        self.now[kind] += nbytes
        if nbytes > 0:
            self.peak[kind] = max(self.peak[kind], self.now[kind])
            self.peak_total = max(self.peak_total, sum(self.now.values()))
        self.changed()

    def add_idle(self, nbytes: int) -> None:
        self.idle += nbytes
        self.changed()

    def changed(self) -> None:
        if self.watcher is not None:
            self.watcher()

    def set(self, kind: str, nbytes: int) -> None:
        self.add(kind, nbytes - self.now[kind])

    def look_at(self, parameters: list[nn.Parameter]) -> None:
        """Count parameters, and their gradients, that nobody keeps account of."""
        self.set("parameters", sum(p.nbytes for p in parameters))
        self.set("gradients", sum(p.grad.nbytes for p in parameters if p.grad is not None))

    def as_dict(self) -> dict[str, Any]:
        return {"now": dict(self.now), "peak": dict(self.peak), "peak_total": self.peak_total}


@dataclass
class FlatViews:
    """An unsharded flat buffer with the tensors that lie in it."""

    flat: Tensor
    views: list[Tensor]
    cdata: int
    """Address of the storage object: tells whether a tensor lies in this buffer."""

    def __post_init__(self) -> None:
        self.nbytes = self.flat.nbytes

    def is_shared(self) -> bool:
        """Whether anybody else still holds a view, so that the bytes must not be written again."""
        storage = self.flat.untyped_storage()
        # Ours: the flat buffer, its views, and the Python storage object just made.
        return torch._C._storage_Use_Count(storage._cdata) > 2 + len(self.views)


class BufferPool:
    """A few unsharded buffers, reused by units of the same layout.

    Reuse saves page faults and the making of views. A buffer that somebody still looks into is never reused, it is
    dropped by reference and lives as long as its last view. Idle buffers are kept as far as all buffers together have no
    more bytes than were once in use at the same time, and the idle ones no more than ``capacity`` of the largest seen: a
    user who reads the whole module between steps does not leave it here.
    """

    def __init__(self, device: torch.device, ledger: Ledger, capacity: int) -> None:
        self.ledger = ledger
        self._device = device
        self._capacity = capacity
        self._largest = self._in_use = self._most_in_use = 0
        self._idle: list[tuple[FlatLayout, FlatViews]] = []

    def take(self, layout: FlatLayout, dtype: torch.dtype) -> FlatViews:
        """A buffer of undefined content, but for its padding, which is zero."""
        buffer = self._take_idle(layout, dtype)
        if buffer is None:
            buffer = allocate(layout, dtype, self._device)
            self.ledger.add("buffers", buffer.nbytes)
        self._in_use += buffer.nbytes
        self._most_in_use = max(self._most_in_use, self._in_use)
        return buffer

    def _take_idle(self, layout: FlatLayout, dtype: torch.dtype) -> FlatViews | None:
        for index, (idle_layout, buffer) in enumerate(self._idle):
            if idle_layout is layout and buffer.flat.dtype == dtype:
                del self._idle[index]
                self.ledger.add_idle(-buffer.nbytes)
                return buffer
        return None

    def give(self, layout: FlatLayout, buffer: FlatViews) -> None:
        """Take back a buffer that its user is done with."""
        self._in_use -= buffer.nbytes
        if buffer.is_shared():
            self.ledger.add("buffers", -buffer.nbytes)
            return
        self._idle.append((layout, buffer))
        self.ledger.add_idle(buffer.nbytes)
        self._largest = max(self._largest, buffer.nbytes)
        most = min(self._capacity * self._largest, self._most_in_use - self._in_use)
        while self.ledger.idle > most:
            self._drop(0)

    def clear(self) -> None:
        while self._idle:
            self._drop(0)

    def _drop(self, index: int) -> None:
        _, buffer = self._idle.pop(index)
        self.ledger.add_idle(-buffer.nbytes)
        self.ledger.add("buffers", -buffer.nbytes)


def allocate(layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> FlatViews:
    """A new buffer outside inference mode: views of one made inside could not be trained later."""
    with torch.inference_mode(False), torch.no_grad():
        # Zeros, for the padding: nobody writes there, but kernels and comparisons run over it.
        flat = torch.zeros(layout.padded_numel, dtype=dtype, device=device)
        return FlatViews(flat, [slot.view_of(flat) for slot in layout.slots], flat.untyped_storage()._cdata)
