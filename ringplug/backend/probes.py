"""What this installation can do, under the names that Horovod's scripts ask for. Layer 7."""

from __future__ import annotations

from importlib.util import find_spec

from ringplug.backend import runtime
from ringplug.backend.errors import UsageError

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether ranks talk, or would talk after `init`, by MPI."""
    return runtime.current().control_name == "mpi" if runtime.is_initialized() else mpi_built()


def mpi_threads_supported() -> bool:
    """Whether MPI may be used by several threads, and by this script itself beside ringplug.

    Raises:
        NotInitializedError: Before `init`.
        UsageError: The ranks do not talk by MPI.
    """
    if runtime.current().control_name != "mpi":
        raise UsageError("MPI is not in use: this process is a world of one without a launcher")
    return runtime.current().thread_multiple


def gloo_built() -> bool:
    """False: there is no gloo."""
    return False


def gloo_enabled() -> bool:
    """False: there is no gloo."""
    return False


def nccl_built() -> int:
    """0: this release moves CPU tensors only. Horovod gives NCCL's version."""
    return 0


def ddl_built() -> bool:
    """False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """False: there is no CCL."""
    return False


def cuda_built() -> bool:
    """False: this release moves CPU tensors only."""
    return False


def rocm_built() -> bool:
    """False: this release moves CPU tensors only."""
    return False
