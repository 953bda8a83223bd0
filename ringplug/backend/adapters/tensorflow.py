"""TensorFlow eager tensors and variables. Layer 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ringplug.backend.adapters import not_on_cpu
from ringplug.backend.buffers import Array
from ringplug.backend.errors import UsageError

__all__ = ["TensorFlowAdapter"]


class TensorFlowAdapter:
    """Eager values on the CPU; the array is read-only, since TensorFlow's tensors are values."""

    def view(self, tensor: Any) -> Array:
        if isinstance(tensor, tf.IndexedSlices):
            raise UsageError("IndexedSlices have no dense memory; use tf.convert_to_tensor")
        if isinstance(tensor, tf.Variable):
            tensor = tensor.value()
        if not tf.is_tensor(tensor) or not hasattr(tensor, "numpy"):
            raise UsageError(
                f"{type(tensor).__name__} is symbolic: a tf.function has no values while it is "
                "traced"
            )
        if "CPU" not in (tensor.device or "CPU"):
            raise not_on_cpu(tensor, tensor.device)
        # EagerTensor hands out its own buffer; .numpy() would copy it.
        return np.asarray(memoryview(tensor)) if _exports(tensor) else tensor.numpy()

    def like(self, array: Array, tensor: Any) -> Any:
        return tf.convert_to_tensor(array)


def _exports(tensor: Any) -> bool:
    # The buffer protocol has no code for bfloat16 and the like.
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer) and (
        tensor.dtype.as_numpy_dtype.__module__ == "numpy"
    )
