"""The control plane over MPI; the only file that imports mpi4py. Layer 2.

MPI is initialised here, inside `ringplug.init()`, never at import: a child process that
imports a training script must not join the job as a second copy of its parent's rank.
"""

from __future__ import annotations

import platform
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402 - rc must be set first

from ringplug.backend.buffers import Buffer, as_bytes  # noqa: E402
from ringplug.backend.config import Config  # noqa: E402
from ringplug.backend.control import Pending  # noqa: E402
from ringplug.backend.errors import (  # noqa: E402
    ConfigError,
    PeerLostError,
    StalledError,
    TransportError,
    UsageError,
)
from ringplug.backend.stall import Wait, name_ranks  # noqa: E402
from ringplug.backend.world import World  # noqa: E402

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

__all__ = ["MpiControl"]

_CHUNK = 2**30
"""Largest message: Open MPI refuses counts beyond 2**31 - 1."""
_POST, _BYE, _HEAD, _BODY, _JOIN, _DATA = 1, 2, 3, 4, 5, 16
_ANSWER_GRACE = 5.0

_initialized_here = False


class _Requests:
    """Several MPI requests that make up one send or receive."""

    __slots__ = ("_buffer", "_requests")

    def __init__(self, requests: list[Request], buffer: Any) -> None:
        self._requests = requests
        self._buffer = buffer

    def done(self) -> bool:
        requests = self._requests
        while requests:
            try:
                if not requests[-1].Test():
                    return False
            except MPI.Exception as error:
                raise TransportError(f"MPI: {error}") from error
            requests.pop()
        return True

    def cancel(self) -> None:
        for request in self._requests:
            request.Cancel()
        _abandoned.append(self)


_abandoned: list[_Requests] = []
"""Cancelled traffic, kept alive because MPI may still touch its memory."""


def _initialize() -> None:
    global _initialized_here  # noqa: PLW0603 - MPI itself is one per process
    if MPI.Is_finalized():
        raise UsageError("MPI was finalised in this process; it cannot be started again")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _initialized_here = True


def _part_of_world(ranks: list[int]) -> Intracomm:
    world = MPI.COMM_WORLD
    if world.Get_rank() not in ranks or len(set(ranks)) < len(ranks):
        raise UsageError(f"comm={ranks} must name rank {world.Get_rank()} and no rank twice")
    if not all(0 <= rank < world.Get_size() for rank in ranks):
        raise UsageError(f"comm={ranks}: MPI's world has ranks 0..{world.Get_size() - 1}")
    return world.Create_group(world.Get_group().Incl(ranks))


def _wait_request(request: Request, what: str, timeout: float) -> None:
    start = time.monotonic()
    while not request.Test():
        if time.monotonic() - start > timeout:
            raise StalledError(
                f"{what}: not all ranks came within {timeout:g} s", what=what, seconds=timeout
            )
        time.sleep(0.0005)


