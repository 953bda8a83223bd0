"""Collectives where each rank can reach every rank's memory. Layer 2.

Direct reduce: every rank owns an equal share of the index range. Between two barriers it adds
all ranks' values of its share, one cache-sized chunk at a time, and writes the result into
every rank's buffer. Each rank reads S bytes and writes S bytes for a buffer of S bytes, and
there is no gather phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringplug.backend.buffers import CHUNK_BYTES, Buffer, ReduceOp, fold, split_evenly
from ringplug.backend.errors import MismatchError
from ringplug.backend.stall import name_ranks
from ringplug.backend.transport import JOINED, Piece, Transport

__all__ = ["allreduce_shares", "common", "describe_mismatch", "stream_through_buffer"]

_MOST_DETAILS = 10


def allreduce_shares(views: Sequence[Buffer], rank: int, op: ReduceOp, factor: float) -> None:
    """Reduce this rank's share of all `views` and write it into all of them.

    Args:
        views: Every rank's buffer, in rank order. The caller puts a barrier before and after.
        rank: The calling rank.
        op: The reduction.
        factor: Applied to the result.
    """
    share = split_evenly(views[0].size, len(views))[rank]
    step = max(1, CHUNK_BYTES // views[0].itemsize)
    others = [views[(rank + shift) % len(views)] for shift in range(1, len(views))]
    for lo in range(share.start, share.stop, step):
        piece = slice(lo, min(lo + step, share.stop))
        total = views[rank][piece]
        fold(op, [total, *(view[piece] for view in others)], factor, total)
        for view in others:
            np.copyto(view[piece], total)


def stream_through_buffer(
    transport: Transport,
    count: int,
    dtype: np.dtype[Any],
    op: ReduceOp,
    factor: float,
    fill: Piece,
    drain: Piece,
) -> None:
    """`Transport.allreduce_stream` for a transport that needs the elements in one buffer."""
    buffer = np.empty(count, dtype)
    everything = slice(0, count)
    fill(buffer, everything)
    transport.allreduce(buffer, op, factor)
    drain(buffer, everything)


def common(signatures: Sequence[int]) -> int | None:
    """The one signature of all ranks that have not joined; None where they differ."""
    active = {int(signature) for signature in signatures} - {JOINED}
    if not active:
        return JOINED
    return active.pop() if len(active) == 1 else None


def describe_mismatch(descriptions: Sequence[str], origin: Sequence[int]) -> MismatchError:
    """The error that every rank raises when they are about to do different things.

    Args:
        descriptions: One per rank; of the lines after the first only those are shown that not
            all ranks have.
        origin: What to call each rank.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in zip(origin, descriptions, strict=True):
        groups.setdefault(text, []).append(rank)
    common = set.intersection(*(set(text.splitlines()[1:]) for text in groups))
    lines = []
    for text, ranks in groups.items():
        first, *details = text.splitlines() or [""]
        details = [line for line in details if line not in common]
        lines.append(f"  {name_ranks(ranks)}: {first}")
        lines += [f"    {line}" for line in details[:_MOST_DETAILS]]
        if len(details) > _MOST_DETAILS:
            lines.append(f"    and {len(details) - _MOST_DETAILS} more differences")
    return MismatchError(
        "ranks are about to do different things:\n" + "\n".join(lines) + "\n"
        "Every rank must run the same operations, on the same tensors, in the same order."
    )
