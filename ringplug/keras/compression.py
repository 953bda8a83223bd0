"""Horovod's names for what gradients travel as."""

from __future__ import annotations

__all__ = ["Compression"]


class Compression:
    """What `DistributedOptimizer` sends: ``Compression.none``, ``.fp16`` or ``.bf16``."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
