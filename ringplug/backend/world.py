"""Who is here: the facts that all ranks agreed on when they joined. Layer 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["World"]


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of the group. A change of membership is a new World, never a mutation.

    Attributes:
        rank: This process, 0 to size - 1.
        size: Number of processes.
        local_rank: This process among those on its host.
        local_size: Number of processes on its host.
        cross_rank: This host among the hosts that have a process with this local rank.
        cross_size: Number of such hosts.
        hosts: For each rank, the number of its host; hosts are numbered by their lowest rank.
        generation: Counts rebuilds of the group.
        origin: For each rank of a subgroup, its number in the whole world, which errors name.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[int, ...]
    generation: int = 0
    origin: tuple[int, ...] = ()

    @classmethod
    def from_hosts(
        cls,
        rank: int,
        names: Sequence[str],
        generation: int = 0,
        origin: Sequence[int] | None = None,
    ) -> World:
        """Derive every fact from the host name of each rank, in rank order."""
        numbers: dict[str, int] = {}
        hosts = tuple(numbers.setdefault(name, len(numbers)) for name in names)
        local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        local_rank = local.index(rank)
        peers = [h for h in range(len(numbers)) if hosts.count(h) > local_rank]
        return cls(
            rank=rank,
            size=len(names),
            local_rank=local_rank,
            local_size=len(local),
            cross_rank=peers.index(hosts[rank]),
            cross_size=len(peers),
            hosts=hosts,
            generation=generation,
            origin=tuple(range(len(names)) if origin is None else origin),
        )

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, in order."""
        return tuple(r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank])

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len({self.hosts.count(host) for host in self.hosts}) == 1
