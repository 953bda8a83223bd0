"""Starting ranks from ``python train.py``: the process becomes an mpirun of itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from ringplug.backend.errors import UsageError

__all__ = ["RingLauncherLogic", "own_command"]


def own_command() -> list[str]:
    """The command that started this process.

    Raises:
        UsageError: It cannot be repeated, since the script came from a pipe or a terminal.
    """
    rest = list(sys.orig_argv[1:])
    script = [word for word in rest if word == "-" or not word.startswith("-")]
    if not rest or (script[:1] in ([], ["-"]) and "-c" not in rest and "-m" not in rest):
        raise UsageError(
            "the script was not read from a file, so it cannot be started again on several "
            "processes: save it and start it with ringrun -np N python script.py"
        )
    return [sys.executable, *rest]


class RingLauncherLogic:
    """A launcher for `RingStrategy`.

    Under ringrun, mpirun or srun the ranks run already, and it only calls the function.
    Otherwise, for several devices, the process is replaced by mpirun, which starts the same
    command on as many ranks; its exit code is the job's.
    """

    cluster_environment: Any
    num_processes: int
    num_nodes: int

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook can train with it: as one process."""
        return self.num_processes == 1 or self.cluster_environment.creates_processes_externally

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        if not self.cluster_environment.creates_processes_externally and (
            self.num_processes > 1 or self.num_nodes > 1
        ):
            self._restart()
        return super().launch(function, *args, trainer=trainer, **kwargs)  # type: ignore[misc]

    def _restart(self) -> None:
        if self.num_nodes > 1:
            raise UsageError(
                f"Trainer(num_nodes={self.num_nodes}) in a process that no launcher started: "
                "start with ringrun -np N -H host1:slots,host2:slots python train.py"
            )
        from ringplug.launch import mpirun

        command, environ = mpirun.command(self.num_processes, own_command())
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(command[0], command, environ)

    def kill(self, signum: int) -> None:
        """Nothing: the launcher outside owns the processes."""
