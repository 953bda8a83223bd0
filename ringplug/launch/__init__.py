"""``ringrun``: starts, supervises and ends the ranks of a job. A thin layer over mpirun.

* ``arguments``   the command line
* ``hosts``       where ranks run
* ``mpirun``      the launcher that fits the MPI library; usable alone, see `command`
* ``supervisor``  one run: output, signals, failure, exit code
* ``output``      lines tagged by rank
* ``failure``     who failed first
* ``job``         the files and processes of a job, and their removal
* ``worker``      the bootstrap of each rank
* ``check``       what is installed and works here
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringplug.launch.arguments import Options
    from ringplug.launch.mpirun import Mpirun, command

__all__ = ["command", "main"]


def __getattr__(name: str) -> Any:
    if name == "command":
        from ringplug.launch.mpirun import command

        return command
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ringrun``.

    Args:
        argv: Its arguments; by default those of this process.

    Returns:
        The exit code: the first failing rank's, 2 for a wrong command line, 1 where no job could
        be started.
    """
    from ringplug.backend.errors import RingplugError, UsageError
    from ringplug.launch.arguments import parse

    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.version:
            from ringplug import __version__

            sys.stdout.write(f"ringrun {__version__}\n")
            return 0
        if options.check:
            from ringplug.launch.check import check

            return check(options.allow_run_as_root)
        return _run(options)
    except BrokenPipeError:
        # The reader of the output has gone. Python would fail again on flushing it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except UsageError as error:
        sys.stderr.write(f"ringrun: {error}\n")
        return 2
    except RingplugError as error:
        sys.stderr.write(f"ringrun: {error}\n")
        return 1


def _run(options: Options) -> int:
    from ringplug.backend.errors import RingplugError
    from ringplug.launch.arguments import rank_command
    from ringplug.launch.hosts import all_local, check_reachable
    from ringplug.launch.job import Job
    from ringplug.launch.mpirun import find, root_reason
    from ringplug.launch.output import Console
    from ringplug.launch.supervisor import Supervisor

    argv = rank_command(options.command)
    reason = root_reason(options.allow_run_as_root)
    if reason and reason != "allowed":
        sys.stderr.write(f"ringrun: running as root, {reason}\n")
    check_slots(options)
    check_reachable(options.hosts)
    launcher = find()
    job = Job()
    try:
        line, environ = job_command(options, launcher, argv, job.directory, job.segments)
    except RingplugError:
        job.remove()
        raise
    if options.verbose:
        import shlex

        sys.stderr.write(f"ringrun: {shlex.join(line)}\n")
        sys.stderr.flush()
    console = Console(sys.stdout.buffer, sys.stderr.buffer, options.output_filename)
    supervisor = Supervisor(
        job, options.np, all_local(options.hosts), console, verbose=options.verbose
    )
    try:
        return supervisor.run(line, environ)
    finally:
        console.close()


def check_slots(options: Options) -> None:
    """Refuse more ranks than other hosts have slots; on this host alone they share cores."""
    from ringplug.backend.errors import UsageError
    from ringplug.launch.hosts import all_local

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
    from ringplug.backend import config
    from ringplug.backend.errors import UsageError
    from ringplug.launch.hosts import all_local
    from ringplug.launch.mpirun import command_line

    own = {config.variable(name): value for name, value in options.settings}
    own |= {name: value for name, value in options.env if value is not None}
    own[config.variable("expected_size")] = str(options.np)
    own[config.JOB] = str(directory)
    environ = config.child_environment(**own)
    names = [name for name, _ in options.env]
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(f"-x {missing[0]}: the variable is not set; say -x {missing[0]}=VALUE")
    local = all_local(options.hosts)
    forward = [] if local else [*config.forwarded_names(), *own, *names]
    extra: list[str] = []
    if local and launcher.vendor == "Open MPI" and launcher.major >= 5:
        # What a killed launcher leaves goes with the job's own directories.
        extra += ["--prtemca", "prte_tmpdir_base", str(directory)]
        if segments is not None:
            extra += ["--mca", "btl_sm_backing_directory", str(segments)]
            extra += ["--mca", "osc_sm_backing_directory", str(segments)]
    extra += options.mpi_args
    line = command_line(
        launcher,
        options.np,
        argv,
        hosts=options.hosts,
        forward=list(dict.fromkeys(forward)),
        tagged=not local,
        extra=extra,
    )
    return line, environ
