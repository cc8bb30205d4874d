"""lightning_zero: ZeRO for unchanged LightningModules."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.strategy import ZeroStrategy

ZeroStrategy.register_strategies(StrategyRegistry)

__all__ = ["ZeroStrategy"]
