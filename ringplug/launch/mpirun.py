"""Which mpirun belongs to this interpreter's MPI library, and how to call it.

An mpirun of another vendor than the library starts N worlds of one rank without a word, so the
two are compared first. Nothing here starts ranks or supervises them: `command` returns an
argument list and an environment for ``os.execvpe`` or ``subprocess``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringplug.backend import config
from ringplug.backend.errors import UnavailableError, UsageError
from ringplug.launch.hosts import Host, all_local

__all__ = ["Library", "Mpirun", "command", "command_line", "find", "library", "root_reason"]

_LIBRARY_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
maps = open("/proc/self/maps").read().splitlines()
paths = sorted({line.split(None, 5)[5] for line in maps if "libmpi" in line})
vendor, version = MPI.get_vendor()
print(json.dumps([vendor, ".".join(map(str, version)), paths]))
"""


@dataclass(frozen=True, slots=True)
class Library:
    """The MPI library that mpi4py loads in this interpreter."""

    vendor: str
    version: str
    path: str

    def __str__(self) -> str:
        return f"{self.vendor} {self.version} ({self.path or 'path unknown'})"


@dataclass(frozen=True, slots=True)
class Mpirun:
    """A launcher: where it is, whose it is (``Open MPI``, ``MPICH``, ``Intel MPI``)."""

    path: str
    vendor: str
    version: str

    def __str__(self) -> str:
        return f"{self.path} ({self.vendor} {self.version})"

    @property
    def major(self) -> int:
        """First number of the version."""
        return int(self.version.partition(".")[0] or 0)


