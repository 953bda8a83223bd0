"""Where this process stands in the world, under Horovod's names. Layer 7.

Every function raises NotInitializedError before `ringplug.init()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringplug.backend import runtime
from ringplug.backend.process_set import ProcessSet

__all__ = [
    "add_process_set",
    "comm_process_set_id",
    "cross_rank",
    "cross_size",
    "get_process_set_ids_and_ranks",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "process_set_included",
    "rank",
    "remove_process_set",
    "size",
]


def rank() -> int:
    """This process, 0 to size() - 1."""
    return runtime.current().world.rank


def size() -> int:
    """Number of processes."""
    return runtime.current().world.size


def local_rank() -> int:
    """This process among those on its host."""
    return runtime.current().world.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return runtime.current().world.local_size


def cross_rank() -> int:
    """This host among the hosts that have a process with this local rank."""
    return runtime.current().world.cross_rank


def cross_size() -> int:
    """Number of hosts that have a process with this local rank."""
    return runtime.current().world.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return runtime.current().world.is_homogeneous


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Set up a process set while the job runs. Collective over all ranks, members or not.

    Args:
        process_set: The set, or its ranks; the same on every rank.

    Returns:
        The set, ready for use.

    Raises:
        UsageError: Sets may not change (see the setting ``dynamic_process_sets``), ranks do
            not exist, or there is a set with the same ranks.
        MismatchError: On every rank, when they pass different ranks.
    """
    return runtime.current().groups.add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up a process set. Collective over all ranks, members or not.

    Args:
        process_set: What `add_process_set` returned; it stands for nothing afterwards.

    Returns:
        Whether it is gone; False for the set of all ranks.

    Raises:
        UsageError: Sets may not change, or it is not set up.
    """
    return runtime.current().groups.remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every process set, by its id; 0 is all ranks."""
    return runtime.current().groups.ranks


def process_set_included(process_set_id: int = 0) -> bool:
    """Whether this process is in a process set.

    Raises:
        UsageError: There is no such set.
    """
    groups = runtime.current().groups
    groups.size_of(process_set_id)
    return runtime.current().world.rank in groups.ranks[process_set_id]


def comm_process_set_id(comm: Any) -> int:
    """The id of the process set whose members are the processes of an ``mpi4py.MPI.Comm``."""
    return runtime.current().groups.number_of(runtime.current().members_of(comm))
