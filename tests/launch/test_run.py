"""`ringplug.run`: a function on new ranks."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ringplug.backend.errors import RankFailedError, UnavailableError, UsageError
from ringplug.launch import run as run_module
from ringplug.launch.mpirun import root_reason
from ringplug.launch.run import run as run_as_any
from tests.launching import run_ranks, start_ranks


def run(*args, **kwargs):
    return run_as_any(*args, allow_run_as_root=True, **kwargs)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    """Each job's files are in a folder of its own, which is empty in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert list(folder.iterdir()) == []


def test_results_come_in_rank_order_and_output_to_the_callers_streams():
    base = 100

    def place(first, *, second):
        import ringplug

        ringplug.init()
        print("hello from", ringplug.rank())
        print("careful", file=sys.stderr)
        total = ringplug.allreduce(float(ringplug.rank()), op=ringplug.Sum, name="t")
        return ringplug.rank(), ringplug.size(), float(total), base + first + second

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        results = run(place, (10,), {"second": 1}, np=3)
    assert results == [(rank, 3, 3.0, 111) for rank in range(3)]
    assert sorted(out.getvalue().splitlines()) == [
        f"[{rank}] hello from {rank}" for rank in range(3)
    ]
    assert sorted(err.getvalue().splitlines()) == [f"[{rank}] careful" for rank in range(3)]


def test_variables_files_of_output_and_large_results(tmp_path):
    def work():
        import numpy as np

        print(os.environ["COLOUR"], os.environ["RINGPLUG_START_TIMEOUT"])
        return np.arange(10**6)

    first, second = run(
        work,
        num_proc=2,
        env={"COLOUR": "dark blue"},
        start_timeout="90s",
        hosts="localhost:2",
        output_filename=tmp_path / "logs",
        use_mpi=True,
        executable=sys.executable,
    )
    assert first.sum() == second.sum() == 499999500000
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text()
        assert text == "dark blue 90s\n"


def test_one_rank_is_the_default_and_a_thread_may_call():
    found = []
    thread = threading.Thread(target=lambda: found.append(run(lambda: os.getpid())))
    thread.start()
    thread.join(60)
    assert len(found[0]) == 1
    assert found[0][0] != os.getpid()


def test_hosts_alone_give_the_number_of_ranks():
    assert run(lambda: 5, hosts="localhost:2") == [5, 5]


def test_a_rank_that_raises_is_named_with_its_traceback_and_ends_the_others():
    def fail():
        import ringplug

        ringplug.init()
        if ringplug.rank() == 1:
            raise KeyError("the cause")
        time.sleep(1000)

    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(RankFailedError) as caught:
        run(fail, np=2)
    error = caught.value
    assert (error.rank, error.code) == (1, 1)
    assert error.pid > 0
    assert error.error == "KeyError: 'the cause'"
    assert error.traceback.startswith("Traceback (most recent call last)")
    assert error.traceback.rstrip().endswith("KeyError: 'the cause'")
    assert "in fail" in error.traceback
    assert "called.py" not in error.traceback
    assert str(error).startswith("rank 1 (host ")
    assert error.traceback.strip() in str(error)
    assert "====" not in str(error)
    # The error has it; it is not shown twice.
    assert err.getvalue() == ""
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.traceback) == (str(error), 1, error.traceback)


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "was killed by SIGKILL"),
        (lambda: os._exit(7), 7, "failed with exit code 7"),
        (lambda: sys.exit(3), 3, "failed with exit code 3"),
        (lambda: sys.exit("no data"), 1, "no data"),
        (lambda: sys.exit(0), 0, "ended without a result"),
    ],
)
def test_a_rank_that_ends_otherwise_is_named_too(end, code, words):
    def work():
        import ringplug

        ringplug.init()
        ringplug.barrier()
        if ringplug.rank() == 1:
            end()

    with pytest.raises(RankFailedError, match=words) as caught:
        run(work, np=2)
    assert (caught.value.rank, caught.value.code) == (1, code)


def test_what_cannot_be_pickled_is_an_error_that_says_so():
    lock = threading.Lock()
    with pytest.raises(UsageError, match="function or its arguments cannot be pickled.*lock"):
        run(lambda: lock)
    with pytest.raises(UsageError, match="cannot be pickled.*lock"):
        run(print, (lock,))
    with pytest.raises(
        RankFailedError, match="the result of rank 0, a lock, cannot be pickled"
    ) as caught:
        run(threading.Lock)
    assert caught.value.rank == 0


class _Unloadable:
    def __reduce__(self):
        return (int, ("not a number",))


