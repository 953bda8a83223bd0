"""What a timeline says of named operations and plans, on real ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ringplug
from ringplug.backend import runtime
from ringplug.backend.fusion import TensorSpec
from tests.checks import check, run_checks
from tests.timelines import check_over, check_spans, read, story, tracks

FOLDER = Path(sys.argv[1])
F4 = np.dtype(np.float32)
SPECS = [TensorSpec("b", (7,), F4), TensorSpec("w", (900, 1000), F4), TensorSpec("v", (0,), F4)]
ONE = np.ones(3, np.float32)


def ticks(size):
    return [str(rank) for rank in range(size)]


def negotiated(said, size):
    """Takes a negotiation, with its ticks in any order, from the beginning of a story."""
    head, said[: size + 2] = said[: size + 2], []
    assert head[0].startswith("NEGOTIATE_"), head
    assert sorted(head[1 : size + 1]) == ticks(size), head
    assert head[size + 1] == "/", head
    return head[0]


@check
def the_environment_records_on_rank_0(rank, size):
    """Each rank may name another file, as scripts with temporary files do."""
    path = FOLDER / f"from-environment-of-{rank}.json"
    os.environ["HOROVOD_TIMELINE"] = str(path)
    os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    ringplug.init()
    ringplug.allreduce(ONE, name="test_allreduce")
    if rank == 0:
        deadline = time.monotonic() + 20
        while "MEMCPY_OUT_FUSION_BUFFER" not in path.read_text():
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.01)
        events = read(path)
        said = story(events, "allreduce.test_allreduce")
        assert negotiated(said, size) == "NEGOTIATE_ALLREDUCE"
        assert said[:2] == ["ALLREDUCE", "QUEUE"]
        assert "CYCLE_START" in [e.get("name") for e in events]
        about = events[0]["args"]
        assert abs(about["start_time_since_epoch_in_micros"] / 1e6 - time.time()) < 600
        assert (about["rank"], about["size"]) == (0, size)
    with pytest.raises(ringplug.UsageError, match="call stop_timeline"):
        ringplug.start_timeline(FOLDER / "no.json")
    ringplug.shutdown()
    assert "ringplug-timeline" not in [thread.name for thread in threading.enumerate()]
    if rank == 0:
        events = read(path)
        check_spans(events)
        (begin,) = [e for e in events if e.get("name") == "ALLREDUCE"]
        assert begin["args"] == {"dtype": "float32", "shape": "[3]"}
    assert path.exists() == (rank == 0)
    assert not (FOLDER / "no.json").exists()


@check
def dynamic_waits_for_the_program(rank, size):
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    with pytest.raises(ValueError, match="initialized"):
        ringplug.start_timeline(FOLDER / "no.json")
    with pytest.raises(ValueError, match="initialized"):
        ringplug.stop_timeline()
    os.chdir(FOLDER)
    ringplug.init(process_sets="dynamic")
    del os.environ["HOROVOD_TIMELINE"], os.environ["HOROVOD_TIMELINE_MARK_CYCLES"]
    ringplug.allreduce(ONE, name="before")
    with pytest.raises(ValueError, match="no timeline is being recorded"):
        ringplug.stop_timeline()
    for number, marks in enumerate([True, False]):
        path = FOLDER / f"dynamic-{number}.json"
        ringplug.start_timeline(str(path), mark_cycles=marks)
        with pytest.raises(ValueError, match="already"):
            ringplug.start_timeline(str(path))
        ringplug.allreduce(ONE, name="test_allreduce")
        ringplug.stop_timeline()
        ringplug.allreduce(ONE, name="after")
        if rank == 0:
            events = read(path)
            check_spans(events)
            assert "allreduce.test_allreduce" in tracks(events).values()
            assert "allreduce.after" not in path.read_text()
            assert "allreduce.before" not in path.read_text()
            assert ("CYCLE_START" in path.read_text()) == marks
    assert not (FOLDER / "DYNAMIC").exists()


@check
def every_kind_of_operation(rank, size):
    path = FOLDER / "kinds.json"
    ringplug.start_timeline(path)
    ringplug.allgather(np.ones((rank + 1, 2)), name="g")
    ringplug.broadcast(ONE, 0, name="b")
    ringplug.alltoall(np.arange(size), name="a")
    ringplug.reducescatter(np.ones((2 * size, 3)), name="r")
    ringplug.barrier(name="m")
    ringplug.grouped_allreduce([ONE, np.ones((2, 2))], name="group")
    if size == 2:
        ringplug.allreduce(np.ones(size), op=ringplug.Adasum, name="adasum")
    handles = [ringplug.allreduce_async(ONE) for _ in range(20)]
    for handle in handles:
        ringplug.synchronize(handle)
    ringplug.join()
    ringplug.allreduce(ONE, name="then")
    ringplug.stop_timeline()
    if rank:
        return
    events = read(path)
    check_spans(events)
    check_over(events, "allreduce.then")
    copied = "MEMCPY_IN_FUSION_BUFFER / SHARED_MEMORY_BCAST / MEMCPY_OUT_FUSION_BUFFER /"
    for track, wanted in {
        "allgather.g": "SHARED_MEMORY_ALLGATHER /",
        "broadcast.b": copied,
        "alltoall.a": "SHARED_MEMORY_ALLTOALL /",
        "reducescatter.r": "SHARED_MEMORY_REDUCESCATTER /",
        "barrier.m": "SHARED_MEMORY_BARRIER /",
    }.items():
        kind = track.partition(".")[0].upper()
        said = story(events, track)
        assert negotiated(said, size) == f"NEGOTIATE_{kind}"
        assert said == f"{kind} QUEUE / {wanted} /".split(), (track, said)
    group = next(
        e
        for e in events
        if e["pid"] == pid_of(events, "allreduce.group") and "args" in e and e["ph"] == "B"
    )
    assert group["args"] == {"dtype": "float32, float64", "shape": "[[3], [2, 2]]"}
    if size == 2:
        said = story(events, "allreduce.adasum")
        assert "SHARED_MEMORY_ALLGATHER" in said
        assert "MEMCPY_OUT_FUSION_BUFFER" not in said
    assert negotiated(story(events, "join"), size) == "NEGOTIATE_JOIN"
    unnamed = [name for name in tracks(events).values() if "noname" in name]
    assert 1 <= len(unnamed) <= 20
    assert sum(story(events, name).count("ALLREDUCE") for name in unnamed) == 20


def pid_of(events, track):
    (pid,) = [pid for pid, name in tracks(events).items() if name == track]
    return pid


@check
def a_plan_shows_how_its_tensors_wait_and_travel(rank, size):
    path = FOLDER / "plan.json"
    plan = runtime.current().plan(SPECS, name="gradients")
    arrays = [np.full(spec.shape, rank, spec.dtype) for spec in SPECS]
    ringplug.start_timeline(path, mark_cycles=True)
    plan.run(arrays, arrays)
    for index in (2, 1, 0):
        plan.ready(index, arrays[index])
    plan.finish()
    ringplug.allreduce(ONE, name="then")
    ringplug.stop_timeline()
    if rank:
        return
    events = read(path)
    check_spans(events)
    check_over(events, "allreduce.then")
    names = [event.get("name") for event in events]
    assert names.count("CYCLE_START") == 3
    assert names.count("NEGOTIATE_ALLREDUCE") == 1
    at_once, as_ready = steps(events, "allreduce.b")
    assert at_once[:5] == ["ALLREDUCE", "QUEUE", "/", "WAIT_FOR_DATA", "/"]
    assert at_once[-3:] == ["SHARED_MEMORY_ALLREDUCE", "/", "/"]
    order = ["MEMCPY_IN_FUSION_BUFFER", "SHARED_MEMORY_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    assert [span for span in at_once[5:-4] if span != "/"] == order
    assert (
        as_ready[:3] == ["ALLREDUCE", "WAIT_FOR_OTHER_TENSOR_DATA", "/"] or as_ready[1] == "QUEUE"
    )
    assert as_ready[-len(at_once[1:]) :] == at_once[1:]
    # This one is cut: the first bucket has a part of it, and a later one the rest.
    at_once, as_ready = steps(events, "allreduce.w")
    assert at_once.count("QUEUE") == 2
    assert at_once.count("MEMCPY_IN_FUSION_BUFFER") > 2
    assert as_ready[:3] == ["ALLREDUCE", "WAIT_FOR_OTHER_TENSOR_DATA", "/"]
    assert at_once[-1] == as_ready[-1] == "/"
    # This one has no elements, and travels in no bucket.
    assert story(events, "allreduce.v") == [
        *["ALLREDUCE", "QUEUE", "/", "/"],
        *["ALLREDUCE", "WAIT_FOR_OTHER_TENSOR_DATA", "/", "/"],
    ]
    begin, _ = [
        e
        for e in events
        if e.get("name") == "ALLREDUCE" and e["pid"] == pid_of(events, "allreduce.w")
    ]
    assert begin["args"] == {"dtype": "float32", "shape": "[900, 1000]"}


def steps(events, track):
    """The story of a track, cut where an operation begins."""
    said = story(events, track)
    starts = [at for at, name in enumerate(said) if name == "ALLREDUCE"]
    return [said[a:b] for a, b in zip(starts, [*starts[1:], len(said)], strict=True)]


@check
def failures_end_what_they_meet(rank, size):
    path = FOLDER / "failures.json"
    ringplug.start_timeline(path)
    with pytest.raises(ringplug.MismatchError):
        ringplug.allreduce(np.ones(rank + 1), name="shapes")
    ringplug.allreduce(ONE, name="shapes")
    ringplug.stop_timeline()
    if rank == 0:
        events = read(path)
        check_spans(events)
        said = story(events, "allreduce.shapes")
        negotiated(said, size)
        negotiated(said, size)
        assert said[0] == "ALLREDUCE"


@check
def process_sets_have_tracks_of_their_own(rank, size):
    path = FOLDER / "sets.json"
    members = list(range(0, size, 2))
    other = ringplug.add_process_set(members)
    ringplug.start_timeline(path)
    ringplug.allreduce_async(ONE, name="same")
    if rank in members:
        ringplug.allreduce(ONE, name="same", process_set=other)
    ringplug.barrier()
    ringplug.stop_timeline()
    ringplug.remove_process_set(other)
    if rank == 0:
        events = read(path)
        check_spans(events)
        assert negotiated(story(events, "allreduce.same"), size) == "NEGOTIATE_ALLREDUCE"
        said = story(events, f"allreduce.same in process set {other_number(events)}")
        end = said.index("/")
        assert sorted(said[1:end]) == [str(member) for member in members]
        assert said.count("ALLREDUCE") == 1


def other_number(events):
    (name,) = [name for name in tracks(events).values() if "in process set" in name]
    return int(name.rpartition(" ")[2])


@check
def it_never_changes_what_is_sent(rank, size):
    """Ranks start and stop alone, in the middle of operations; traffic is the same."""
    rt = runtime.current()
    plan = rt.plan(SPECS, name="gradients")
    arrays = [np.ones(spec.shape, spec.dtype) for spec in SPECS]
    posted = []
    control = rt.named._control
    post = control.post

    def counting(target, payload):
        posted.append((target, payload))
        post(target, payload)

    control.post = counting
    seen = []
    for recorded in (False, True):
        posted.clear()
        before = [lane.transport.traffic.sent for lane in rt._lanes]
        for step in range(12):
            if recorded and step == 3 + 2 * rank:
                ringplug.start_timeline(FOLDER / f"alone-{rank}.json", mark_cycles=True)
            ringplug.allreduce(ONE, name=f"step{step}")
            plan.run(arrays, arrays)
            if recorded and step == 9 - rank:
                ringplug.stop_timeline()
        sent = [lane.transport.traffic.sent for lane in rt._lanes]
        seen.append((sorted(posted), [b - a for a, b in zip(before, sent, strict=True)]))
    del control.post
    # The second time, names go by their numbers; so compare a third time, without.
    posted.clear()
    control.post = counting
    for step in range(12):
        ringplug.allreduce(ONE, name=f"step{step}")
    del control.post
    assert sorted(posted) == seen[1][0]
    assert seen[0][1] == seen[1][1]
    if rank == 0:
        check_spans(read(FOLDER / "alone-0.json"))


@check
def every_rank_may_write_its_own(rank, size):
    ringplug.start_timeline(FOLDER / "all-{rank}.json", mark_cycles=True)
    for _ in range(3):
        ringplug.allreduce(ONE, name="w")
    ringplug.stop_timeline()
    events = read(FOLDER / f"all-{rank}.json")
    check_spans(events)
    assert events[0]["args"]["rank"] == rank
    said = story(events, "allreduce.w")
    if rank == 0:
        negotiated(said, size)
    else:
        assert said[:3] == ["NEGOTIATE_ALLREDUCE", str(rank), "/"]
    assert said.count("SHARED_MEMORY_ALLREDUCE") == 3


@check
def what_is_recorded_at_exit_is_complete(rank, size):
    """The test that launched this reads it."""
    ringplug.start_timeline(FOLDER / "exit.json")
    ringplug.allreduce(ONE, name="last")


run_checks(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"]))
