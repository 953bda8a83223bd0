"""ringrun's command line.

The options have horovodrun's names; `horovod_options` has those that differ. Everything from the
first word that is no option is the command.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ringplug.backend.errors import UsageError
from ringplug.backend.parsing import parse_seconds
from ringplug.launch.horovod_options import REFUSED, SATISFIED, WITHOUT_EFFECT
from ringplug.launch.hosts import Host, parse_hostfile, parse_hosts

__all__ = ["Options", "parse", "rank_command"]


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    np: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    env: tuple[tuple[str, str | None], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    output_filename: Path | None = None
    verbose: bool = False
    check: bool = False
    version: bool = False
    allow_run_as_root: bool = False
    mpi_args: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    as_horovod: bool = False
    timestamps: bool = False
    without_effect: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and knows which of its options take a value."""

    def __init__(self) -> None:
        super().__init__(
            prog="ringrun",
            usage="ringrun -np N [options] COMMAND [arguments of the command]",
            description="Run a training script on N processes.",
            allow_abbrev=False,
        )
        self.flags: dict[str, bool] = {"-h": False, "--help": False}

    def option(self, *names: str, **settings: Any) -> None:
        self.add_argument(*names, **settings)
        takes_value = settings.get("action") not in ("store_true", "store_false", "append_const")
        self.flags.update(dict.fromkeys(names, takes_value))

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def split(self, argv: Sequence[str]) -> int:
        """Index of the first word of the command."""
        index = 0
        while index < len(argv) and argv[index].startswith("-"):
            word = argv[index]
            if word == "--":
                return index
            name = word.partition("=")[0]
            if name in REFUSED:
                raise UsageError(f"{name} is not offered: {REFUSED[name]}")
            if name not in self.flags:
                raise UsageError(f"unknown option {name}; `ringrun --help` lists all")
            index += 2 if self.flags[name] and "=" not in word else 1
        return min(index, len(argv))


def _parser() -> _Parser:
    parser = _Parser()
    option = parser.option
    option("-v", "--version", action="store_true", help="show the version")
    option("-np", "--num-proc", dest="np", type=int, metavar="N", help="number of processes")
    option("-H", "--hosts", metavar="HOST:SLOTS,...", help="where, and how many on each host")
    option("-hostfile", "--hostfile", metavar="FILE", help="the same from lines `HOST slots=N`")
    option(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="give the ranks a variable, on other hosts too; may be repeated",
    )
    option("--output-filename", metavar="DIR", help="write DIR/rank.N/stdout and stderr too")
    option("--verbose", action="store_true", help="show the launcher's command and messages")
    option(
        "-cb",
        "--check-build",
        "--check",
        dest="check",
        action="store_true",
        help="show what is installed and works here, and why the rest does not",
    )
    option("--allow-run-as-root", action="store_true", help="run as root outside a container")
    option(
        "--as-horovod",
        action="store_true",
        help="let `import horovod` be ringplug, so that a Horovod script runs as it is",
    )
    option(
        "--mpi-args",
        "--binding-args",
        action="append",
        default=[],
        metavar="ARGS",
        help="more options for mpirun, one string; may be repeated",
    )
    option(
        "--network-interfaces",
        "--network-interface",
        action="append",
        default=[],
        metavar="NAME,...",
        help="network interfaces that hosts talk through",
    )
    option(
        "--prefix-output-with-timestamp",
        "-prefix-timestamp",
        dest="timestamps",
        action="store_true",
        help="put the time before each line of output",
    )
    for names, setting, text in _SETTINGS:
        option(*names, dest=setting, metavar="VALUE", help=text)
    _horovod_options(option)
    return parser


