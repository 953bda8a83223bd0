"""What a training function has to be able to commit, restore and bring to all ranks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ringplug.backend import ops, place
from ringplug.backend.errors import HostsUpdatedInterrupt

__all__ = ["HostUpdateResult", "ObjectState", "State"]


class HostUpdateResult:
    """How the hosts of a job have changed: numbers that can be combined by ``|``."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """Base class of training states.

    A subclass says what `save`, `restore` and `sync` do.

    Args:
        bcast_object: Gives every rank an object of rank 0; ringplug's by default.
        get_rank: The rank of this process; ringplug's by default.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        self._bcast_object = ops.broadcast_object if bcast_object is None else bcast_object
        self._rank = place.rank if get_rank is None else get_rank
        self._host_messages: deque[tuple[float, int]] = deque()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called before training starts over; after `reset`, in this order.

        Args:
            callbacks: Called without arguments; to scale a learning rate, for example.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Training starts over: `reset`, then the registered callbacks."""
        self._host_messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts came or went. ringplug itself never calls this, as its jobs have a fixed size.

        Args:
            timestamp: When; later ones count, each once.
            update_res: One of `HostUpdateResult`.
        """
        self._host_messages.append((timestamp, update_res))

    def commit(self) -> None:
        """`save`, and `check_host_updates`: call it now and then, on all ranks.

        What was committed last is what `restore` brings back. It costs a copy of the state.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt if this rank was told that hosts came or went.

        Without communication: whoever tells a rank has to tell all of them.

        Raises:
            HostsUpdatedInterrupt: `on_hosts_updated` was called since last time.
        """
        newest, kinds = self._last_updated_timestamp, HostUpdateResult.no_update
        while self._host_messages:
            timestamp, kind = self._host_messages.popleft()
            if timestamp > newest:
                newest, kinds = timestamp, kinds | kind
        if newest > self._last_updated_timestamp:
            self._last_updated_timestamp = newest
            raise HostsUpdatedInterrupt(kinds == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError(f"{type(self).__name__} needs a method save")

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError(f"{type(self).__name__} needs a method restore")

    def sync(self) -> None:
        """Give all ranks the state of rank 0. A collective."""
        raise NotImplementedError(f"{type(self).__name__} needs a method sync")

    def reset(self) -> None:
        """Prepare for starting over; does nothing here."""


class ObjectState(State):
    """Ordinary objects, which become attributes.

    What is saved are deep copies: changing a list in place does not change what was committed.

    Args:
        bcast_object: See `State`.
        get_rank: See `State`.
        **kwargs: The attributes and their first values, which count as saved; they can be
            pickled and copied.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keep deep copies of the attributes."""
        self._save_objects()

    def restore(self) -> None:
        """Set the attributes to copies of what was saved last."""
        self._restore_objects()

    def sync(self) -> None:
        """Give all ranks the attributes that rank 0 has now, and save them. A collective."""
        # Not save and restore: a subclass may do more in these.
        self._save_objects()
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._restore_objects()

    def _save_objects(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def _restore_objects(self) -> None:
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)