def test_what_cannot_be_loaded_is_an_error_that_says_where():
    def result():
        class Unloadable:
            def __reduce__(self):
                return (int, ("not a number",))

        return Unloadable()

    with pytest.raises(UsageError, match="result of rank 0 cannot be loaded here: ValueError"):
        run(result)
    with pytest.raises(RankFailedError, match="rank 0 cannot load the function.*ValueError"):
        run(print, (_Unloadable(),))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"np": 0}, "whole number from 1 up, not 0"),
        ({"np": True}, "whole number"),
        ({"num_proc": 2.0}, "whole number"),
        ({"np": 2, "num_proc": 3}, "are the same argument"),
        ({"use_gloo": True}, "no Gloo"),
        ({"use_mpi": False}, "no other controller"),
        ({"executable": "/usr/bin/env"}, "ranks run in the interpreter of this process"),
        ({"hosts": "far.invalid:2"}, "this host only.*not on far.invalid"),
        ({"hosts": "localhost:2", "hostfile": "x"}, "cannot be combined"),
        ({"start_timeout": "soon"}, "expected a time"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_errors(arguments, message):
    with pytest.raises(UsageError, match=message):
        run(print, **arguments)


def test_root_outside_a_container_needs_leave(monkeypatch):
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.delenv(name, raising=False)
    try:
        root_reason()
    except UsageError as error:
        with pytest.raises(UsageError, match=re.escape(str(error))):
            run_as_any(lambda: 1)
    else:
        assert run_as_any(lambda: 1) == [1]


def test_errors_of_the_launch_are_errors_of_the_call(tmp_path, monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "missing.so"))
    with pytest.raises(UnavailableError, match="no MPI library can be loaded"):
        run(print)


def test_a_launcher_that_fails_is_quoted():
    with pytest.raises(
        RuntimeError, match=r"(?s)the launcher failed with exit code.*no-such-option"
    ):
        run(print, mpi_args="--no-such-option")


def test_a_rank_is_refused():
    code = """
    import ringplug
    from ringplug.launch.run import run
    for ready in (lambda: None, ringplug.init):
        ready()
        try:
            run(print)
        except ValueError as error:
            print(error)
    """
    done = run_ranks(code, 2)
    for rank in range(2):
        assert len(done.lines(rank)) == 2
        for line in done.lines(rank):
            assert f"this process is rank {rank} of a job" in line
            assert "call the function directly" in line


def test_a_script_a_module_beside_it_and_its_classes(tmp_path):
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "script.py").write_text(
        "import ringplug, sys\n"
        "import beside\n"
        "from ringplug.launch.run import run\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "def shift(point): return Point(beside.double(point.x) + len(sys.argv))\n"
        "if __name__ == '__main__':\n"
        "    ringplug.init()  # a world of one, which is no rank of a job\n"
        "    def both(point):\n"
        "        ringplug.init()\n"
        "        return shift(point), ringplug.size()\n"
        "    for result, size in run(both, (Point(4),), np=2, allow_run_as_root=True):\n"
        "        print(type(result) is Point, result.x, size)\n"
        "    print(run(beside.double, (3,), allow_run_as_root=True))\n"
    )
    done = run_ranks(tmp_path / "script.py", 1, launcher="python")
    assert done.stdout.splitlines() == ["True 9 2", "True 9 2", "[6]"]


WAITING = """
from ringplug.launch.run import run
def work():
    import os, signal, time
    import ringplug
    ringplug.init()
    if {deaf}:
        signal.signal(signal.SIGINT, lambda *_: print("not yet", flush=True))
    print("ready in", os.environ["RINGPLUG_JOB"], flush=True)
    try:
        while True: time.sleep(0.1)
    finally:
        print("saved", flush=True)
run(work, np=2, allow_run_as_root=True)
"""


def files_of(stdout):
    (name,) = set(re.findall(r"ready in (\S+)", stdout))
    return [Path(name), Path("/dev/shm") / Path(name).name]


@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_ends_all_ranks_and_is_raised(deaf, tmp_path):
    code = WAITING.format(deaf=deaf)
    with start_ranks(code, 1, launcher="python", directory=tmp_path) as job:
        job.wait_for_output("ready", 2)
        files = files_of(job.output()[0])
        assert all(path.exists() for path in files)
        job.process.send_signal(signal.SIGINT)
        done = job.finish()
    assert done.returncode == -signal.SIGINT, done.output
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.stdout.count("not yet" if deaf else "saved") == 2
    assert ("ending all ranks now" in done.stderr) == deaf
    assert not any(path.exists() for path in files)


def test_a_caller_that_is_killed_leaves_nothing(tmp_path):
    code = WAITING.format(deaf=True)
    with start_ranks(code, 1, launcher="python", directory=tmp_path) as job:
        job.wait_for_output("ready", 2)
        files = files_of(job.output()[0])
        job.process.kill()
        job.process.wait()
        job.wait_until(lambda: not job.alive(), 10, "end of all processes")
        job.wait_until(lambda: not any(path.exists() for path in files), 10, "end of all files")


def test_the_function_and_the_results_are_private_files():
    def look():
        import stat

        job = Path(os.environ["RINGPLUG_JOB"])
        return [stat.S_IMODE(path.stat().st_mode) for path in (job, job / "function")]

    assert run(look) == [[0o700, 0o600]]


def test_a_failing_stream_of_the_caller_ends_the_job(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError("no room")

    def work():
        print("line", flush=True)
        time.sleep(1000)

    monkeypatch.setattr(run_module, "_PATIENCE", 3.0)
    with contextlib.redirect_stdout(Broken()), pytest.raises(OSError, match="no room"):
        run(work)
