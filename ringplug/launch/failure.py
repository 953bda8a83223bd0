"""Who failed, how, and who was first: records of ranks, words of launchers, and the report."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

__all__ = [
    "Failure",
    "first",
    "from_launcher",
    "load",
    "record",
    "report",
    "started",
    "started_by",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one rank that was not the end of its work.

    Attributes:
        rank: Its rank, or -1 where nobody knows.
        host: Name of its host, empty where nobody knows.
        pid: Its process there, or 0.
        code: Exit code, as a shell reports it: 128 + signal for a signal.
        when: Seconds since the epoch, or 0.
        error: The exception in one line, or empty.
        traceback: The exception with its traceback, or empty.
        consequence: Whether the failure of another rank has caused this one.
    """

    rank: int
    host: str = ""
    pid: int = 0
    code: int = 1
    when: float = 0.0
    error: str = ""
    traceback: str = ""
    consequence: bool = False


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def started(directory: Path, rank: int) -> None:
    """Note, on a rank, that it has started and with which pid."""
    _write(directory / f"started.{rank}", json.dumps([os.getpid(), platform.node()]))


def started_by(directory: Path) -> dict[int, tuple[int, str]]:
    """Pid and host of each rank that has started on this host."""
    found = {}
    for path in directory.glob("started.*"):
        if path.suffix[1:].isdigit():
            pid, host = json.loads(path.read_text())
            found[int(path.suffix[1:])] = (int(pid), str(host))
    return found


def record(directory: Path, failure: Failure) -> None:
    """Leave, on a rank, the record of its failure; the first one of a rank stays."""
    path = directory / f"failure.{failure.rank}"
    if not path.exists():
        here = replace(failure, host=platform.node(), pid=os.getpid(), when=time.time())
        _write(path, json.dumps(asdict(here)))


def load(directory: Path) -> list[Failure]:
    """All records of ranks on this host."""
    paths = [path for path in directory.glob("failure.*") if path.suffix[1:].isdigit()]
    return [Failure(**json.loads(path.read_text())) for path in paths]


def from_launcher(text: str, ranks: Mapping[int, tuple[int, str]]) -> Failure | None:
    """The rank that failed first, in the words of Open MPI's or MPICH's launcher.

    Args:
        text: What the launcher wrote on standard error.
        ranks: Pid and host of ranks, to complete what it does not say.
    """
    found: Failure | None = None
    by_signal = re.search(
        r"process rank (\d+) with PID (\d+) on node (\S+) exited on\s+signal (\d+)", text
    )
    by_code = re.search(r"Process name:\s+\[.*,(\d+)\]\s+Exit code:\s+(\d+)", text)
    improper = re.search(
        r"process rank (\d+) with PID (\d+) on\s+node (\S+)\s+(?:exiting\s+improperly|calling)",
        text,
    )
    hydra = re.search(r"=\s+PID (\d+) RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)", text)
    if by_signal:
        rank, pid, host, number = by_signal.groups()
        found = Failure(int(rank), host, int(pid), 128 + int(number))
    elif by_code:
        found = Failure(int(by_code[1]), code=int(by_code[2]))
    elif improper:
        said = re.search(r"Errorcode:\s+(\d+)", text)
        error = "" if said else "it ended without finalising MPI while others went on"
        found = Failure(int(improper[1]), improper[3], int(improper[2]), error=error)
        found = replace(found, code=int(said[1]) if said else 1)
    elif hydra:
        pid_number, code = int(hydra[1]), int(hydra[3])
        known = [rank for rank, (pid, _) in ranks.items() if pid == pid_number]
        killed = re.search(r"EXIT STRING:.*\(signal (\d+)\)", text)
        code = 128 + int(killed[1]) if killed else code
        found = Failure(known[0] if known else -1, hydra[2], pid_number, code)
    if found is not None and found.rank in ranks:
        pid, host = ranks[found.rank]
        found = replace(found, pid=pid, host=found.host or host)
    return found


def first(failures: Iterable[Failure]) -> Failure | None:
    """The failure that the others follow from.

    Own failures come before consequences of another rank's; among equals a death that only the
    launcher saw (it has no time) comes first, since the dead cannot have been a bystander.
    """
    return min(failures, key=lambda one: (one.consequence, one.when), default=None)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(failure: Failure, others: Sequence[Failure], tail: Sequence[str]) -> str:
    """What ringrun says last: the first failure with its traceback, then those that followed.

    Args:
        failure: The first failure.
        others: More failures, listed by their one-line error.
        tail: The last lines that the rank wrote, shown where there is no traceback.
    """
    who = "a rank" if failure.rank < 0 else f"rank {failure.rank}"
    place = [f"host {failure.host}"] if failure.host else []
    place += [f"pid {failure.pid}"] if failure.pid else []
    where = f" ({', '.join(place)})" if place else ""
    killed = failure.code > 128 and not failure.error
    if killed:
        how = f"was killed by {_name(failure.code - 128)}"
        if failure.code == 128 + signal.SIGKILL:
            how += " (the kernel does that when memory runs out)"
    else:
        how = f"failed with exit code {failure.code}"
    lines = ["", "=" * 80, f"ringrun: {who}{where} {how}"]
    if failure.when:
        lines[-1] += time.strftime(", at %H:%M:%S", time.localtime(failure.when))
    followed = sorted({one.rank for one in others} - {failure.rank})
    for one in sorted(others, key=lambda other: other.rank):
        if one.rank in followed:
            lines.append(f"  then rank {one.rank}: {one.error or f'exit code {one.code}'}")
    if failure.traceback:
        lines += ["", failure.traceback.rstrip("\n")]
    else:
        if tail:
            lines += ["", f"The last lines of {who}:", *(f"  {line}" for line in tail)]
        if failure.error:
            lines += ["", failure.error]
    return "\n".join([*lines, "=" * 80, ""])
