"""Modules built on the meta device, whose tensors remember how they were made.

[Note: deferred construction]
On the meta device tensors have no memory, so a module of any size can be built there: but without values. Inside
:meth:`Deferred.recording` every operation that makes or changes a meta tensor is put down, with what it was given:
``torch.empty``, ``uniform_`` of a layer's initialiser, the user's own ``normal_`` over it, ``copy_`` from a file. Later
:meth:`Deferred.value` runs, for one tensor at a time and in host memory, the operations that its values depend on.

Random operations are run at once as well, on memory that is given up again, so that they draw from torch's generator what
they would have drawn without the meta device; their state is put down. Therefore values, and what is drawn afterwards, are
those of the same code without ``torch.device("meta")``, bit for bit, whichever tensors are asked for and in which order.

Storages are what is followed, not tensors: views, in-place operations, ``.data`` and parameters over them need no thought.
"""

import itertools
import sys
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.comm import Comm
from lightning_zero.partition.handle import rebase

_HOST = torch.device("cpu")
_ATEN = torch.ops.aten
# They leave nothing of what was in the tensor before.
_FILLS = {
    _ATEN.bernoulli_.float, _ATEN.cauchy_.default, _ATEN.copy_.default, _ATEN.exponential_.default, _ATEN.fill_.Scalar,
    _ATEN.fill_.Tensor, _ATEN.geometric_.default, _ATEN.log_normal_.default, _ATEN.normal_.default,
    _ATEN.random_.default, getattr(_ATEN.random_, "from"), _ATEN.random_.to, _ATEN.uniform_.default, _ATEN.zero_.default,
}  # fmt: skip
# They make a tensor without values.
_EMPTY = {
    _ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default, _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}  # fmt: skip
_FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray}
# What is made from numbers is small, and by such a tensor some libraries look for the device.
_MAKERS = _device_constructors() - _FROM_NUMBERS
_TO_PYTHON = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__}
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_INITIALISERS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True)
class _View:
    """A meta tensor, as a view of its storage."""

    key: int
    nbytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_View":
        storage = tensor.untyped_storage()
        return cls(
            storage._cdata, storage.nbytes(), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    @property
    def is_all(self) -> bool:
        """Whether it is all of its storage."""
        return self.size.numel() * self.dtype.itemsize == self.nbytes


@dataclass(frozen=True)
class _Real:
    """A tensor with memory, which the operation was given."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Real":
        return cls(tensor, 0 if tensor.is_inference() else tensor._version)

    def value(self) -> Tensor:
        if not self.tensor.is_inference() and self.tensor._version != self.version:
            raise RuntimeError(
                f"A tensor of shape {tuple(self.tensor.shape)}, from which parameters on the meta device take values, has"
                " been changed since. Give them a copy (`clone()`)."
            )
        return self.tensor.detach()


class _Storages(dict[int, torch.UntypedStorage]):
    """Host memory for storages on the meta device."""

    def view(self, view: _View) -> Tensor:
        if view.key not in self:
            self[view.key] = torch.UntypedStorage(view.nbytes)
        return torch.empty(0, dtype=view.dtype, device=_HOST).set_(self[view.key], view.offset, view.size, view.stride)

    def take(self, view: _View, value: Tensor) -> None:
        """``value`` is what the tensor ``view`` holds when its storage has just been made."""
        alike = value.stride() == view.stride and not value.storage_offset() and not view.offset
        if alike and value.untyped_storage().nbytes() == view.nbytes:
            self[view.key] = value.untyped_storage()
        else:
            self.view(view).copy_(value)


@dataclass
class _Operation:
    """One operation, to be run again on other memory."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    results: list[_View | None]
    """Those of its results whose storages it has made."""
    overwrites: int | None
    """The storage that it fills, whatever was there before."""
    default_dtype: torch.dtype
    generator: tuple[torch.Generator, Tensor] | None
    """The random generator, and its state before."""
    reads: set[int] = field(default_factory=set)

    def run(self, storages: _Storages, draws: bool = False) -> None:
        """Unless it ``draws``, the random generator stays as it is."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return storages.view(leaf)
            if isinstance(leaf, _Real):
                return leaf.value()
            return _HOST if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        if self.generator is not None:
            generator, state = self.generator
            now = generator.get_state()
            generator.set_state(state)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            results = tree_leaves(self.function(*tree_map(real, self.args), **tree_map(real, self.kwargs)))
        finally:
            torch.set_default_dtype(before)
            if self.generator is not None and not draws:
                generator.set_state(now)
        for view, result in zip(self.results, results, strict=True):
            if view is not None:
                storages.take(view, result)


class Deferred:
    """Follows tensors on the meta device, and gives them values. See [Note: deferred construction]."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._log: dict[int, list[int]] = defaultdict(list)
        """By storage: the operations that have written to it, in order."""
        self._alive: dict[int, torch.UntypedStorage] = {}
        """Keeps storages, which are without memory, so that no other comes to their address."""
        self._above: _Above | None = None
        self._lost = False

    def __reduce__(self) -> tuple:
        # To processes that are spawned: they make other tensors.
        return (_lost if self._operations or self._lost else Deferred), ()

    @contextmanager
    def recording(self, redirect: bool = False) -> Iterator[None]:
        """Follow what happens to meta tensors inside. With ``redirect``, what would be made in host memory is made on the
        meta device; unlike with ``torch.device("meta")`` the code that makes it does not notice, and goes the same way."""
        if self._above is not None:
            before, self._above.redirects = self._above.redirects, redirect or self._above.redirects
            try:
                yield
            finally:
                self._above.redirects = before
            return
        self._above = _Above(self, redirect)
        try:
            with self._above, _Recorder(self):
                yield
        finally:
            self._above = None

    def knows(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has been given values."""
        return not tensor.numel() or tensor.untyped_storage()._cdata in self._log

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a tensor on the meta device, in host memory; those that nobody has set are undefined.

        Raises RuntimeError if they come from a tensor that has been changed since.
        """
        view, storages = _View.of(tensor), _Storages()
        with outside_modes(), torch.inference_mode(False), torch.no_grad():
            for index in self._needed({view.key}, len(self._operations)):
                self._operations[index].run(storages)
            return storages.view(view)

    def values(self, tree: Any) -> Any:
        """``tree`` with values for the tensors on the meta device that have any."""
        return tree_map(lambda leaf: self.value(leaf) if _is_followed(leaf) and self.knows(leaf) else leaf, tree)

    def clear(self) -> None:
        """Forget everything: what was on the meta device has values."""
        self.__init__()  # type: ignore[misc]

    def _needed(self, keys: set[int], before: int) -> list[int]:
        """The operations, in order, that the storages' values ``before`` that operation depend on."""
        needed: set[int] = set()
        looking = [(key, before) for key in keys]
        while looking:
            key, before = looking.pop()
            written = self._log.get(key, [])
            written = written[: bisect_left(written, before)]
            # What was there before the last one that fills the storage is of no use.
            start = max((n for n, i in enumerate(written) if self._operations[i].overwrites == key), default=0)
            for index in written[start:]:
                if index not in needed:
                    needed.add(index)
                    looking += [(read, index) for read in self._operations[index].reads]
        return sorted(needed)

    def _add(self, function: Any, args: tuple, kwargs: dict[str, Any], results: Any, generator: Any) -> None:
        """Put down an operation that has just run on meta tensors."""
        given = {leaf.untyped_storage()._cdata for leaf in _meta_tensors((args, kwargs))}
        made = [
            _View.of(leaf) if _is_followed(leaf) and leaf.untyped_storage()._cdata not in given else None
            for leaf in tree_leaves(results)
        ]
        changed = [_View.of(leaf) for leaf in _changed(function, args, kwargs)]
        written = {view.key for view in (*made, *changed) if view is not None}
        if not written or function in _EMPTY:
            return
        self._alive.update(
            (leaf.untyped_storage()._cdata, leaf.untyped_storage()) for leaf in _meta_tensors((args, kwargs, results))
        )
        fills = function in _FILLS and changed[0].is_all
        operation = _Operation(
            function, tree_map(_put_down, args), tree_map(_put_down, kwargs), made, changed[0].key if fills else None,
            torch.get_default_dtype(), generator,
        )  # fmt: skip
        rest = (args[1:], kwargs) if fills else (args, kwargs)
        operation.reads = {leaf.untyped_storage()._cdata for leaf in _meta_tensors(rest)}
        for key in written:
            self._log[key].append(len(self._operations))
        self._operations.append(operation)
        if generator is not None:
            self._draw(operation)

    def _draw(self, operation: _Operation) -> None:
        """Let the random generator go on as it would have done."""
        storages = _Storages()
        for index in self._needed(operation.reads, len(self._operations) - 1):
            self._operations[index].run(storages)
        operation.run(storages, draws=True)

    # -- modules -----------------------------------------------------------------------------------------------------

    def prepare(self, module: nn.Module, comm: Comm) -> None:
        """See to it that every parameter of ``module`` on the meta device can be given values, and give buffers theirs.
        All ranks call it.

        What was built while nobody followed is initialised by the modules' own ``reset_parameters``, inner modules
        first. Only rank 0 must know all values (others take them from it). Raises ValueError on all ranks, by name, for
        what it has no initialiser for.
        """
        if self._lost and is_on_meta(module):
            raise ValueError(
                "The module was built on the meta device before its processes were spawned, where what its code did is not"
                " known. Build it in `configure_model`, or start the processes with start_method='popen'."
            )
        for submodule in _inner_first(module, set()):
            reset = next((getattr(submodule, name) for name in _INITIALISERS if hasattr(submodule, name)), None)
            if callable(reset) and any(not self.knows(t) for _, t in _own_meta_tensors(submodule)):
                with self.recording(), torch.no_grad():
                    reset()
        with comm.failing_together("give values to what is on the meta device"):
            if comm.is_first:
                self._check(module)
            buffers: dict[int, Tensor] = {}  # shared ones stay shared
            for submodule in module.modules():
                for name, buffer in submodule._buffers.items():
                    if buffer is not None and buffer.is_meta:
                        if id(buffer) not in buffers:
                            buffers[id(buffer)] = self.value(buffer)
                        submodule._buffers[name] = buffers[id(buffer)]
                self._fill_attributes(submodule)

    def source(self, parameter: nn.Parameter) -> Tensor:
        """The first values of a parameter of any device."""
        return self.value(parameter) if parameter.is_meta else parameter.data

    def fill(self, module: nn.Module, comm: Comm) -> None:
        """Give every parameter on the meta device its values, in host memory. All ranks call it, after :meth:`prepare`."""
        _drop_references(module)
        with comm.failing_together("give values to what is on the meta device"):
            for name, parameter in module.named_parameters():
                if parameter.is_meta:
                    rebase(name, parameter, self.value(parameter))

    def finish(self, module: nn.Module) -> None:
        """All parameters have values."""
        for submodule in module.modules():
            if isinstance(submodule, nn.RNNBase) and not submodule._flat_weight_refs:
                submodule._flat_weight_refs = [w if w is None else weakref.ref(w) for w in submodule._flat_weights]
        self.clear()

    def _check(self, module: nn.Module) -> None:
        for path, submodule in module.named_modules():
            for name, tensor in _own_meta_tensors(submodule):
                if not self.knows(tensor):
                    kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Buffer"
                    raise ValueError(
                        f"{kind} {f'{path}.{name}' if path else name!r} is on the meta device and nothing gives it values:"
                        f" {type(submodule).__qualname__} has no reset_parameters that does. Build the module in"
                        " `configure_model`, or under `trainer.init_module(empty_init=True)`, where its own code is"
                        " followed, or give the class such a method."
                    )

        for path, model in module.named_modules():
            if any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__):
                for name, submodule in model.named_modules(prefix=path):
                    self._check_initialised(name, submodule)

    def _check_initialised(self, path: str, module: nn.Module) -> None:
        """Models of transformers put down which modules they have initialised, and do nothing under a meta device."""
        done = getattr(module, "_is_hf_initialized", False)
        for name, tensor in () if done else _own_meta_tensors(module):
            if not isinstance(tensor, nn.Parameter):
                continue
            last = self._log.get(tensor.untyped_storage()._cdata, [])[-1:]
            if not any(self._operations[i].function is _ATEN.copy_.default for i in last):
                raise ValueError(
                    f"transformers does not initialise {f'{path}.{name}' if path else name!r} under torch.device('meta'): build"
                    " the model under `self.trainer.init_module(empty_init=True)`, which it does not notice, or load weights"
                    " for all of it."
                )

    def _fill_attributes(self, module: nn.Module) -> None:
        """Tensors that are neither parameters nor buffers: masks and tables, states of metrics."""
        for name, value in vars(module).items():
            found = () if name in ("_parameters", "_buffers", "_modules") else _meta_tensors(value)
            if found and not any(isinstance(leaf, nn.Parameter) for leaf in found):
                vars(module)[name] = self.values(value)


def _lost() -> Deferred:
    deferred = Deferred()
    deferred._lost = True
    return deferred


class _Recorder(TorchDispatchMode):
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if _returns_numbers(func):  # code that looks at values, as in `if x.any():`
                args, kwargs = self._deferred.values((args, kwargs))
                return func(*args, **kwargs)
            generator = None
            if torch.Tag.nondeterministic_seeded in func.tags:
                if _is_loading():
                    return func(*args, **kwargs)
                used = kwargs.get("generator") or torch.default_generator
                generator = (used, used.get_state())
            try:
                results = func(*args, **kwargs)
            except NotImplementedError:
                if func._schema.is_mutable:
                    raise
                # Of some operations torch does not know what they return.
                results = tree_map(_like_on_meta, func(*self._deferred.values(args), **self._deferred.values(kwargs)))
            if any(map(_is_followed, tree_leaves(results))):
                self._deferred._add(func, args, kwargs, results, generator)
            return results


class _Above(TorchFunctionMode):
    """What torch decides about meta tensors before an operation is run."""

    def __init__(self, deferred: Deferred, redirects: bool) -> None:
        super().__init__()
        self.redirects = redirects
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META and _asked_by("torch.nn.init", "torch.nn.modules.module"):
            return False  # some initialisers have nothing to do there, and `load_state_dict` warns of that
        if self.redirects and func in _MAKERS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        if func in _TO_PYTHON:
            args = self._deferred.values(args)
        result = func(*args, **kwargs)
        # And these drop the numbers.
        if func in _FROM_NUMBERS and _is_followed(result) and not isinstance(args[0] if args else None, Tensor):
            result.detach().copy_(func(*args, **{**kwargs, "device": _HOST}).detach())
        return result


def is_followed_now() -> bool:
    """Whether what happens to meta tensors now is put down."""
    return any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack())


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of ``module`` is on the meta device."""
    return any(t.is_meta for t in itertools.chain(module.parameters(), module.buffers()))


def rest_to_device(module: nn.Module, comm: Comm) -> None:
    """Bring to the device all but parameters, and rank 0's buffers to all ranks. All ranks call it."""

    def move(tensor: Tensor) -> Tensor:
        stays = isinstance(tensor, nn.Parameter) and not is_lazy(tensor) and tensor.numel()
        return tensor if stays else tensor.to(comm.device)

    module._apply(move)  # metrics have states that are no buffers
    _drop_references(module)
    _update_properties(module, device=comm.device)
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    buffers = [b.detach() for name, b in module.named_buffers() if not is_lazy(b) and b.numel() and name not in ignored]
    comm.broadcast(buffers, counted=False)


