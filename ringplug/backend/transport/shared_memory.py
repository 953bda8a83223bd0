"""The transport among processes of one host, through shared segments. Layer 3.

Each rank has one segment: a header of 64-bit words, then three staging pieces. Memory from
`allocate` lies in further segments, and an allreduce in it reduces in place (see direct.py);
ordinary memory passes through the staging pieces, copy and reduction overlapping, with one
barrier per piece.

Why three pieces are enough: a rank refills the piece of turn t at turn t + 3. It has then
passed the barrier of turn t + 1, which no rank reaches before it has read turn t.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringplug.backend.buffers import Buffer, ReduceOp, fold, split_evenly
from ringplug.backend.config import Config
from ringplug.backend.control import Control
from ringplug.backend.errors import StalledError, TransportError
from ringplug.backend.stall import Wait
from ringplug.backend.transport import JOINED, Piece, Traffic
from ringplug.backend.transport.direct import allreduce_shares, common, describe_mismatch
from ringplug.backend.transport.segment import fence, map_segments, wait_for_change, wake

__all__ = ["SharedMemoryTransport"]

_PAGE = 4096
_PIECES = 3
_SEQUENCE, _SIGNATURE, _LOCATION = 0, 8, 16
"""Words of the header. Signature and location have two places, used in turn: a rank can be
one barrier ahead of one that still reads them."""
_SPINS = 400
_EXPLAIN_SECONDS = 10.0
"""What ranks that disagree wait for each other to say so."""
_YIELD_SECONDS = 200e-6
"""Waking a sleeping core can take longer than the ranks are apart within one collective."""
_SMALL_BYTES = 16 * 1024
"""Up to here every rank reduces everything by itself, which saves the second barrier."""


class SharedMemoryTransport:
    """Ranks on one host that map each other's segments."""

    name = "shared_memory"

    def __init__(self, config: Config, control: Control) -> None:
        self.control = control
        self.rank = control.world.rank
        self.size = control.world.size
        self.traffic = Traffic()
        self._config = config
        self._peers = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        self._piece_bytes = max(_SMALL_BYTES, config.staging_bytes // 64 * 64)
        nbytes = _PAGE + _PIECES * self._piece_bytes
        segments = map_segments(control, nbytes, config.timeout)
        self._words = [segment[:_PAGE].data.cast("B").cast("q") for segment in segments]
        self._addresses = [segment.ctypes.data for segment in segments]
        self._pieces = [
            [
                segment[_PAGE + turn * self._piece_bytes :][: self._piece_bytes]
                for turn in range(_PIECES)
            ]
            for segment in segments
        ]
        self._areas: list[tuple[int, int, list[Buffer]]] = []
        self._sequence = 0
        self._turn = 0
        # A busy look at the others' words only pays where every rank has a core to look from.
        self._spins = _SPINS if self.size <= _cores() else 10

    # -- agreement and order

    def agree(self, signature: int, description: str) -> int:
        place = _SIGNATURE + (self._sequence + 1) % 2
        # With the barrier's number in it: what an earlier call left must not look like consent.
        stamp = self._sequence + 1
        word = signature ^ stamp
        self._words[self.rank][place] = word
        self.barrier()
        if signature != JOINED and all(self._words[peer][place] == word for peer in self._peers):
            return signature
        agreed = common([words[place] ^ stamp for words in self._words])
        if agreed is None:
            limit = min(self._config.timeout, _EXPLAIN_SECONDS)
            try:
                shown = self.control.exchange(description.encode(), limit)
            except StalledError as error:
                raise TransportError(
                    "ranks are in different operations: this one is about to do "
                    f"{description.splitlines()[0]}, others are in the middle of something else"
                ) from error
            texts = [text.decode() for text in shown]
            raise describe_mismatch(texts, self.control.world.origin)
        return agreed

    def barrier(self) -> None:
        self._sequence = sequence = self._sequence + 1
        fence()
        self._words[self.rank][_SEQUENCE] = sequence
        wake(self._addresses[self.rank])
        for peer in self._peers:
            if self._words[peer][_SEQUENCE] < sequence:
                self._wait_for(peer, sequence)
        fence()

    def _wait_for(self, peer: int, sequence: int) -> None:
        words = self._words[peer]
        for _ in range(self._spins):
            if words[_SEQUENCE] >= sequence:
                return
        until = time.perf_counter() + _YIELD_SECONDS
        while time.perf_counter() < until:
            # Gives the core and the interpreter to whoever can use them.
            time.sleep(0)
            if words[_SEQUENCE] >= sequence:
                return
        wait = Wait(
            lambda: [p for p in self._peers if self._words[p][_SEQUENCE] < sequence],
            self._config.timeout,
            self._config.stall_warning,
            self.control.departed,
            spins=0,
            origin=self.control.world.origin,
        )
        address = self._addresses[peer]
        while (seen := words[_SEQUENCE]) < sequence:
            wait.pause(lambda _, seen=seen: wait_for_change(address, seen, 0.05))  # type: ignore[misc]

    # -- collectives

    def allreduce(self, buffer: Buffer, op: ReduceOp, factor: float = 1.0) -> None:
        self.traffic.calls += 1
        if buffer.nbytes <= _SMALL_BYTES:
            self._allreduce_small(buffer, op, factor)
            return
        self.traffic.sent += 2 * (self.size - 1) * buffer.nbytes // self.size
        views = self._locate(buffer)
        if views is None:
            self._allreduce_staged(buffer, op, factor)
        else:
            allreduce_shares(views, self.rank, op, factor)
            self.barrier()

    def _allreduce_small(self, buffer: Buffer, op: ReduceOp, factor: float) -> None:
        if buffer.size:
            views = self._fill(buffer)
            self.barrier()
            fold(op, views, factor, buffer)
            self.traffic.sent += (self.size - 1) * buffer.nbytes

    def _allreduce_staged(self, buffer: Buffer, op: ReduceOp, factor: float) -> None:
        def fill(piece: Buffer, place: slice) -> None:
            np.copyto(piece, buffer[place])

        def drain(piece: Buffer, place: slice) -> None:
            np.copyto(buffer[place], piece)

        self._stream(buffer.size, buffer.dtype, op, factor, fill, drain)

    def allreduce_stream(
        self,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        factor: float,
        fill: Piece,
        drain: Piece,
    ) -> None:
        self.traffic.calls += 1
        self.traffic.sent += 2 * (self.size - 1) * count * dtype.itemsize // self.size
        if count:
            self._stream(count, dtype, op, factor, fill, drain)

    def _stream(
        self,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        factor: float,
        fill: Piece,
        drain: Piece,
    ) -> None:
        pieces = list(self._cut(count, dtype.itemsize))

        def load(place: slice) -> list[Buffer]:
            views = self._views(place.stop - place.start, dtype)
            fill(views[self.rank], place)
            return views

        following = load(pieces[0])
        self.barrier()
        for index, place in enumerate(pieces):
            views = following
            shares = split_evenly(place.stop - place.start, self.size)
            share = shares[self.rank]
            own = views[self.rank][share]
            fold(op, [own, *(views[peer][share] for peer in self._peers)], factor, own)
            if index + 1 < len(pieces):
                following = load(pieces[index + 1])
            self.barrier()
            for view, part in zip(views, shares, strict=True):
                drain(view[part], slice(place.start + part.start, place.start + part.stop))

    def reducescatter(
        self, source: Buffer, target: Buffer, op: ReduceOp, counts: Sequence[int], factor: float
    ) -> None:
        self.traffic.calls += 1
        self.traffic.sent += source.nbytes - counts[self.rank] * source.itemsize
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        for span in self._cut(max(counts), source.itemsize * self.size):
            width = span.stop - span.start
            views = self._views(width * self.size, source.dtype)
            for rank in range(self.size):
                stop = min(span.stop, counts[rank])
                if stop > span.start:
                    block = source[starts[rank] + span.start : starts[rank] + stop]
                    views[self.rank][rank * width : rank * width + block.size] = block
            self.barrier()
            size = min(span.stop, counts[self.rank]) - span.start
            if size > 0:
                at = self.rank * width
                parts = [view[at : at + size] for view in views]
                fold(op, parts, factor, target[span.start : span.start + size])

    def allgather(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
        self.traffic.calls += 1
        self.traffic.sent += (self.size - 1) * source.nbytes
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        for span in self._cut(max(counts), source.itemsize):
            views = self._views(span.stop - span.start, source.dtype)
            mine = source[span]
            views[self.rank][: mine.size] = mine
            self.barrier()
            for rank in range(self.size):
                stop = min(span.stop, counts[rank])
                if stop > span.start:
                    into = target[starts[rank] + span.start : starts[rank] + stop]
                    into[:] = views[rank][: into.size]

    def broadcast(self, buffer: Buffer, root: int) -> None:
        self.traffic.calls += 1
        if self.rank == root:
            self.traffic.sent += (self.size - 1) * buffer.nbytes
        for span in self._cut(buffer.size, buffer.itemsize):
            views = self._views(span.stop - span.start, buffer.dtype)
            if self.rank == root:
                views[root][:] = buffer[span]
            self.barrier()
            if self.rank != root:
                buffer[span] = views[root]

    def alltoall(
        self, source: Buffer, target: Buffer, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        self.traffic.calls += 1
        self.traffic.sent += source.nbytes - send[self.rank] * source.itemsize
        send_at = [sum(send[:rank]) for rank in range(self.size)]
        receive_at = [sum(receive[:rank]) for rank in range(self.size)]
        longest = np.array([max([*send, *receive])], np.int64)
        self._allreduce_small(longest, ReduceOp.MAX, 1.0)
        for span in self._cut(int(longest[0]), source.itemsize * self.size):
            width = span.stop - span.start
            views = self._views(width * self.size, source.dtype)
            for rank in range(self.size):
                stop = min(span.stop, send[rank])
                if stop > span.start:
                    block = source[send_at[rank] + span.start : send_at[rank] + stop]
                    views[self.rank][rank * width : rank * width + block.size] = block
            self.barrier()
            at = self.rank * width
            for rank in range(self.size):
                stop = min(span.stop, receive[rank])
                if stop > span.start:
                    into = target[receive_at[rank] + span.start : receive_at[rank] + stop]
                    into[:] = views[rank][at : at + into.size]

    # -- memory

    def allocate(self, nbytes: int) -> Buffer:
        if nbytes == 0:
            return np.empty(0, np.uint8)
        size = -(-nbytes // _PAGE) * _PAGE
        views = map_segments(self.control, size, self._config.timeout)
        views[self.rank][:] = 0
        self._areas.append((views[self.rank].ctypes.data, size, views))
        self.barrier()
        return views[self.rank][:nbytes]

    def close(self) -> None:
        self._areas.clear()
        self.control.close()

    def _locate(self, buffer: Buffer) -> list[Buffer] | None:
        """Every rank's buffer, when all of them lie in allocated memory; after a barrier."""
        if not self._areas:
            return None
        address = buffer.ctypes.data
        location = 0
        for index, (base, size, _) in enumerate(self._areas):
            if base <= address < base + size:
                location = (index + 1) << 44 | (address - base)
        place = _LOCATION + (self._sequence + 1) % 2
        self._words[self.rank][place] = location
        self.barrier()
        locations = [words[place] for words in self._words]
        if not all(locations):
            return None
        views = []
        for rank, where in enumerate(locations):
            area = self._areas[(where >> 44) - 1][2][rank]
            at = where & (2**44 - 1)
            views.append(area[at : at + buffer.nbytes].view(buffer.dtype))
        return views

    def _cut(self, count: int, itemsize: int) -> Iterator[slice]:
        step = max(1, self._piece_bytes // itemsize)
        for lo in range(0, count, step):
            yield slice(lo, min(lo + step, count))

    def _views(self, count: int, dtype: np.dtype[Any]) -> list[Buffer]:
        """Every rank's staging piece of the next turn, `count` elements of `dtype`."""
        self._turn += 1
        turn = self._turn % _PIECES
        nbytes = count * dtype.itemsize
        return [pieces[turn][:nbytes].view(dtype) for pieces in self._pieces]

    def _fill(self, source: Buffer) -> list[Buffer]:
        views = self._views(source.size, source.dtype)
        np.copyto(views[self.rank], source)
        return views


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
