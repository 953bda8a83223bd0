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
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from ringplug.backend.compression import Compressor, get_compressor
from ringplug.backend.config import Config
from ringplug.backend.control import Control
from ringplug.backend.coordinator import MOST_KNOWN, Answer, Coordinator, error_of, memorable
from ringplug.backend.errors import (
    PeerLostError,
    RingplugError,
    ShutDownError,
    StalledError,
)
from ringplug.backend.execution import Work, neutral
from ringplug.backend.handle import Handle
from ringplug.backend.lane import Lane
from ringplug.backend.log import get_logger
from ringplug.backend.pending import Item, PendingTable
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
        self._pending = PendingTable()
        self._turn = threading.Lock()
        self._announced: dict[Request, int] = {}
        self._worker: threading.Thread | None = None
        self._starting = threading.Lock()
        self._next_check = 0.0
        self._left_at: dict[int, float] = {}
        self._withdrawn: set[str] = set()
        self._origin = control.world.origin
        self._shown = shown
        self._coordinator = Coordinator(self._origin, shown) if self._rank == 0 else None
        # A busy look for messages only pays where every rank has a core to look from.
        self._spins = _SPINS if control.world.local_size <= _cores() else 5

    def next_name(self) -> str:
        """A name for an operation without one: ranks count them."""
        return self._pending.next_name()

    def join(self) -> Handle:
        """Announce that this rank takes part in nothing more until all ranks have joined.

        It contributes neutral values to what the others reduce.

        Returns:
            A handle whose result is the rank that came last.
        """
        request = Request("join", "join", numbers=(self._pending.unnamed,))
        return self.submit(Work(request, []), background=True)

    def touch(self) -> None:
        """Begin the deadlines anew: the others are seen to be at work."""
        self._pending.touch()

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
        earlier = self._pending.get(work.request.name)
        if earlier is not None and earlier.request.refused:
            # Its caller has its error already; here it only waits for the others to hear of it.
            with contextlib.suppress(RingplugError):
                self.wait(earlier.handle)
        item = self._pending.add(work, background)
        self._shown.submitted(work.request.kind, item.handle)
        if background and self._worker is None:
            self._start_worker()
        return item.handle

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
            if pauses > self._spins:
                time.sleep(min(20e-6 * (1 + pauses - self._spins), 1e-3))
        return handle.wait()

    def close(self) -> None:
        """Fail what is pending, tell the others, wait for nobody."""
        if self._pending.closed:
            return
        for item in self._pending.close():
            item.handle.fail(ShutDownError(f"{item.request.name}: ringplug was shut down"))
        self._control.leave()
        self._lane.close()

    def ended(self, timeout: float) -> bool:
        """After `close`, wait for the worker's last operation; whether it has ended."""
        if self._worker is not None:
            self._worker.join(timeout)
        return self._worker is None or not self._worker.is_alive()

    # -- progress; only the thread that holds _turn is here

    def _start_worker(self) -> None:
        with self._starting:
            if self._worker is None:
                worker = threading.Thread(target=self._work, name="ringplug-named", daemon=True)
                worker.start()
                self._worker = worker

    def _work(self) -> None:
        while (item := self._pending.sleep()) is not None:
            # Whoever submits one operation often submits more, which can travel together.
            time.sleep(_LINGER)
            try:
                self.wait(item.handle)
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
        fresh = self._pending.take_fresh()
        if not fresh:
            return False
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
        batch: list[Item] = []
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
            item = self._pending.take(name)
            if item is None:
                if shown is None or kind:
                    continue
                item = self._stand_in(Request.decode(shown))
            if kind:
                item.handle.fail(error_of(name, kind, text, numbers))
                continue
            if item.request.kind == "join":
                self._pending.count_from(numbers[1])
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

    def _stand_in(self, request: Request) -> Item:
        """This rank has joined: what it contributes to an operation of the others."""
        self._pending.touch()
        own = self._config.compression
        codec: str | Compressor = request.codec
        if not isinstance(own, str) and own.name == codec:
            codec = own
        return Item(neutral(request, get_compressor(codec)), Handle(request.name), 0.0)

    def _run(self, batch: Sequence[Item]) -> None:
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
            for name, started in self._pending.since().items():
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
        for item in self._pending.take_older(now - self._config.timeout - _GRACE):
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
        for item in self._pending.take_all():
            item.handle.fail(error)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
