"""A lane: operations on one transport, in the order in which they were submitted. Layer 4.

Operations run on the thread that asks for them (`run`) or on the lane's worker thread
(`submit`); either way one at a time and, for what one thread asks for, first come, first served,
so that ranks that ask in the same order communicate in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ringplug.backend.errors import (
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RecoverableError,
    RingplugError,
    StalledError,
    TransportError,
)
from ringplug.backend.handle import Handle
from ringplug.backend.transport import JOINED, Transport

__all__ = ["Lane"]

T = TypeVar("T")
Job = Callable[[Transport], Any]


class Lane:
    """A first-in-first-out queue of operations on one transport.

    Args:
        transport: Owned by the lane from now on.
        name: Shown in errors; starts the worker thread's name.
        threaded: False where the layer below forbids a second thread: `submit` then runs the
            operation before it returns.
    """

    def __init__(self, transport: Transport, name: str, threaded: bool = True) -> None:
        self.transport = transport
        self.name = name
        self._threaded = threaded and transport.size > 1
        self._queue: deque[tuple[Handle, Job]] = deque()
        self._wakeup = threading.Condition()
        self._turn = threading.RLock()
        self._holder = 0
        self._worker: threading.Thread | None = None
        self._broken: RecoverableError | None = None
        self._closed = False
        # Weak: a plan registers a method of its own.
        self._partners: dict[int, weakref.WeakMethod[Callable[[Transport], object]]] = {}

    def run(self, job: Callable[[Transport], T], name: str) -> T:
        """Run `job` on this thread, after everything that was submitted before it.

        Args:
            job: Given the transport; its result is returned.
            name: What it does, for errors.

        Raises:
            NotInitializedError: The lane is closed.
            RingplugError: What the job raised. After a RecoverableError the group is broken,
                and every later call raises that again.
        """
        if self._queue and self._holder != threading.get_ident():
            return self.submit(job, name).wait()  # type: ignore[no-any-return]
        with self._turn:
            return self._execute(job, name)

    def submit(self, job: Job, name: str) -> Handle:
        """Queue `job` for the worker thread; see `run`."""
        handle = Handle(name)
        if not self._threaded or self._holder == threading.get_ident():
            with self._turn:
                self._settle(handle, job)
            return handle
        with self._wakeup:
            if self._closed:
                handle.fail(NotInitializedError(f"{name}: ringplug was shut down"))
                return handle
            if self._worker is None:
                self._worker = threading.Thread(
                    target=self._work, name=f"ringplug-{self.name}", daemon=True
                )
                self._worker.start()
            self._queue.append((handle, job))
            self._wakeup.notify()
        return handle

    def partner(self, signature: int, job: Callable[[Transport], object]) -> None:
        """What this rank does in operations of that signature once it has joined.

        Args:
            signature: What the others give to `Transport.agree`.
            job: A bound method; called after the agreement, it must take part in all that
                follows. Forgotten with its object.
        """
        self._partners[signature] = weakref.WeakMethod(job)

    def follow(self, name: str) -> bool:
        """As a rank that has joined, take part in the next operation that begins by agreeing.

        Returns:
            Whether there was one; False when all ranks have joined.
        """

        def job(transport: Transport) -> bool:
            signature = transport.agree(JOINED, name)
            if signature == JOINED:
                return False
            partner = self._partners.get(signature)
            part = None if partner is None else partner()
            if part is None:
                # Breaks the lane, on all ranks.
                raise TransportError(
                    "this rank has joined, and cannot take part in what the others do: it has "
                    "no optimizer with the same parameters"
                )
            part(transport)
            return True

        return self.run(job, name)

    def gather(self, number: int, name: str) -> list[int]:
        """Every rank's number, in rank order."""

        def job(transport: Transport) -> list[int]:
            numbers = np.empty(transport.size, np.int64)
            transport.allgather(np.array([number], np.int64), numbers, [1] * transport.size)
            return [int(one) for one in numbers]

        return self.run(job, name)

    def close(self) -> None:
        """Refuse further operations and release the transport. Waits for nobody."""
        with self._wakeup:
            if self._closed:
                return
            self._closed = True
            self._wakeup.notify()
        self.transport.control.leave()
        self.transport.close()

    def abandon(self, reason: str) -> None:
        """End the lane on every rank: this one can no longer take part as it should."""
        self._break(TransportError(reason))

    def ended(self, timeout: float) -> bool:
        """After `close`, wait for the operation that is under way; whether none is any more."""
        if self._worker is not None:
            self._worker.join(timeout)
        return self._worker is None or not self._worker.is_alive()

    @property
    def broken(self) -> RecoverableError | None:
        """The failure that ended this lane, if any."""
        return self._broken

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _work(self) -> None:
        while True:
            with self._wakeup:
                while not self._queue and not self._closed:
                    self._wakeup.wait()
                if not self._queue:
                    return
            # The entry leaves the queue inside the turn, so that `run` cannot overtake it.
            with self._turn:
                handle, job = self._queue.popleft()
                # Also while the handle calls back: what is submitted then runs at once.
                self._holder = threading.get_ident()
                try:
                    self._settle(handle, job)
                finally:
                    self._holder = 0
            del handle, job

    def _settle(self, handle: Handle, job: Job) -> None:
        try:
            result = self._execute(job, handle.name)
        except BaseException as error:  # noqa: BLE001 - the handle carries it to the caller
            handle.fail(error)
        else:
            handle.finish(result)

    def _execute(self, job: Callable[[Transport], T], name: str) -> T:
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        if self._closed:
            raise NotInitializedError(f"{name}: ringplug was shut down")
        outer, self._holder = self._holder, threading.get_ident()
        try:
            return job(self.transport)
        except MismatchError as error:
            raise MismatchError(f"{name}: {error}") from None
        except RecoverableError as error:
            raise self._break(_named(error, name)) from error
        except RingplugError:
            raise
        except BaseException as error:
            # It may have come in the middle of a collective: the others must not wait for it.
            self._break(TransportError(f"{name} failed on this rank: {error!r}"))
            raise
        finally:
            self._holder = outer

    def _break(self, error: RecoverableError) -> RecoverableError:
        self._broken = error
        self.transport.control.leave()
        return error


def _named(error: RecoverableError, name: str) -> RecoverableError:
    text = f"{name}: {error}"
    if isinstance(error, StalledError):
        return StalledError(text, name, error.absent, error.seconds)
    if isinstance(error, PeerLostError):
        return PeerLostError(text, error.ranks)
    return type(error)(text)
