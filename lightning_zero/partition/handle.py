"""Handles: tensors that are sharded but still tell the truth.

[Note: sharded handles]
A sharded tensor stays the same Python object. While its bytes are away it holds one NaN element expanded to its
logical shape, and its class is switched to one whose ``__torch_function__`` stands between the user and the NaN (the
way torch's own ``UninitializedParameter`` becomes a ``Parameter``). Metadata answers at once; any other operation first
asks the owner for the bytes, after which the object is plain again and the operation runs as if nothing had been.
An unsharded tensor has its own class and its own data, so the hot path pays nothing.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


class Owner(Protocol):
    """Whoever can bring a handle's bytes back."""

    @property
    def dtype(self) -> torch.dtype:
        """What the tensor's dtype is for its user."""

    def stride(self, tensor: Tensor) -> tuple[int, ...]:
        """The strides that ``tensor`` has when its bytes are here."""

    def access(self, tensor: Tensor) -> None:
        """Make ``tensor`` plain, or raise."""


# Keyed by id and not by an attribute of the tensor: attributes travel with pickle, the owner must not. Owners keep
# their tensors alive, so an id is not reused while it stands here.
_owners: "dict[int, weakref.ref[Owner]]" = {}

_METADATA_NAMES = (
    "__hash__ __len__ dim ndimension numel nelement size element_size get_device is_floating_point is_complex "
    "is_signed is_same_size requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad is_inference"
)
_METADATA_PROPERTIES = (
    "shape ndim dtype device layout requires_grad grad grad_fn is_leaf itemsize nbytes is_cuda is_cpu is_meta is_mps "
    "is_xpu is_xla is_sparse is_sparse_csr is_quantized is_mkldnn is_nested is_vulkan is_maia is_ipu is_mtia is_ort "
    "retains_grad _version output_nr names _backward_hooks _post_accumulate_grad_hooks _is_view _is_param _base "
    "grad_dtype"
)


def _metadata_functions() -> frozenset[Callable]:
    functions: list[Any] = [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.is_same_size]
    functions += [getattr(Tensor, name) for name in _METADATA_NAMES.split() if hasattr(Tensor, name)]
    for name in _METADATA_PROPERTIES.split():
        descriptor = getattr(Tensor, name, None)
        functions += [getattr(descriptor, a) for a in ("__get__", "__set__", "__delete__") if hasattr(descriptor, a)]
        if callable(descriptor):
            functions.append(descriptor)
    return frozenset(f for f in functions if f is not None)


_METADATA = _metadata_functions()


