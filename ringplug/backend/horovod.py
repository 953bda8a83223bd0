"""Which of Horovod's environment variables have no effect here, and why. Layer 0."""

from __future__ import annotations

__all__ = ["why_ignored"]

_EVENTS = "operations start when they are there; there is no cycle"
_NEGOTIATION = "requests that were announced before always go by number"
_TOPOLOGY = "the algorithm follows from the hosts; the setting `transport` chooses another"
_TUNING = "there is nothing to tune at run time; see `fusion_bytes`"
_GLOO = "there is no gloo; ranks talk by MPI"
_GPU = "it is about GPUs, which this release does not use"
_BUILD = "nothing is compiled"
_LAUNCHED = (
    "it is what Horovod's own launcher sets. Start the script with ringrun or mpirun; otherwise "
    "each process is a world of one"
)

_REASONS = {
    "CYCLE_TIME": _EVENTS,
    "CACHE_CAPACITY": _NEGOTIATION,
    "HIERARCHICAL_ALLREDUCE": _TOPOLOGY,
    "HIERARCHICAL_ALLGATHER": _TOPOLOGY,
    "TORUS_ALLREDUCE": _TOPOLOGY,
    "MPI_THREADS_DISABLE": "threads are used only where the MPI library allows it",
    "THREAD_AFFINITY": "threads are never pinned",
    "ADASUM_MPI_CHUNK_SIZE": "messages are cut at 1 GiB",
    "ELASTIC": "the number of ranks is fixed",
    "ELASTIC_TIMEOUT": "the number of ranks is fixed",
    "ENABLE_XLA_OPS": "XLA programs are always supported",
    "LOG_HIDE_TIME": "log lines have no time unless the application's format has it",
    "DISABLE_NVTX_RANGES": _GPU,
    "NUM_NCCL_STREAMS": _GPU,
    "BATCH_D2D_MEMCOPIES": _GPU,
    "ENABLE_ASYNC_COMPLETION": _GPU,
    "CCL_CACHE": "there is no CCL",
}
_PREFIXES = {
    "AUTOTUNE": _TUNING,
    "GLOO_": _GLOO,
    "GPU": _GPU,
    "CUDA_": _BUILD,
    "ROCM_": _BUILD,
    "NCCL_": _BUILD,
    "BUILD_": _BUILD,
    "WITH": _BUILD,
}
_BY_LAUNCHER = (
    "RANK",
    "SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "HOSTNAME",
    "SECRET_KEY",
)
_MPI = ("CONTROLLER", "CPU_OPERATIONS")


def why_ignored(name: str, value: str) -> str:
    """Why a ``HOROVOD_*`` variable that is no setting has no effect.

    Args:
        name: The variable.
        value: Its value.

    Returns:
        The reason; empty where the value asks for what is done anyway.
    """
    word = name.removeprefix("HOROVOD_")
    if word in _MPI:
        return "" if value.strip().lower() in ("mpi", "") else "ranks talk by MPI"
    if word in _BY_LAUNCHER:
        return _LAUNCHED
    if word in _REASONS:
        return _REASONS[word]
    for prefix, reason in _PREFIXES.items():
        if word.startswith(prefix):
            return reason
    return "it is not known here"
