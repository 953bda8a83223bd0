"""The data plane: flat buffers moved and reduced among a fixed group of ranks. Layer 2.

A transport knows no names, frameworks, buckets or compression. Implementations:

* ``alone.py``          one rank: nothing moves
* ``threads.py``        ranks that are threads of one process, for tests
* ``shared_memory.py``  ranks on one host: direct reduce in shared segments
* ``ring.py``           any hosts: pipelined ring over the control plane's sends and receives
* ``hierarchical.py``   shared memory inside a host, ring across hosts
* ``direct.py``         the arithmetic that threads and shared memory have in common
* ``segment.py``        memory that several processes map, and waiting on a word in it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ringplug.backend.buffers import Buffer, ReduceOp
from ringplug.backend.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from ringplug.backend.config import Config
    from ringplug.backend.control import Control

__all__ = ["JOINED", "Piece", "Traffic", "Transport", "open_transport"]

JOINED = 2**63 - 1
"""The signature of a rank without work of its own; see `Transport.agree`."""

Piece: TypeAlias = Callable[[Buffer, slice], None]
"""Packs or unpacks the part of a stream that a slice names."""


@dataclass(slots=True)
class Traffic:
    """What this rank has caused so far; tests compare it with what an operation should cost.

    Attributes:
        calls: Collectives entered.
        sent: Bytes of payload that other ranks took from this rank or were given by it.
    """

    calls: int = 0
    sent: int = 0


class Transport(Protocol):
    """Collectives over one group; every rank makes the same calls in the same order.

    Buffers are one-dimensional and contiguous. A call returns when its result is complete in
    this rank's buffers and its inputs may be changed. One thread at a time.

    Raises, from every call:
        StalledError: A rank did not come before the deadline.
        PeerLostError: A rank has ended.
        TransportError: The library below failed.
    """

    name: str
    rank: int
    size: int

    @property
    def traffic(self) -> Traffic:
        """What this rank has caused so far."""
        ...

    @property
    def control(self) -> Control:
        """The channel that this transport owns; its sends and receives are point-to-point."""
        ...

    def agree(self, signature: int, description: str) -> int:
        """Wait for all ranks and check that they are about to do the same thing.

        Args:
            signature: Non-negative, below 2**63 - 1; equal on all ranks when all is well. Or
                `JOINED`: this rank goes along with what the others do.
            description: What this rank is about to do, shown when they differ.

        Returns:
            The signature of the ranks that have not joined; `JOINED` when all have.

        Raises:
            MismatchError: On every rank, with every rank's description.
        """
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def allreduce(self, buffer: Buffer, op: ReduceOp, factor: float = 1.0) -> None:
        """In place: ``buffer = factor * (op over ranks of buffer)``.

        All ranks end with the same bits. 16-bit floats are added in float32 and rounded once;
        twice by a transport that reduces inside hosts and then across.
        """
        ...

    def allreduce_stream(
        self,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        factor: float,
        fill: Piece,
        drain: Piece,
    ) -> None:
        """Allreduce `count` elements that the caller packs and unpacks piece by piece.

        Args:
            count: Number of elements, the same on every rank.
            dtype: Their type on the wire.
            op: The reduction.
            factor: Applied to the result.
            fill: Called with memory and its place in the stream; writes this rank's elements.
            drain: Called with memory and its place; reads the result. Together the calls
                cover the stream once; pieces come in order, each filled before it is drained.
        """
        ...

    def reducescatter(
        self, source: Buffer, target: Buffer, op: ReduceOp, counts: Sequence[int], factor: float
    ) -> None:
        """Block r of `source`, ``counts[r]`` elements long, reduced, goes to rank r's `target`."""
        ...

    def allgather(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
        """`target` is all ranks' `source` in rank order; rank r passes ``counts[r]`` elements."""
        ...

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """In place: every rank's buffer becomes root's."""
        ...

    def alltoall(
        self, source: Buffer, target: Buffer, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        """Block r of `source` goes to rank r; block r of `target` came from rank r.

        ``send[r]`` and ``receive[r]`` are the blocks' lengths in elements.
        """
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed uint8 memory in which collectives need no staging. Collective."""
        ...

    def close(self) -> None:
        """Release everything. Never blocks, never waits for other ranks."""
        ...


_TRANSPORTS = ("alone", "shared_memory", "ring", "hierarchical")


def open_transport(config: Config, control: Control) -> Transport:
    """A transport over `control`'s group, which it then owns. Collective.

    Raises:
        ConfigError: `config.transport` does not fit this group; says why.
    """
    from ringplug.backend.control.threads import ThreadControl

    world = control.world
    hosts = len(set(world.hosts))
    choice = config.transport
    if not isinstance(choice, str):
        made: Transport = choice(config, control)
        return made
    if choice == "auto":
        if world.size == 1:
            choice = "alone"
        elif hosts == 1:
            choice = "threads" if isinstance(control, ThreadControl) else "shared_memory"
        else:
            choice = "hierarchical" if hosts < world.size else "ring"
    if choice == "alone":
        if world.size != 1:
            raise ConfigError(f"transport=alone serves one rank, this group has {world.size}")
        from ringplug.backend.transport.alone import AloneTransport

        return AloneTransport(control)
    if choice == "shared_memory":
        if hosts != 1:
            raise ConfigError(
                f"transport=shared_memory serves one host, these ranks are on {hosts}; "
                "use hierarchical, ring or auto"
            )
        from ringplug.backend.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(config, control)
    if choice == "ring":
        from ringplug.backend.transport.ring import RingTransport

        return RingTransport(config, control)
    if choice == "hierarchical":
        from ringplug.backend.transport.hierarchical import HierarchicalTransport

        return HierarchicalTransport(config, control)
    assert isinstance(control, ThreadControl)
    from ringplug.backend.transport.threads import ThreadTransport

    return ThreadTransport(config, control)
