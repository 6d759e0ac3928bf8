"""The GPU tier: slots in device memory, and the kernels' side of every batch."""

from __future__ import annotations

from tierstore._tiers.gpu.tier import GpuTier

__all__ = ["GpuTier"]
