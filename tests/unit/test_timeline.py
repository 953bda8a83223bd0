"""The timeline: what a recording writes, and that its file can be read at any time."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from ringplug.backend.coordinator import Coordinator
from ringplug.backend.errors import UsageError
from ringplug.backend.request import Request
from ringplug.backend.trace import Recording, Timeline
from ringplug.backend.trace import file as trace_file
from ringplug.backend.trace import recording as trace_recording
from ringplug.backend.trace.file import TraceFile
from ringplug.backend.trace.operations import Operations
from ringplug.backend.trace.spans import Spans
from tests.timelines import check_spans, read, story


def events_of(spans):
    return [json.loads(line) for line in spans.lines]


def record(path, **options):
    return Recording(
        str(path), options.pop("mark_cycles", False), {"rank": 0, "size": 2}, **options
    )


def whole_operation(recording, name="w", kind="allreduce"):
    recording.tick(name, kind, 0)
    recording.tick(name, kind, 1)
    recording.begin(name, kind, "float32", (2, 3))
    recording.activity([name], "QUEUE")
    recording.activity([name], f"SHARED_MEMORY_{kind.upper()}")
    recording.end([name])


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- spans: what an operation looks like


def test_an_operation_has_horovods_events():
    spans = Spans()
    spans.tick(1, "w", "allreduce", 1)
    spans.tick(2, "w", "allreduce", 0)
    spans.begin(3, "w", "allreduce", "float32", (2, 3))
    spans.activity(4, ["w"], "MEMCPY_IN_FUSION_BUFFER")
    spans.activity(5, ["w"], "RING_ALLREDUCE")
    spans.end(6, ["w"])
    about = {"dtype": "float32", "shape": "[2, 3]"}
    assert events_of(spans) == [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "allreduce.w"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "tid": 0, "args": {"sort_index": 1}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1, "pid": 1, "tid": 0},
        {"ph": "X", "name": "1", "ts": 1, "dur": 0, "pid": 1, "tid": 0},
        {"ph": "X", "name": "0", "ts": 2, "dur": 0, "pid": 1, "tid": 0},
        {"ph": "E", "ts": 3, "pid": 1, "tid": 0},
        {"ph": "B", "name": "ALLREDUCE", "ts": 3, "pid": 1, "tid": 0, "args": about},
        {"ph": "B", "name": "MEMCPY_IN_FUSION_BUFFER", "ts": 4, "pid": 1, "tid": 0},
        {"ph": "E", "ts": 5, "pid": 1, "tid": 0},
        {"ph": "B", "name": "RING_ALLREDUCE", "ts": 5, "pid": 1, "tid": 0},
        {"ph": "E", "ts": 6, "pid": 1, "tid": 0},
        {"ph": "E", "ts": 6, "pid": 1, "tid": 0, "args": about},
    ]


def test_the_same_activity_goes_on():
    spans = Spans()
    spans.tick(0, "w", "allreduce", 0)
    count = len(spans.lines)
    spans.activity(0, ["w", "unknown"], "QUEUE")
    assert len(spans.lines) == count, "nothing has begun"
    spans.begin(1, "w", "allreduce", "float32", ())
    spans.activity(2, ["w"], "QUEUE")
    count = len(spans.lines)
    spans.activity(3, ["w"], "QUEUE")
    assert len(spans.lines) == count


def test_a_track_per_name_and_kind():
    spans = Spans()
    for name, kind in [
        ("w", "allreduce"),
        ("v", "allreduce"),
        ("w", "broadcast"),
        ("w", "allreduce"),
    ]:
        spans.begin(1, name, kind, "float32", ())
        spans.end(2, [name])
    spans.begin(3, "allgather.x", "allgather", "int64", (1,))
    names = [
        e["args"]["name"]
        for e in events_of(spans)
        if e["name" if "name" in e else "ph"] == "process_name"
    ]
    assert names == ["allreduce.w", "allreduce.v", "broadcast.w", "allgather.x"]


def test_names_of_any_kind_are_valid_json():
    spans = Spans()
    name = 'a"b\\c\n\N{SNOWMAN}\udc80'
    spans.begin(1, name, "allreduce", "float32", ())
    assert events_of(spans)[0]["args"]["name"] == f"allreduce.{name}"
    assert all("\n" not in line and line.isascii() for line in spans.lines)


def test_unnamed_operations_share_few_tracks():
    spans = Spans()
    for number in range(0, 30, 3):
        names = [f"unnamed.allreduce.{number + i}" for i in range(3)]
        for name in names:
            spans.tick(number, name, "allreduce", 0)
        for name in reversed(names):
            spans.begin(number + 1, name, "allreduce", "float32", ())
        spans.end(number + 2, names[1:])
        spans.end(number + 2, names[:1])
    tracks = {e["args"]["name"] for e in events_of(spans) if e.get("name") == "process_name"}
    assert tracks == {f"allreduce.noname.{i}" for i in (1, 2, 3)}
    check_spans(events_of(spans))
    # A negotiation and its operation are on one track, also when a lower one came free meanwhile.
    spans = Spans()
    for i in range(3):
        spans.tick(1, f"unnamed.{i}", "allreduce", 0)
    spans.end(2, ["unnamed.0"])
    spans.begin(3, "unnamed.2", "allreduce", "float32", ())
    assert events_of(spans)[-1]["pid"] == 3


@pytest.mark.parametrize(
    "calls",
    [
        ["activity", "end", "tick", "end"],
        ["tick", "activity", "begin", "begin", "end", "end"],
        ["begin", "activity", "tick", "begin", "activity", "tick"],
        ["begin", "tick", "tick", "end_all"],
        ["tick", "begin", "activity", "begin"],
    ],
)
def test_whatever_is_missing_spans_match(calls):
    spans = Spans()
    ways = {
        "tick": lambda ts: spans.tick(ts, "w", "allreduce", 0),
        "begin": lambda ts: spans.begin(ts, "w", "allreduce", "float32", ()),
        "activity": lambda ts: spans.activity(ts, ["w"], "QUEUE"),
        "end": lambda ts: spans.end(ts, ["w"]),
        "end_all": spans.end_all,
    }
    for ts, call in enumerate(calls):
        ways[call](ts)
    spans.end_all(len(calls))
    check_spans(events_of(spans))


# -- the file


def test_the_file_is_an_array_after_every_write(tmp_path):
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), ['{"n":0}'], 10**9)
    wanted = [{"n": 0}]
    assert read(path) == wanted
    for number in range(1, 200):
        lines = [
            json.dumps({"n": number, "text": "x" * (number * 37 % 500)})
            for _ in range(number % 3 + 1)
        ]
        file.append(lines)
        wanted += [json.loads(line) for line in lines]
        assert read(path) == wanted
    file.close()
    assert read(path) == wanted


@pytest.fixture
def calls(monkeypatch):
    """What was written, by calls of the system, with a hook to call after each."""

    class Calls(list):
        after = staticmethod(lambda: None)

    seen, real = Calls(), os.pwrite

    def pwrite(file, data, at):
        done = real(file, data, at)
        seen.append((at, data))
        seen.after()
        return done

    monkeypatch.setattr(trace_file.os, "pwrite", pwrite)
    return seen


def test_the_file_is_whole_after_every_call_of_the_system(tmp_path, calls):
    """A kill, or a reader, comes between two of them at any place."""
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), ["{}"], 10**9)
    open_ends = []

    def after():
        try:
            read(path)
        except json.JSONDecodeError:
            open_ends.append(calls[-1])

    del calls[:]
    calls.after = after
    count = 0
    for step in range(90):
        # Some lengths end where a page does.
        lines = [json.dumps({"text": "x" * (n * 131 % 1023)}) for n in range(step % 50)]
        file.append(lines)
        count += len(lines)
    assert len(read(path)) == 1 + count
    blanks = [(at, data) for at, data in calls if not data.strip()]
    written = [(at, data) for at, data in calls if data.strip() and data != b"]"]
    assert all(at // 4096 == (at + len(data) - 1) // 4096 for at, data in written)
    # Only while the bracket moves on is there a moment without one.
    moves = [(at, data) for at, data in blanks if len(data) == 1]
    assert len(moves) > 2
    assert open_ends == moves


def test_pages_may_reach_a_reader_in_any_order(tmp_path, calls):
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), ["{}"], 10**9)
    old = path.read_bytes()
    file.append([json.dumps({"text": "x" * (n * 131 % 1023)}) for n in range(300)])
    new = path.read_bytes()
    assert len(calls) > 30
    for odd in (0, 1):
        seen = [
            (new if at // 4096 % 2 == odd else old)[at : at + 4096]
            for at in range(0, len(new), 4096)
        ]
        assert 100 < len(json.loads(b"".join(seen))) < 200


def test_a_closed_file_has_no_spaces(tmp_path):
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), ["{}"], 10**9)
    file.append(['{"a":1}', '{"b":2}'])
    file.close()
    assert path.read_bytes() == b'[\n{},\n{"a":1},\n{"b":2}\n]\n'


@pytest.mark.parametrize("way", ["short", "error"])
def test_a_full_disk_leaves_what_was_there(way, tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), ["{}"], 10**9)
    file.append(['{"a":1}'])
    real = os.pwrite

    def full(fd, data, at):
        if not data.strip():
            return real(fd, data, at)
        real(fd, data[:20], at)
        if way == "error":
            raise OSError(28, "No space left on device")
        return 20

    monkeypatch.setattr(trace_file.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        file.append(['{"much":"more than twenty bytes"}'])
    monkeypatch.undo()
    assert read(path) == [{}, {"a": 1}]
    file.append(['{"c":1}'])
    assert read(path) == [{}, {"a": 1}, {"c": 1}]


def test_a_full_file_makes_room(tmp_path):
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), ['{"head":1}'], 60)
    assert not file.full
    file.append([json.dumps({"first": "x" * 60})])
    assert file.full
    file.make_room()
    assert not file.full
    file.append(['{"second":1}'])
    assert read(path) == [{"head": 1}, {"second": 1}]
    assert read(tmp_path / "trace.earlier.json") == [{"head": 1}, {"first": "x" * 60}]
    assert b"  " not in (tmp_path / "trace.earlier.json").read_bytes()


def test_a_device_is_not_renamed():
    file = TraceFile("/dev/null", ["{}"], 1)
    file.append(["{}"])
    assert not file.full
    file.close()


# -- a recording


def test_a_recording_is_balanced_and_says_when_it_began(tmp_path):
    path = tmp_path / "trace.json"
    before = time.time_ns() // 1000
    recording = record(path, mark_cycles=True)
    for _ in range(50):
        recording.cycle()
        whole_operation(recording)
    recording.close()
    events = read(path)
    check_spans(events)
    head = events[0]
    assert (head["name"], head["ph"], head["pid"]) == ("process_name", "M", 0)
    assert before <= head["args"]["start_time_since_epoch_in_micros"] <= time.time_ns() // 1000
    assert (head["args"]["rank"], head["args"]["size"]) == (0, 2)
    assert sum(e.get("name") == "CYCLE_START" for e in events) == 50
    one = "NEGOTIATE_ALLREDUCE 0 1 / ALLREDUCE QUEUE / SHARED_MEMORY_ALLREDUCE / /"
    assert story(events, "allreduce.w") == one.split() * 50


def test_without_mark_cycles_there_are_none(tmp_path):
    recording = record(tmp_path / "trace.json")
    recording.cycle()
    recording.close()
    assert "CYCLE_START" not in (tmp_path / "trace.json").read_text()


def test_what_comes_last_is_written_at_the_end(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    monkeypatch.setattr(Recording, "_work", lambda self: None)
    recording = record(path)
    whole_operation(recording)
    recording.close()
    assert len(story(read(path), "allreduce.w")) == 10


def test_threads_record_in_an_order_that_time_has(tmp_path):
    path = tmp_path / "trace.json"
    recording = record(path)

    def work(number):
        for _ in range(300):
            whole_operation(recording, f"t{number}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording.close()
    events = read(path)
    check_spans(events)
    for number in range(4):
        assert story(events, f"allreduce.t{number}").count("ALLREDUCE") == 300


def test_stamps_never_go_back(tmp_path):
    recording = record(tmp_path / "trace.json")
    origin = recording._origin
    assert [recording._stamp(origin + us * 1000) for us in (5, 9, 7, 10)] == [5, 9, 9, 10]
    recording.close()


def test_events_reach_the_file_while_it_records(tmp_path):
    path = tmp_path / "trace.json"
    recording = record(path)
    for number in range(3):
        # The writer is asleep in between: what comes must wake it.
        wait_for(lambda: recording._asleep)
        whole_operation(recording, f"w{number}")
        wait_for(lambda n=number: f"allreduce.w{n}" in path.read_text())
        read(path)
    recording.tick("pending", "allreduce", 1)
    wait_for(lambda: "allreduce.pending" in path.read_text())
    assert read(path)[-1]["ph"] == "X"
    recording.close()
    # What was open when it ended is ended.
    assert read(path)[-1]["ph"] == "E"
    check_spans(read(path))


def test_what_does_not_fit_is_counted_and_nobody_waits(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    stop, go_on = threading.Event(), threading.Event()
    real = TraceFile.append

    def slow(self, lines):
        stop.set()
        assert go_on.wait(20)
        real(self, lines)

    monkeypatch.setattr(TraceFile, "append", slow)
    recording = record(path, capacity=60)
    whole_operation(recording)
    assert stop.wait(20)
    recording.begin("lost", "allreduce", "float32", ())
    for _ in range(20):
        whole_operation(recording)
    recording.end(["lost"])
    assert len(recording._entries) == 60
    go_on.set()
    wait_for(lambda: not recording._entries and not recording._dropped)
    whole_operation(recording)
    recording.close()
    events = read(path)
    check_spans(events)
    (at,) = [at for at, e in enumerate(events) if e.get("name") == "DROPPED_EVENTS"]
    assert events[at]["args"]["count"] == 1 + 20 * 6 + 1 - 60
    assert story(events, "allreduce.w").count("ALLREDUCE") == 1 + 10 + 1
    # What is known no longer is not shown as going on.
    check_spans(events[:at])


def test_a_long_recording_keeps_the_last_files(tmp_path):
    path = tmp_path / "trace.json"
    recording = record(path, limit=20_000)
    recording.begin("long", "broadcast", "int8", (7,))
    recording.activity(["long"], "QUEUE")
    for number in range(600):
        whole_operation(recording, f"w{number % 5}")
    recording.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.earlier.json", "trace.json"]
    last, earlier = read(path), read(tmp_path / "trace.earlier.json")
    check_spans(last)
    check_spans(earlier, ended=False)
    assert (tmp_path / "trace.json").stat().st_size < 80_000
    assert last[0] == earlier[0]
    notes = [e for e in last if e.get("name") == "EARLIER_EVENTS"]
    assert [n["args"] for n in notes] == [
        {"file": str(tmp_path / "trace.earlier.json"), "limit_bytes": 20_000}
    ]
    # The span that was open all the time is whole in the last file, with what is known of it.
    assert story(last, "broadcast.long") == ["BROADCAST", "QUEUE", "/", "/"]
    begins = [e for e in last if e.get("name") == "BROADCAST"]
    assert begins[0]["args"] == {"dtype": "int8", "shape": "[7]"}
    assert earlier[-1]["ts"] <= notes[0]["ts"]


def test_a_disk_that_fails_ends_the_recording_only(tmp_path, monkeypatch, caplog):
    recording = record(tmp_path / "trace.json")
    whole_operation(recording)

    def broken(self, lines):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(TraceFile, "append", broken)
    whole_operation(recording)
    wait_for(lambda: not recording._entries)
    for _ in range(10):
        whole_operation(recording)
    recording.close()
    assert caplog.text.count("recording ends: [Errno 5] Input/output error") == 1
    read(tmp_path / "trace.json")


def test_a_writer_that_hangs_does_not_hold_the_rank(tmp_path, monkeypatch, caplog):
    go_on = threading.Event()
    monkeypatch.setattr(trace_recording, "_LAST_WRITE", 0.05)
    monkeypatch.setattr(TraceFile, "append", lambda self, lines: go_on.wait(20))
    recording = record(tmp_path / "trace.json")
    whole_operation(recording)
    recording.close()
    assert "cannot be written in time" in caplog.text
    go_on.set()
    recording._writer.join(20)


def test_a_fork_leaves_the_file_alone(tmp_path):
    path = tmp_path / "trace.json"
    recording = record(path)
    whole_operation(recording)
    wait_for(lambda: "SHARED_MEMORY_ALLREDUCE" in path.read_text() and recording._asleep)
    before = path.read_bytes()
    pid = os.fork()
    if pid == 0:
        try:
            recording._asleep = False
            recording.begin("child", "allreduce", "float32", ())
            recording.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert path.read_bytes() == before
    whole_operation(recording)
    recording.close()
    check_spans(read(path))


# -- a named lane


def test_a_request_that_is_taken_back_negotiates_no_longer(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(0, 2)
    coordinator = Coordinator([0, 5], Operations(timeline, None))
    timeline.start(path)
    request = Request("w", "allreduce", ("float32",), ((3,),), "SUM")
    coordinator.enter(1, request)
    coordinator.withdraw(1, "w")
    # Nobody waits for this one: it comes too late, and only hears so.
    coordinator.enter(0, request)
    coordinator.enter(1, request)
    coordinator.enter(0, request)
    timeline.stop()
    said = ["NEGOTIATE_ALLREDUCE", "5", "/", "NEGOTIATE_ALLREDUCE", "5", "0", "/"]
    assert story(read(path), "allreduce.w") == said


# -- starting and stopping


def test_start_and_stop(tmp_path):
    timeline = Timeline(0, 2)
    assert timeline.recording is None
    for number in range(2):
        path = tmp_path / f"{number}.json"
        timeline.start(path)
        whole_operation(timeline.recording)
        with pytest.raises(UsageError, match=f"already, to .*{number}.json"):
            timeline.start(tmp_path / "other.json")
        timeline.stop()
        assert timeline.recording is None
        check_spans(read(path))
        assert len(story(read(path), "allreduce.w")) == 10
    with pytest.raises(ValueError, match="no timeline is being recorded"):
        timeline.stop()
    assert not (tmp_path / "other.json").exists()
    assert "ringplug-timeline" not in [thread.name for thread in threading.enumerate()]


def test_other_ranks_write_where_the_name_says_so(tmp_path):
    timeline = Timeline(1, 2)
    timeline.start(str(tmp_path / "shared.json"))
    assert timeline.recording is None
    with pytest.raises(UsageError, match="already"):
        timeline.start(str(tmp_path / "shared.json"))
    timeline.stop()
    timeline.start(str(tmp_path / "own-{rank}.json"))
    timeline.stop()
    assert [p.name for p in tmp_path.iterdir()] == ["own-1.json"]
    assert read(tmp_path / "own-1.json")[0]["args"]["rank"] == 1


@pytest.mark.parametrize("path", ["", b"bytes", "/nonexistent/x.json", "/"])
def test_a_path_that_cannot_be(path):
    timeline = Timeline(0, 1)
    with pytest.raises(UsageError, match="timeline"):
        timeline.start(path)
    assert timeline.recording is None
    with pytest.raises(UsageError, match="no timeline"):
        timeline.stop()


def test_a_pipe_without_a_reader_is_an_error_not_a_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe"):
        Timeline(0, 1).start(tmp_path / "pipe")
