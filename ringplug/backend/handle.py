"""One submitted operation, as its caller sees it. Layer 1."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ringplug.backend.errors import StalledError

__all__ = ["Handle"]


class Handle:
    """The outcome, now or later, of an operation that was submitted.

    The side that runs the operation calls `finish` or `fail` exactly once.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_result", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._done: threading.Event | None = None
        self._callbacks: list[Callable[[], None]] | None = []
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._callbacks is None

    def wait(self, timeout: float | None = None) -> Any:
        """The operation's result, once it has ended.

        Args:
            timeout: Seconds to wait at most; None leaves it to the operation's own deadline.

        Raises:
            StalledError: `timeout` ran out.
            RingplugError: Whatever the operation raised.
        """
        if not self.done():
            with self._lock:
                if self._done is None:
                    self._done = threading.Event()
                    if self._callbacks is None:
                        self._done.set()
            if not self._done.wait(timeout):
                raise StalledError(
                    f"{self.name} has not ended after {timeout:g} s",
                    what=self.name,
                    seconds=timeout or 0.0,
                )
        if self._error is not None:
            raise self._error
        return self._result

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the operation has ended; at once if it has."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, result: Any = None) -> None:
        """The operation went well."""
        self._result = result
        self._end()

    def fail(self, error: BaseException) -> None:
        """The operation failed; `wait` raises `error`."""
        self._error = error
        self._end()

    def exception(self) -> BaseException | None:
        """What `wait` would raise, once done."""
        return self._error

    def _end(self) -> None:
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
            if self._done is not None:
                self._done.set()
        with contextlib.ExitStack() as stack:
            # Every callback is called, also after one that raises.
            for callback in reversed(callbacks or ()):
                stack.callback(callback)
