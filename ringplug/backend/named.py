"""The named lane: operations that ranks match by name, in any order. Layer 5.

Ranks announce their requests to rank 0, which decides an order as soon as every rank has
announced a name, checks that the requests fit together, and tells all. Nothing is sent, and
nothing polls, while a rank has nothing pending. A rank that waits for a result does the
communication itself, on its own thread; a worker thread does it for results that nobody waits
for yet.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringplug.backend.buffers import Array, Buffer, ReduceOp, scale_into
from ringplug.backend.config import Config
from ringplug.backend.control import Control
from ringplug.backend.coordinator import MOST_KNOWN, Answer, Coordinator
from ringplug.backend.errors import (
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RingplugError,
    StalledError,
    UsageError,
)
from ringplug.backend.handle import Handle
from ringplug.backend.lane import Lane
from ringplug.backend.log import get_logger
from ringplug.backend.request import Request, fusable
from ringplug.backend.stall import name_ranks
from ringplug.backend.transport import Transport

__all__ = ["NamedLane"]

_log = get_logger(__name__)

_SPINS = 200
_SETTLE = 0.5
_GRACE = 5.0
"""Seconds that a rank gives rank 0 to say who is late before it says so itself."""


@dataclass(slots=True)
class _Pending:
    request: Request
    array: Array
    handle: Handle
    since: float


class NamedLane:
    """One rank's end of the named lane.

    Args:
        control: A channel of its own, for the agreement.
        lane: Where agreed operations run; nothing else may use it.
        config: Deadlines and bucket size.
    """

    def __init__(self, control: Control, lane: Lane, config: Config) -> None:
        self._control = control
        self._lane = lane
        self._config = config
        self._rank = control.world.rank
        self._size = control.world.size
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._wakeup = threading.Condition(self._lock)
        self._pending: dict[str, _Pending] = {}
        self._fresh: list[Request] = []
        self._announced: dict[Request, int] = {}
        self._unwatched = 0
        self._worker: threading.Thread | None = None
        self._closed = False
        self._next_check = 0.0
        self._left_at: dict[int, float] = {}
        self._withdrawn: set[str] = set()
        self._coordinator = Coordinator(self._size) if self._rank == 0 else None

    def submit(self, request: Request, array: Array, background: bool) -> Handle:
        """Announce one operation.

        Args:
            request: What this rank asks for.
            array: Its contiguous input; must not change until the handle is done.
            background: Whether the worker thread must make progress because the caller does
                not wait right away.

        Returns:
            A handle whose result is a new array.

        Raises:
            UsageError: An operation of that name is still pending on this rank.
            NotInitializedError: ringplug was shut down.
        """
        handle = Handle(request.name)
        earlier = self._pending.get(request.name)
        if earlier is not None and earlier.request.refused:
            # Its caller has its error already; here it only waits for the others to hear of it.
            with contextlib.suppress(RingplugError):
                self.wait(earlier.handle)
        with self._lock:
            if self._closed:
                raise NotInitializedError(f"{request.name}: ringplug was shut down")
            if request.name in self._pending:
                raise UsageError(
                    f"{request.name} is already pending on this rank: give each operation in "
                    "flight a name of its own, or wait for the first"
                )
            self._pending[request.name] = _Pending(request, array, handle, time.monotonic())
            self._fresh.append(request)
            if background:
                self._unwatched += 1
                self._ensure_worker()
                self._wakeup.notify()
        return handle

    def wait(self, handle: Handle) -> Array:
        """The handle's result; this thread communicates until it is there."""
        pauses = 0
        while not handle.done():
            if self._turn.acquire(blocking=False):
                try:
                    moved = self._step()
                finally:
                    self._turn.release()
                pauses = 0 if moved else pauses + 1
            else:
                pauses += 1
            if pauses > _SPINS:
                time.sleep(min(20e-6 * (1 + pauses - _SPINS), 1e-3))
        return handle.wait()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Fail what is pending, tell the others, wait for nobody."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending, self._pending = list(self._pending.values()), {}
            self._wakeup.notify_all()
        for item in pending:
            item.handle.fail(NotInitializedError(f"{item.request.name}: ringplug was shut down"))
        self._control.leave()
        self._lane.close()

    def join(self, timeout: float) -> bool:
        """After `close`, wait for the worker's last operation; whether it has ended."""
        if self._worker is not None:
            self._worker.join(timeout)
        return self._worker is None or not self._worker.is_alive()

    # -- progress; only the thread that holds _turn is here

    def _ensure_worker(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="ringplug-named", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                while not (self._unwatched and self._pending) and not self._closed:
                    self._unwatched = 0
                    self._wakeup.wait()
                if self._closed:
                    return
                handle = next(iter(self._pending.values())).handle
            try:
                self.wait(handle)
            except Exception:  # noqa: BLE001 - every handle has it, for its caller
                continue

    def _step(self) -> bool:
        """Announce, listen, and run what is agreed. True when anything happened."""
        try:
            moved = self._announce()
            while (message := self._control.poll()) is not None:
                moved = True
                self._hear(*message)
            if self._coordinator is not None:
                moved = self._tell(self._coordinator) or moved
            if not moved and time.monotonic() >= self._next_check:
                self._check_time()
        except Exception as error:
            self._fail_all(error)
            raise
        return moved

    def _announce(self) -> bool:
        if not self._fresh:
            return False
        with self._lock:
            fresh, self._fresh = self._fresh, []
        if self._coordinator is not None:
            for request in fresh:
                self._coordinator.enter(0, request)
            return True
        entries: list[str | int] = []
        for request in fresh:
            number = self._announced.get(request)
            if number is not None:
                # Rank 0 has seen it from here before.
                entries.append(number)
                continue
            entries.append(request.encode())
            if not request.name.startswith("unnamed.") and len(self._announced) < MOST_KNOWN:
                self._announced[request] = len(self._announced)
        self._control.post(0, json.dumps(entries).encode())
        return True

    def _hear(self, source: int, payload: bytes) -> None:
        if self._coordinator is not None:
            for entry in json.loads(payload):
                if isinstance(entry, dict):
                    self._coordinator.withdraw(source, entry["withdraw"])
                else:
                    request = self._coordinator.request(source, entry)
                    self._coordinator.enter(source, request)
        else:
            self._carry_out(json.loads(payload))

    def _tell(self, coordinator: Coordinator) -> bool:
        """Tell what is decided, and do it here too; whether anything was."""
        answers, coordinator.answers = coordinator.answers, []
        addressed, coordinator.addressed = coordinator.addressed, []
        if answers:
            payload = json.dumps(answers).encode()
            for rank in range(1, self._size):
                self._control.post(rank, payload)
            self._carry_out(answers)
        for rank, answer in addressed:
            if rank == 0:
                self._carry_out([answer])
            else:
                self._control.post(rank, json.dumps([answer]).encode())
        return bool(answers or addressed)

    def _carry_out(self, answers: Sequence[Answer]) -> None:
        batch: list[tuple[_Pending, list[int]]] = []
        nbytes = 0
        for name, kind, text, numbers in answers:
            if name in self._withdrawn:
                # About the request that was withdrawn, not about a later one of that name.
                if kind == "withdrawn":
                    self._withdrawn.discard(name)
                elif not kind:
                    # The others are about to start what this rank has given up.
                    self._lane.abandon(f"{name}: this rank gave up waiting before all came")
                continue
            with self._lock:
                item = self._pending.pop(name, None)
            if item is None:
                continue
            if kind:
                item.handle.fail(_error(kind, f"{name}: {text}", numbers))
                continue
            fits = batch and fusable(batch[-1][0].request, item.request)
            if batch and not (fits and nbytes + item.array.nbytes <= self._config.fusion_bytes):
                self._run(batch)
                batch, nbytes = [], 0
            batch.append((item, numbers))
            nbytes += item.array.nbytes
        if batch:
            self._run(batch)

    def _run(self, batch: Sequence[tuple[_Pending, list[int]]]) -> None:
        items = [item for item, _ in batch]
        try:
            if items[0].request.kind == "allreduce":
                results = self._lane.run(lambda t: _allreduce(t, items), items[0].request.name)
            else:
                (only, sizes), *_ = batch
                results = [self._lane.run(lambda t: _other(t, only, sizes), only.request.name)]
        except BaseException as error:
            for item in items:
                item.handle.fail(error)
            raise
        for item, result in zip(items, results, strict=True):
            item.handle.finish(result)

    # -- time and failure

    def _check_time(self) -> None:
        now = time.monotonic()
        self._next_check = now + 0.05
        departed = self._gone(now)
        if self._coordinator is not None:
            with self._lock:
                since = {name: item.since for name, item in self._pending.items()}
            for name, started in since.items():
                absent = self._coordinator.absent(name)
                lost = sorted(departed.intersection(absent))
                if lost:
                    self._coordinator.give_up(name, "lost", f"{name_ranks(lost)} left", lost)
                elif now - started > self._config.timeout:
                    self._coordinator.give_up(
                        name,
                        "stalled",
                        f"{name_ranks(absent)} did not submit it within {self._config.timeout:g} s",
                        absent,
                    )
                elif now - started > self._config.stall_warning:
                    self._coordinator.warn(name, absent, now - started)
            return
        if 0 in departed:
            raise PeerLostError("rank 0, which orders the operations, left the job", [0])
        with self._lock:
            limit = now - self._config.timeout - _GRACE
            late = [item for item in self._pending.values() if item.since < limit]
            for item in late:
                del self._pending[item.request.name]
        for item in late:
            # Rank 0 says who is late as soon as it waits for the same; here, it does not.
            name = item.request.name
            self._withdrawn.add(name)
            self._control.post(0, json.dumps([{"withdraw": name}]).encode())
            text = f"{name}: rank 0 did not submit it within {self._config.timeout:g} s"
            seconds = now - item.since
            item.handle.fail(StalledError(text, name, absent=[0], seconds=seconds))

    def _gone(self, now: float) -> set[int]:
        """Ranks that left long enough ago for what they sent before to have arrived."""
        for rank in self._control.departed():
            self._left_at.setdefault(rank, now)
        return {rank for rank, since in self._left_at.items() if now - since > _SETTLE}

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
            self._fresh = []
        for item in pending:
            item.handle.fail(error)


def _error(kind: str, text: str, ranks: Sequence[int]) -> RingplugError:
    if kind == "mismatch":
        return MismatchError(text)
    return PeerLostError(text, ranks) if kind == "lost" else StalledError(text, absent=ranks)


def _allreduce(transport: Transport, items: Sequence[_Pending]) -> list[Array]:
    request = items[0].request
    op = ReduceOp[request.op]
    factor = request.postscale / transport.size if op is ReduceOp.AVERAGE else request.postscale
    fused = np.empty(sum(item.array.size for item in items), items[0].array.dtype)
    at = 0
    parts: list[Buffer] = []
    for item in items:
        part = fused[at : at + item.array.size]
        scale_into(item.array.reshape(-1), request.prescale, part)
        parts.append(part)
        at += item.array.size
    transport.allreduce(fused, op, factor)
    if len(items) == 1:
        return [fused.reshape(items[0].array.shape)]
    return [part.copy().reshape(item.array.shape) for part, item in zip(parts, items, strict=True)]


def _other(transport: Transport, item: _Pending, sizes: Sequence[int]) -> Array:
    request, array = item.request, item.array
    if request.kind == "allgather":
        row = int(np.prod(array.shape[1:], dtype=np.int64))
        out = np.empty((sum(sizes), *array.shape[1:]), array.dtype)
        transport.allgather(array.reshape(-1), out.reshape(-1), [size * row for size in sizes])
        return out
    if request.kind == "broadcast":
        out = array.copy()
        transport.broadcast(out.reshape(-1), request.root)
        return out
    transport.barrier()
    return array
