"""Whether a compiled model can be trained with ringplug."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from ringplug.backend.errors import UsageError

__all__ = ["check_compilation"]


def check_compilation(model: Any) -> None:
    """Turn XLA off, with a warning, where a step that it compiles could not reach ringplug.

    Keras turns XLA on by itself on machines with a GPU, so this is not always the user's wish.

    Raises:
        UsageError: The model was made under a ``tf.distribute`` strategy.
    """
    if getattr(model, "_distribute_strategy", None) is not None:
        raise UsageError(
            "the model was made under a tf.distribute strategy; use either that or ringplug, "
            "which needs one process per device and no strategy"
        )
    if keras.backend.backend() != "tensorflow" or model.run_eagerly or not model.jit_compile:
        return
    from ringplug.keras.step_tensorflow import ffi_reason

    reason = ffi_reason()
    if reason:
        warnings.warn(
            f"jit_compile=True is turned off: XLA cannot reach ringplug here ({reason})",
            stacklevel=2,
        )
        model.jit_compile = False
        model.train_function = None
