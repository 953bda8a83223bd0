"""Ranks as the launcher and the communicator say, for Lightning.

Lightning's own environment for MPI starts MPI in every process that has mpi4py, and derives
sizes from ``devices=``. This one reads what the launcher left until the world exists, then the
world, or the part of it that trains together.
"""

from __future__ import annotations

import functools

from ringplug.backend import config, runtime
from ringplug.backend.errors import UsageError
from ringplug.backend.world import World

__all__ = ["RingEnvironmentLogic"]


class RingEnvironmentLogic:
    """A ClusterEnvironment; holds no communicator, so it can be pickled.

    Args:
        members: The ranks that train together, ascending, this process among them; all by
            default. Every rank, size and host below then counts among them. The world exists
            by then.
    """

    def __init__(self, members: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.members = members

    def _world(self) -> World | None:
        """The ranks that train together, numbered from 0; None before the world exists."""
        if self.members is not None:
            return _part(runtime.current().world, self.members)
        return runtime.current().world if runtime.is_initialized() else None

    @staticmethod
    def detect() -> bool:
        """Whether a launcher started this process. Looks at variables only."""
        return config.launched() is not None

    @property
    def creates_processes_externally(self) -> bool:
        """Whether all ranks run already."""
        return runtime.is_initialized() or config.launched() is not None

    @property
    def main_address(self) -> str:
        """Not used: the ring group opens its own store."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Not used: the ring group opens its own store."""
        return 0

    def world_size(self) -> int:
        world = self._world()
        if world is not None:
            return world.size
        start = config.launched()
        return 1 if start is None else start.size

    def set_world_size(self, size: int) -> None:
        """Ignored: the communicator decides."""

    def global_rank(self) -> int:
        world = self._world()
        if world is not None:
            return world.rank
        start = config.launched()
        return 0 if start is None else start.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the communicator decides."""

    def local_rank(self) -> int:
        world = self._world()
        if world is not None:
            return world.local_rank
        start = config.launched()
        return 0 if start is None else start.local_rank

    def local_size(self) -> int:
        """Ranks on this host."""
        world = self._world()
        if world is not None:
            return world.local_size
        start = config.launched()
        return 1 if start is None else start.local_size

    def node_rank(self) -> int:
        """This host; before the world exists, as if ranks filled one host after the other."""
        world = self._world()
        if world is not None:
            return world.hosts[world.rank]
        start = config.launched()
        return 0 if start is None else start.rank // max(start.local_size, 1)

    def num_nodes(self) -> int:
        """Number of hosts."""
        world = self._world()
        if world is not None:
            return len(set(world.hosts))
        start = config.launched()
        return 1 if start is None else -(-start.size // max(start.local_size, 1))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse ``Trainer(devices=, num_nodes=)`` that contradict the processes that run.

        One device is what Lightning takes for ``devices="auto"`` on a CPU, and one node is its
        default, so those fit everything. Of launchers other than MPI's, which say less about
        hosts, nothing is refused before the world exists.

        Raises:
            UsageError: Names both sides.
        """
        start = config.launched()
        if not runtime.is_initialized() and (start is None or start.by != "mpi"):
            return
        if num_devices not in (1, self.local_size()):
            if self.members is None:
                found = f"{self.local_size()} processes were started on this host"
                change = "start as many processes as it says"
            else:
                found = f"{self.local_size()} of the process set {list(self.members)} on this host"
                change = "make the set of as many ranks as it says"
            raise UsageError(
                f"Trainer(devices={num_devices}), but {found}: leave devices out, or {change}"
            )
        if runtime.is_initialized() and num_nodes not in (1, self.num_nodes()):
            raise UsageError(
                f"Trainer(num_nodes={num_nodes}), but the processes run on {self.num_nodes()} "
                "hosts: leave num_nodes out, or start the processes on as many hosts"
            )

    def teardown(self) -> None:
        """Nothing to undo."""


@functools.lru_cache(maxsize=4)
def _part(world: World, members: tuple[int, ...]) -> World:
    if world.rank not in members:
        raise UsageError(f"rank {world.rank} does not train with ranks {list(members)}")
    hosts = [str(world.hosts[rank]) for rank in members]
    return World.from_hosts(members.index(world.rank), hosts, world.generation, members)
