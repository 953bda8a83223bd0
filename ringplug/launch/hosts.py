"""Hosts: how they are named, which one is this, whether the others answer."""

from __future__ import annotations

import platform
import re
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ringplug.backend.errors import UnavailableError, UsageError

__all__ = ["Host", "all_local", "check_reachable", "parse_hostfile", "parse_hosts"]

# A name reaches ssh's and mpirun's argument lists, so it must not look like an option.
_NAME = re.compile(r"[A-Za-z0-9._:][A-Za-z0-9._:-]*")


@dataclass(frozen=True, slots=True)
class Host:
    """A host and how many ranks it may run."""

    name: str
    slots: int


def _host(name: str, slots: str | None, text: str) -> Host:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{text!r}: a host name has letters, digits and . _ : - only")
    if slots is None:
        return Host(name, 1)
    if not slots.isdigit() or int(slots) < 1:
        raise UsageError(f"{text!r}: slots must be a whole number from 1 up, not {slots!r}")
    return Host(name, int(slots))


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts from ``host1:2,host2:4``; without slots a host has one. IPv6 as ``[::1]:2``.

    Raises:
        UsageError: Names the part that is wrong.
    """
    hosts = []
    for part in text.split(","):
        bracketed = re.fullmatch(r"\[([^]]*)\](?::(.*))?", part.strip())
        if bracketed:
            name, slots = bracketed[1], bracketed[2]
        else:
            name, colon, count = part.strip().partition(":")
            slots = count if colon else None
        hosts.append(_host(name, slots, part))
    return _unique(hosts)


def parse_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Hosts from a file with lines ``host slots=N`` or ``host:N``; ``#`` starts a comment.

    Raises:
        UsageError: The file cannot be read or a line is wrong; names it.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise UsageError(f"hostfile {path}: {error.strerror}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) == 1:
            hosts += parse_hosts(words[0])
            continue
        slots = re.fullmatch(r"slots=(\S+)", words[1])
        if len(words) > 2 or slots is None:
            raise UsageError(f"{path}, line {number}: expected `host slots=N`, not {line!r}")
        hosts.append(_host(words[0], slots[1], line))
    if not hosts:
        raise UsageError(f"hostfile {path} names no host")
    return _unique(hosts)


def _unique(hosts: Sequence[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"named more than once: {', '.join(twice)}")
    return tuple(hosts)


def _is_local(name: str) -> bool:
    here = platform.node()
    own = {"localhost", "127.0.0.1", "::1", here, here.partition(".")[0], socket.getfqdn()}
    return name in own


def all_local(hosts: Sequence[Host]) -> bool:
    """Whether every host is this one; true of none, too."""
    return all(_is_local(host.name) for host in hosts)


def check_reachable(hosts: Sequence[Host]) -> None:
    """Log in to all other hosts at once, so that one message lists all that do not answer.

    Raises:
        UnavailableError: Some host cannot be reached without a password; says what ssh said.
    """
    remote = [host.name for host in hosts if not _is_local(host.name)]
    if not remote:
        return
    with ThreadPoolExecutor(min(32, len(remote))) as pool:
        answers = list(pool.map(_ssh, remote))
    silent = [f"  {name}: {why}" for name, why in zip(remote, answers, strict=True) if why]
    if silent:
        raise UnavailableError(
            "these hosts cannot be reached by ssh without a password:\n" + "\n".join(silent)
        )


def _ssh(name: str) -> str:
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "--", name, "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except FileNotFoundError:
        return "ssh is not installed here"
    except subprocess.TimeoutExpired:
        return "no answer within 20 s"
    return (
        "" if done.returncode == 0 else done.stderr.strip() or f"ssh ended with {done.returncode}"
    )
