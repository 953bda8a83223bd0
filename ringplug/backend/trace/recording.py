"""One recording: a queue that never waits, and the thread that writes it. Layer 1."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ringplug.backend.log import get_logger
from ringplug.backend.trace.file import TraceFile
from ringplug.backend.trace.spans import Spans

__all__ = ["Recording"]

_log = get_logger(__name__)

_LIMIT = 128 * 2**20
"""Bytes of one file; viewers have trouble with several times that."""
_CAPACITY = 1 << 16
"""Entries that may wait for the writer."""
_INTERVAL = 0.02
"""Seconds in which the writer collects entries: what a killed process loses at most."""
_LINES = 256
"""Events in one write; the writer lets other threads run in between."""
_LAST_WRITE = 5.0


class Recording:
    """Takes events from any thread, at once; a thread of its own writes them.

    Args:
        path: The file.
        mark_cycles: Whether `cycle` is recorded.
        about: What the file says about this rank.
        limit: Bytes of one file; see `TraceFile`.
        capacity: Entries that may wait to be written; what comes then is counted instead.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(
        self,
        path: str,
        mark_cycles: bool,
        about: dict[str, int],
        limit: int = _LIMIT,
        capacity: int = _CAPACITY,
    ) -> None:
        self._origin = time.perf_counter_ns()
        args = {
            "name": "ringplug",
            "start_time_since_epoch_in_micros": time.time_ns() // 1000,
            **about,
        }
        header = [
            f'{{"name":"process_name","ph":"M","pid":0,"tid":0,"args":{json.dumps(args)}}}',
            '{"name":"process_sort_index","ph":"M","pid":0,"tid":0,"args":{"sort_index":0}}',
        ]
        self._file: TraceFile | None = TraceFile(path, header, limit)
        self._limit = limit
        self._mark_cycles = mark_cycles
        self._capacity = capacity
        self._spans = Spans()
        self._entries: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._last = 0
        self._dropped = 0
        self._counting = threading.Lock()
        self._asleep = False
        self._wakeup = threading.Event()
        self._closing = threading.Event()
        self._owner = os.getpid()
        self._writer = threading.Thread(target=self._work, name="ringplug-timeline", daemon=True)
        self._writer.start()

    def tick(self, name: str, kind: str, rank: int) -> None:
        """A rank asks for the operation `name`, an ``allreduce`` for example."""
        self._put(Spans.tick, name, kind, rank)

    def begin(self, name: str, kind: str, dtype: object, shape: Sequence[object]) -> None:
        """All ranks have asked for it: it is about to run."""
        self._put(Spans.begin, name, kind, dtype, shape)

    def activity(self, names: Sequence[str], what: str) -> None:
        """These operations, which have begun, now do `what`."""
        self._put(Spans.activity, names, what)

    def end(self, names: Sequence[str]) -> None:
        """These operations have ended, well or not."""
        self._put(Spans.end, names)

    def cycle(self) -> None:
        """A round in which something is done begins."""
        if self._mark_cycles:
            self._put(Spans.mark, "CYCLE_START")

    def close(self) -> None:
        """Write what is left, end what is open, let the file go."""
        if os.getpid() != self._owner:
            # A fork of the rank: neither the file nor the writer is its own.
            return
        self._closing.set()
        self._wakeup.set()
        self._writer.join(_LAST_WRITE)
        if self._writer.is_alive():
            _log.warning("timeline: the file cannot be written in time; it lacks the last events")
            return
        self._drain()
        self._spans.end_all(self._stamp(time.perf_counter_ns()))
        self._write()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _put(self, event: Callable[..., None], *args: object) -> None:
        if len(self._entries) >= self._capacity:
            with self._counting:
                self._dropped += 1
            return
        self._entries.append((time.perf_counter_ns(), event, args))
        if self._asleep:
            self._asleep = False
            self._wakeup.set()

    # -- the writer's side

    def _work(self) -> None:
        while not self._closing.is_set():
            self._wakeup.clear()
            self._asleep = True
            if not self._entries and not self._closing.is_set():
                self._wakeup.wait()
            self._asleep = False
            self._closing.wait(_INTERVAL)
            self._drain()

    def _drain(self) -> None:
        spans, entries = self._spans, self._entries
        while entries:
            while entries and len(spans.lines) < _LINES:
                at, event, args = entries.popleft()
                event(spans, self._stamp(at), *args)
            self._write()
            # The interpreter would let a waiting thread run after 5 ms only.
            time.sleep(0)
        if self._dropped:
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            now = self._stamp(time.perf_counter_ns())
            spans.end_all(now)
            spans.mark(now, "DROPPED_EVENTS", {"count": dropped})
            self._write()

    def _stamp(self, at: int) -> int:
        """Microseconds since the beginning; threads' entries may be a little out of order."""
        self._last = max(self._last, (at - self._origin) // 1000)
        return self._last

    def _write(self) -> None:
        lines, self._spans.lines = self._spans.lines, []
        if self._file is None or not lines:
            return
        try:
            self._file.append(lines)
            if self._file.full:
                self._file.make_room()
                earlier = {"file": self._file.earlier, "limit_bytes": self._limit}
                self._spans.mark(self._last, "EARLIER_EVENTS", earlier)
                self._spans.move(self._last)
                lines, self._spans.lines = self._spans.lines, []
                self._file.append(lines)
        except OSError as error:
            # Training goes on; entries are taken from the queue and forgotten.
            _log.warning("timeline: recording ends: %s", error)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
