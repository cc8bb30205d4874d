"""Copies between a device and host memory, under way while both go on computing.

[Note: the life of a transfer]
A transfer reads its source until it is done, and its target is undefined until then. Before the host touches either, it
calls ``synchronize``; before work queued on the device does, ``wait`` lets the device's queue wait without stopping the
host. Host memory comes from the link's pool (pinned where that makes copies asynchronous) and goes back to it.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

# Staging buffers on their way to the device before the host waits for the oldest rather than take another one: bounds
# pinned memory.
MAX_LEAVING = 4

Account = Callable[[str, int], None]
"""Called with a kind and the bytes that are held from now on under that kind, or given up (negative)."""
STAGING = "staging"
"""The kind of what is on its way between device and host."""
FILE_BUFFERS = "file_buffers"
"""The kind of host memory that files are read into and written from."""


def count_nowhere(kind: str, nbytes: int) -> None:
    """For memory that nobody keeps account of."""


class Transfer(Protocol):
    """One copy under way. See [Note: the life of a transfer]."""

    def wait(self) -> None:
        """What is queued on the device from now on runs after the copy."""

    def synchronize(self) -> None:
        """Return when the copy is done."""


class Link(Protocol):
    """The way between a device and host memory."""

    def take(self, numel: int, dtype: torch.dtype, kind: str | None = STAGING) -> Tensor:
        """A 1-D host tensor of undefined content, counted under ``kind``; None if its user counts it."""

    def give(self, tensor: Tensor, after: Transfer | None = None) -> None:
        """Take back a tensor that nobody uses any more, but for the transfer that it is to wait for."""

    def clear(self) -> None:
        """Let go of all memory that nobody uses."""

    def download(self, source: Tensor, target: Tensor) -> Transfer:
        """Start copying device memory to the host, after what is queued on the device so far."""

    def upload(self, source: Tensor, target: Tensor) -> Transfer:
        """Start copying host memory to the device, after what is queued on the device so far."""


class HostPool:
    """Host tensors that are used again: pinning memory is slow, and so are the page faults of new memory.

    Idle memory stays here for its next use, and stays counted under the kind that it was taken for.
    """

    def __init__(self, pin_memory: bool, account: Account = count_nowhere) -> None:
        self._pin_memory = pin_memory
        self._account = account
        self._idle: dict[tuple[str | None, int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._kinds: dict[int, str | None] = {}
        """Of what is lent, by address."""
        self._leaving: list[tuple[Tensor, Transfer]] = []

    def take(self, numel: int, dtype: torch.dtype, kind: str | None = STAGING) -> Tensor:
        idle = self._idle[kind, numel, dtype]
        while not idle and len(self._leaving) >= MAX_LEAVING:
            self._await_oldest()
        if idle:
            tensor = idle.pop()
        else:
            with torch.inference_mode(False):
                tensor = torch.empty(numel, dtype=dtype, pin_memory=self._pin_memory)
            self._count(kind, tensor.nbytes)
        self._kinds[tensor.data_ptr()] = kind
        return tensor

    def give(self, tensor: Tensor, after: Transfer | None = None) -> None:
        if after is None:
            kind = self._kinds.pop(tensor.data_ptr())
            self._idle[kind, tensor.numel(), tensor.dtype].append(tensor)
            return
        self._leaving.append((tensor, after))

    def clear(self) -> None:
        while self._leaving:
            self._await_oldest()
        for (kind, _, _), idle in self._idle.items():
            self._count(kind, -sum(tensor.nbytes for tensor in idle))
        self._idle.clear()

    def _await_oldest(self) -> None:
        tensor, transfer = self._leaving.pop(0)
        transfer.synchronize()
        self.give(tensor)

    def _count(self, kind: str | None, nbytes: int) -> None:
        if kind is not None:
            self._account(kind, nbytes)


class StreamLink(HostPool):
    """An accelerator's copy engines: one stream for each direction beside the stream that computes."""

    def __init__(
        self, device: torch.device, pin_memory: bool = True, account: Account = count_nowhere
    ) -> None:
        super().__init__(pin_memory, account)
        self._accelerator: Any = torch.get_device_module(device)
        self._down, self._up = self._accelerator.Stream(device), self._accelerator.Stream(device)

    def download(self, source: Tensor, target: Tensor) -> Transfer:
        return self._copy(self._down, source, target, source)

    def upload(self, source: Tensor, target: Tensor) -> Transfer:
        return self._copy(self._up, source, target, target)

    def _copy(self, stream: Any, source: Tensor, target: Tensor, on_device: Tensor) -> Transfer:
        stream.wait_stream(self._accelerator.current_stream(on_device.device))
        with self._accelerator.stream(stream):
            target.copy_(source, non_blocking=True)
            done = self._accelerator.Event()
            done.record(stream)
        # Its memory is not handed to anybody else before the copy is done, though its user lets go of it now.
        on_device.record_stream(stream)
        return _StreamTransfer(self._accelerator, done)


class _StreamTransfer:
    def __init__(self, accelerator: Any, done: Any) -> None:
        self._accelerator = accelerator
        self._done = done

    def wait(self) -> None:
        self._accelerator.current_stream().wait_event(self._done)

    def synchronize(self) -> None:
        self._done.synchronize()
