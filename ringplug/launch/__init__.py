"""``ringrun``: starts, supervises and ends the ranks of a job. A thin layer over mpirun.

* ``arguments``   the command line
* ``horovod_options``  options of horovodrun that are not here, or without effect
* ``hosts``       where ranks run
* ``mpirun``      the launcher that fits the MPI library; usable alone, see `command`
* ``start``       from options to a job that can be supervised
* ``supervisor``  one run: output, signals, failure, exit code
* ``output``      lines tagged by rank
* ``failure``     who failed first
* ``job``         the files and processes of a job, and their removal
* ``worker``      the bootstrap of each rank
* ``run``         `ringplug.run`: a function on new ranks; `job_process` is its supervisor,
                  `called` its side in the ranks
* ``check``       what is installed and works here
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringplug.launch.arguments import Options
    from ringplug.launch.mpirun import command

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
    from ringplug.launch.arguments import rank_command
    from ringplug.launch.mpirun import root_reason
    from ringplug.launch.start import supervised

    argv = rank_command(options.command, as_horovod=options.as_horovod)
    reason = root_reason(options.allow_run_as_root)
    if reason and reason != "allowed":
        sys.stderr.write(f"ringrun: running as root, {reason}\n")
    if options.without_effect:
        from ringplug.launch.horovod_options import explain

        sys.stderr.write(f"ringrun: {explain(options.without_effect)}\n")
    with supervised(options, argv) as (supervisor, line, environ):
        return supervisor.run(line, environ)
