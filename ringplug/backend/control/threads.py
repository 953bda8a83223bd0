"""The control plane among threads of one process: the engine's tests run on it. Layer 2."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Any

from ringplug.backend.buffers import Buffer, as_bytes
from ringplug.backend.control import Pending
from ringplug.backend.errors import TransportError, UsageError
from ringplug.backend.stall import Wait
from ringplug.backend.world import World

__all__ = ["Hub", "ThreadControl"]


class Hub:
    """What the threads share: meetings, and a mailbox per sender, receiver and tag."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.meetings: dict[Hashable, dict[int, Any]] = {}
        self.boxes: dict[Hashable, deque[Any]] = defaultdict(deque)
        self.left: dict[Hashable, set[int]] = defaultdict(set)

    @classmethod
    def controls(cls, size: int, hosts: Sequence[str] | None = None) -> list[ThreadControl]:
        """One control per rank of a new world of `size`, on one host unless `hosts` says."""
        hub = cls()
        names = list(hosts) if hosts else ["localhost"] * size
        return [ThreadControl(hub, ("world",), rank, names) for rank in range(size)]


class _Sent:
    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


class _Receive:
    def __init__(self, box: deque[Any], buffer: Buffer) -> None:
        self._box = box
        self._buffer: Buffer | None = buffer

    def done(self) -> bool:
        if self._buffer is not None and self._box:
            sent = self._box.popleft()
            into = as_bytes(self._buffer)
            if sent.size != into.size:
                raise TransportError(f"sent {sent.size} bytes, expected {into.size}")
            into[:] = sent
            self._buffer = None
        return self._buffer is None

    def cancel(self) -> None:
        self._buffer = None


class ThreadControl:
    """One thread's end of a channel on a hub."""

    name = "threads"

    def __init__(
        self,
        hub: Hub,
        key: tuple[Any, ...],
        rank: int,
        hosts: Sequence[str],
        origin: Sequence[int] | None = None,
    ) -> None:
        self.world = World.from_hosts(rank, hosts, origin=origin)
        self._hub = hub
        self._key = key
        self._rank = rank
        self._hosts = list(hosts)
        self._round = 0
        self._subsets: dict[tuple[int, ...], int] = defaultdict(int)

    def meet(self, value: Any, timeout: float) -> list[Any]:
        """All-gather of references: entry i is what rank i's thread passed."""
        self._round += 1
        key = (self._key, self._round)
        size = self.world.size
        with self._hub.lock:
            meeting = self._hub.meetings.setdefault(key, {})
            meeting[self._rank] = value
            self._hub.meetings.pop((self._key, self._round - 2), None)
        if len(meeting) < size:
            wait = Wait(
                lambda: [r for r in range(size) if r not in meeting],
                timeout,
                timeout,
                self.departed,
                origin=self.world.origin,
            )
            while len(meeting) < size:
                wait.pause()
        return [meeting[rank] for rank in range(size)]

    def exchange(self, payload: bytes, timeout: float) -> list[bytes]:
        return self.meet(payload, timeout)

    def post(self, to: int, payload: bytes) -> None:
        self._box("post", to).append((self._rank, payload))

    def poll(self) -> tuple[int, bytes] | None:
        box = self._box("post", self._rank)
        return box.popleft() if box else None

    def isend(self, buffer: Buffer, to: int, tag: int = 0) -> Pending:
        self._box(self._rank, to, tag).append(as_bytes(buffer).copy())
        return _Sent()

    def irecv(self, buffer: Buffer, frm: int, tag: int = 0) -> Pending:
        return _Receive(self._box(frm, self._rank, tag), buffer)

    def subset(self, ranks: Sequence[int], timeout: float) -> ThreadControl:
        members = tuple(ranks)
        if self._rank not in members:
            raise UsageError(f"rank {self._rank} is not among {list(members)}")
        self._subsets[members] += 1
        key = (*self._key, members, self._subsets[members])
        hosts = [self._hosts[rank] for rank in members]
        origin = [self.world.origin[rank] for rank in members]
        return ThreadControl(self._hub, key, members.index(self._rank), hosts, origin)

    def members(self, comm: Any) -> list[int]:
        raise UsageError(f"{comm!r}: ranks that are threads have no communicators")

    def departed(self) -> frozenset[int]:
        return frozenset(self._hub.left[self._key])

    def leave(self) -> None:
        with self._hub.lock:
            self._hub.left[self._key].add(self._rank)

    def close(self) -> None:
        pass

    def abort(self, code: int) -> None:
        self.leave()

    def finalize(self) -> None:
        pass

    def thread_multiple(self) -> bool:
        return True

    def _box(self, *parts: Hashable) -> deque[Any]:
        with self._hub.lock:
            return self._hub.boxes[(self._key, *parts)]
