"""Runs code on several real processes, for tests.

``run_ranks`` starts N ranks, waits for them, and gives back what they printed::

    from tests.launching import run_ranks

    def test_sum():
        done = run_ranks(
            '''
            import numpy as np
            import ringplug
            ringplug.init()
            total = ringplug.allreduce(np.ones(3, np.float32), op=ringplug.Sum)
            assert total.tolist() == [ringplug.size()] * 3
            print("total", total[0])
            ''',
            3,
        )
        assert done.stdout.count("total 3.0") == 3
        assert done.lines(1) == ["total 3.0"]          # what rank 1 printed

* Code is a string (dedented) or the path of a script; a failing ``assert`` in it fails the test
  with the output of all ranks.
* It runs with the repository on ``sys.path``, ``OMP_NUM_THREADS=1``, and as root if the tests do.
* A hang ends at `timeout` with the stacks of all threads of all ranks. Whatever happens, no
  process that was started here outlives the call, and one that outlived its launcher is an error.
* ``expect=3`` expects that exit code, ``expect=None`` accepts any that is not 0.

Run as a program, this file is the bootstrap of a rank: it arms the stack dump, then runs a script.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Completed", "Job", "run_ranks", "start_ranks"]

_REPOSITORY = Path(__file__).resolve().parent.parent
_TOKEN = "LAUNCHING_TEST_TOKEN"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_TAG = re.compile(r"^\[(\d+)\] ?")


@dataclass(frozen=True)
class Completed:
    """What a job left: its exit code, and its output with each line tagged ``[rank] ``."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both streams, for messages."""
        return f"exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def lines(self, rank: int, stream: str = "stdout") -> list[str]:
        """What one rank wrote, without the tag. Needs the launcher ``ringrun`` (the default)."""
        text = getattr(self, stream)
        found = [(_TAG.match(line), line) for line in text.splitlines()]
        return [line[tag.end() :] for tag, line in found if tag and int(tag[1]) == rank]


class Job:
    """A running job; use it in a ``with`` block, at whose end nothing of it is left alive.

    Attributes:
        process: The launcher.
    """

    def __init__(self, command: list[str], environ: dict[str, str], directory: Path) -> None:
        self._token = uuid.uuid4().hex
        self._out = (directory / f"{self._token}.out").open("w+")
        self._err = (directory / f"{self._token}.err").open("w+")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env={**environ, _TOKEN: self._token},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._out.close()
        self._err.close()

    def alive(self) -> list[int]:
        """Pids of all processes of this job, however deep, that are alive; not its zombies."""
        return _processes(f"{_TOKEN}={self._token}".encode())

    def kill(self) -> list[int]:
        """End every process of the job at once; the pids that were alive.

        The launcher goes first: ringrun's janitor then clears up, and is only killed when it
        takes too long.
        """
        killed: list[int] = []
        if self.process.poll() is None:
            killed.append(self.process.pid)
            self.process.kill()
            self.process.wait()
            deadline = time.monotonic() + 10
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        while pids := self.alive():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += pids
            time.sleep(0.02)
            self.process.poll()
        self.process.wait()
        return killed

    def output(self) -> tuple[str, str]:
        """What the job wrote so far: standard output and standard error."""
        texts = []
        for stream in (self._out, self._err):
            texts.append(Path(stream.name).read_text(errors="replace"))
        return texts[0], texts[1]

    def wait_until(
        self, condition: Callable[[], Any], timeout: float = 60.0, what: str = "a condition"
    ) -> None:
        """Poll until `condition` holds; an AssertionError with all output when it does not."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                out, err = self.output()
                raise AssertionError(
                    f"no {what} within {timeout} s; alive: {self.alive()}\n{out}\n{err}"
                )
            time.sleep(0.05)

    def wait_for_output(self, text: str, count: int = 1, timeout: float = 60.0) -> None:
        """Wait until standard output has `text` at least `count` times."""
        self.wait_until(lambda: self.output()[0].count(text) >= count, timeout, f"{text!r}")

    def finish(self, timeout: float = 60.0) -> Completed:
        """Wait for the launcher's end; it must come within `timeout` and leave no process."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the job did not end within {timeout} s\n{Completed(-9, *self.output()).output}"
            ) from None
        deadline = time.monotonic() + 5
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        done = Completed(code, *self.output())
        if left:
            self.kill()
            raise AssertionError(f"processes {left} outlived their launcher\n{done.output}")
        return done


def start_ranks(
    script_or_code: str | Path,
    np: int,
    *args: object,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    launcher: str = "ringrun",
    options: tuple[str, ...] = (),
    directory: Path | None = None,
) -> Job:
    """Start a job without waiting for it; the arguments are those of `run_ranks`."""
    folder = Path(tempfile.mkdtemp(prefix="ringplug-test-")) if directory is None else directory
    if isinstance(script_or_code, Path):
        script = script_or_code
    else:
        script = folder / "rank.py"
        script.write_text(textwrap.dedent(script_or_code))
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **(env or {}),
    }
    command = [*_launch(launcher, np), *options, sys.executable, __file__, str(timeout)]
    return Job([*command, str(script), *map(str, args)], environ, folder)


def run_ranks(
    script_or_code: str | Path,
    np: int,
    *args: object,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    expect: int | None = 0,
    launcher: str = "ringrun",
    options: tuple[str, ...] = (),
) -> Completed:
    """Run a script or code on `np` ranks and wait for its end.

    Args:
        script_or_code: Path of a script, or code as a string (it is dedented).
        np: Number of ranks.
        *args: What the script finds in ``sys.argv[1:]``, as strings.
        timeout: Seconds after which all ranks dump their stacks and are killed.
        env: Variables on top of this process's environment.
        expect: The exit code that the job must have; None for any but 0.
        launcher: ``ringrun``, ``mpirun`` (bare, without ringplug's supervisor), or ``python``
            (no launcher; `np` must be 1).
        options: More options for the launcher.

    Raises:
        AssertionError: Another exit code, a hang, or a process that outlived its launcher; with
            the output of all ranks.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ringplug-test-") as folder,
        start_ranks(
            script_or_code,
            np,
            *args,
            timeout=timeout,
            env=env,
            launcher=launcher,
            options=options,
            directory=Path(folder),
        ) as job,
    ):
        done = job.finish(timeout + 10)
    wrong = done.returncode == 0 if expect is None else done.returncode != expect
    if wrong:
        wanted = "an exit code other than 0" if expect is None else f"exit code {expect}"
        raise AssertionError(f"{wanted} expected from {np} ranks\n{done.output}")
    return done


def _launch(launcher: str, np: int) -> list[str]:
    if launcher == "python":
        assert np == 1, "without a launcher there is one rank"
        return []
    if launcher == "ringrun":
        return [sys.executable, "-m", "ringplug.launch", "--allow-run-as-root", "-np", str(np)]
    assert launcher == "mpirun", launcher
    mpirun = str(Path(sys.prefix) / "bin" / "mpirun")
    flags = "--allow-run-as-root --oversubscribe --bind-to none --mca pml ob1 --mca osc ^ucx"
    return [mpirun, *flags.split(), "--mca", "btl", "self,sm,tcp", "-np", str(np)]


def _die_with_parent() -> None:
    """In the launcher, before exec: end when the test process is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _processes(mark: bytes) -> list[int]:
    """Live processes whose environment at their start had the entry `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            continue
        if marked and alive:
            found.append(int(entry.name))
    return found


def _main() -> None:
    """``python launching.py TIMEOUT SCRIPT ARGS...``: one rank."""
    timeout, script = float(sys.argv[1]), sys.argv[2]
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout)
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _main()
