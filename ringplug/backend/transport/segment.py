"""Memory that several processes on a host map, and sleeping until a word in it changes. Layer 2.

A segment is an anonymous memory file: it has no name that could be left behind, and the system
frees it when the last process that maps it ends, however that happens. Its size is not bounded
by the one of /dev/shm, which containers keep small. The other ranks open it through the owner's
entry in /proc; where they cannot see that (separate process namespaces), a file in /dev/shm is
used, unlinked as soon as all have mapped it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ringplug.backend.buffers import Buffer
from ringplug.backend.control import Control
from ringplug.backend.errors import UnavailableError

__all__ = ["fence", "map_segments", "wait_for_change", "wake"]


def map_segments(control: Control, nbytes: int, timeout: float) -> list[Buffer]:
    """Map one zeroed segment per rank into every rank. Collective.

    Args:
        control: The ranks, all on one host.
        nbytes: Size of each rank's segment; may differ between ranks.
        timeout: Seconds to wait for the others.

    Returns:
        Every rank's segment in rank order, as uint8.

    Raises:
        UnavailableError: On every rank, when some rank cannot map another's memory.
    """
    reasons = []
    for create in (_anonymous_file, _named_file):
        segments, reason = _try_map(control, nbytes, timeout, create)
        if segments is not None:
            return segments
        reasons.append(reason)
    raise UnavailableError(
        "shared memory between the ranks of this host cannot be had: "
        + "; ".join(reasons)
        + ". Use transport=ring (RINGPLUG_TRANSPORT=ring) instead"
    )


def _try_map(
    control: Control,
    nbytes: int,
    timeout: float,
    create: Callable[[int], tuple[int, str]],
) -> tuple[list[Buffer] | None, str]:
    fd, path, failure = -1, "", ""
    mapped: list[Buffer] = []
    try:
        fd, path = create(nbytes)
        identity = [os.fstat(fd).st_dev, os.fstat(fd).st_ino]
    except OSError as error:
        failure, identity = f"{create.__name__}: {error}", [0, 0]
    mine = json.dumps({"path": path, "identity": identity, "nbytes": nbytes, "error": failure})
    shown = [json.loads(part) for part in control.exchange(mine.encode(), timeout)]
    failure = next((other["error"] for other in shown if other["error"]), "")
    if not failure:
        try:
            mapped = [_attach(**{k: v for k, v in o.items() if k != "error"}) for o in shown]
        except (OSError, ValueError) as error:
            failure = f"rank {control.world.rank}: {error}"
    verdicts = [part.decode() for part in control.exchange(failure.encode(), timeout)]
    if fd >= 0:
        os.close(fd)
    if create is _named_file and path:
        os.unlink(path)
    failures = [text for text in verdicts if text]
    return (None, failures[0]) if failures else (mapped, "")


def _anonymous_file(nbytes: int) -> tuple[int, str]:
    if not hasattr(os, "memfd_create"):
        raise OSError(f"{sys.platform} has no anonymous memory files")
    fd = os.memfd_create("ringplug", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def _named_file(nbytes: int) -> tuple[int, str]:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    fd, path = tempfile.mkstemp(prefix="ringplug-", dir=folder)
    try:
        # Takes the space now: a full /dev/shm is an error here, not a crash at first touch.
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd, path


def _attach(path: str, identity: list[int], nbytes: int) -> Buffer:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if [found.st_dev, found.st_ino] != identity:
            raise ValueError(f"{path} is another file here than for the rank that made it")
        memory = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    if hasattr(mmap, "MADV_DONTFORK"):
        # A forked data loader must not hold the job's segments after the job has ended.
        memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)


class _Ordering(threading.local):
    """A lock of each thread's own, held."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


_ordering = _Ordering()
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


def fence() -> None:
    """Keep this thread's memory accesses before and after the call in that order.

    x86 keeps stores in order by itself; elsewhere releasing and taking a lock does it.
    """
    if not _ORDERED:
        _ordering.lock.release()
        _ordering.lock.acquire()


_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(
    platform.machine() if sys.platform == "linux" else ""
)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _load_syscall() -> Any:
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    )
    return syscall


_syscall = _load_syscall() if _FUTEX else None


def wait_for_change(address: int, value: int, seconds: float) -> None:
    """Sleep until `wake` is called for the 32-bit word at `address`, at most `seconds`.

    Returns at once when the word is not `value`; may return early. (futex(2))
    """
    if _syscall is None:
        # Where the system cannot watch a word, look again soon.
        threading.Event().wait(min(seconds, 100e-6))
        return
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(_FUTEX, address, _FUTEX_WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake every process that sleeps in `wait_for_change` on `address`."""
    if _syscall is not None:
        _syscall(_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, None)