class MpiControl:
    """One private MPI communicator."""

    name = "mpi"

    def __init__(
        self, comm: Intracomm, world: World, host_names: Sequence[str], config: Config
    ) -> None:
        self.world = world
        self._comm = comm
        self._names = list(host_names)
        self._config = config
        self._departed: set[int] = set()
        self._posted: list[Request] = []

    @classmethod
    def open(
        cls, config: Config, comm: Intracomm | list[int] | None, expected: int | None
    ) -> MpiControl:
        """Start MPI if need be and make a private communicator.

        Args:
            config: The settings.
            comm: What to duplicate, or the ranks of COMM_WORLD that take part; all by default.
            expected: The size that it must have, if known.
        """
        _initialize()
        parent = comm if isinstance(comm, MPI.Intracomm) else MPI.COMM_WORLD
        if isinstance(comm, list):
            parent = _part_of_world(comm)
        size, rank = parent.Get_size(), parent.Get_rank()
        if expected is not None and expected != size:
            vendor = " ".join(str(part) for part in MPI.get_vendor())
            raise ConfigError(
                f"{expected} processes were launched, but MPI sees a world of {size}: the "
                f"launcher and the MPI library do not belong together. Library: {vendor}, "
                f"interpreter: {sys.executable}. Start with the mpirun beside this interpreter, "
                "or with ringrun, which finds it (ringrun --check tells more)"
            )
        private, request = parent.Idup()
        _wait_request(request, "init", config.start_timeout)
        private.Set_errhandler(MPI.ERRORS_RETURN)
        local = private.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
        lowest = local.bcast(rank)
        local.Free()
        name = f"{config.host_id}/{platform.node()}/{lowest}"
        control = cls(private, World.from_hosts(rank, [name] * size), [name] * size, config)
        names = control.exchange(name.encode(), config.start_timeout)
        control._names = [other.decode() for other in names]
        control.world = World.from_hosts(rank, control._names)
        return control

    def exchange(self, payload: bytes, timeout: float) -> list[bytes]:
        if self.world.size == 1:
            return [payload]
        if self.world.rank == 0:
            return self._collect(payload, timeout)
        self._send(struct.pack("<q", len(payload)), 0, _HEAD)
        self._send(payload, 0, _BODY)
        wait = self._waiter(lambda: [0], timeout + _ANSWER_GRACE)
        head = np.empty(1, np.int64)
        self._receive(head, 0, _HEAD, wait)
        body = np.empty(abs(int(head[0])), np.uint8)
        self._receive(body, 0, _BODY, wait)
        if head[0] < 0:
            gone, *ranks = (int(r) for r in np.frombuffer(body.tobytes(), np.int64))
            if gone:
                raise PeerLostError(f"{name_ranks(ranks)} left while others waited for it", ranks)
            raise StalledError(
                f"waited {timeout:g} s for {name_ranks(ranks)}", absent=ranks, seconds=timeout
            )
        return _unpack(body.tobytes())

    def _collect(self, payload: bytes, timeout: float) -> list[bytes]:
        parts: dict[int, bytes] = {0: payload}
        size = self.world.size
        wait = self._waiter(lambda: [r for r in range(size) if r not in parts], timeout)
        status = MPI.Status()
        while len(parts) < size:
            if not self._comm.Iprobe(MPI.ANY_SOURCE, _HEAD, status):
                try:
                    wait.pause()
                except (PeerLostError, StalledError) as error:
                    gone = isinstance(error, PeerLostError)
                    ranks = error.ranks if isinstance(error, PeerLostError) else error.absent
                    self._answer(parts, -1, np.array([gone, *ranks], np.int64).tobytes())
                    raise
                continue
            source = status.Get_source()
            head = np.empty(1, np.int64)
            self._receive(head, source, _HEAD, wait)
            body = np.empty(int(head[0]), np.uint8)
            self._receive(body, source, _BODY, wait)
            parts[source] = body.tobytes()
        everything = [parts[rank] for rank in range(size)]
        self._answer(parts, 1, _pack(everything))
        return everything

    def _answer(self, parts: dict[int, bytes], sign: int, body: bytes) -> None:
        for rank in parts:
            if rank != 0:
                self._send(struct.pack("<q", sign * len(body)), rank, _HEAD)
                self._send(body, rank, _BODY)

    def _send(self, payload: bytes, to: int, tag: int) -> None:
        self._reap()
        for chunk in _chunks(np.frombuffer(payload, np.uint8)):
            self._posted.append(self._comm.Isend([chunk, MPI.BYTE], to, tag))

    def _receive(self, buffer: Buffer, frm: int, tag: int, wait: Wait) -> None:
        chunks = _chunks(as_bytes(buffer))
        requests = [self._comm.Irecv([chunk, MPI.BYTE], frm, tag) for chunk in chunks]
        pending = _Requests(requests[::-1], buffer)
        while not pending.done():
            wait.pause()

    def post(self, to: int, payload: bytes) -> None:
        self._reap()
        self._posted.append(self._comm.Isend([payload, MPI.BYTE], to, _POST))

    def poll(self) -> tuple[int, bytes] | None:
        status = MPI.Status()
        if not self._comm.Iprobe(MPI.ANY_SOURCE, _POST, status):
            return None
        source = status.Get_source()
        payload = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([payload, MPI.BYTE], source, _POST)
        return source, bytes(payload)

    def isend(self, buffer: Buffer, to: int, tag: int = 0) -> Pending:
        chunks = _chunks(as_bytes(buffer))
        requests = [self._comm.Isend([chunk, MPI.BYTE], to, _DATA + tag) for chunk in chunks]
        return _Requests(requests[::-1], buffer)

    def irecv(self, buffer: Buffer, frm: int, tag: int = 0) -> Pending:
        chunks = _chunks(as_bytes(buffer))
        requests = [self._comm.Irecv([chunk, MPI.BYTE], frm, _DATA + tag) for chunk in chunks]
        return _Requests(requests[::-1], buffer)

    def subset(self, ranks: Sequence[int], timeout: float) -> MpiControl:
        members = list(ranks)
        if self.world.rank not in members:
            raise UsageError(f"rank {self.world.rank} is not among {members}")
        self._gather_members(members, timeout)
        group = self._comm.Get_group().Incl(members)
        comm = self._comm.Create_group(group, tag=_JOIN)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        names = [self._names[rank] for rank in members]
        origin = [self.world.origin[rank] for rank in members]
        world = World.from_hosts(members.index(self.world.rank), names, origin=origin)
        return MpiControl(comm, world, names, self._config)

    def _gather_members(self, members: list[int], timeout: float) -> None:
        """Wait, with a deadline, until all members are here: making a communicator has none."""
        first, token = members[0], np.zeros(1, np.uint8)
        others = [rank for rank in members if rank != first]
        if self.world.rank == first:
            here: set[int] = set()
            wait = self._waiter(lambda: [r for r in others if r not in here], timeout)
            for rank in others:
                self._receive(token, rank, _JOIN, wait)
                here.add(rank)
            for rank in others:
                self._send(b"\0", rank, _JOIN)
        else:
            self._send(b"\0", first, _JOIN)
            self._receive(token, first, _JOIN, self._waiter(lambda: [first], timeout + 5))

    def members(self, comm: Any) -> list[int]:
        group = comm.Get_group()
        ranks = group.Translate_ranks(None, self._comm.Get_group())
        if MPI.UNDEFINED in ranks:
            raise UsageError("a communicator with processes that are not in ringplug's world")
        return sorted(int(rank) for rank in ranks)

    def departed(self) -> frozenset[int]:
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _BYE, status):
            source = status.Get_source()
            self._comm.Recv([bytearray(1), MPI.BYTE], source, _BYE)
            self._departed.add(source)
        return frozenset(self._departed)

    def leave(self) -> None:
        for rank in range(self.world.size):
            if rank != self.world.rank:
                self._posted.append(self._comm.Isend([b"\0", MPI.BYTE], rank, _BYE))

    def close(self) -> None:
        # Freeing is collective in the standard's words and may wait for a rank that is gone;
        # a communicator that is not freed costs a few kB until the process ends.
        self._reap()

    def abort(self, code: int) -> None:
        MPI.COMM_WORLD.Abort(code)

    def finalize(self) -> None:
        if _initialized_here and MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()

    def thread_multiple(self) -> bool:
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def _reap(self) -> None:
        if self._posted:
            self._posted = [request for request in self._posted if not request.Test()]

    def _waiter(self, absent: Callable[[], Sequence[int]], timeout: float) -> Wait:
        return Wait(
            absent,
            timeout,
            self._config.stall_warning,
            self.departed,
            origin=self.world.origin,
        )


def _chunks(data: Buffer) -> list[Buffer]:
    if data.size <= _CHUNK:
        return [data]
    return [data[lo : lo + _CHUNK] for lo in range(0, data.size, _CHUNK)]


def _pack(parts: Sequence[bytes]) -> bytes:
    lengths = struct.pack(f"<{len(parts) + 1}q", len(parts), *map(len, parts))
    return lengths + b"".join(parts)


def _unpack(body: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<q", body)
    lengths = struct.unpack_from(f"<{count}q", body, 8)
    parts, at = [], 8 * (count + 1)
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    return parts