def library(python: str = sys.executable) -> Library:
    """Ask a process of its own which MPI library mpi4py loads.

    Raises:
        UnavailableError: mpi4py or its library cannot be loaded; says why and what to install.
    """
    done = subprocess.run(
        [python, "-c", _LIBRARY_PROBE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UnavailableError(
            f"no MPI library can be loaded in {python}: {last}. "
            "Install one with: pip install 'ringplug[mpi]'"
        )
    vendor, version, paths = json.loads(done.stdout.splitlines()[-1])
    return Library(vendor, version, paths[0] if paths else "")


def _candidates(loaded: Library) -> list[str]:
    """Paths of launchers, the most likely first, each once."""
    folders = [Path(sys.prefix) / "bin"]
    if loaded.path:
        folders.insert(0, Path(loaded.path).parent.parent / "bin")
    folders += [Path(folder) for folder in os.get_exec_path()]
    found: dict[str, None] = {}
    for folder in folders:
        for name in ("mpirun", "mpiexec"):
            path = shutil.which(name, path=str(folder))
            if path and not any(os.path.samefile(path, other) for other in found):
                found[path] = None
    return list(found)


def identify(path: str) -> Mpirun:
    """Whose launcher this is, from what it says for ``--version``."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        text = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        text = str(error)
    number = r"[^0-9]*?([0-9]+(?:\.[0-9]+)*)"
    for vendor, pattern in (
        ("Open MPI", r"\((?:Open MPI|OpenRTE|PRRTE)\)" + number),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version" + number),
        ("MPICH", r"HYDRA build details:.*?Version:" + number),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return Mpirun(path, vendor, match[1])
    return Mpirun(path, "unknown", "")


def find(loaded: Library | None = None, candidates: Sequence[str] | None = None) -> Mpirun:
    """The launcher that belongs to the MPI library of this interpreter.

    Looked for beside the library, in ``sys.prefix/bin``, then on PATH. One with the library's
    own version is preferred to another version of the same vendor.

    Args:
        loaded: The library; by default a short process finds out.
        candidates: Paths of launchers to choose from, by default those found.

    Raises:
        UnavailableError: None fits; lists every launcher with its vendor.
    """
    loaded = library() if loaded is None else loaded
    known = [identify(p) for p in (_candidates(loaded) if candidates is None else candidates)]
    fitting = [one for one in known if one.vendor == _launcher_vendor(loaded.vendor)]
    exact = [one for one in fitting if one.version == loaded.version]
    if fitting:
        return (exact or fitting)[0]
    listed = "\n".join(f"  {one}" for one in known) or "  none found"
    raise UnavailableError(
        f"no mpirun belongs to the MPI library of this interpreter.\n"
        f"library: {loaded}\nlaunchers:\n{listed}\n"
        "A launcher of another MPI would start worlds of one rank each. Install the library and "
        "its launcher together, with: pip install 'ringplug[mpi]', or choose the library with "
        "the variable MPI4PY_LIBMPI=/path/to/libmpi.so"
    )


def _launcher_vendor(vendor: str) -> str:
    """Libraries derived from MPICH are started by its launcher."""
    return "MPICH" if vendor in ("MVAPICH", "MVAPICH2", "Cray MPICH") else vendor


def root_reason(allowed: bool = False) -> str:
    """Why this process, if it is root, may start ranks all the same; empty if it is not root.

    Raises:
        UsageError: It may not: root outside a container, and nobody allowed it.
    """
    if os.geteuid() != 0:
        return ""
    env = config.child_environment()
    both = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if allowed or all(env.get(name) == "1" for name in both):
        return "allowed"
    if _in_container():
        return "inside a container"
    raise UsageError(
        "refusing to run as root outside a container, where a mistake in a script can destroy "
        f"the system; to do it all the same: --allow-run-as-root, or {both[0]}=1 {both[1]}=1"
    )


def _in_container() -> bool:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    try:
        groups = Path("/proc/1/cgroup").read_text()
    except OSError:
        return False
    return bool(re.search(r"docker|containerd|kubepods|libpod|lxc", groups))


def _has_fabric() -> bool:
    """Whether there is InfiniBand or the like, which MPI's own choice of transport uses."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def command_line(
    launcher: Mpirun,
    np: int,
    argv: Sequence[str],
    *,
    hosts: Sequence[Host] = (),
    forward: Sequence[str] = (),
    tagged: bool = False,
    fabric: bool | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The argument list that starts `argv` on `np` ranks.

    Args:
        launcher: What `find` returned.
        np: Number of ranks, at least 1.
        argv: The command, as a list; no shell sees it.
        hosts: Where; by default here.
        forward: Names of variables that ranks on other hosts get, with the values they have in
            the launcher's environment. Values never appear in the list.
        tagged: Let the launcher mark each line of output with its rank.
        fabric: Whether a fast network is to be left to MPI's choice; None looks for one.
            Without one, Open MPI starts three times faster when it is told not to look.
        extra: Options put before the command; one that binds processes replaces ours.
    """
    if np < 1:
        raise UsageError(f"the number of ranks must be at least 1, not {np}")
    if not argv:
        raise UsageError("there is no command to run")
    fabric = _has_fabric() if fabric is None else fabric
    if launcher.vendor == "Open MPI":
        options = _open_mpi(launcher, hosts, forward, tagged, fabric)
        if not {"--bind-to", "-bind-to"} & set(extra):
            options = ["--bind-to", "none", *options]
    else:
        options = _hydra(hosts, tagged)
    return [launcher.path, *options, *extra, "-n", str(np), *argv]


def _open_mpi(
    launcher: Mpirun,
    hosts: Sequence[Host],
    forward: Sequence[str],
    tagged: bool,
    fabric: bool,
) -> list[str]:
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if not fabric:
        on_host = "sm" if launcher.major >= 5 else "vader"
        options += ["--mca", "pml", "ob1", "--mca", "btl", f"self,{on_host},tcp"]
        options += ["--mca", "osc", "^ucx"]
    if all_local(hosts):
        options.append("--oversubscribe")
    if hosts:
        options += ["--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    for name in forward:
        options += ["-x", name]
    if tagged:
        options += ["--output", "tag"] if launcher.major >= 5 else ["--tag-output"]
    return options


def _hydra(hosts: Sequence[Host], tagged: bool) -> list[str]:
    """MPICH and Intel MPI; their launcher passes the whole environment on by itself."""
    options = []
    if hosts:
        options += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    if tagged:
        options.append("-l")
    return options


def command(
    np: int,
    argv: Sequence[str],
    *,
    hosts: Sequence[Host] = (),
    env: Mapping[str, str] | None = None,
    allow_run_as_root: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """What to execute to run `argv` on `np` ranks, without a supervisor.

    Example:
        >>> argv, environ = command(4, [sys.executable, "train.py"])
        >>> os.execvpe(argv[0], argv, environ)

    Args:
        np: Number of ranks.
        argv: The command of each rank.
        hosts: Where; by default here.
        env: Variables for the ranks on top of this process's environment.
        allow_run_as_root: Start ranks as root outside a container too.

    Returns:
        The argument list, and the whole environment for it. The ranks check that the world has
        `np` ranks.

    Raises:
        UnavailableError: No launcher fits the MPI library.
        UsageError: Root, and nobody allowed it.
    """
    root_reason(allow_run_as_root)
    own = {**(env or {}), config.variable("expected_size"): str(np)}
    environ = config.child_environment(**own)
    names = [] if all_local(hosts) else sorted({*config.forwarded_names(), *own})
    line = command_line(find(), np, argv, hosts=hosts, forward=names)
    return line, environ
