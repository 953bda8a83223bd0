"""What agreed named operations do on a transport. Layer 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16 and relatives by name
import numpy as np

from ringplug.backend.adasum import allreduce_adasum
from ringplug.backend.buffers import (
    Array,
    Buffer,
    ReduceOp,
    as_bytes,
    neutral_array,
    scale_into,
    split_evenly,
)
from ringplug.backend.compression import Compressor
from ringplug.backend.compression.none import NoCompression
from ringplug.backend.reduction import Reduction, allreduce_custom
from ringplug.backend.request import Request
from ringplug.backend.transport import Transport

__all__ = ["Work", "execute", "neutral"]

_PLAIN = NoCompression()


@dataclass(slots=True)
class Work:
    """One rank's data for one operation.

    Attributes:
        request: What it asked for.
        arrays: Its contiguous inputs.
        targets: Where the results go, of the shapes and dtypes of the inputs but with any
            strides; None for new arrays.
        op: The reduction.
        codec: What an allreduce travels as.
        numbers: What rank 0 said; see `coordinator.Answer`.
    """

    request: Request
    arrays: Sequence[Array]
    targets: Sequence[Array] | None = None
    op: ReduceOp | Reduction = ReduceOp.SUM
    codec: Compressor = _PLAIN
    numbers: Sequence[int] = field(default=())

    @property
    def nbytes(self) -> int:
        """Size of the inputs."""
        return sum(array.nbytes for array in self.arrays)


def neutral(request: Request, codec: Compressor) -> Work:
    """What a rank that has joined contributes: it changes no sum, minimum, maximum or product."""
    op = ReduceOp[request.op] if request.op else ReduceOp.SUM
    arrays = [
        neutral_array(shape, np.dtype(name), op)
        for name, shape in zip(request.dtypes, request.shapes, strict=True)
    ]
    return Work(request, arrays, op=op, codec=codec)


def execute(transport: Transport, works: Sequence[Work]) -> list[list[Array]]:
    """Do operations that may share a buffer; the results of each, tensor by tensor."""
    kind = works[0].request.kind
    if kind == "allreduce":
        return _allreduce(transport, works)
    if kind == "broadcast":
        return _broadcast(transport, works)
    return [_KINDS[kind](transport, work) for work in works]


def _allreduce(transport: Transport, works: Sequence[Work]) -> list[list[Array]]:
    outputs = [_outputs(work) for work in works]
    alike: dict[np.dtype[Any], list[tuple[Work, Array, Array]]] = {}
    for work, outs in zip(works, outputs, strict=True):
        for array, out in zip(work.arrays, outs, strict=True):
            alike.setdefault(array.dtype, []).append((work, array, out))
    for dtype, members in alike.items():
        _allreduce_alike(transport, dtype, members)
    return outputs


def _allreduce_alike(
    transport: Transport, dtype: np.dtype[Any], members: Sequence[tuple[Work, Array, Array]]
) -> None:
    """One fused buffer: all of one dtype, reduction and scales."""
    work = members[0][0]
    op, codec, request = work.op, work.codec, work.request
    wire = codec.wire_dtype(dtype)
    factor, after = request.postscale, 1.0
    if op is ReduceOp.AVERAGE:
        factor /= transport.size
    elif op is ReduceOp.SUM and wire != dtype:
        # On a narrow wire a sum travels as the mean, which fits wherever the values do.
        factor, after = factor / transport.size, float(transport.size)
    only = members[0][2] if len(members) == 1 else None
    in_place = only is not None and wire == dtype and only.flags.c_contiguous
    bounds: list[slice] = []
    for _, array, _ in members:
        start = bounds[-1].stop if bounds else 0
        bounds.append(slice(start, start + array.size))
    fused = only.reshape(-1) if in_place and only is not None else np.empty(bounds[-1].stop, wire)
    for (_, array, _), place in zip(members, bounds, strict=True):
        flat = array.reshape(-1)
        if wire == dtype:
            scale_into(flat, request.prescale, fused[place])
            continue
        if request.prescale != 1.0:
            scaled = np.empty_like(flat)
            scale_into(flat, request.prescale, scaled)
            flat = scaled
        codec.encode(flat, fused[place])
    if isinstance(op, Reduction):
        allreduce_custom(transport, fused, op, bounds)
        scale_into(fused, factor, fused)
    elif op is ReduceOp.ADASUM:
        allreduce_adasum(transport, fused, bounds)
        scale_into(fused, factor, fused)
    else:
        transport.allreduce(fused, op, factor)
    if in_place:
        return
    for (_, _, out), place in zip(members, bounds, strict=True):
        flat = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, dtype)
        codec.decode(fused[place], flat, after)
        if not out.flags.c_contiguous:
            np.copyto(out, flat.reshape(out.shape))


def _broadcast(transport: Transport, works: Sequence[Work]) -> list[list[Array]]:
    root = works[0].request.root
    mine = transport.rank == root
    outputs = [_outputs(work) for work in works]
    pairs = [
        (array, out)
        for work, outs in zip(works, outputs, strict=True)
        for array, out in zip(work.arrays, outs, strict=True)
    ]
    if len(pairs) == 1 and pairs[0][1].flags.c_contiguous:
        array, out = pairs[0]
        if mine and out is not array:
            np.copyto(out, array)
        transport.broadcast(as_bytes(out.reshape(-1)), root)
        return outputs
    fused = np.empty(sum(array.nbytes for array, _ in pairs), np.uint8)
    at = 0
    places = []
    for array, _ in pairs:
        places.append(slice(at, at + array.nbytes))
        at += array.nbytes
        if mine:
            fused[places[-1]] = as_bytes(array.reshape(-1))
    transport.broadcast(fused, root)
    for (array, out), place in zip(pairs, places, strict=True):
        if mine:
            np.copyto(out, array)
        else:
            # A copy, because a place in the buffer need not be aligned for the dtype.
            np.copyto(out, fused[place].copy().view(array.dtype).reshape(array.shape))
    return outputs


def _allgather(transport: Transport, work: Work) -> list[Array]:
    results: list[Array] = []
    for at, array in enumerate(work.arrays):
        rows = list(work.numbers[at * transport.size : (at + 1) * transport.size])
        width = int(np.prod(array.shape[1:], dtype=np.int64))
        out = np.empty((sum(rows), *array.shape[1:]), array.dtype)
        transport.allgather(array.reshape(-1), out.reshape(-1), [row * width for row in rows])
        results.append(out)
    return results


def _alltoall(transport: Transport, work: Work) -> list[Array]:
    (array,) = work.arrays
    size, rank = transport.size, transport.rank
    width = int(np.prod(array.shape[1:], dtype=np.int64))
    sent = work.numbers[rank * size : (rank + 1) * size]
    received = work.numbers[rank::size]
    out = np.empty((sum(received), *array.shape[1:]), array.dtype)
    transport.alltoall(
        array[: sum(sent)].reshape(-1),
        out.reshape(-1),
        [rows * width for rows in sent],
        [rows * width for rows in received],
    )
    return [out, np.array(received, np.int32)]


def _reducescatter(transport: Transport, work: Work) -> list[Array]:
    request = work.request
    assert isinstance(work.op, ReduceOp)
    factor = request.postscale / (transport.size if work.op is ReduceOp.AVERAGE else 1)
    results: list[Array] = []
    for array in work.arrays:
        shares = split_evenly(array.shape[0], transport.size)
        width = int(np.prod(array.shape[1:], dtype=np.int64))
        counts = [(share.stop - share.start) * width for share in shares]
        wire, after = work.codec.wire_dtype(array.dtype), 1.0
        if wire != array.dtype and work.op is ReduceOp.SUM:
            factor, after = request.postscale / transport.size, float(transport.size)
        source: Buffer = array.reshape(-1)
        if request.prescale != 1.0:
            source = np.empty_like(source)
            scale_into(array.reshape(-1), request.prescale, source)
        if wire != array.dtype:
            plain, source = source, np.empty(source.size, wire)
            work.codec.encode(plain, source)
        mine = shares[transport.rank]
        out = np.empty((mine.stop - mine.start, *array.shape[1:]), array.dtype)
        part = out.reshape(-1) if wire == array.dtype else np.empty(out.size, wire)
        transport.reducescatter(source, part, work.op, counts, factor)
        if wire != array.dtype:
            work.codec.decode(part, out.reshape(-1), after)
        results.append(out)
    return results


def _barrier(transport: Transport, work: Work) -> list[Array]:
    transport.barrier()
    return list(work.arrays)


_KINDS = {
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
}


def _outputs(work: Work) -> list[Array]:
    if work.targets is not None:
        return list(work.targets)
    return [np.empty_like(array) for array in work.arrays]
