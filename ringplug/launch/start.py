"""From options to a job that can be supervised: its launcher, its command line, its environment."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringplug.backend import config
from ringplug.backend.errors import UsageError
from ringplug.launch.arguments import Options
from ringplug.launch.hosts import all_local, check_reachable
from ringplug.launch.job import Job
from ringplug.launch.mpirun import Mpirun, command_line, find
from ringplug.launch.output import Console
from ringplug.launch.supervisor import Supervisor

__all__ = ["check_slots", "job_command", "supervised"]


@contextlib.contextmanager
def supervised(
    options: Options, argv: Sequence[str]
) -> Iterator[tuple[Supervisor, list[str], dict[str, str]]]:
    """A supervisor, with the command line and environment that it is to run.

    Args:
        options: What was asked for.
        argv: What each rank executes.

    Raises:
        UsageError: The options do not fit together.
        UnavailableError: There is no launcher, or a host does not answer.
    """
    check_slots(options)
    check_reachable(options.hosts)
    launcher = find()
    job = Job()
    try:
        line, environ = job_command(options, launcher, argv, job.directory, job.segments)
        if options.verbose:
            sys.stderr.write(f"ringrun: {shlex.join(line)}\n")
            sys.stderr.flush()
        out, err = sys.stdout.buffer, sys.stderr.buffer
        console = Console(out, err, options.output_filename, timestamps=options.timestamps)
        with contextlib.closing(console):
            local = all_local(options.hosts)
            yield (
                Supervisor(job, options.np, local, console, verbose=options.verbose),
                line,
                environ,
            )
    except BaseException:
        job.remove()
        raise


def check_slots(options: Options) -> None:
    """Refuse more ranks than other hosts have slots; on this host alone they share cores."""
    slots = sum(host.slots for host in options.hosts)
    if options.hosts and options.np > slots and not all_local(options.hosts):
        named = ", ".join(f"{host.name}:{host.slots}" for host in options.hosts)
        raise UsageError(f"{options.np} processes were asked for, but {named} has {slots} slots")


def job_command(
    options: Options,
    launcher: Mpirun,
    argv: Sequence[str],
    directory: Path,
    segments: Path | None,
) -> tuple[list[str], dict[str, str]]:
    """The launcher's argument list and environment for a supervised job.

    Raises:
        UsageError: ``-x NAME`` names a variable that is not set.
    """
    own = {config.variable(name): value for name, value in options.settings}
    own |= {name: value for name, value in options.env if value is not None}
    own[config.variable("expected_size")] = str(options.np)
    own[config.JOB] = str(directory)
    environ = config.child_environment(**own)
    if options.as_horovod:
        from ringplug.as_horovod import FOLDER

        before = environ.get("PYTHONPATH")
        own["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [before])])
        environ |= own
    names = [name for name, _ in options.env]
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(f"-x {missing[0]}: the variable is not set; say -x {missing[0]}=VALUE")
    local = all_local(options.hosts)
    forward = [] if local else [*config.forwarded_names(), *own, *names]
    line = command_line(
        launcher,
        options.np,
        argv,
        hosts=options.hosts,
        forward=list(dict.fromkeys(forward)),
        tagged=not local,
        extra=_extra(options, launcher, directory, segments),
    )
    return line, environ


def _extra(options: Options, launcher: Mpirun, directory: Path, segments: Path | None) -> list[str]:
    """Options for the launcher that only a supervised job has."""
    extra: list[str] = []
    newer = launcher.vendor == "Open MPI" and launcher.major >= 5
    if all_local(options.hosts) and newer:
        # What a killed launcher leaves goes with the job's own directories.
        extra += ["--prtemca", "prte_tmpdir_base", str(directory)]
        if segments is not None:
            extra += ["--mca", "btl_sm_backing_directory", str(segments)]
            extra += ["--mca", "osc_sm_backing_directory", str(segments)]
    if options.interfaces:
        names = ",".join(options.interfaces)
        is_open_mpi = launcher.vendor == "Open MPI"
        extra += ["--mca", "btl_tcp_if_include", names] if is_open_mpi else ["-iface", names]
    return [*extra, *options.mpi_args]
