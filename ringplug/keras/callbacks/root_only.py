"""Callbacks that one rank runs for all."""

from __future__ import annotations

from typing import Any

import keras

from ringplug.backend import runtime
from ringplug.backend.errors import UsageError
from ringplug.keras.callbacks.base import check_root

__all__ = ["BestModelCheckpoint", "RootOnly"]


class RootOnly(keras.callbacks.Callback):
    """Run another callback on one rank only: one that writes files, for example.

    What it does must not need the other ranks, and what it decides does not reach them; see
    `StopTogetherCallback` for callbacks that stop the training.

    Args:
        callback: Any Keras callback.
        root_rank: Where it runs.
    """

    def __init__(self, callback: keras.callbacks.Callback, root_rank: int = 0) -> None:
        super().__init__()
        check_root(type(self).__name__, root_rank)
        self.callback = callback
        self.active = runtime.current().world.rank == root_rank
        if self.active:
            # Instance attributes in front of the methods: a hook that the callback does not
            # have stays Keras' own, and so Keras sees what may run in the background.
            for name in dir(keras.callbacks.Callback):
                if name.startswith("on_"):
                    setattr(self, name, getattr(callback, name))
            if hasattr(callback, "async_safe"):
                self.async_safe = callback.async_safe

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        if self.active:
            self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if self.active:
            self.callback.set_model(model)


class BestModelCheckpoint(RootOnly):
    """Rank 0 keeps the best model so far in a file.

    Put it after `MetricAverageCallback`, so that "best" is about all ranks' data.

    Args:
        monitor: The log entry that decides.
        verbose: 1: say when the model is saved.
        save_weights_only: Save weights instead of the model.
        mode: ``min``, ``max`` or ``auto``.
        save_freq: ``epoch`` or a number of batches.
        filepath: Where to; can also be assigned to the attribute of that name before `fit`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
    ) -> None:
        self._made = keras.callbacks.ModelCheckpoint(
            filepath=_placeholder(filepath, save_weights_only),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        super().__init__(self._made)
        self.filepath = filepath

    def set_model(self, model: Any) -> None:
        if not self.filepath:
            raise UsageError("BestModelCheckpoint(filepath=...): say where to save the model")
        self._made.filepath = str(self.filepath)
        super().set_model(model)


def _placeholder(filepath: Any, weights: bool) -> str:
    return str(filepath) if filepath else "best.weights.h5" if weights else "best.keras"
