"""Tensors that wait in a folder until somebody looks at them: a module that is sharded already has no use for all at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.partition import handle


class WaitingTensor(handle.Sharded, Tensor):  # type: ignore[misc]
    """The class of a tensor whose bytes have not been read. An operation on it reads them, and it is plain then."""

    _reader: "_Reader"


class _Reader:
    """Who reads one of them (the owner of the handle, which keeps him)."""

    def __init__(self, like: Tensor, read: Callable[[], Tensor]) -> None:
        self.dtype = like.dtype
        self.read = read
        self._stride = like.stride()

    def stride(self, tensor: Tensor) -> tuple[int, ...]:
        return self._stride

    def access(self, tensor: Tensor) -> None:
        values = self.read()
        handle.disown(tensor)
        del tensor._reader  # type: ignore[attr-defined]
        tensor.__class__ = Tensor
        tensor.data = values


def waiting(like: Tensor, read: Callable[[], Tensor]) -> Tensor:
    """A tensor of the shape and dtype of ``like`` that is on the CPU and has the bytes that ``read`` returns."""
    host = torch.device("cpu")
    tensor = Tensor._make_subclass(Tensor, torch.empty(0, dtype=like.dtype))
    tensor._reader = reader = _Reader(like, read)  # type: ignore[attr-defined]
    handle.adopt(tensor, reader)
    tensor.data = handle.placeholder(like.dtype, host).expand(like.shape)
    tensor.__class__ = WaitingTensor
    return tensor


@contextmanager
def read_as_loaded(module: nn.Module) -> Iterator[None]:
    """In ``module.load_state_dict`` inside, what waits is read for one submodule at a time, and not kept."""

    def enter(submodule: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # The dict is that submodule's own. Scripted children take no hooks.
        scripted = [name + "." for name, child in submodule.named_children() if isinstance(child, torch.jit.ScriptModule)]
        names = {prefix + name for name in (*submodule._parameters, *submodule._buffers)}
        starts = tuple(prefix + name for name in scripted)
        names |= {key for key in state if starts and key.startswith(starts)}
        for name in names:
            value = state.get(name)
            if isinstance(value, WaitingTensor):
                state[name] = value._reader.read()

    hooks = [
        submodule.register_load_state_dict_pre_hook(enter)
        for submodule in module.modules()
        if not isinstance(submodule, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
