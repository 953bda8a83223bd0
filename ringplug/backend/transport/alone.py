"""The transport of a group of one: every collective is the identity or a copy. Layer 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringplug.backend.buffers import Buffer, ReduceOp, convert, scale_into
from ringplug.backend.control import Control
from ringplug.backend.transport import Piece, Traffic
from ringplug.backend.transport.direct import stream_through_buffer

__all__ = ["AloneTransport"]


class AloneTransport:
    """One rank."""

    name = "alone"
    rank = 0
    size = 1

    def __init__(self, control: Control) -> None:
        self.control = control
        self.traffic = Traffic()

    def agree(self, signature: int, description: str) -> int:
        return signature

    def barrier(self) -> None:
        pass

    def allreduce(self, buffer: Buffer, op: ReduceOp, factor: float = 1.0) -> None:
        self.traffic.calls += 1
        scale_into(buffer, factor, buffer)

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
        self.traffic.calls += 1
        scale_into(source, factor, target)

    def allgather(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
        self.traffic.calls += 1
        convert(source, target)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        self.traffic.calls += 1

    def alltoall(
        self, source: Buffer, target: Buffer, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        self.traffic.calls += 1
        convert(source, target)

    def allocate(self, nbytes: int) -> Buffer:
        return np.zeros(nbytes, np.uint8)

    def close(self) -> None:
        self.control.close()
