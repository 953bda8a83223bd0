"""``ringrun --check``: what is installed and works here, as a table, with why not.

Every probe runs in a process of its own: a library that is broken, slow or of the wrong MPI shows
up as a line of the table, not as the end of it.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ringplug.backend import config
from ringplug.backend.errors import RingplugError
from ringplug.launch import mpirun

__all__ = ["Finding", "check", "findings", "table"]

_LIMIT = 180.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Attributes:
        what: The thing looked for.
        works: Whether it does.
        detail: Version and facts, or why not.
        needed: Whether nothing works without it.
    """

    what: str
    works: bool
    detail: str
    needed: bool = False


# Each prints one line about itself.
_VERSION = "import {module} as m; print(m.__version__)"
_PROBES = {
    "numpy": _VERSION.format(module="numpy"),
    "PyTorch": "import torch; print(torch.__version__, '- CUDA' if torch.cuda.is_available() "
    "else '- CPU only', '- torch.distributed' if torch.distributed.is_available() else '')",
    "lightning": _VERSION.format(module="lightning"),
    "pytorch_lightning": _VERSION.format(module="pytorch_lightning"),
    "TensorFlow": _VERSION.format(module="tensorflow"),
    "Keras": "import keras; print(keras.__version__, '- backend', keras.backend.backend())",
    "JAX": "import jax; print(jax.__version__, '- devices', *jax.devices())",
    "CuPy, NCCL": "import cupy; from cupy.cuda import nccl; n = cupy.cuda.runtime"
    ".getDeviceCount(); print(cupy.__version__, '- NCCL', nccl.get_version(), '-', n, 'GPUs')",
}

_THREADS = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED",
         MPI.THREAD_SERIALIZED: "SERIALIZED", MPI.THREAD_MULTIPLE: "MULTIPLE"}
print(names[level])
MPI.Finalize()
"""

_HELLO = """
import numpy as np
import ringplug
ringplug.init()
total = ringplug.allreduce(np.full(1000, ringplug.rank() + 1.0), op=ringplug.Sum, name="hello")
assert (total == 3.0).all(), total[:3]
print("sum of 2 ranks:", total[0], flush=True)
"""


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _python(what: str, code: str, needed: bool = False) -> Finding:
    """Run code in a fresh interpreter; its last line of output, or of the error, is the detail."""
    quiet = config.child_environment(TF_CPP_MIN_LOG_LEVEL="3")
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            env=quiet,
        )
    except subprocess.TimeoutExpired:
        return Finding(what, False, f"no answer within {_LIMIT:g} s", needed)
    if done.returncode == 0:
        return Finding(what, True, _last_line(done.stdout), needed)
    why = _last_line(done.stderr) or f"ended with exit code {done.returncode}"
    return Finding(what, False, why, needed)


def _mpi() -> list[Finding]:
    try:
        loaded = mpirun.library()
    except RingplugError as error:
        return [Finding("MPI library", False, str(error), needed=True)]
    lines = [Finding("MPI library", True, str(loaded), needed=True)]
    try:
        lines.append(Finding("mpirun", True, str(mpirun.find(loaded)), needed=True))
    except RingplugError as error:
        lines.append(Finding("mpirun", False, " ".join(str(error).split()), needed=True))
    threads = _python("MPI threads", _THREADS)
    works = threads.works and threads.detail == "MULTIPLE"
    why = "" if works or not threads.works else " (operations run on the calling thread only)"
    lines.append(Finding("MPI threads", works, threads.detail + why))
    return lines


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", False, f"{folder} does not exist")
    free = shutil.disk_usage(folder).free
    enough = free >= 2**28
    why = "" if enough else ", too little for buckets of 64 MiB (docker: --shm-size=2g)"
    return Finding("shared memory", enough, f"{folder}, {free / 2**30:.1f} GiB free{why}")


def _hello(allow_run_as_root: bool) -> Finding:
    """Two ranks, started as any job is, add two arrays."""
    command = [sys.executable, "-m", "ringplug.launch", "-np", "2"]
    if allow_run_as_root:
        command.append("--allow-run-as-root")
    try:
        done = subprocess.run(
            [*command, "python", "-c", _HELLO],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return Finding("2 processes", False, f"did not end within {_LIMIT:g} s", needed=True)
    both = done.stdout.count("sum of 2 ranks: 3.0") == 2
    if done.returncode == 0 and both:
        return Finding("2 processes", True, "started, added two arrays, ended", needed=True)
    rule = "=" * 80
    lines = [line for line in done.stderr.splitlines() if line.strip() and line != rule]
    why = lines[-1] if lines else f"exit code {done.returncode}, output {done.stdout!r}"
    return Finding("2 processes", False, why, needed=True)


def findings(allow_run_as_root: bool = False) -> list[Finding]:
    """Look at everything; takes as long as importing all frameworks does."""
    lines = [
        Finding("Python", True, f"{platform.python_version()} ({sys.executable})", needed=True),
        _python("mpi4py", _VERSION.format(module="mpi4py"), needed=True),
        *_mpi(),
        _shared_memory(),
    ]
    if all(line.works for line in lines if line.needed):
        lines.append(_hello(allow_run_as_root))
    else:
        lines.append(Finding("2 processes", False, "needs what is missing above", needed=True))
    with ThreadPoolExecutor(2) as pool:
        lines += pool.map(_python, _PROBES.keys(), _PROBES.values())
    return lines


def table(lines: Sequence[Finding]) -> str:
    """The findings as aligned text."""
    width = max(len(line.what) for line in lines)
    rows = [
        f"{'works' if line.works else 'no':<6}{line.what:<{width}}  {line.detail}" for line in lines
    ]
    return "\n".join(rows) + "\n"


def check(allow_run_as_root: bool = False) -> int:
    """Print the table; the exit code is 0 if a job can be started here."""
    lines = findings(allow_run_as_root)
    sys.stdout.write(table(lines))
    return 0 if all(line.works for line in lines if line.needed) else 1
