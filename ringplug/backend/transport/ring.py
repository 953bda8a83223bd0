"""The transport between hosts: a pipelined ring over sends and receives. Layer 3.

Allreduce is reduce-scatter and allgather around a ring (Patarasuk and Yuan, 2009), in which
each rank sends 2 (N - 1) / N of the buffer. Blocks travel in segments: one is passed on as soon
as it has been added, while the next ones are still arriving.

16-bit floats are not added hop by hop, which would round N - 1 times. Every rank sends each
share straight to its owner, who adds all in float32 and rounds once: the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringplug.backend.buffers import Buffer, ReduceOp, accumulator, fold, scale_into, split_evenly
from ringplug.backend.config import Config
from ringplug.backend.control import Control, Pending
from ringplug.backend.stall import Wait
from ringplug.backend.transport import Piece, Traffic
from ringplug.backend.transport.direct import common, describe_mismatch, stream_through_buffer

__all__ = ["RingTransport"]

_SMALL_BYTES = 8 * 1024
"""Up to here everybody sends everything to everybody: one step in place of 2 (N - 1)."""
_WINDOW = 4
"""Segments that are expected at a time."""


class RingTransport:
    """Ranks anywhere that the control plane can send between."""

    name = "ring"

    def __init__(self, config: Config, control: Control) -> None:
        self.control = control
        self.rank = control.world.rank
        self.size = control.world.size
        self.traffic = Traffic()
        self._config = config
        self._right = (self.rank + 1) % self.size
        self._left = (self.rank - 1) % self.size

    # -- agreement

    def agree(self, signature: int, description: str) -> int:
        mine = np.array([signature], np.int64)
        signatures = np.empty(self.size, np.int64)
        self._gather_all(mine, signatures, [1] * self.size)
        agreed = common(signatures.tolist())
        if agreed is None:
            shown = self.control.exchange(description.encode(), self._config.timeout)
            texts = [text.decode() for text in shown]
            raise describe_mismatch(texts, self.control.world.origin)
        return agreed

    def barrier(self) -> None:
        # Dissemination: after round k every rank has heard, indirectly, from 2**k others.
        token, got = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        shift = 1
        while shift < self.size:
            frm = (self.rank - shift) % self.size
            receive = self.control.irecv(got, frm)
            send = self._send(token, (self.rank + shift) % self.size, count=False)
            self._finish([(receive, frm), (send, frm)])
            shift *= 2

    # -- collectives

    def allreduce(self, buffer: Buffer, op: ReduceOp, factor: float = 1.0) -> None:
        self.traffic.calls += 1
        if self.size == 1:
            scale_into(buffer, factor, buffer)
        elif buffer.nbytes <= _SMALL_BYTES:
            everything = np.empty(self.size * buffer.size, buffer.dtype)
            self._gather_all(buffer, everything, [buffer.size] * self.size)
            fold(op, np.split(everything, self.size), factor, buffer)
        elif accumulator(buffer.dtype, factor) != buffer.dtype:
            shares = split_evenly(buffer.size, self.size)
            own = buffer[shares[self.rank]]
            counts = [share.stop - share.start for share in shares]
            reduced = np.empty_like(own)
            self._reduce_to_owners(buffer, reduced, op, counts, factor)
            own[:] = reduced
            self._gather_all(reduced, buffer, counts)
        else:
            self._allreduce_ring(buffer, op, factor)

    def _allreduce_ring(self, buffer: Buffer, op: ReduceOp, factor: float) -> None:
        size, rank = self.size, self.rank
        blocks = split_evenly(buffer.size, size)
        segments = [list(self._cut(block, buffer.itemsize)) for block in blocks]
        # Segments as they arrive: reduced ones first, then finished ones, block by block.
        reducing = [(step, (rank - step - 1) % size) for step in range(size - 1)]
        gathering = [(step, (rank - step) % size) for step in range(size - 1)]
        arrivals = [(True, s, seg) for s, block in reducing for seg in segments[block]]
        arrivals += [(False, s, seg) for s, block in gathering for seg in segments[block]]
        sends: dict[int, Pending] = {}
        for segment in segments[rank]:
            sends[segment.start] = self._send(buffer[segment], self._right)
        longest = max((seg.stop - seg.start for block in segments for seg in block), default=0)
        scratch = [np.empty(longest, buffer.dtype) for _ in range(_WINDOW)]
        expected: deque[tuple[Pending, Buffer]] = deque()
        posted = 0
        for index, (reduce, step, segment) in enumerate(arrivals):
            while posted < len(arrivals) and posted < index + _WINDOW:
                to_reduce, _, ahead = arrivals[posted]
                if to_reduce:
                    into = scratch[posted % _WINDOW][: ahead.stop - ahead.start]
                elif ahead.start not in sends:
                    # The first phase has not sent from this place yet.
                    break
                else:
                    self._finish([(sends.pop(ahead.start), self._right)])
                    into = buffer[ahead]
                expected.append((self.control.irecv(into, self._left), into))
                posted += 1
            pending, arrived = expected.popleft()
            self._finish([(pending, self._left)])
            here = buffer[segment]
            last = step == size - 2
            if reduce:
                fold(op, [here, arrived], factor if last else 1.0, here)
            if reduce or not last:
                sends[segment.start] = self._send(here, self._right)
        self._finish([(pending, self._right) for pending in sends.values()])

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
        self._reduce_to_owners(source, target, op, counts, factor)

    def allgather(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
        self.traffic.calls += 1
        self._gather_all(source, target, counts)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        # Binomial tree, segment by segment, so that the levels work at the same time.
        self.traffic.calls += 1
        if not buffer.size:
            return
        relative = (self.rank - root) % self.size
        parent, children = _tree(relative, self.size)
        frm = (parent + root) % self.size
        segments = list(self._cut(slice(0, buffer.size), buffer.itemsize))
        sends: list[tuple[Pending, int]] = []
        receives = [] if relative == 0 else [self.control.irecv(buffer[s], frm) for s in segments]
        for index, segment in enumerate(segments):
            if receives:
                self._finish([(receives[index], frm)])
            for child in children:
                to = (child + root) % self.size
                sends.append((self._send(buffer[segment], to), to))
        self._finish(sends)

    def alltoall(
        self, source: Buffer, target: Buffer, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        self.traffic.calls += 1
        send_blocks, receive_blocks = _blocks(send), _blocks(receive)
        target[receive_blocks[self.rank]] = source[send_blocks[self.rank]]
        pending: list[tuple[Pending, int]] = []
        for shift in range(1, self.size):
            to, frm = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            if receive[frm]:
                pending.append((self.control.irecv(target[receive_blocks[frm]], frm), frm))
            if send[to]:
                pending.append((self._send(source[send_blocks[to]], to), to))
        self._finish(pending)

    def allocate(self, nbytes: int) -> Buffer:
        return np.zeros(nbytes, np.uint8)

    def close(self) -> None:
        self.control.close()

    # -- pieces of the above

    def _reduce_to_owners(
        self, source: Buffer, target: Buffer, op: ReduceOp, counts: Sequence[int], factor: float
    ) -> None:
        blocks = _blocks(counts)
        # By sender, so that the sum is added up in rank order wherever it is owned.
        parts = [np.empty(counts[self.rank], source.dtype) for _ in range(self.size)]
        parts[self.rank] = source[blocks[self.rank]]
        pending: list[tuple[Pending, int]] = []
        for shift in range(1, self.size):
            to, frm = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            if counts[self.rank]:
                pending.append((self.control.irecv(parts[frm], frm), frm))
            if counts[to]:
                pending.append((self._send(source[blocks[to]], to), to))
        self._finish(pending)
        fold(op, parts, factor, target)

    def _gather_all(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
        blocks = _blocks(counts)
        pending: list[tuple[Pending, int]] = []
        for shift in range(1, self.size):
            to, frm = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            if counts[frm]:
                pending.append((self.control.irecv(target[blocks[frm]], frm), frm))
            if source.size:
                pending.append((self._send(source, to), to))
        target[blocks[self.rank]] = source
        self._finish(pending)

    def _cut(self, block: slice, itemsize: int) -> Iterator[slice]:
        step = max(1, self._config.segment_bytes // itemsize)
        for lo in range(block.start, block.stop, step):
            yield slice(lo, min(lo + step, block.stop))

    def _send(self, buffer: Buffer, to: int, count: bool = True) -> Pending:
        if count:
            self.traffic.sent += buffer.nbytes
        return self.control.isend(buffer, to)

    def _finish(self, pending: Sequence[tuple[Pending, int]]) -> None:
        """Wait for traffic, each with the rank that it is waiting for."""
        open_ones = [(item, rank) for item, rank in pending if not item.done()]
        if not open_ones:
            return
        wait = Wait(
            lambda: sorted({rank for _, rank in open_ones}),
            self._config.timeout,
            self._config.stall_warning,
            self.control.departed,
            origin=self.control.world.origin,
        )
        try:
            while open_ones:
                wait.pause()
                open_ones = [(item, rank) for item, rank in open_ones if not item.done()]
        except BaseException:
            for item, _ in open_ones:
                item.cancel()
            raise


def _blocks(counts: Sequence[int]) -> list[slice]:
    starts = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
    return [slice(starts[rank], starts[rank + 1]) for rank in range(len(counts))]


def _tree(relative: int, size: int) -> tuple[int, list[int]]:
    """Parent and children of a rank in the binomial tree whose root is 0."""
    lowest = relative & -relative if relative else 1 << (size - 1).bit_length()
    children = []
    bit = lowest >> 1
    while bit:
        if relative + bit < size:
            children.append(relative + bit)
        bit >>= 1
    return relative - lowest if relative else 0, children
