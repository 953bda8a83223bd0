"""The transport of several hosts with several ranks each. Layer 3.

Allreduce is a reduce-scatter in the host's shared memory, an allreduce of each shard among the
ranks of the same local rank across hosts (so that every rank carries its own shard over the
network), and an allgather in the host. Hosts of unequal size reduce to one leader each. All
other collectives go over a ring of all ranks. 16-bit floats are rounded once inside the host and
once across, so that the network carries 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringplug.backend.buffers import Buffer, ReduceOp, accumulator, is_floating, split_evenly
from ringplug.backend.config import Config
from ringplug.backend.control import Control
from ringplug.backend.transport import Piece, Traffic
from ringplug.backend.transport.alone import AloneTransport
from ringplug.backend.transport.direct import stream_through_buffer
from ringplug.backend.transport.ring import RingTransport
from ringplug.backend.transport.shared_memory import SharedMemoryTransport

__all__ = ["HierarchicalTransport"]


class HierarchicalTransport:
    """Shared memory inside a host, rings across."""

    name = "hierarchical"

    def __init__(self, config: Config, control: Control) -> None:
        world = control.world
        self.control = control
        self.rank = world.rank
        self.size = world.size
        self._everyone = RingTransport(config, control)
        inner = control.subset(world.local_ranks, config.timeout)
        self._inner: SharedMemoryTransport | AloneTransport = (
            SharedMemoryTransport(config, inner) if world.local_size > 1 else AloneTransport(inner)
        )
        self._leads = world.local_rank == 0
        self._sharded = world.is_homogeneous
        self._outer: RingTransport | None = None
        if self._sharded or self._leads:
            members = [
                rank
                for rank in range(world.size)
                if world.hosts[:rank].count(world.hosts[rank])
                == (world.local_rank if self._sharded else 0)
            ]
            self._outer = RingTransport(config, control.subset(members, config.timeout))

    @property
    def traffic(self) -> Traffic:
        """All that this rank moved, inside its host and between hosts."""
        parts = [t.traffic for t in (self._everyone, self._inner, self._outer) if t is not None]
        return Traffic(sum(t.calls for t in parts), sum(t.sent for t in parts))

    def agree(self, signature: int, description: str) -> int:
        return self._everyone.agree(signature, description)

    def barrier(self) -> None:
        self._everyone.barrier()

    def allreduce(self, buffer: Buffer, op: ReduceOp, factor: float = 1.0) -> None:
        # Sums of floats are scaled inside the host, before a narrow type could overflow; at the
        # end what a factor inside would change: a product, or a minimum when it is negative.
        if accumulator(buffer.dtype, factor).kind in "iu" and factor != 1.0:
            # Their sum may need more bits than they have: added where it is scaled.
            self._everyone.allreduce(buffer, op, factor)
            return
        sums = op in (ReduceOp.SUM, ReduceOp.AVERAGE)
        inner, outer = (factor, 1.0) if sums and is_floating(buffer.dtype) else (1.0, factor)
        if not self._sharded:
            self._inner.allreduce(buffer, op, inner)
            if self._outer is not None:
                self._outer.allreduce(buffer, op, outer)
            self._inner.broadcast(buffer, 0)
            return
        assert self._outer is not None
        shares = split_evenly(buffer.size, self._inner.size)
        counts = [share.stop - share.start for share in shares]
        shard = np.empty(counts[self._inner.rank], buffer.dtype)
        self._inner.reducescatter(buffer, shard, op, counts, inner)
        self._outer.allreduce(shard, op, outer)
        self._inner.allgather(shard, buffer, counts)

    def allreduce_stream(
        self,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        factor: float,
        fill: Piece,
        drain: Piece,
    ) -> None:
        stream_through_buffer(self, count, dtype, op, factor, fill, drain)

    def reducescatter(
        self, source: Buffer, target: Buffer, op: ReduceOp, counts: Sequence[int], factor: float
    ) -> None:
        self._everyone.reducescatter(source, target, op, counts, factor)

    def allgather(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
        self._everyone.allgather(source, target, counts)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        self._everyone.broadcast(buffer, root)

    def alltoall(
        self, source: Buffer, target: Buffer, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        self._everyone.alltoall(source, target, send, receive)

    def allocate(self, nbytes: int) -> Buffer:
        return np.zeros(nbytes, np.uint8)

    def close(self) -> None:
        for transport in (self._inner, self._outer, self._everyone):
            if transport is not None:
                transport.control.leave()
                transport.close()
