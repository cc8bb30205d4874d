"""The public names, and those by which the Trainer finds the strategy."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.callbacks import MemoryMonitor, StepTimeline
from lightning_zero.checkpoint.alone import load_from_checkpoint
from lightning_zero.estimate import estimate_memory
from lightning_zero.offload.cpu_adam import CPUAdam
from lightning_zero.pretrained import load_pretrained
from lightning_zero.settings import OffloadConfig
from lightning_zero.strategy import ZeroStrategy

ZeroStrategy.register_strategies(StrategyRegistry)

__all__ = [
    "ZeroStrategy", "OffloadConfig", "CPUAdam", "MemoryMonitor", "StepTimeline", "estimate_memory", "load_from_checkpoint",
    "load_pretrained",
]  # fmt: skip
