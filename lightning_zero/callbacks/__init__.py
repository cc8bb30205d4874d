"""Callbacks for the Trainer."""

from lightning_zero.callbacks.memory_monitor import MemoryMonitor

__all__ = ["MemoryMonitor"]
