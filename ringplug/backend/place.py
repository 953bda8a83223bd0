"""Where this process stands in the world, under Horovod's names. Layer 7.

Every function raises NotInitializedError before `ringplug.init()`.
"""

from __future__ import annotations

from ringplug.backend.runtime import current

__all__ = [
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "rank",
    "size",
]


def rank() -> int:
    """This process, 0 to size() - 1."""
    return current().world.rank


def size() -> int:
    """Number of processes."""
    return current().world.size


def local_rank() -> int:
    """This process among those on its host."""
    return current().world.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return current().world.local_size


def cross_rank() -> int:
    """This host among the hosts that have a process with this local rank."""
    return current().world.cross_rank


def cross_size() -> int:
    """Number of hosts that have a process with this local rank."""
    return current().world.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return current().world.is_homogeneous
