from __future__ import annotations

import os
import platform

import pytest

from ringplug.launch.failure import (
    Failure,
    first,
    from_launcher,
    load,
    record,
    report,
    started,
    started_by,
)

SIGNAL = """
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 5402 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
CODE = """
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-5372@1,1]
   Exit code:    3
"""
ABORT = """
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[45068,1],1]
  Errorcode: 5
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
"""
IMPROPER = """
prterun has exited due to process rank 1 with PID 5444 on node vm exiting
improperly. There are three reasons this could occur:
"""
HYDRA = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 5725 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""


@pytest.mark.parametrize(
    ("text", "rank", "pid", "code"),
    [
        (SIGNAL, 1, 77, 137),
        (CODE, 1, 77, 3),
        (ABORT, 1, 77, 5),
        (IMPROPER, 1, 77, 1),
        (HYDRA, 0, 5725, 137),
    ],
)
def test_launchers_words(text, rank, pid, code):
    found = from_launcher(text, {0: (5725, "vm"), 1: (77, "vm")})
    assert found is not None
    assert (found.rank, found.pid, found.host, found.code) == (rank, pid, "vm", code)


def test_other_words_are_no_failure():
    assert from_launcher("a warning about rank 1", {}) is None


def test_records_come_back(tmp_path):
    started(tmp_path, 2)
    assert started_by(tmp_path) == {2: (os.getpid(), platform.node())}
    record(tmp_path, Failure(2, code=4, error="E: x", traceback="Traceback"))
    record(tmp_path, Failure(2, code=5, error="later"))
    (one,) = load(tmp_path)
    assert (one.rank, one.code, one.error, one.pid) == (2, 4, "E: x", os.getpid())
    assert one.when > 0


def test_the_first_is_the_earliest_that_no_other_has_caused():
    lost = Failure(0, when=1.0, consequence=True)
    early, late = Failure(1, when=2.0), Failure(2, when=3.0)
    assert first([late, lost, early]) is early
    assert first([lost]) is lost
    assert first([early, Failure(3, code=137)]).rank == 3
    assert first([]) is None


def test_the_report_ends_with_the_traceback():
    one = Failure(1, "vm", 7, 1, 1.0, "ValueError: boom", "Traceback ...\nValueError: boom\n")
    other = Failure(0, code=1, error="PeerLostError: rank 1 has left")
    lines = report(one, [one, other], ["noise"]).rstrip().splitlines()
    assert lines[2].startswith("ringrun: rank 1 (host vm, pid 7) failed with exit code 1, at ")
    assert lines[3] == "  then rank 0: PeerLostError: rank 1 has left"
    assert lines[-2] == "ValueError: boom"
    assert "noise" not in "".join(lines)


def test_the_report_of_a_killed_rank_shows_its_last_lines():
    text = report(Failure(1, "vm", 7, 137), [], ["step 3"])
    assert "rank 1 (host vm, pid 7) was killed by SIGKILL" in text
    assert "memory" in text
    assert "  step 3" in text
    assert "memory" not in report(Failure(1, code=139), [], [])
