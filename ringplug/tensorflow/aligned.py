"""Memory that TensorFlow takes over without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringplug.backend.buffers import Array

__all__ = ["aligned_empty"]

_ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """``np.empty`` at an address divisible by 64: TensorFlow copies an array at any other."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
