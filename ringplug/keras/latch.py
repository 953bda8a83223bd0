"""An error that happened where it cannot be raised: kept until somebody can raise it.

A compiled step may run on another thread, and JAX's `fit` goes on after it failed; the error
that its handler met waits here for the next callback or optimizer call.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["OF_LAYERS", "Latch", "take_latched"]


class Latch:
    """Holds the first error that was put in, until it is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def put(self, error: BaseException) -> None:
        """Keep `error`, unless an earlier one still waits."""
        with self._lock:
            if self._error is None:
                self._error = error

    def waiting(self) -> BaseException | None:
        """The error that waits, which stays."""
        return self._error

    def take(self) -> BaseException | None:
        """The error that waits, which is gone afterwards."""
        with self._lock:
            error, self._error = self._error, None
            return error


OF_LAYERS = Latch()
"""The first error of a layer's exchange in a compiled step: a layer has no optimizer to keep it."""


def take_latched(optimizer: Any) -> BaseException | None:
    """The error that waits for an optimizer, or of a layer; neither waits any more."""
    reduction = getattr(optimizer, "ringplug", None)
    own = reduction.meter.latch.take() if reduction is not None else None
    of_layer = OF_LAYERS.take()
    return own or of_layer
