"""The transport among threads of one process: each reaches the others' arrays. Layer 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringplug.backend.buffers import Buffer, ReduceOp, fold
from ringplug.backend.config import Config
from ringplug.backend.control.threads import ThreadControl
from ringplug.backend.transport import Piece, Traffic
from ringplug.backend.transport.direct import (
    allreduce_shares,
    common,
    describe_mismatch,
    stream_through_buffer,
)

__all__ = ["ThreadTransport"]


class ThreadTransport:
    """Ranks are threads; a collective is a meeting at which they show their buffers."""

    name = "threads"

    def __init__(self, config: Config, control: ThreadControl) -> None:
        self.control = control
        self.rank = control.world.rank
        self.size = control.world.size
        self.traffic = Traffic()
        self._timeout = config.timeout

    def agree(self, signature: int, description: str) -> int:
        shown = self.control.meet((signature, description), self._timeout)
        agreed = common([sig for sig, _ in shown])
        if agreed is None:
            raise describe_mismatch([text for _, text in shown], self.control.world.origin)
        return agreed

    def barrier(self) -> None:
        self.control.meet(None, self._timeout)

    def allreduce(self, buffer: Buffer, op: ReduceOp, factor: float = 1.0) -> None:
        views = self._show(buffer)
        allreduce_shares(views, self.rank, op, factor)
        self.traffic.sent += 2 * (self.size - 1) * buffer.nbytes // self.size
        self.barrier()

    def allreduce_stream(
        self,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        factor: float,
        fill: Piece,
        drain: Piece,
    ) -> None:
        stream_through_buffer(self, count, dtype, op, factor, fill, drain)

    def reducescatter(
        self, source: Buffer, target: Buffer, op: ReduceOp, counts: Sequence[int], factor: float
    ) -> None:
        views = self._show(source)
        start = sum(counts[: self.rank])
        fold(op, [view[start : start + counts[self.rank]] for view in views], factor, target)
        self.traffic.sent += source.nbytes - target.nbytes
        self.barrier()

    def allgather(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
        np.concatenate(self._show(source), out=target)
        self.traffic.sent += (self.size - 1) * source.nbytes
        self.barrier()

    def broadcast(self, buffer: Buffer, root: int) -> None:
        views = self._show(buffer)
        if self.rank == root:
            self.traffic.sent += (self.size - 1) * buffer.nbytes
        else:
            np.copyto(buffer, views[root])
        self.barrier()

    def alltoall(
        self, source: Buffer, target: Buffer, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        shown = self.control.meet((source, list(send)), self._timeout)
        self.traffic.calls += 1
        at = 0
        for view, lengths in shown:
            start, count = sum(lengths[: self.rank]), lengths[self.rank]
            target[at : at + count] = view[start : start + count]
            at += count
        self.traffic.sent += source.nbytes - send[self.rank] * source.itemsize
        self.barrier()

    def allocate(self, nbytes: int) -> Buffer:
        return np.zeros(nbytes, np.uint8)

    def close(self) -> None:
        self.control.close()

    def _show(self, buffer: Buffer) -> list[Buffer]:
        self.traffic.calls += 1
        return self.control.meet(buffer, self._timeout)
