"""What autograd saves for backward waits in host memory, and comes back a little ahead of its use (ZeRO-R, P_a+cpu)."""

from typing import Any

import torch
from torch import Tensor

from lightning_zero.activations.inputs import flat_view, is_dense
from lightning_zero.transfer import Link, Transfer

# Smaller tensors are not worth a copy of their own.
MIN_BYTES = 64 * 1024
# Tensors on their way back before backward asks for them.
_AHEAD = 4


class ActivationStore:
    """Packs saved tensors of one device to the host and unpacks them again (the engine's ``Keeper``).

    Uses ``link`` for both directions; backward asks in about the reverse order of packing, so each tensor that is asked
    for brings those packed just before it on their way.
    """

    def __init__(self, link: Link, device: torch.device) -> None:
        self._link = link
        self._device = device
        self._packed: list[_Away] = []

    def begin_forward(self) -> None:
        """What an earlier graph has left is not brought back ahead of its use."""
        self._packed.clear()

    def pack(self, tensor: Tensor) -> Any:
        if tensor.device != self._device or tensor.nbytes < MIN_BYTES or not is_dense(tensor):
            return tensor
        away = _Away(self._link, tensor.detach(), len(self._packed))
        self._packed.append(away)
        return away

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Away):
            return saved
        tensor = saved.bring_back(for_use=True)
        for other in self._packed[max(0, saved.position - _AHEAD) : saved.position]:
            other.bring_back()
        del self._packed[saved.position :]
        return tensor


class _Away:
    """One tensor in host memory."""

    def __init__(self, link: Link, tensor: Tensor, position: int) -> None:
        self.position = position
        self._link = link
        self._size, self._stride, self._device = tensor.size(), tensor.stride(), tensor.device
        self._host = link.take(tensor.numel(), tensor.dtype, "activations")
        self._last: Transfer = link.download(flat_view(tensor), self._host)
        self._back: Tensor | None = None

    def bring_back(self, for_use: bool = False) -> Tensor:
        if self._back is None:
            self._last.wait()  # in the device's queue: an upload comes after what is queued there
            self._back = torch.empty_strided(self._size, self._stride, dtype=self._host.dtype, device=self._device)
            self._last = self._link.upload(self._host, flat_view(self._back))
        tensor = self._back
        if for_use:
            self._last.wait()
            self._back = None  # a second backward brings it again
        return tensor

    def __del__(self) -> None:
        if hasattr(self, "_last"):
            self._link.give(self._host, after=self._last)
