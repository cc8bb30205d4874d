"""Which parameters form a unit: a walk over the module tree, so that nobody writes a wrap policy."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_zero.config import checked_unit_policy
from lightning_zero.partition.handle import check_shardable
from lightning_zero.settings import largest_automatic_unit

UnitPolicy = Callable[..., bool]

# Their forward hands the parameters of their children to one fused kernel, and takes a slower path (with other
# rounding) if it meets a handle among them.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass
class Group:
    """Parameters that are unsharded together.

    ``modules`` are the modules whose forward brackets the use of the parameters; it is empty for bare parameters,
    which are unsharded on access. ``readers`` are modules that look at the parameters before they call ``modules``.
    """

    name: str
    modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]]
    readers: list[nn.Module] = field(default_factory=list)


@dataclass
class _Node:
    """One module of the tree with the parameters that belong to it alone."""

    path: str
    module: nn.Module
    own: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    children: "list[_Node]" = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for _, p in self.own) + sum(c.nbytes for c in self.children)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.own + [pair for child in self.children for pair in child.parameters()]


def group_parameters(
    root: nn.Module, unit_bytes: int, policy: UnitPolicy | Iterable[type] | None = None
) -> list[Group]:
    """Cut the parameters of ``root`` into groups, in module order; every parameter is in exactly one group.

    Without a policy the largest subtrees of at most ``unit_bytes`` become groups, neighbours are packed together up to
    that size, and what is left over in a larger module forms a group of its own. With a policy (module classes, or a
    callable with the signature of FSDP's policies) each chosen module becomes a group and the rest goes to its parent's.
    """
    tree = _build_tree(root)
    if policy is None:
        groups = _walk(tree, largest_automatic_unit(tree.nbytes, unit_bytes))
    else:
        groups = _walk_policy(tree, _as_predicate(policy))
    _find_readers(root, groups)
    return [g for g in groups if g.parameters]


def _find_readers(root: nn.Module, groups: list[Group]) -> None:
    """Modules that choose between a fused kernel and a slower path by a look at parameters of their children."""
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoder):
            read = {id(p) for layer in list(module.layers)[:1] for p in layer.parameters()}
        elif isinstance(module, _INDIVISIBLE):
            read = {id(p) for p in module.parameters()}
        else:
            continue
        for group in groups:
            if module not in group.modules and any(id(p) in read for _, p in group.parameters):
                group.readers.append(module)


def check_module(root: nn.Module, whole_parameters: bool) -> None:
    """Refuse what cannot be sharded, and modules that read parameters where no hook and no handle notices, by name."""
    for name, parameter in root.named_parameters():
        check_shardable(name, parameter)
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(
            p.requires_grad or not whole_parameters for p in module.parameters()
        ):
            raise ValueError(
                f"Module {name!r} is a TorchScript module: it runs in C++, where nothing notices that a parameter is still"
                " to come from the other ranks. Use the Python module, or freeze it and use stage 1 or 2."
            )


def check_synced_norm(root: nn.Module, device: torch.device) -> None:
    """Refuse synchronised batch norm where torch has none, by name: torch itself says so at the first step."""
    for name, layer in root.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training and device.type == "cpu":
            raise ValueError(
                f"Module {name!r} is a SyncBatchNorm, which torch has for GPUs only. On CPUs use Trainer(sync_batchnorm=False)"
                " and plain batch norm (running statistics then follow rank 0, as under DDP), or a norm without statistics"
                " of the batch, such as GroupNorm."
            )


def check_nothing_new(root: nn.Module, known: Container[int]) -> None:
    """Refuse trainable parameters that joined the module after it was sharded, by name; ``known`` holds ids.

    Called before every step: a plain walk, which takes a tenth of a millisecond for a few hundred modules.
    """
    modules, seen = [root], {root}
    while modules:
        module = modules.pop()
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in known and parameter.requires_grad and parameter.numel():
                name = next(name for name, p in root.named_parameters() if p is parameter)
                raise RuntimeError(
                    f"Parameter {name!r} has been added to the module, or put in another one's place, since training began:"
                    " its gradients would not be reduced over the ranks. Build it before (in `__init__` or"
                    " `configure_model`) and freeze it until it is needed, copy new values into the old parameter, or"
                    " replace it between two calls of `fit`."
                )
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)


def _build_tree(root: nn.Module) -> _Node:
    """The module tree, each parameter at the lowest module that contains all its uses (tied weights meet there)."""
    nodes: dict[str, _Node] = {}
    uses: dict[int, list[str]] = {}
    names: dict[int, tuple[str, nn.Parameter]] = {}
    first_path: dict[int, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if id(module) not in first_path:
            first_path[id(module)] = path
            node = nodes[path] = _Node(path, module)
            if path:
                nodes[path.rpartition(".")[0]].children.append(node)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
                uses.setdefault(id(parameter), []).append(path)
    for key, (name, parameter) in names.items():
        path = _common_ancestor(uses[key])
        while path not in nodes:
            path = path.rpartition(".")[0]
        nodes[path].own.append((name, parameter))
    return nodes[""]


def _common_ancestor(paths: list[str]) -> str:
    split = [path.split(".") if path else [] for path in paths]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _walk(node: _Node, cap: int) -> list[Group]:
    if node.nbytes <= cap or not node.children or isinstance(node.module, _INDIVISIBLE):
        return [Group(node.path, _callable_roots(node), node.parameters())]
    groups = [Group(node.path, [node.module] if _is_called(node) else [], list(node.own))]
    pack: list[_Node] = []

    def flush() -> None:
        if pack:
            name = pack[0].path if len(pack) == 1 else f"{pack[0].path}..{pack[-1].path}"
            roots = [m for n in pack for m in _callable_roots(n)]
            groups.append(Group(name, roots, [pair for n in pack for pair in n.parameters()]))
            pack.clear()

    for child in node.children:
        if child.nbytes > cap:
            flush()
            groups += _walk(child, cap)
        elif child.nbytes:
            if sum(n.nbytes for n in pack) + child.nbytes > cap:
                flush()
            pack.append(child)
    flush()
    return groups


def _walk_policy(node: _Node, chosen: Callable[[nn.Module, int], bool]) -> list[Group]:
    """One group for ``node`` (everything below it that no chosen module takes), then the groups below."""
    below: list[Group] = []

    def leftover(current: _Node) -> list[tuple[str, nn.Parameter]]:
        rest = list(current.own)
        for child in current.children:
            if chosen(child.module, sum(p.numel() for _, p in child.parameters())):
                below.extend(_walk_policy(child, chosen))
            else:
                rest += leftover(child)
        return rest

    rest = leftover(node)
    return [Group(node.path, [node.module] if _is_called(node) else [], rest), *below]


def _as_predicate(policy: UnitPolicy | Iterable[type]) -> Callable[[nn.Module, int], bool]:
    checked = checked_unit_policy(policy)
    if isinstance(checked, tuple):
        return lambda module, numel: isinstance(module, checked)
    return lambda module, numel: bool(checked(module=module, recurse=False, nonwrapped_numel=numel))


def _is_called(node: _Node) -> bool:
    """Whether the module's own ``forward`` brackets its parameters' use: containers are never called, of the root only
    its steps are, and TorchScript modules take no hooks."""
    if isinstance(node.module, torch.jit.ScriptModule):
        return False
    return bool(node.path) and type(node.module).forward is not nn.Module.forward


def _callable_roots(node: _Node) -> list[nn.Module]:
    if _is_called(node):
        return [node.module]
    return [m for child in node.children if child.nbytes for m in _callable_roots(child)]


def describe(value: Any) -> str:
    """A name for error messages."""
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def outline(module: nn.Module) -> list[str]:
    """What ranks must have in common before they exchange weights."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    kinds = {name: "trainable" if p.requires_grad else "frozen" for name, p in module.named_parameters()}
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [
        f"{name!r} ({tuple(tensor.shape)}, {tensor.dtype}, {kinds.get(name, 'buffer')})"
        for name, tensor in tensors
        if name not in ignored
    ]
