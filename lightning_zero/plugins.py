"""What a Trainer sets on its strategy, kept apart from what the user gave to the constructor.

Lightning takes the base class's private attributes for arguments of the constructor: a Trainer would refuse a strategy, or
take over its precision, because of what an earlier Trainer has set.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_zero.precision import ZeroPrecision, translate


class TakesPlugins(DDPStrategy):
    """Accelerator and precision plugin as a Trainer sets them, the latter translated for shards."""

    _set_accelerator: "pl.accelerators.Accelerator | None" = None
    _set_precision: ZeroPrecision | None = None

    @property
    @override
    def accelerator(self) -> "pl.accelerators.Accelerator | None":
        return self._accelerator if self._set_accelerator is None else self._set_accelerator

    @accelerator.setter
    @override
    def accelerator(self, accelerator: "pl.accelerators.Accelerator") -> None:
        self._set_accelerator = accelerator

    @property
    @override
    def precision_plugin(self) -> ZeroPrecision:
        if self._set_precision is None:
            self._set_precision = translate(self._precision_plugin or Precision())
        return self._set_precision

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Lightning hands in its stock plugin for ``Trainer(precision=...)``."""
        self._set_precision = None if precision_plugin is None else translate(precision_plugin)


def check_plugins(**plugins: Any) -> None:
    """Raise TypeError for arguments of the strategy that are not what their names say."""
    kinds = {"checkpoint_io": CheckpointIO, "cluster_environment": ClusterEnvironment, "parallel_devices": list}
    for name, plugin in plugins.items():
        if plugin is not None and not isinstance(plugin, kinds[name]):
            kind = f"{kinds[name].__module__}.{kinds[name].__qualname__}".removeprefix("builtins.")
            raise TypeError(
                f"{name} must be a {kind}, got {plugin!r} of {type(plugin).__module__}.{type(plugin).__qualname__}. What is"
                " given to the Trainer comes here by itself."
            )
