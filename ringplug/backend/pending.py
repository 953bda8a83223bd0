"""One rank's named operations that have no outcome yet; for any thread. Layer 5."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from ringplug.backend.errors import NotInitializedError, UsageError
from ringplug.backend.execution import Work
from ringplug.backend.handle import Handle
from ringplug.backend.request import Request

__all__ = ["Item", "PendingTable"]


@dataclass(slots=True)
class Item:
    """One operation: what was asked for, its outcome, and since when it is waited for."""

    work: Work
    handle: Handle
    since: float

    @property
    def request(self) -> Request:
        """What the other ranks hear."""
        return self.work.request


class PendingTable:
    """The operations that have no outcome yet, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakeup = threading.Condition(self._lock)
        self._items: dict[str, Item] = {}
        self._fresh: list[Request] = []
        self._unwatched = False
        self._closed = False
        self._unnamed = 0

    def next_name(self) -> str:
        """A name for an operation without one: ranks count them."""
        with self._lock:
            self._unnamed += 1
            return f"unnamed.{self._unnamed}"

    @property
    def unnamed(self) -> int:
        """How many operations without a name there were."""
        return self._unnamed

    def count_from(self, unnamed: int) -> None:
        """Go on counting from the highest of all ranks' numbers."""
        with self._lock:
            self._unnamed = max(self._unnamed, unnamed)

    def add(self, work: Work, background: bool) -> Item:
        """A new operation.

        Args:
            work: What is asked for.
            background: Whether to wake the worker.

        Raises:
            UsageError: One of that name is there already.
            NotInitializedError: After `close`.
        """
        name = work.request.name
        with self._lock:
            if self._closed:
                raise NotInitializedError(f"{name}: ringplug was shut down")
            if name in self._items:
                raise UsageError(
                    f"{name} is already pending on this rank: give each operation in flight a "
                    "name of its own, or wait for the first"
                )
            item = self._items[name] = Item(work, Handle(name), time.monotonic())
            self._fresh.append(work.request)
            if background and not self._unwatched:
                self._unwatched = True
                self._wakeup.notify()
        return item

    def get(self, name: str) -> Item | None:
        """The operation of that name."""
        return self._items.get(name)

    def take(self, name: str) -> Item | None:
        """The same, which leaves the table."""
        with self._lock:
            return self._items.pop(name, None)

    def take_fresh(self) -> list[Request]:
        """What was added since the last call."""
        if not self._fresh:
            return []
        with self._lock:
            fresh, self._fresh = self._fresh, []
        return fresh

    def take_older(self, limit: float) -> list[Item]:
        """What is waited for since before `limit`; leaves the table."""
        with self._lock:
            late = [item for item in self._items.values() if item.since < limit]
            for item in late:
                del self._items[item.request.name]
        return late

    def take_all(self) -> list[Item]:
        """Everything; leaves the table."""
        with self._lock:
            items, self._items = list(self._items.values()), {}
            self._fresh = []
        return items

    def since(self) -> dict[str, float]:
        """Since when each operation is waited for."""
        with self._lock:
            return {name: item.since for name, item in self._items.items()}

    def touch(self) -> None:
        """Begin all deadlines anew."""
        with self._lock:
            for item in self._items.values():
                item.since = time.monotonic()

    def close(self) -> list[Item]:
        """Refuse what comes; returns what was there."""
        with self._lock:
            self._closed = True
            self._wakeup.notify_all()
        return self.take_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def sleep(self) -> Item | None:
        """For the worker: wait until an operation was added in the background.

        Returns:
            Some operation; None after `close`.
        """
        with self._lock:
            while not (self._unwatched and self._items) and not self._closed:
                self._unwatched = False
                self._wakeup.wait()
            return None if self._closed else next(iter(self._items.values()))
