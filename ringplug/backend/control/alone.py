"""The control plane of a world of one. Layer 2."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from ringplug.backend.buffers import Buffer
from ringplug.backend.control import Pending
from ringplug.backend.errors import UsageError
from ringplug.backend.world import World

__all__ = ["AloneControl"]


class _Copied:
    """A send to oneself, or a receive that took it."""

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


class AloneControl:
    """One rank, which can only talk to itself."""

    name = "alone"

    def __init__(self) -> None:
        self.world = World.from_hosts(0, ["localhost"])
        self._posts: deque[bytes] = deque()
        self._sends: dict[int, deque[Buffer]] = {}

    def exchange(self, payload: bytes, timeout: float) -> list[bytes]:
        return [payload]

    def post(self, to: int, payload: bytes) -> None:
        self._posts.append(payload)

    def poll(self) -> tuple[int, bytes] | None:
        return (0, self._posts.popleft()) if self._posts else None

    def isend(self, buffer: Buffer, to: int, tag: int = 0) -> Pending:
        self._sends.setdefault(tag, deque()).append(buffer.copy())
        return _Copied()

    def irecv(self, buffer: Buffer, frm: int, tag: int = 0) -> Pending:
        if not self._sends.get(tag):
            raise UsageError("receive from oneself before the send: it would wait for ever")
        buffer[:] = self._sends[tag].popleft()
        return _Copied()

    def subset(self, ranks: Sequence[int], timeout: float) -> AloneControl:
        if tuple(ranks) != (0,):
            raise UsageError(f"this world has rank 0 only, not {list(ranks)}")
        return AloneControl()

    def members(self, comm: Any) -> list[int]:
        if comm.Get_size() != 1:
            raise UsageError(f"a communicator of {comm.Get_size()} processes in a world of one")
        return [0]

    def departed(self) -> frozenset[int]:
        return frozenset()

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self, code: int) -> None:
        sys.exit(code)

    def finalize(self) -> None:
        pass

    def thread_multiple(self) -> bool:
        return True
