"""lightning_zero: ZeRO for unchanged LightningModules."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The console script answers many questions without torch and Lightning, whose import takes seconds. For everybody else the
# Trainer is to know the strategy's names from now on.
if TYPE_CHECKING or Path(sys.argv[0] if sys.argv else "").stem != "lightning-zero":
    from lightning_zero.names import (
        CPUAdam,
        MemoryMonitor,
        OffloadConfig,
        StepTimeline,
        ZeroStrategy,
        estimate_memory,
        load_from_checkpoint,
        load_pretrained,
    )

__all__ = [
    "ZeroStrategy", "OffloadConfig", "CPUAdam", "MemoryMonitor", "StepTimeline", "estimate_memory", "load_from_checkpoint",
    "load_pretrained",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    return getattr(import_module("lightning_zero.names"), name)
