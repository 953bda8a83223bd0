"""dtypes of any Keras backend as numpy's."""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np

__all__ = ["numpy_dtype"]


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The numpy dtype of a Keras dtype, tensor dtype or name; bfloat16 and float8 included."""
    name = keras.backend.standardize_dtype(dtype)
    extended = getattr(ml_dtypes, name, None)
    return np.dtype(name if extended is None else extended)
