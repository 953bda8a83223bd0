"""Reading timelines in tests."""

from __future__ import annotations

import json
from pathlib import Path


def read(path):
    """The events of a file that must be valid JSON."""
    return json.loads(Path(path).read_text())


def tracks(events):
    """Name of each track by its pid."""
    return {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}


def story(events, track):
    """What happened on one track: names of spans and ticks as they begin, ``/`` where one ends."""
    (pid,) = [pid for pid, name in tracks(events).items() if name == track]
    return [e.get("name", "/") for e in events if e["pid"] == pid and e["ph"] in "BEX"]


def check_over(events, track):
    """Fail unless all that began on other tracks had ended when `track` began."""
    (pid,) = [pid for pid, name in tracks(events).items() if name == track]
    first = next(at for at, e in enumerate(events) if e["pid"] == pid and e["ph"] != "M")
    check_spans(events[:first])


def check_spans(events, ended=True):
    """Fail unless time goes on, and each track's begins and ends match."""
    last, depth = 0, {}
    named = tracks(events)
    for event in events:
        if event["ph"] == "M":
            continue
        assert event["ts"] >= last, event
        last = event["ts"]
        pid = event["pid"]
        assert pid in named, event
        if event["ph"] == "B":
            depth[pid] = depth.get(pid, 0) + 1
            assert depth[pid] <= 2, event
        elif event["ph"] == "E":
            depth[pid] = depth.get(pid, 0) - 1
            assert depth[pid] >= 0, event
    assert not ended or not any(depth.values()), depth
