"""Hooks on modules, parameters and autograd that call whom they are told to; nothing else."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.partition.handle import outside_transforms
from lightning_zero.partition.unit import Unit


class ModuleListener(Protocol):
    """Who brings the parameters of a unit where they are used, and may give them up after."""

    def unshard(self, unit: Unit) -> None: ...

    def post_forward(self, unit: Unit, module: nn.Module) -> None: ...

    def post_backward(self, unit: Unit) -> None: ...


class GradientListener(Protocol):
    """Who collects gradients."""

    def gradient_coming(self) -> None: ...

    def gradient_arrived(self, gradients: UnitGradients, index: int) -> None: ...


class _ModuleHook:
    """A hook that survives ``deepcopy`` and pickling of its module by doing nothing on the copy."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._module: nn.Module | None = module
        self._call: Callable[..., None] | None = call

    @torch.compiler.disable  # what we do between modules is no part of a user's compiled graph
    def __call__(self, module: nn.Module, *args: Any) -> None:
        if module is self._module and self._call is not None:
            with outside_transforms():
                self._call(module, *args)

    def __deepcopy__(self, memo: dict) -> "_ModuleHook":
        return _ModuleHook.__new__(_ModuleHook)._cleared()

    def __reduce__(self) -> Any:
        return (_inert_hook, ())

    def _cleared(self) -> "_ModuleHook":
        self._module = self._call = None
        return self


def _inert_hook() -> _ModuleHook:
    return _ModuleHook.__new__(_ModuleHook)._cleared()


