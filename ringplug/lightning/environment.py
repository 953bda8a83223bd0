"""Ranks as the launcher and the communicator say, for Lightning.

Lightning's own environment for MPI starts MPI in every process that has mpi4py, and derives
sizes from ``devices=``. This one reads what the launcher left until the world exists, then the
world.
"""

from __future__ import annotations

from ringplug.backend import config, runtime
from ringplug.backend.errors import UsageError

__all__ = ["RingEnvironmentLogic"]


class RingEnvironmentLogic:
    """A ClusterEnvironment; holds no communicator, so it can be pickled."""

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
        if runtime.is_initialized():
            return runtime.current().world.size
        start = config.launched()
        return 1 if start is None else start.size

    def set_world_size(self, size: int) -> None:
        """Ignored: the communicator decides."""

    def global_rank(self) -> int:
        if runtime.is_initialized():
            return runtime.current().world.rank
        start = config.launched()
        return 0 if start is None else start.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the communicator decides."""

    def local_rank(self) -> int:
        if runtime.is_initialized():
            return runtime.current().world.local_rank
        start = config.launched()
        return 0 if start is None else start.local_rank

    def local_size(self) -> int:
        """Ranks on this host."""
        if runtime.is_initialized():
            return runtime.current().world.local_size
        start = config.launched()
        return 1 if start is None else start.local_size

    def node_rank(self) -> int:
        """This host; before the world exists, as if ranks filled one host after the other."""
        if runtime.is_initialized():
            world = runtime.current().world
            return world.hosts[world.rank]
        start = config.launched()
        return 0 if start is None else start.rank // max(start.local_size, 1)

    def num_nodes(self) -> int:
        """Number of hosts."""
        if runtime.is_initialized():
            return len(set(runtime.current().world.hosts))
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
            raise UsageError(
                f"Trainer(devices={num_devices}), but {self.local_size()} processes were started "
                "on this host: leave devices out, or start as many processes as it says"
            )
        if runtime.is_initialized() and num_nodes not in (1, self.num_nodes()):
            raise UsageError(
                f"Trainer(num_nodes={num_nodes}), but the processes run on {self.num_nodes()} "
                "hosts: leave num_nodes out, or start the processes on as many hosts"
            )

    def teardown(self) -> None:
        """Nothing to undo."""
