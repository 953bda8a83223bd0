"""What happened, as balanced spans on one track per operation. Layer 1."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Spans"]

_UNNAMED = "unnamed."
"""How the names of operations begin that their callers did not name."""


class Spans:
    """Turns entries into events: one track per name, whose begins and ends always match.

    A span that begins where another one should have ended ends that one, and what ends without
    having begun is left out: a recording may begin in the middle of operations, and miss some.

    Attributes:
        lines: Events since the caller last took them, each one line of JSON.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._pids: dict[str, int] = {}
        self._open: dict[str, _Track] = {}
        self._free: dict[str, list[int]] = {}
        self._slots: dict[str, int] = {}

    def tick(self, ts: int, name: str, kind: str, rank: int) -> None:
        """A rank asks for an operation: its negotiation begins, or goes on."""
        track = self._open.get(name)
        if track is None or not track.negotiating:
            track = self._track(ts, name, kind)
            track.negotiating = True
            self._push(ts, track, f"NEGOTIATE_{kind.upper()}")
        self.lines.append(
            f'{{"ph":"X","name":"{rank}","ts":{ts},"dur":0,"pid":{track.pid},"tid":0}}'
        )

    def begin(self, ts: int, name: str, kind: str, dtype: object, shape: Sequence[object]) -> None:
        """An operation begins; what there was of it has ended."""
        track = self._open.get(name)
        if track is not None and track.negotiating:
            self._pop(ts, track)
            track.negotiating = False
        else:
            track = self._track(ts, name, kind)
        track.args = f',"args":{{"dtype":"{dtype}","shape":"{list(shape)}"}}'
        self._push(ts, track, kind.upper(), track.args)

    def activity(self, ts: int, names: Iterable[str], what: str) -> None:
        """The operations do something else from now on."""
        for name in names:
            track = self._open.get(name)
            if track is None or track.negotiating or track.spans[-1] == what:
                continue
            if len(track.spans) > 1:
                self._pop(ts, track)
            self._push(ts, track, what)

    def end(self, ts: int, names: Iterable[str]) -> None:
        """The operations have ended, or have been given up."""
        for name in names:
            track = self._open.pop(name, None)
            if track is not None:
                self._end(ts, track)

    def end_all(self, ts: int) -> None:
        """Nothing is known any longer of what is under way."""
        self.end(ts, list(self._open))

    def mark(self, ts: int, what: str, args: dict[str, Any] | None = None) -> None:
        """Something that concerns all tracks."""
        shown = "" if args is None else f',"args":{json.dumps(args)}'
        self.lines.append(f'{{"ph":"i","name":"{what}","ts":{ts},"pid":0,"tid":0,"s":"g"{shown}}}')

    def move(self, ts: int) -> None:
        """What follows goes to another file, in which open spans begin again."""
        self._pids.clear()
        for track in self._open.values():
            track.pid = self._pid(track.label)
            spans, track.spans = track.spans, []
            for depth, span in enumerate(spans):
                self._push(ts, track, span, "" if depth or track.negotiating else track.args)

    def _track(self, ts: int, name: str, kind: str) -> _Track:
        """A track on which nothing is open, for this operation."""
        track = self._open.get(name)
        if track is not None:
            self._end(ts, track)
        slot, label = 0, f"{kind}.{name}"
        if name == kind or name.startswith(f"{kind}."):
            label = name
        if name.startswith(_UNNAMED):
            # No name comes twice: tracks are as many as operations are at once.
            free = self._free.setdefault(kind, [])
            slot = heapq.heappop(free) if free else self._slots.get(kind, 0) + 1
            self._slots[kind] = max(slot, self._slots.get(kind, 0))
            label = f"{kind}.noname.{slot}"
        track = self._open[name] = _Track(label, kind, slot, self._pid(label))
        return track

    def _pid(self, label: str) -> int:
        pid = self._pids.get(label)
        if pid is None:
            pid = self._pids[label] = len(self._pids) + 1
            head = f'"ph":"M","pid":{pid},"tid":0'
            self.lines += [
                f'{{"name":"process_name",{head},"args":{{"name":{json.dumps(label)}}}}}',
                f'{{"name":"process_sort_index",{head},"args":{{"sort_index":{pid}}}}}',
            ]
        return pid

    def _push(self, ts: int, track: _Track, span: str, args: str = "") -> None:
        track.spans.append(span)
        self.lines.append(f'{{"ph":"B","name":"{span}","ts":{ts},"pid":{track.pid},"tid":0{args}}}')

    def _pop(self, ts: int, track: _Track, args: str = "") -> None:
        track.spans.pop()
        self.lines.append(f'{{"ph":"E","ts":{ts},"pid":{track.pid},"tid":0{args}}}')

    def _end(self, ts: int, track: _Track) -> None:
        while track.spans:
            self._pop(ts, track, track.args if len(track.spans) == 1 else "")
        if track.slot:
            heapq.heappush(self._free[track.kind], track.slot)


class _Track:
    """What is open of one operation."""

    __slots__ = ("args", "kind", "label", "negotiating", "pid", "slot", "spans")

    def __init__(self, label: str, kind: str, slot: int, pid: int) -> None:
        self.label, self.kind, self.slot, self.pid = label, kind, slot, pid
        self.spans: list[str] = []
        self.args = ""
        self.negotiating = False
