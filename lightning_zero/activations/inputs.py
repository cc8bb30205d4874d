"""What the keepers of recomputed modules' inputs have in common."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.partition.layout import dense_stride

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Inputs(Protocol):
    """Who keeps what recomputed modules were called with."""

    def hooks(self, name: str) -> Hooks:
        """Saved-tensor hooks for one forward of the named module, around the saving of its inputs."""


class Keeper(Protocol):
    """Who keeps single tensors."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, saved: Any) -> Tensor: ...


def is_parameter(tensor: Tensor) -> bool:
    """Whether it stays where it is anyway, or others know how to find it again."""
    return tensor.is_leaf and tensor.requires_grad


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a range of memory once each (one that broadcasts or skips is small or rare)."""
    return tensor.layout is torch.strided and (tensor.is_contiguous() or tensor.stride() == dense_stride(tensor))


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, of shape ``(numel,)``."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
