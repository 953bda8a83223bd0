"""numpy arrays, and whatever numpy makes an array of. Layer 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringplug.backend.buffers import Array
from ringplug.backend.errors import UsageError

__all__ = ["NumpyAdapter"]


class NumpyAdapter:
    """Arrays are themselves; numbers and nested lists become new arrays."""

    def view(self, tensor: Any) -> Array:
        try:
            array = np.asarray(tensor)
        except ValueError as error:
            raise UsageError(f"{type(tensor).__name__}: {error}") from None
        if array.dtype.hasobject or array.dtype.kind in "SUmM":
            raise UsageError(
                f"{type(tensor).__name__} with dtype {array.dtype} is no tensor of numbers; use "
                "broadcast_object or allgather_object"
            )
        return array

    def like(self, array: Array, tensor: Any) -> Any:
        if isinstance(tensor, (bool, int, float, complex)):
            return array.item() if array.size == 1 and array.ndim == 0 else array
        return array
