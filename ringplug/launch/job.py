"""What a running job consists of, and how all of it is removed.

A job is a private directory. Its processes carry the directory's path in their environment, so
they are found whatever became of their parents. A janitor, forked off before the first rank,
waits for the end of ringrun, however it comes, and leaves nothing of the job behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from ringplug.backend import config

__all__ = ["Janitor", "Job", "die_with_parent"]

_PR_SET_PDEATHSIG = 1
# Where MPI libraries put their segments.
_SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = ("mpich_shm_*", "sm_segment*", "osc_*", "Intel_MPI_*")


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends.

    Args:
        parent: The parent's pid as known before, to notice that it has ended already.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class Job:
    """The files and processes of one job.

    Attributes:
        directory: Private to this user; the failure records and pipes of ranks on this host.
        segments: A private directory for shared memory of the ranks, or None where there is none.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ringrun-"))
        self.segments: Path | None = None
        with contextlib.suppress(OSError):
            segments = _SHARED_MEMORY / self.directory.name
            segments.mkdir(mode=0o700)
            self.segments = segments
        self._began = time.time()

    def processes(self) -> list[int]:
        """Pids of the job's processes on this host that are alive."""
        mark = f"{config.JOB}={self.directory}".encode()
        found = []
        for pid in _pids():
            try:
                if mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    continue
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX":
                found.append(pid)
        return found

    def kill(self, limit: float = 5.0) -> None:
        """End all processes of the job at once."""
        deadline = time.monotonic() + limit
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def remove(self) -> None:
        """Remove every file of the job, and segments that nobody has open any more."""
        for folder in (self.directory, self.segments):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        _remove_segments(self._began)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _remove_segments(began: float) -> None:
    """Remove MPI's segments of this user that are younger than the job and used by nobody."""
    left = []
    for pattern in _SEGMENTS:
        for path in _SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):
                info = path.lstat()
                if info.st_uid == os.geteuid() and info.st_mtime >= began - 1:
                    left.append(path)
    if not left:
        return
    used = _files_in_use()
    for path in left:
        if str(path) not in used:
            with contextlib.suppress(OSError):
                path.unlink()


def _files_in_use() -> set[str]:
    """Files in shared memory that some process of this user has mapped or open."""
    used = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition("/")
                if name[1]:
                    used.add("/" + name[2])
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    used.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return used


class Janitor:
    """A process that clears up after the job when ringrun ends, even by SIGKILL.

    It notices by the end of a pipe whose other end only ringrun holds.
    """

    def __init__(self, job: Job) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._serve(job, read)
        os.close(read)

    def _serve(self, job: Job, read: int) -> None:
        try:
            os.setsid()
            os.close(self._write)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            # ringrun's output may be a pipe whose reader waits for its end.
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            os.read(read, 1)
            job.kill()
            job.remove()
        finally:
            os._exit(0)

    def finish(self) -> None:
        """Have it clear up now, and wait until it has."""
        os.close(self._write)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
