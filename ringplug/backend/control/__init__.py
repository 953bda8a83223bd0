"""The control plane: who is here, and messages between ranks. Layer 2.

`Control` is one private channel of a fixed group of ranks; nothing sent on one can match
anything sent on another. Implementations:

* ``alone.py``    a world of one
* ``threads.py``  ranks that are threads of one process, for tests
* ``mpi.py``      MPI through mpi4py; the only file that imports it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ringplug.backend.errors import ConfigError, UnavailableError
from ringplug.backend.world import World

if TYPE_CHECKING:
    from ringplug.backend.buffers import Buffer
    from ringplug.backend.config import Config, Launched

__all__ = ["Control", "Pending", "open_control"]


class Pending(Protocol):
    """A send or receive on its way."""

    def done(self) -> bool:
        """Whether the buffer may be used again. Must be called until it says so."""
        ...

    def cancel(self) -> None:
        """Give it up after a failure; the buffer must still outlive the process's traffic."""
        ...


class Control(Protocol):
    """One private channel among an ordered group of ranks.

    Ranks in calls and results count within this group. A channel is used by one thread at a
    time; its owner takes care of that. No call blocks for longer than its deadline.
    """

    name: str
    world: World

    def exchange(self, payload: bytes, timeout: float) -> list[bytes]:
        """All-gather of bytes: every rank passes its own, entry i is rank i's.

        Raises:
            StalledError: Some rank did not call within `timeout` seconds.
            PeerLostError: Some rank has left.
        """
        ...

    def post(self, to: int, payload: bytes) -> None:
        """Send a short message without waiting; messages of one sender keep their order."""
        ...

    def poll(self) -> tuple[int, bytes] | None:
        """The next message that `post` sent here, with its sender, or None. Never blocks."""
        ...

    def isend(self, buffer: Buffer, to: int, tag: int = 0) -> Pending:
        """Start sending a buffer of any size; it must not change until the send is done."""
        ...

    def irecv(self, buffer: Buffer, frm: int, tag: int = 0) -> Pending:
        """Start receiving into a buffer; the sender's must have the same number of bytes."""
        ...

    def subset(self, ranks: Sequence[int], timeout: float) -> Control:
        """A new private channel among `ranks` of this group, in that order.

        Collective over exactly those ranks, and this one must be among them. With all ranks
        it is a duplicate.
        """
        ...

    def members(self, comm: Any) -> list[int]:
        """The ranks, ascending, of the processes of an ``mpi4py.MPI.Comm``.

        Raises:
            UsageError: Some are not in this group, or it is no such communicator.
        """
        ...

    def departed(self) -> frozenset[int]:
        """Ranks that said they leave, as far as heard. Cheap; never blocks."""
        ...

    def leave(self) -> None:
        """Tell the others that this rank will take part in nothing more. Never blocks."""
        ...

    def close(self) -> None:
        """Release what this channel holds. Never blocks."""
        ...

    def abort(self, code: int) -> None:
        """End the whole job at once; does not return where the plane can do that."""
        ...

    def finalize(self) -> None:
        """End the library below if this plane began it; waits for all ranks to do so."""
        ...

    def thread_multiple(self) -> bool:
        """Whether several threads may each use a channel of their own at the same time."""
        ...


def open_control(config: Config, launched: Launched | None, comm: Any = None) -> Control:
    """The control plane that the settings and the launcher ask for.

    Args:
        config: The settings; `config.control` chooses.
        launched: What the launcher said, or None.
        comm: An ``mpi4py.MPI.Comm`` of the user's, to be duplicated; or ranks of the world.

    Raises:
        UnavailableError: The one asked for cannot be had; says why.
        ConfigError: The world that was found is not the one that was launched.
    """
    expected = config.expected_size
    if expected is None and launched is not None:
        expected = launched.size
    choice = config.control
    if choice == "auto":
        by_launcher = launched is not None and launched.size > 1
        many = expected is not None and expected > 1
        choice = "mpi" if comm is not None or by_launcher or many else "alone"
    if choice == "alone":
        if comm is not None:
            raise ConfigError("control=alone cannot be combined with init(comm=...)")
        from ringplug.backend.control.alone import AloneControl

        return AloneControl()
    try:
        from ringplug.backend.control.mpi import MpiControl
    except ImportError as error:
        raise UnavailableError(
            f"control plane mpi: mpi4py cannot be imported ({error}). "
            "Install it with: pip install 'ringplug[mpi]'"
        ) from error
    return MpiControl.open(config, comm, expected if comm is None else None)