def _is_contiguous(tensor: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    like = torch.empty_strided(tensor.shape, _owner(tensor).stride(tensor), device="meta")
    return like.is_contiguous(memory_format=memory_format)


def _stride(tensor: Tensor, dim: int | None = None) -> Any:
    stride = _owner(tensor).stride(tensor)
    return stride if dim is None else stride[dim]


# The placeholder's own strides are zero. Answer for the logical tensor instead.
_LOGICAL: dict[Any, Callable] = {Tensor.is_contiguous: _is_contiguous, Tensor.stride: _stride}


def _dtype(tensor: Tensor) -> torch.dtype:
    return _owner(tensor).dtype


def _set_grad(tensor: Tensor, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        fits = grad is None or grad.dtype == tensor.dtype
    if not fits:
        materialize(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        tensor.grad = grad


# Nor is its dtype always the one that the user sees: see Unit's two faces.
_TENSOR: Any = Tensor
_LOGICAL[_TENSOR.dtype.__get__] = _dtype
_LOGICAL[_TENSOR.element_size] = _LOGICAL[_TENSOR.itemsize.__get__] = lambda tensor: _dtype(tensor).itemsize
_LOGICAL[_TENSOR.nbytes.__get__] = lambda tensor: tensor.numel() * _dtype(tensor).itemsize
_LOGICAL[_TENSOR.grad.__set__] = _set_grad


def _handles(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Sharded):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _handles(value)
        elif isinstance(value, dict):
            yield from _handles(value.values())


def _torch_function(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    kwargs = kwargs or {}
    if func in _LOGICAL:
        return _LOGICAL[func](*args, **kwargs)
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for handle in list(_handles((args, kwargs))):
        materialize(handle)
    return func(*args, **kwargs)


class Sharded:
    """What a tensor's class gains while its bytes are away. See [Note: sharded handles]."""

    __slots__ = ()
    __torch_function__: Any = classmethod(_torch_function)

    # nn.Parameter implements these in Python without consulting __torch_function__.
    def __deepcopy__(self: Any, memo: dict) -> Any:
        materialize(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        materialize(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self: Any) -> str:
        name = type(self).__name__
        return f"{name}(shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"


@cache
def sharded_class(cls: type[Tensor]) -> type[Tensor]:
    """The class of a tensor of class ``cls`` while its bytes are away: a subclass, so that it still is one."""
    metaclass: Any = type(cls)
    return metaclass(f"Sharded{cls.__name__}", (Sharded, cls), {"__module__": __name__})


def materialize(handle: Tensor) -> None:
    """Bring the bytes of ``handle`` back; it is a plain tensor afterwards."""
    owner = _owner(handle)
    with outside_transforms():
        owner.access(handle)
    if isinstance(handle, Sharded):
        raise AssertionError(f"{owner} did not unshard a tensor of shape {tuple(handle.shape)}")


def outside_transforms() -> AbstractContextManager[None]:
    """Suspends the ``torch.func`` transforms, dispatch modes (selective recompute, FLOP counters) and ``torch.jit.trace``
    under way: what is gathered inside one must not become part of it."""
    quiet = torch._C._functorch.peek_interpreter_stack() is None and not torch._C._is_tracing()
    if quiet and not torch._C._len_torch_dispatch_stack():
        return _NOTHING  # nearly always; every hook on a module comes here
    return _suspended()


_NOTHING = nullcontext()


@contextmanager
def _suspended() -> Iterator[None]:
    with ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._is_tracing():
            set_state = torch._C._set_tracing_state  # type: ignore[attr-defined]
            stack.callback(set_state, torch._C._get_tracing_state())
            set_state(None)
        yield


def _owner(handle: Tensor) -> Owner:
    owner = owner_of(handle)
    if owner is None:
        raise RuntimeError(
            f"A sharded tensor of shape {tuple(handle.shape)} was read after the engine that owns its bytes was closed."
        )
    return owner


def adopt(tensor: Tensor, owner: Owner) -> None:
    """Register ``owner`` as the one to ask for the bytes of ``tensor``."""
    _owners[id(tensor)] = weakref.ref(owner)


def disown(tensor: Tensor) -> None:
    """Forget ``tensor``; it must be plain."""
    _owners.pop(id(tensor), None)


def owner_of(tensor: Tensor) -> Owner | None:
    """The owner registered for ``tensor``, if any."""
    reference = _owners.get(id(tensor))
    return reference() if reference is not None else None


_placeholders: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-dim tensor to expand: NaN where the dtype has one, so that a read that slips through is seen."""
    key = (dtype, device)
    if key not in _placeholders:
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        with torch.inference_mode(False):
            _placeholders[key] = torch.full((), value, dtype=dtype, device=device)
    return _placeholders[key]


def rebase(name: str, parameter: nn.Parameter, data: Tensor) -> None:
    """``parameter.data = data``, also where the parameter is on the meta device, which torch keeps apart from others."""
    if not parameter.is_meta:
        parameter.data = data
        return
    with torch.inference_mode(False):
        other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    other.__class__ = type(parameter)
    other.__dict__.update(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, other)  # the object stays the one that modules and others know
    except RuntimeError as error:
        raise RuntimeError(
            f"Parameter {name!r} is on the meta device and cannot be given values: something else holds on to it. ({error})"
        ) from error


def check_shardable(name: str, parameter: nn.Parameter) -> None:
    """Refuse parameters whose bytes this package cannot move, by name."""
    if nn.parameter.is_lazy(parameter):
        raise ValueError(
            f"Parameter {name!r} is not initialised yet (lazy module). Run one batch through the module in"
            " `configure_model` or in `__init__`, so that its shape is known before it is sharded."
        )
    if type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__ or parameter.layout is not torch.strided:
        raise ValueError(
            f"Parameter {name!r} is a {type(parameter).__name__} with layout {parameter.layout}: only plain strided"
            " parameters can be sharded. Convert it to a plain `torch.nn.Parameter` or freeze it into a buffer."
        )


def check_distinct(module: nn.Module) -> None:
    """Refuse a trainable parameter that shares memory with another tensor object: sharding would part the two."""
    seen: dict[tuple[torch.device, int], tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        # On the meta device there are no addresses.
        address = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()
        first_name, first = seen.setdefault((tensor.device, address), (name, tensor))
        if first is not tensor and (first.requires_grad or tensor.requires_grad):
            raise ValueError(
                f"{first_name!r} and {name!r} share memory but are two tensor objects, so sharding would part them. Tie"
                " weights by assigning the same Parameter object to both names, or give each its own memory (`clone()`)."
            )
