"""Callbacks for the Trainer."""

from lightning_zero.callbacks.memory_monitor import MemoryMonitor
from lightning_zero.callbacks.step_timeline import StepTimeline

__all__ = ["MemoryMonitor", "StepTimeline"]
