"""Timelines of real ranks, and what is left of them when a job ends badly."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.checks import passed
from tests.launching import run_ranks, start_ranks
from tests.timelines import check_spans, read, story

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_recorded(ranks, tmp_path):
    passed(run_ranks(HERE / "ranks_timeline.py", ranks, tmp_path), ranks)
    events = read(tmp_path / "exit.json")
    check_spans(events)
    assert story(events, "allreduce.last")[-1] == "/"


BUSY = """
import os, signal, sys, threading, time
import numpy as np
import ringplug
from ringplug.backend.fusion import TensorSpec

way = sys.argv[1]
rt = ringplug.init()
specs = [TensorSpec(f"w{i}", (100,), np.dtype("f4")) for i in range(50)]
plan = rt.plan(specs, name="gradients")
arrays = [np.ones(100, np.float32) for _ in specs]
for step in range(10**9):
    plan.run(arrays, arrays)
    ringplug.allreduce(np.ones(3), name="loss")
    if step == 20:
        print("going", flush=True)
        if way == "kill" and rt.world.rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if way == "error" and rt.world.rank == 0:
            ringplug.broadcast_async(np.ones(3), 0, name="never")
            time.sleep(0.1)
            ringplug.allreduce_async(np.ones(3), name="loss")
            raise ValueError("this went wrong")
"""


def left(tmp_path):
    """Both ranks' events, each from a whole file."""
    found = [read(tmp_path / f"trace-{rank}.json") for rank in range(2)]
    for events in found:
        assert story(events, "allreduce.loss").count("ALLREDUCE") > 10
        assert story(events, "allreduce.w49").count("ALLREDUCE") > 10
    return found


@pytest.mark.parametrize("way", ["kill", "interrupt", "terminate"])
def test_a_job_that_ends_at_once_leaves_whole_files(way, tmp_path):
    env = {"HOROVOD_TIMELINE": str(tmp_path / "trace-{rank}.json")}
    with start_ranks(BUSY, 2, way, env=env, timeout=40, directory=tmp_path) as job:
        job.wait_for_output("going", 2)
        if way != "kill":
            # Ctrl-C reaches the launcher, and through it the ranks.
            job.process.send_signal(signal.SIGINT if way == "interrupt" else signal.SIGTERM)
        done = job.finish(40)
    assert done.returncode != 0
    for events in left(tmp_path):
        check_spans(events, ended=False)


def test_an_exception_loses_nothing(tmp_path):
    env = {"RINGPLUG_TIMELINE": str(tmp_path / "trace-{rank}.json")}
    done = run_ranks(BUSY, 2, "error", env=env, timeout=40, expect=1)
    assert "ValueError: this went wrong" in done.stderr
    events = left(tmp_path)[0]
    # Also what was pending is there, and ends where the recording ends.
    check_spans(events)
    assert story(events, "broadcast.never") == ["NEGOTIATE_BROADCAST", "0", "/"]


def test_a_file_that_cannot_be_is_an_error_of_init():
    code = """
    import ringplug
    try:
        ringplug.init()
    except ringplug.ConfigError as error:
        print("refused:", error)
    """
    env = {"HOROVOD_TIMELINE": "/nonexistent/folder/trace.json"}
    done = run_ranks(code, 1, env=env, launcher="python")
    assert "refused: timeline /nonexistent/folder/trace.json: No such file" in done.stdout
