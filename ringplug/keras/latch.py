"""An error that happened where it cannot be raised: kept until somebody can raise it.

A compiled step may run on another thread, and JAX's `fit` goes on after it failed; the error
that its handler met waits here for the next callback or optimizer call.
"""

from __future__ import annotations

import threading

__all__ = ["Latch"]


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