def _drop_references(module: nn.Module) -> None:
    """Parameters on the meta device cannot be given memory while something refers to them weakly. :meth:`Deferred.finish`
    puts the references back."""
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):
            submodule._flat_weight_refs = []


def _asked_by(*modules: str) -> bool:
    """Whether code of ``modules`` has called the function that calls this one, through ``torch.device`` as it may be."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "torch.utils._device" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in modules


def _is_loading() -> bool:
    """Whether ``from_pretrained`` is at work, as of transformers: what it builds on the meta device it replaces, by weights
    from files, and it counts on that drawing nothing."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "from_pretrained":
        frame = frame.f_back
    return frame is not None


@contextmanager
def outside_modes() -> Iterator[None]:
    """Nothing is followed inside, nor made on another device than it says."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _returns_numbers(function: Any) -> bool:
    returns = [result.type.kind() for result in function._schema.returns]
    return bool(returns) and all(kind in ("BoolType", "NumberType", "IntType", "FloatType") for kind in returns)


def _is_followed(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta and leaf.layout is torch.strided


def _meta_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if _is_followed(leaf)]


def _changed(function: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The meta tensors among the arguments that the operation writes to."""
    given = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return _meta_tensors(given)


def _like_on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _put_down(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _View.of(leaf) if _is_followed(leaf) else _Real.of(leaf)
    return leaf


def _own_meta_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = itertools.chain(module._parameters.items(), module._buffers.items())
    return [(name, tensor) for name, tensor in named if tensor is not None and tensor.is_meta]


def _inner_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """As they were built: a module's initialiser runs when its submodules are there."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _inner_first(child, seen)
        yield module
