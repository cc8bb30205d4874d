"""What cannot be sharded."""

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from lightning_zero.partition.elementwise import check_supported, is_known
from lightning_zero.partition.grouping import check_module
from lightning_zero.partition.handle import check_distinct


def can_shard(module: nn.Module, optimizers: Iterable[Optimizer], whole_parameters: bool, needed: bool) -> bool:
    """Whether the module and its optimizers can be sharded. Raises ValueError or TypeError, by name, where that is
    ``needed``; one rank that has everything can train them as they are, without trying out what an optimizer does."""
    if not needed and not all(is_known(optimizer) for optimizer in optimizers):
        return False
    names = {id(p): n for n, p in module.named_parameters()}
    try:
        check_module(module, whole_parameters)
        for optimizer in optimizers:
            check_supported(optimizer, names)
        check_distinct(module)
    except (TypeError, ValueError):
        if needed:
            raise
        return False
    return True