def _horovod_options(option: Callable[..., None]) -> None:
    """Switches that scripts around horovodrun pass."""
    for name, word in (("mark_cycles", "timeline-mark-cycles"), ("stall_check", "stall-check")):
        option(f"--{word}", dest=name, action="store_true", default=None, help=argparse.SUPPRESS)
        option(f"--no-{word}", dest=name, action="store_false", help=argparse.SUPPRESS)
    for name in SATISFIED:
        option(name, action="store_true", help=argparse.SUPPRESS)
    for name, (takes_value, _) in WITHOUT_EFFECT.items():
        if takes_value:
            option(name, dest=name, help=argparse.SUPPRESS)
        else:
            option(name, dest=name, action="store_true", help=argparse.SUPPRESS)


_SETTINGS = (
    (("--start-timeout",), "start_timeout", "time for all ranks to reach init(): 120, 2min"),
    (
        ("--timeout", "--stall-check-shutdown-time-seconds"),
        "timeout",
        "longest wait for other ranks",
    ),
    (
        ("--stall-warning", "--stall-check-warning-time-seconds"),
        "stall_warning",
        "time after which a wait for other ranks is logged",
    ),
    (("--fusion-threshold-mb",), "fusion_bytes", "size of a bucket of fused tensors, in MiB"),
    (("--log-level",), "log_level", "show ringplug's log from this level up"),
    (("--timeline-filename",), "timeline", "write a timeline of the operations to this file"),
)
_HOROVODS_ZERO = {
    "timeout": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "stall_warning": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "fusion_bytes": "HOROVOD_FUSION_THRESHOLD",
}
"""Settings whose 0 means something else to Horovod: the settings know what, by its variables."""


def parse(argv: Sequence[str]) -> Options:
    """Understand ringrun's arguments.

    Raises:
        UsageError: An option is unknown or a value is wrong; says which.
        SystemExit: ``--help`` was shown.
    """
    parser = _parser()
    index = parser.split(argv)
    found = parser.parse_args(list(argv[:index]))
    command = tuple(argv[index:])
    if command[:1] == ("--",):
        command = command[1:]
    if found.hosts and found.hostfile:
        raise UsageError("-H and --hostfile cannot be combined")
    hosts: tuple[Host, ...] = ()
    if found.hosts:
        hosts = parse_hosts(found.hosts)
    elif found.hostfile:
        hosts = parse_hostfile(found.hostfile)
    np = found.np if found.np is not None else sum(host.slots for host in hosts)
    if not (found.check or found.version):
        _check(np, found.np, command)
    return Options(
        np=np,
        command=command,
        hosts=hosts,
        env=(*_horovod_variables(found), *map(_variable, found.env)),
        settings=_settings(found),
        output_filename=Path(found.output_filename) if found.output_filename else None,
        verbose=found.verbose,
        check=found.check,
        version=found.version,
        allow_run_as_root=found.allow_run_as_root,
        mpi_args=tuple(word for text in found.mpi_args for word in shlex.split(text)),
        interfaces=tuple(name for text in found.network_interfaces for name in text.split(",")),
        as_horovod=found.as_horovod,
        timestamps=found.timestamps,
        without_effect=tuple(name for name in WITHOUT_EFFECT if getattr(found, name)),
    )


def _check(np: int, asked: int | None, command: Sequence[str]) -> None:
    if asked is not None and asked < 1:
        raise UsageError(f"-np must be at least 1, not {asked}")
    if np < 1:
        raise UsageError("how many processes? Say -np N, or name hosts with -H")
    if not command:
        raise UsageError("there is no command to run, for example: ringrun -np 2 python train.py")


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"-x {text}: {name!r} is not the name of a variable")
    return name, value if equals else None


