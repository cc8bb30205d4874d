"""Host-side tiers: what rests and what is computed in CPU memory."""

from lightning_zero.offload.cpu_adam import CPUAdam

__all__ = ["CPUAdam"]