def hook_modules(unit: Unit, listener: ModuleListener) -> list[RemovableHandle]:
    """Bracket the unit's use by the forward of its modules."""

    def pre(module: nn.Module, args: Any, kwargs: Any) -> None:
        listener.unshard(unit)
        if not unit.buffer.is_whole and torch.is_grad_enabled() and not any(p.requires_grad for p in unit.tensors):
            _watch_inputs(unit, listener, args, kwargs)

    def post(module: nn.Module, args: Any, output: Any) -> None:
        listener.post_forward(unit, module)

    handles = []
    for module in unit.modules:
        # First before, last after the user's own hooks: those may read the parameters as well.
        handles.append(module.register_forward_pre_hook(_ModuleHook(module, pre), prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(_ModuleHook(module, post), always_call=True))
    return handles


def hook_readers(unit: Unit, readers: list[nn.Module], listener: ModuleListener) -> list[RemovableHandle]:
    """Unshard before modules that look at the parameters without being the ones that use them."""

    def pre(module: nn.Module, args: Any) -> None:
        listener.unshard(unit)

    return [module.register_forward_pre_hook(_ModuleHook(module, pre), prepend=True) for module in readers]


def hook_loading(
    module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[RemovableHandle]:
    """Bracket what ``load_state_dict`` does with each module."""
    for submodule in module.modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            continue  # it takes no such hooks, and its parameters are not sharded
        yield submodule.register_load_state_dict_pre_hook(_ModuleHook(submodule, enter))
        yield submodule.register_load_state_dict_post_hook(_ModuleHook(submodule, leave))


def _watch_inputs(unit: Unit, listener: ModuleListener, args: Any, kwargs: Any) -> None:
    """Frozen parameters get no gradients to tell that their backward is done; the gradients of the inputs do.

    A forward inside backward is a recompute. If the original forward ran with gradients on (non-reentrant recompute) its
    inputs are being watched already and those of the recompute belong to a graph that is never run.
    """
    if unit.pending_backward and in_backward():
        return

    def done(grad: Tensor) -> None:
        unit.pending_backward -= 1
        if not unit.pending_backward:
            listener.post_backward(unit)

    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            unit.pending_backward += 1
            leaf.register_hook(done)
            return


def hook_gradients(gradients: UnitGradients, listener: GradientListener) -> list[RemovableHandle]:
    """Tell the listener when a parameter's gradient is about to be accumulated, and when it has been.

    Before, because the user may call ``backward`` past the strategy (manual optimization, a penalty in a hook), and
    autograd must not add to what stands in ``p.grad``.
    """
    handles: list[RemovableHandle] = []
    for index, parameter in enumerate(gradients.unit.tensors):
        if not parameter.requires_grad or gradients.hooked >> index & 1:
            continue
        gradients.hooked |= 1 << index
        arrival = parameter.register_post_accumulate_grad_hook(_GradientHook(gradients, index, listener))
        handles += [arrival, parameter.register_hook(_ComingHook(parameter, arrival.id, listener))]
    return handles


class _ComingHook:
    __slots__ = ("_hooks", "_last", "_listener")

    def __init__(self, parameter: nn.Parameter, last: int, listener: GradientListener) -> None:
        self._hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
        self._last, self._listener = last, listener

    def __call__(self, grad: Tensor) -> None:
        self._listener.gradient_coming()
        if len(self._hooks) > 1 and next(reversed(self._hooks)) != self._last:
            # Hooks of the user see `p.grad`, whenever they were registered: ours, which moves it away, comes last.
            self._hooks[self._last] = self._hooks.pop(self._last)


class _GradientHook:
    __slots__ = ("_gradients", "_index", "_listener")

    def __init__(self, gradients: UnitGradients, index: int, listener: GradientListener) -> None:
        self._gradients, self._index, self._listener = gradients, index, listener

    def __call__(self, parameter: Tensor) -> None:
        self._listener.gradient_arrived(self._gradients, self._index)


class _Promise:
    """Stands in autograd's graph for a tensor that lies in a unit's flat buffer."""

    __slots__ = ("offset", "size", "stride", "unit")

    def __init__(self, unit: Unit, tensor: Tensor) -> None:
        self.unit = unit
        self.offset, self.size, self.stride = tensor.storage_offset(), tensor.size(), tensor.stride()


class Keeper(Protocol):
    """Who keeps what autograd saves of other tensors."""

    def begin_forward(self) -> None: ...

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, saved: Any) -> Tensor: ...


def resident(module: nn.Module, units: Sequence[Unit]) -> Iterator[Tensor]:
    """What stays on the device all the time, though autograd saves it."""
    yield from module.buffers()
    if not units:
        yield from module.parameters()
    for unit in units:
        if unit.buffer.is_whole and unit.buffer.buffer is not None:
            yield unit.buffer.buffer.flat


class SavedTensors:
    """[Note: never hold bytes, hold a promise]

    What autograd saves of a unit's flat buffer (a weight, its transpose, a slice) is replaced by (unit, offset, size,
    stride), so that saving keeps no bytes alive; when backward asks for it the unit is unsharded and the view is made
    again. Active around forward and backward: a recompute saves too. A ``keeper`` is handed everything else, but for what
    stays where it is all the time (whole parameters, buffers).
    """

    def __init__(self, listener: ModuleListener, keeper: Keeper | None) -> None:
        self._listener = listener
        self._by_storage: dict[int, Unit] = {}
        self._keeper = keeper
        self._resident: set[int] = set()

    def begin_forward(self, resident: Iterable[Tensor]) -> None:
        """A step begins; the ``resident`` tensors are not for the keeper."""
        if self._keeper is not None:
            self._keeper.begin_forward()
            self._resident = {tensor.untyped_storage()._cdata for tensor in resident}

    def watch(self, unit: Unit) -> None:
        """Recognise the buffer that ``unit`` has been unsharded into."""
        if unit.buffer.buffer is not None:
            self._by_storage[unit.buffer.buffer.cdata] = unit

    @contextmanager
    def context(self) -> Iterator[None]:
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise RuntimeError(
                "torch.func's reverse-mode transforms (grad, vjp, jacrev, hessian) cannot run inside a step at stage 3: they"
                " refuse the hooks by which sharded parameters are found again in backward. Use torch.autograd.grad with"
                " create_graph=True, or stage 2."
            ) from error

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return tensor  # not in anybody's flat buffer
        storage = tensor.untyped_storage()._cdata
        unit = self._by_storage.get(storage)
        if unit is not None:
            buffer = unit.buffer.buffer
            # The address may be another storage's by now: it is this buffer's only while the buffer is alive.
            if buffer is not None and buffer.cdata == storage and buffer.flat.dtype == tensor.dtype:
                return _Promise(unit, tensor)
        if self._keeper is None or storage in self._resident:
            # What goes through hooks, autograd does not check for having been changed in place.
            return tensor, tensor._version
        return self._keeper.pack(tensor)

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is tuple:
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation:"
                    f" [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}"
                    " instead. Change a copy of it, or run with torch.autograd.set_detect_anomaly(True) to find the operation."
                )
            return tensor
        if not isinstance(saved, _Promise):
            return saved if self._keeper is None else self._keeper.unpack(saved)
        self._listener.unshard(saved.unit)
        buffer = saved.unit.buffer.buffer
        if buffer is None:
            raise AssertionError(f"{saved.unit} has no bytes after unsharding")
        return buffer.flat.as_strided(saved.size, saved.stride, saved.offset)


def in_backward() -> bool:
    """Whether autograd is at work on this thread: a forward is then a recompute."""
    return torch._C._current_graph_task_id() != -1
