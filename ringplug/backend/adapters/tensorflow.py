"""TensorFlow eager tensors and variables. Layer 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ringplug.backend.adapters import not_on_cpu
from ringplug.backend.buffers import BFLOAT16, Array
from ringplug.backend.errors import UsageError

__all__ = ["TensorFlowAdapter"]

_EXPORTED = (
    tf.bool,
    *(tf.int8, tf.int16, tf.int32, tf.int64),
    *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    *(tf.float16, tf.float32, tf.float64),
)


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
        # An eager tensor hands out its own memory, where .numpy() may copy it; bfloat16 has no
        # code there and goes by its bits.
        if tensor.dtype == tf.bfloat16:
            bits: Array = np.asarray(memoryview(tf.bitcast(tensor, tf.uint16)))
            return bits.view(BFLOAT16)
        if tensor.dtype.is_complex:
            parts = np.asarray(memoryview(tf.bitcast(tensor, tensor.dtype.real_dtype)))
            return parts.view(tensor.dtype.as_numpy_dtype)[..., 0]
        if tensor.dtype not in _EXPORTED:
            raise UsageError(f"TensorFlow values of {tensor.dtype.name} are no numbers to reduce")
        return np.asarray(memoryview(tensor))

    def like(self, array: Array, tensor: Any) -> Any:
        return tf.convert_to_tensor(array)
