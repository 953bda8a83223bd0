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
from typing import Any

from ringplug.backend.compression import Compressor, get_compressor
from ringplug.backend.config import Config
from ringplug.backend.control import Control
from ringplug.backend.coordinator import MOST_KNOWN, Answer, Coordinator, error_of, memorable
from ringplug.backend.errors import (
    NotInitializedError,
    PeerLostError,
    RingplugError,
    ShutDownError,
    StalledError,
    UsageError,
)
from ringplug.backend.execution import Work, neutral
from ringplug.backend.handle import Handle
from ringplug.backend.lane import Lane
from ringplug.backend.log import get_logger
from ringplug.backend.request import Request, fusable
from ringplug.backend.stall import name_ranks
from ringplug.backend.trace.operations import Operations
from ringplug.backend.traced import enact

__all__ = ["NamedLane"]

_log = get_logger(__name__)

_SPINS = 200
_SETTLE = 0.5
_LINGER = 200e-6
_GRACE = 5.0
"""Seconds that a rank gives rank 0 to say who is late before it says so itself."""


@dataclass(slots=True)
class _Pending:
    work: Work
    handle: Handle
    since: float

    @property
    def request(self) -> Request:
        return self.work.request


class NamedLane:
    """One rank's end of the named lane.

    Args:
        control: A channel of its own, for the agreement.
        lane: Where agreed operations run; nothing else may use it.
        config: Deadlines and bucket size.
        shown: What the timeline hears.
    """

    def __init__(self, control: Control, lane: Lane, config: Config, shown: Operations) -> None:
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
        self._origin = control.world.origin
        self._shown = shown
        self._coordinator = Coordinator(self._origin, shown) if self._rank == 0 else None
        self._unnamed = 0

    def next_name(self) -> str:
        """A name for an operation without one: ranks count them."""
        with self._lock:
            self._unnamed += 1
            return f"unnamed.{self._unnamed}"

    def join(self) -> Handle:
        """Announce that this rank takes part in nothing more until all ranks have joined.

        It contributes neutral values to what the others reduce.

        Returns:
            A handle whose result is the rank that came last.
        """
        with self._lock:
            request = Request("join", "join", numbers=(self._unnamed,))
        return self.submit(Work(request, []), background=True)

    def touch(self, handle: Handle) -> None:
        """Begin the deadline of an operation anew: the others are seen to be at work."""
        with self._lock:
            if handle.name in self._pending:
                self._pending[handle.name].since = time.monotonic()

    def submit(self, work: Work, background: bool) -> Handle:
        """Announce one operation.

        Args:
            work: What this rank asks for, and its data, which must not change until the handle
                is done.
            background: Whether the worker thread must make progress because the caller does
                not wait right away.

        Returns:
            A handle whose result is a list of arrays: `work.targets` or new ones.

        Raises:
            UsageError: An operation of that name is still pending on this rank.
            NotInitializedError: ringplug was shut down.
        """
        request = work.request
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
            self._pending[request.name] = _Pending(work, handle, time.monotonic())
            self._shown.submitted(request.kind, handle)
            self._fresh.append(request)
            if background:
                self._unwatched += 1
                self._ensure_worker()
                self._wakeup.notify()
        return handle

    def wait(self, handle: Handle) -> Any:
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
        return handle.wait()

    def close(self) -> None:
        """Fail what is pending, tell the others, wait for nobody."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending, self._pending = list(self._pending.values()), {}
            self._wakeup.notify_all()
        for item in pending:
            item.handle.fail(ShutDownError(f"{item.request.name}: ringplug was shut down"))
        self._control.leave()
        self._lane.close()

    def ended(self, timeout: float) -> bool:
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
            # Whoever submits one operation often submits more, which can travel together.
            time.sleep(_LINGER)
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
        entries: list[Any] = []
        for request in fresh:
            number = self._announced.get(request)
            if number is not None:
                # Rank 0 has seen it from here before.
                entries.append(number)
                continue
            entries.append(request.encode())
            if memorable(request) and len(self._announced) < MOST_KNOWN:
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
        answers, addressed = coordinator.take()
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
        batch: list[_Pending] = []
        nbytes = 0
        for name, kind, text, numbers, shown in answers:
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
                if shown is None or kind:
                    continue
                item = self._stand_in(Request.decode(shown))
            if kind:
                item.handle.fail(error_of(name, kind, text, numbers))
                continue
            if item.request.kind == "join":
                self._unnamed = max(self._unnamed, numbers[1])
                item.handle.finish(numbers[0])
                continue
            item.work.numbers = numbers
            self._shown.agreed(name, item.request.kind, item.request.dtypes, item.request.shapes)
            fits = batch and self._fusable(batch[-1].request, item.request)
            if batch and not (fits and nbytes + item.work.nbytes <= self._config.fusion_bytes):
                self._run(batch)
                batch, nbytes = [], 0
            batch.append(item)
            nbytes += item.work.nbytes
        if batch:
            self._run(batch)

    def _fusable(self, one: Request, other: Request) -> bool:
        grouped = len(one.shapes) > 1 or len(other.shapes) > 1
        return fusable(one, other) and (self._config.group_fusion or not grouped)

    def _stand_in(self, request: Request) -> _Pending:
        """This rank has joined: what it contributes to an operation of the others."""
        with self._lock:
            for item in self._pending.values():
                item.since = time.monotonic()
        own = self._config.compression
        codec: str | Compressor = request.codec
        if not isinstance(own, str) and own.name == codec:
            codec = own
        return _Pending(neutral(request, get_compressor(codec)), Handle(request.name), 0.0)

    def _run(self, batch: Sequence[_Pending]) -> None:
        works = [item.work for item in batch]
        try:
            results = self._lane.run(lambda t: enact(t, works, self._shown), works[0].request.name)
        except BaseException as error:
            for item in batch:
                item.handle.fail(error)
            raise
        for item, result in zip(batch, results, strict=True):
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
                called = self._called(absent)
                lost = self._called(sorted(departed.intersection(absent)))
                if lost:
                    self._coordinator.give_up(name, "lost", f"{name_ranks(lost)} left", lost)
                elif now - started > self._config.timeout:
                    self._coordinator.give_up(
                        name,
                        "stalled",
                        f"{name_ranks(called)} did not submit it within {self._config.timeout:g} s",
                        called,
                    )
                elif now - started > self._config.stall_warning:
                    self._coordinator.warn(name, absent, now - started)
            return
        first = self._origin[0]
        if 0 in departed:
            raise PeerLostError(f"rank {first}, which orders the operations, left", [first])
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
            text = f"{name}: rank {first} did not submit it within {self._config.timeout:g} s"
            seconds = now - item.since
            item.handle.fail(StalledError(text, name, absent=[first], seconds=seconds))

    def _called(self, ranks: Sequence[int]) -> list[int]:
        return [self._origin[rank] for rank in ranks]

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
