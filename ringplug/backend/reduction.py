"""Reductions that a user defines, over any transport. Layer 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringplug.backend.buffers import CHUNK_BYTES, Buffer, split_evenly
from ringplug.backend.transport import Transport

__all__ = ["Reduction", "allreduce_custom"]


@dataclass(frozen=True)
class Reduction:
    """A reduction of your own, for the `op` of an allreduce.

    Values are combined in rank order, ``((v0 ∘ v1) ∘ v2) ...``, so it need not be commutative,
    nor associative. Every rank gets the same bits.

    Example, the value of largest magnitude::

        def combine(into, other):
            np.copyto(into, other, where=abs(other) > abs(into))

        largest = ringplug.Reduction("largest magnitude", combine)
        ringplug.allreduce(x, op=largest)

    Args:
        name: The same on every rank; what ranks compare.
        combine: ``combine(into, other)`` puts ``into ∘ other`` into `into`. Both are flat
            numpy arrays of one size and of the tensor's dtype (bfloat16 is ml_dtypes');
            `other` must not be changed.
        elementwise: Whether element i of the result depends on elements i only. Then the
            arrays are pieces of the tensor and each rank reduces a share of it, which moves
            twice the tensor's bytes per rank. Otherwise the arrays are whole tensors, which
            every rank gathers from all.
    """

    name: str
    combine: Callable[[Buffer, Buffer], object]
    elementwise: bool = True


def allreduce_custom(
    transport: Transport, buffer: Buffer, reduction: Reduction, bounds: Sequence[slice]
) -> None:
    """In place: `buffer` becomes the reduction of all ranks' buffers.

    Args:
        transport: Where.
        buffer: As many elements on every rank.
        reduction: What to do.
        bounds: The tensors in the buffer.
    """
    size = transport.size
    if size == 1:
        return
    if not reduction.elementwise:
        everything = np.empty(size * buffer.size, buffer.dtype)
        transport.allgather(buffer, everything, [buffer.size] * size)
        rows = everything.reshape(size, -1)
        for tensor in bounds:
            for other in rows[1:]:
                reduction.combine(rows[0][tensor], other[tensor])
        np.copyto(buffer, rows[0])
        return
    rows, counts = exchange_shares(transport, buffer)
    step = max(1, CHUNK_BYTES // buffer.itemsize)
    for lo in range(0, rows.shape[1], step):
        for other in rows[1:]:
            reduction.combine(rows[0][lo : lo + step], other[lo : lo + step])
    transport.allgather(np.ascontiguousarray(rows[0]), buffer, counts)


def exchange_shares(transport: Transport, buffer: Buffer) -> tuple[Buffer, list[int]]:
    """Every rank's values of this rank's share, one row per rank, and the shares' sizes."""
    shares = split_evenly(buffer.size, transport.size)
    counts = [share.stop - share.start for share in shares]
    mine = counts[transport.rank]
    rows = np.empty(transport.size * mine, buffer.dtype)
    transport.alltoall(buffer, rows, counts, [mine] * transport.size)
    return rows.reshape(transport.size, mine), counts
