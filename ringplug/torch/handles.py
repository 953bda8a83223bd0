"""What asynchronous operations return, and how to wait for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

from ringplug.backend.errors import UsageError
from ringplug.torch.compilation import untraced

__all__ = ["Handle", "Waitable", "begin", "poll", "synchronize"]

_numbers = itertools.count(1)


class Waitable(Protocol):
    """An operation that has been started."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self) -> Any:
        """Its result; raises what it raised."""
        ...


class Handle(int):
    """An operation that has been started: a number of its own, for `poll` and `synchronize`.

    It keeps the tensors of the operation alive; dropping it neither ends nor waits for the
    operation.

    Args:
        pending: The operation.
        finish: Makes the result from the operation's.
    """

    _pending: Waitable
    _finish: Callable[[Any], Any] | None

    def __new__(cls, pending: Waitable, finish: Callable[[Any], Any] | None = None) -> Handle:
        """A new number."""
        self = super().__new__(cls, next(_numbers))
        self._pending = pending
        self._finish = finish
        return self

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._pending.done()

    def wait(self) -> Any:
        """Its result; raises what it raised."""
        result = self._pending.wait()
        return result if self._finish is None else self._finish(result)


@untraced
def begin(
    function: Callable[..., Waitable],
    *arguments: Any,
    finish: Callable[[Any], Any] | None = None,
) -> Handle:
    """Start an operation, out of the compiler's sight: ``function(*arguments)``."""
    return Handle(function(*arguments), finish)


def poll(handle: Any) -> bool:
    """Whether an asynchronous operation has ended, well or not.

    Args:
        handle: What an operation's asynchronous form returned.

    Returns:
        True once `synchronize` returns or raises without waiting.

    Raises:
        UsageError: It is no handle.
    """
    if not _is_handle(handle):
        raise UsageError(
            f"poll({handle!r}): expected what allreduce_async and its relatives return"
        )
    return handle.done()


@untraced
def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation.

    Args:
        handle: What an operation's asynchronous form returned. A handle may be waited for more
            than once, and from any thread.

    Returns:
        What the synchronous form returns; for an alltoall always the pair of tensor and received
        splits. None for None and for a plain number, which stand for no operation.

    Raises:
        HorovodInternalError: The operation failed on this rank or another: a mismatch, a rank
            that is late or gone, a shutdown.
        UsageError: This is no handle at all.
    """
    if _is_handle(handle):
        return handle.wait()
    if handle is None or isinstance(handle, int):
        return None
    raise UsageError(
        f"synchronize({handle!r}): expected what allreduce_async and its relatives return"
    )


def _is_handle(handle: Any) -> TypeGuard[Waitable]:
    return callable(getattr(handle, "done", None)) and callable(getattr(handle, "wait", None))
