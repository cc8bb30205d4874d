"""Activation checkpointing chosen from outside: the module is not wrapped, its names and its code stay as they are.

[Note: a module that is recomputed]
A chosen module gets a ``forward`` of its own in its ``__dict__`` that runs the class's under
``torch.utils.checkpoint.checkpoint`` (non-reentrant). Hooks on the module run once, around both; type, parameters' names and
``state_dict`` do not change. The original comes back with :meth:`Recomputation.remove`.
"""

import copy
import fnmatch
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_zero.activations.inputs import Inputs

# Keyword arguments of torch.utils.checkpoint.checkpoint that a policy may give; it is never reentrant.
_SETTINGS = {"context_fn", "determinism_check", "preserve_rng_state", "debug", "early_stop"}

Chooser = Callable[[str, nn.Module], "bool | Mapping[str, Any]"]


def checked_policy(policy: Any) -> Chooser | None:
    """Turn what users write into one function of (name, module); raises TypeError for what cannot be a policy.

    A policy is one or several module classes, names or patterns of names (``"blocks.*"``), or a callable: of the module,
    or with the signature of FSDP's policies. What a callable returns is true for modules to recompute; a mapping is true,
    and holds keyword arguments of ``torch.utils.checkpoint.checkpoint`` (``context_fn`` for a selective policy).
    """
    if policy is None:
        return None
    if isinstance(policy, (str, type)):
        policy = (policy,)
    if callable(policy):
        return _of_callable(policy)
    if isinstance(policy, Iterable) and not isinstance(policy, Mapping):
        chosen = tuple(policy)
        classes = tuple(one for one in chosen if isinstance(one, type) and issubclass(one, nn.Module))
        patterns = tuple(one for one in chosen if isinstance(one, str))
        if len(classes) + len(patterns) == len(chosen):
            return lambda name, module: isinstance(module, classes) or any(
                fnmatch.fnmatchcase(name, pattern) for pattern in patterns
            )
    raise TypeError(
        "activation_checkpointing_policy must hold module classes or names of modules, or be a callable, got"
        f" {policy!r}"
    )


def _of_callable(policy: Callable) -> Chooser:
    try:
        names = set(inspect.signature(policy).parameters)
    except (TypeError, ValueError):
        names = set()
    if {"recurse", "nonwrapped_numel"} <= names:
        return lambda _, module: policy(module=module, recurse=False, nonwrapped_numel=0)
    return lambda _, module: policy(module)


class Recomputation:
    """The modules below ``root`` that are recomputed in backward. See [Note: a module that is recomputed].

    ``inputs`` keeps what they were called with.
    """

    def __init__(self, root: nn.Module, chooser: Chooser, inputs: Inputs | None = None) -> None:
        chosen: dict[nn.Module, tuple[str, Mapping[str, Any]]] = {}
        _choose("", root, chooser, chosen)
        if not chosen:
            raise ValueError(
                "activation_checkpointing_policy chooses none of the module's parts: name classes or names that"
                f" {type(root).__name__} has, such as {_some_children(root)}."
            )

        # Only now: a policy that raises has changed nothing.
        self.names = [name for name, _ in chosen.values()]
        self._modules = list(chosen)
        for module, (name, settings) in chosen.items():
            module.forward = _Recomputed(module, settings, name, inputs)

    def remove(self) -> None:
        """Give the modules their own ``forward`` back."""
        for module in self._modules:
            recomputed = module.__dict__.get("forward")
            if isinstance(recomputed, _Recomputed):
                recomputed.restore()
        self._modules.clear()


class _Recomputed:
    """``module.forward`` under checkpointing. Copies with the module, and then runs the copy's."""

    def __init__(
        self, module: nn.Module, settings: Mapping[str, Any], name: str = "", inputs: Inputs | None = None
    ) -> None:
        self._module = module
        self._settings = dict(settings)
        self._name, self._inputs = name, inputs
        self._own = module.__dict__.get("forward")  # somebody has replaced the class's already

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward()
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # One tensor may be given several times, and the module may look whether it is (attention does): what is kept for
        # the recompute comes back as another object each time, so each is kept once.
        leaves, structure = tree_flatten((args, kwargs))
        distinct = {id(leaf): leaf for leaf in leaves}
        order = {key: index for index, key in enumerate(distinct)}
        places = [order[id(leaf)] for leaf in leaves]

        def run(*kept: Any) -> Any:
            args, kwargs = tree_unflatten([kept[place] for place in places], structure)
            with _inside():
                return forward(*args, **kwargs)

        # Only the inputs are saved under these hooks: the recompute has its own for what is saved inside, which the inputs
        # of recomputed modules within this one are left to.
        inputs = None if getattr(_running, "depth", 0) else self._inputs
        with nullcontext() if inputs is None else saved_tensors_hooks(*inputs.hooks(self._name)):
            return checkpoint(run, *distinct.values(), use_reentrant=False, **self._settings)

    def _forward(self) -> Callable:
        return self._own if self._own is not None else type(self._module).forward.__get__(self._module)

    def restore(self) -> None:
        if self._own is not None:
            self._module.forward = self._own
        else:
            del self._module.forward

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_inputs": None}

    def __deepcopy__(self, memo: dict) -> "_Recomputed":
        other = _Recomputed.__new__(_Recomputed)
        memo[id(self)] = other
        other._module = copy.deepcopy(self._module, memo)
        other._name, other._inputs = self._name, None
        other._settings, other._own = self._settings, copy.deepcopy(self._own, memo)
        return other


_running = threading.local()


@contextmanager
def _inside() -> Iterator[None]:
    """While the forward of a recomputed module runs on this thread."""
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        yield
    finally:
        _running.depth -= 1


def _choose(name: str, module: nn.Module, chooser: Chooser, chosen: dict[nn.Module, tuple[str, Mapping[str, Any]]]) -> None:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if child in chosen:
            continue  # used in two places
        settings = _checked_settings(chooser(full, child), full)
        # Containers without a forward of their own are not called; their parts may be meant.
        if settings is not None and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            chosen[child] = (full, settings)
        else:
            _choose(full, child, chooser, chosen)


def _checked_settings(answer: Any, name: str) -> Mapping[str, Any] | None:
    """Keyword arguments for a module that is chosen, None for one that is not."""
    if isinstance(answer, Mapping):
        unknown = sorted(set(answer) - _SETTINGS)
        if unknown:
            raise ValueError(
                f"activation_checkpointing_policy gives {', '.join(map(repr, unknown))} for {name!r}: known are"
                f" {', '.join(sorted(_SETTINGS))}"
            )
        return answer
    if answer is None or isinstance(answer, bool):
        return {} if answer else None
    raise TypeError(
        f"activation_checkpointing_policy must return True, False or a dict of settings, got {answer!r} for {name!r}"
    )


def _some_children(root: nn.Module) -> str:
    kinds = {type(module).__name__: name for name, module in root.named_modules() if module is not root}
    return ", ".join(f"{kind} ({name!r})" for kind, name in list(kinds.items())[:5]) or "none, it has no submodules"
