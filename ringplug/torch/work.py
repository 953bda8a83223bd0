"""What a collective returns: torch's Work over a lane's handle."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from ringplug.backend.errors import RingplugError
from ringplug.backend.handle import Handle

__all__ = ["RingWork"]

dist: Any = torch.distributed


class RingWork(dist.Work):
    """One operation of a process group, running or ended.

    Args:
        handle: The operation.
        result: The tensors that it fills, or one tensor where its future shall hold just that.
    """

    def __init__(self, handle: Handle, result: Any) -> None:
        super().__init__()
        self._handle = handle
        self._result = result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises what the operation raised.

        Args:
            timeout: Zero or None leave it to the group's own deadline.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        self._handle.wait(seconds if seconds > 0 else None)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result; where the operation failed, its value raises the error.

        torch takes an exception that is *set* on a future for a value, so that a failed
        operation would look like a good one, or end the process. Here a callback raises it.
        """
        if self._future is None:
            start: torch.futures.Future[None] = torch.futures.Future()
            self._future = start.then(self._outcome)
            self._handle.then(lambda: start.set_result(None))
        return self._future

    def _outcome(self, _: torch.futures.Future[None]) -> Any:
        error = self._handle.exception()
        if isinstance(error, RingplugError):
            # torch turns the error into text and adds its traceback to it: the lines of our own
            # files would be the last thing that users read.
            raise error.with_traceback(None)
        if error is not None:
            raise error
        return self._result

    def is_completed(self) -> bool:
        return self._handle.done()

    def is_success(self) -> bool:
        return self._handle.done() and self._handle.exception() is None

    def exception(self) -> BaseException | None:
        return self._handle.exception()

    def result(self) -> Any:
        self._handle.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """For a receive from any rank: whose message came."""
        return int(self._handle.wait())

    _source_rank = source_rank
