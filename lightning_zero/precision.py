"""Precision plugins that know that gradients are sharded."""

import copy
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.partition.engine import ZeroEngine

_REFUSED = {
    "TransformerEnginePrecision": "it replaces linear layers by its own and keeps fp8 state in them",
    "BitsandbytesPrecision": "its quantised weights are tensor subclasses whose bytes cannot be sharded",
    "DeepSpeedPrecision": "it belongs to DeepSpeedStrategy",
    "FSDPPrecision": "it belongs to FSDPStrategy",
    "XLAPrecision": "it belongs to XLAStrategy",
}


class ShardedGradientsMixin(Precision):
    """What a Lightning precision plugin must do differently when ``p.grad`` is sharded: clip over all ranks."""

    engine: ZeroEngine | None = None

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None or not self.engine.units:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.engine.clip_by_norm(list(self.main_params(optimizer)), float(clip_val))  # type: ignore[arg-type]

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None or not self.engine.units:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.engine.clip_by_value(list(self.main_params(optimizer)), float(clip_val))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        # The class is made on the fly; rebuild it from the user's plugin.
        state = {k: v for k, v in vars(self).items() if k != "engine"}
        return _rebuild, (type(self).__mro__[2], state)


def translate(plugin: Precision) -> Precision:
    """The same plugin for sharded gradients: of a subclass of its own class, so that user overrides stay in force."""
    if isinstance(plugin, ShardedGradientsMixin):
        return plugin
    for cls in type(plugin).__mro__:
        if cls.__name__ in _REFUSED:
            raise ValueError(
                f"ZeroStrategy does not work with the precision plugin {type(plugin).__name__}: {_REFUSED[cls.__name__]}."
                " Use precision='32-true', 'bf16-mixed', '16-mixed', 'bf16-true' or '16-true'."
            )
    return _rebuild(type(plugin), vars(copy.copy(plugin)))


def _rebuild(cls: type[Precision], state: dict[str, Any]) -> Precision:
    sharded = type(cls.__name__, (ShardedGradientsMixin, cls), {"__module__": cls.__module__})
    plugin = object.__new__(sharded)
    plugin.__dict__.update(state)
    return plugin