def _settings(found: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    given = []
    for names, setting, _ in _SETTINGS:
        value = getattr(found, setting)
        if value is None or _is_horovods_zero(setting, value):
            continue
        if setting == "fusion_bytes":
            if not value.isdigit():
                raise UsageError(f"{names[0]} {value}: expected a whole number of MiB")
            value = f"{value}MiB"
        elif setting not in ("log_level", "timeline"):
            try:
                parse_seconds(value)
            except ValueError as error:
                raise UsageError(f"{names[0]} {value}: {error}") from None
        given.append((setting, value))
    if found.mark_cycles is not None:
        given.append(("timeline_mark_cycles", str(int(found.mark_cycles))))
    return tuple(given)


def _is_horovods_zero(setting: str, value: str) -> bool:
    return setting in _HOROVODS_ZERO and value == "0"


def _horovod_variables(found: argparse.Namespace) -> list[tuple[str, str]]:
    """Variables of Horovod for what only they can say."""
    given = [
        (name, "0")
        for setting, name in _HOROVODS_ZERO.items()
        if getattr(found, setting) is not None
        and _is_horovods_zero(setting, getattr(found, setting))
    ]
    if found.stall_check is not None:
        given.append(("HOROVOD_STALL_CHECK_DISABLE", str(int(not found.stall_check))))
    return given


_FLAGS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def rank_command(
    command: Sequence[str], python: str = sys.executable, as_horovod: bool = False
) -> list[str]:
    """What each rank executes: ringplug's bootstrap, then the command.

    ``python [flags] script.py`` becomes one interpreter, `python`, with those flags; a ``.py``
    file needs no ``python`` before it, and neither does a program that was installed as a
    script of that interpreter, such as ``pytest``; anything else is executed as it is.
    """
    flags: list[str] = []
    rest = list(command)
    if _is_this_python(rest[0], python):
        rest.pop(0)
        while rest and rest[0].startswith("-") and rest[0][:2] not in ("-m", "-c"):
            flags.append(rest.pop(0))
            if flags[-1] in _FLAGS_WITH_VALUE and rest:
                flags.append(rest.pop(0))
        if not rest:
            raise UsageError(f"{shlex.join(command)}: there is no script, -m or -c")
        if rest[0][:2] in ("-m", "-c") and len(rest[0]) > 2:
            rest[:1] = [rest[0][:2], rest[0][2:]]
        if rest[0] in ("-m", "-c"):
            if len(rest) < 2:
                raise UsageError(f"{shlex.join(command)}: {rest[0]} needs an argument")
        else:
            rest.insert(0, "--script")
    elif Path(rest[0]).suffix == ".py":
        rest.insert(0, "--script")
    elif (script := _script_of(rest[0], python)) is not None:
        rest[:1] = ["--script", script]
    if rest[0] == "--script" and not Path(rest[1]).exists():
        raise UsageError(f"{rest[1]}: no such file")
    own = ["--as-horovod"] if as_horovod else []
    return [python, *flags, "-m", "ringplug.launch.worker", *own, *rest]


def _script_of(name: str, python: str) -> str | None:
    """Path of a Python script beside the interpreter that a bare name, or its path, means.

    Such as pip installs for ``pytest``: in the bootstrap's process it fails with a traceback.
    """
    folder = Path(python).absolute().parent
    path = Path(name).absolute() if os.sep in name else folder / name
    if path.parent != folder:
        return None
    try:
        with path.open("rb") as file:
            first, second = file.readline(), file.readline()
    except OSError:
        return None
    # A path that is too long for the first line is put into the second one.
    long = first.startswith(b"#!/bin/sh") and second.startswith(b"'''exec' ")
    words = (second[len(b"'''exec' ") :] if long else first.removeprefix(b"#!")).split()
    interpreter = Path(os.fsdecode(words[0]).strip('"')) if words else Path()
    is_script = first.startswith(b"#!") and interpreter.name.startswith("python")
    return str(path) if is_script and interpreter.parent == folder else None


def _is_this_python(name: str, python: str) -> bool:
    """Whether a command's first word means the interpreter that ringrun runs in.

    A bare name does: an MPI library belongs to one interpreter, and PATH may name another.
    """
    if os.sep not in name:
        return bool(re.fullmatch(r"python(3(\.\d+)?)?", name)) and _version_fits(name)
    path = shutil.which(name)
    return path is not None and Path(path).absolute().parent == Path(python).absolute().parent


def _version_fits(name: str) -> bool:
    minor = name.partition(".")[2]
    if minor and int(minor) != sys.version_info.minor:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UsageError(f"{name} was asked for, but ringrun runs in Python {here}")
    return True
