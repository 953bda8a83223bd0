"""What ranks see when one of them fails, dies, leaves or stops; the job never hangs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.launching import run_ranks, start_ranks

BEGIN = """
import os, signal, sys, time
import numpy as np
import ringplug
from ringplug.backend.fusion import TensorSpec

rt = ringplug.init(timeout=float(os.environ.get("T", "30")))
rank, size = ringplug.rank(), ringplug.size()
plan = rt.plan([TensorSpec("w", (90_000,), np.dtype("f4"))], name="gradients")
array = np.ones(90_000, np.float32)
plan.run([array], [array])
assert ringplug.allreduce(1, op=ringplug.Sum) == size
"""


def left_in_shared_memory():
    return [name for name in os.listdir("/dev/shm") if "ringplug" in name]


@pytest.mark.parametrize("launcher", ["ringrun", "mpirun"])
def test_an_exception_on_one_rank_ends_all(launcher):
    code = """
if rank == 1:
    raise ValueError("this went wrong")
while True:
    plan.run([array], [array])
"""
    done = run_ranks(BEGIN + code, 3, expect=None, timeout=30, launcher=launcher)
    assert "ValueError: this went wrong" in done.stderr
    if launcher == "ringrun":
        assert "ValueError: this went wrong" in "".join(done.stderr.splitlines()[-2:])
        assert done.returncode == 1
    assert not left_in_shared_memory()


def test_an_exception_in_a_thread_ends_all():
    code = """
import threading
def work():
    raise ValueError("in a thread")
if rank == 0:
    threading.Thread(target=work).start()
time.sleep(60)
"""
    done = run_ranks(BEGIN + code, 2, expect=1, timeout=30)
    assert "ValueError: in a thread" in done.stderr


@pytest.mark.parametrize("code", [3, 1])
def test_sys_exit_is_the_exit_code(code):
    text = f"""
if rank == 1:
    sys.exit({code})
ringplug.allreduce(np.ones(3), name="never")
"""
    done = run_ranks(BEGIN + text, 2, expect=code, timeout=30)
    assert "Traceback" not in done.stderr or "rank 1" in done.stderr


def test_kill_9():
    code = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
ringplug.allreduce(np.ones(3), name="never")
"""
    done = run_ranks(BEGIN + code, 3, expect=137, timeout=30)
    assert "rank 1" in done.stderr
    assert not left_in_shared_memory()


@pytest.mark.parametrize("way", ["plan", "ready", "named", "barrier", "ring"])
def test_a_rank_that_left_is_an_error_for_those_who_wait(way):
    code = """
way = sys.argv[1]
if rank == 1:
    ringplug.shutdown()
    time.sleep(4)
    sys.exit()
try:
    if way in ("plan", "ring"):
        plan.run([array], [array])
    elif way == "ready":
        plan.ready(0, array)
        plan.finish()
    elif way == "named":
        ringplug.allreduce(np.ones(3), name="late")
    else:
        ringplug.barrier(name="late")
except ringplug.PeerLostError as error:
    assert 1 in error.ranks, error.ranks
    print("lost", error)
"""
    env = {"RINGPLUG_TRANSPORT": "ring"} if way == "ring" else {}
    done = run_ranks(BEGIN + code, 2, way, timeout=30, env=env)
    assert "rank 1 left" in done.lines(0)[-1]
    assert ("gradients" if way in ("plan", "ready", "ring") else "late") in done.lines(0)[-1]


@pytest.mark.parametrize("way", ["plan", "named"])
@pytest.mark.parametrize("transport", ["shared_memory", "ring"])
def test_a_stopped_rank_is_named(way, transport, tmp_path):
    code = """
if rank == 2:
    print("stopping", os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    if sys.argv[1] == "plan":
        plan.run([array], [array])
    else:
        ringplug.allreduce(np.ones(3), name="late")
except ringplug.StalledError as error:
    print("absent", list(error.absent), error, flush=True)
time.sleep(60)
"""
    env = {"T": "1.5", "RINGPLUG_TRANSPORT": transport}
    with start_ranks(BEGIN + code, 3, way, timeout=50, env=env, directory=tmp_path) as job:
        job.wait_for_output("absent", 2, timeout=40)
        out, _ = job.output()
        shown = [line for line in out.splitlines() if "absent" in line]
        assert any("absent [2]" in line for line in shown), out
        assert all("gradients" in line or "late" in line for line in shown)
        if transport == "shared_memory":
            assert all("absent [2]" in line for line in shown), out
        # Killed by the harness, the job could not clear up after itself.
        os.kill(job.process.pid, signal.SIGTERM)
        job.process.wait(30)


def abandoned():
    """Files in shared memory that no live process maps; other jobs on this machine map theirs."""
    names = {path for path in Path("/dev/shm").rglob("*") if path.is_file()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names = {path for path in names if str(path) not in text}
    return names


def test_nothing_is_left_in_shared_memory(tmp_path):
    before = abandoned()
    run_ranks(BEGIN + "ringplug.barrier()", 2)
    with start_ranks(
        BEGIN + "print('up', flush=True)\ntime.sleep(60)", 2, directory=tmp_path
    ) as job:
        job.wait_for_output("up", 2)
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait(10)
        job.wait_until(lambda: not job.alive(), 15, "end of the ranks")
        # Other jobs create and map theirs in two steps: what stays is what counts.
        job.wait_until(lambda: abandoned() <= before, 15, "end of its files")


def test_named_segments_are_unlinked_as_soon_as_they_are_mapped():
    """Where anonymous files cannot be shared, files with names are, for a moment."""
    code = """
import os
before = set(os.listdir("/dev/shm"))
from ringplug.backend.transport import segment
def refuse(nbytes):
    raise OSError("no anonymous files here")
segment._anonymous_file = refuse
import ringplug
import numpy as np
rt = ringplug.init(timeout=20)
assert rt.lane("x").transport.name == "shared_memory"
assert ringplug.allreduce(1, op=ringplug.Sum) == 2
left = [n for n in set(os.listdir("/dev/shm")) - before if n.startswith("ringplug")]
ringplug.barrier()
assert not left, left
print("fine")
"""
    assert run_ranks(code, 2).stdout.count("fine") == 2
    assert not [p for p in Path("/dev/shm").iterdir() if p.name.startswith("ringplug")]
