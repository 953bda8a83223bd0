"""Options of ``horovodrun`` that ``ringrun`` has in another form, or does not have."""

from __future__ import annotations

from collections.abc import Sequence

from ringplug.backend.horovod import why_ignored

__all__ = ["REFUSED", "SATISFIED", "WITHOUT_EFFECT", "explain"]

SATISFIED = (
    "--mpi",
    "--no-autotune",
    "--no-mpi-threads-disable",
    "--no-torus-allreduce",
    "--log-hide-timestamp",
    "--log-without-timestamp",
)
"""Switches that ask for what is done anyway."""

WITHOUT_EFFECT: dict[str, tuple[bool, str]] = {
    "--disable-cache": (False, "no check of hosts is cached"),
    "--tcp": (False, "ranks on one host share memory; between hosts, --mpi-args can ask for it"),
    "--cycle-time-ms": (True, "HOROVOD_CYCLE_TIME"),
    "--cache-capacity": (True, "HOROVOD_CACHE_CAPACITY"),
    "--hierarchical-allreduce": (False, "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    "--no-hierarchical-allreduce": (False, "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    "--hierarchical-allgather": (False, "HOROVOD_HIERARCHICAL_ALLGATHER"),
    "--no-hierarchical-allgather": (False, "HOROVOD_HIERARCHICAL_ALLGATHER"),
    "--torus-allreduce": (False, "HOROVOD_TORUS_ALLREDUCE"),
    "--autotune": (False, "HOROVOD_AUTOTUNE"),
    "--autotune-log-file": (True, "HOROVOD_AUTOTUNE_LOG"),
    "--autotune-warmup-samples": (True, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"),
    "--autotune-steps-per-sample": (True, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"),
    "--autotune-bayes-opt-max-samples": (True, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"),
    "--autotune-gaussian-process-noise": (True, "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"),
    "--mpi-threads-disable": (False, "HOROVOD_MPI_THREADS_DISABLE"),
    "--num-nccl-streams": (True, "HOROVOD_NUM_NCCL_STREAMS"),
    "--thread-affinity": (True, "HOROVOD_THREAD_AFFINITY"),
    "--gloo-timeout-seconds": (True, "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    "--log-with-timestamp": (False, "HOROVOD_LOG_HIDE_TIME"),
    "--no-log-hide-timestamp": (False, "HOROVOD_LOG_HIDE_TIME"),
}
"""Options that are accepted and named in one warning.

Whether they take a value; and the variable that they stand for, or why they do nothing.
"""

_ELASTIC = "a job has a fixed number of processes"
_SSH = "say it for the host in ~/.ssh/config"

REFUSED: dict[str, str] = {
    "--gloo": "there is no Gloo controller; without --gloo the job runs on MPI",
    "--jsrun": "start the ranks with jsrun itself, without ringrun",
    "--config-file": "give its settings as options, or as HOROVOD_* variables",
    "-p": _SSH,
    "--ssh-port": _SSH,
    "-i": _SSH,
    "--ssh-identity-file": _SSH,
    "--min-np": _ELASTIC,
    "--min-num-proc": _ELASTIC,
    "--max-np": _ELASTIC,
    "--max-num-proc": _ELASTIC,
    "--slots-per-host": _ELASTIC,
    "--elastic-timeout": _ELASTIC,
    "--reset-limit": _ELASTIC,
    "--blacklist-cooldown-range": _ELASTIC,
    "--host-discovery-script": _ELASTIC,
}
"""Options that ask for something which is not there: what to do instead."""


def explain(names: Sequence[str]) -> str:
    """The warning about options that were given and have no effect; each reason once."""
    reasons: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        why = WITHOUT_EFFECT[name][1]
        reason = why_ignored(why, "1") if why.startswith("HOROVOD_") else why
        reasons.setdefault(reason, []).append(name)
    parts = [f"{', '.join(given)} ({reason})" for reason, given in reasons.items()]
    return f"without effect: {'; '.join(parts)}"
