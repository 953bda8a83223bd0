"""JAX arrays. Layer 1."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ringplug.backend.adapters import not_on_cpu
from ringplug.backend.buffers import Array
from ringplug.backend.errors import UsageError

__all__ = ["JaxAdapter"]


class JaxAdapter:
    """Concrete arrays on one CPU device; the array is read-only, since JAX's are values."""

    def view(self, tensor: Any) -> Array:
        if isinstance(tensor, jax.core.Tracer):
            raise UsageError("a traced JAX value has no memory yet; call this outside jax.jit")
        devices = tensor.devices()
        if len(devices) != 1 or next(iter(devices)).platform != "cpu":
            raise not_on_cpu(tensor, sorted(map(str, devices)))
        return np.asarray(tensor)

    def like(self, array: Array, tensor: Any) -> Any:
        return jax.numpy.asarray(array)
