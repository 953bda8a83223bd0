"""What each collective of torch.distributed does on a transport.

A function here checks its tensors, and returns what must be the same on every rank together
with the job that does the work once the ranks have agreed on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ringplug.backend.buffers import Buffer
from ringplug.backend.errors import MismatchError, UsageError
from ringplug.backend.transport import Transport
from ringplug.torch.reductions import Reduction, allreduce_sparse
from ringplug.torch.tensors import Flat, describe

__all__ = [
    "Task",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


@dataclass(frozen=True, slots=True)
class Task:
    """One collective, ready to run.

    Attributes:
        what: Its tensors and arguments; equal on all ranks when all is well.
        job: The work.
    """

    what: str
    job: Callable[[Transport], None]


def _listed(tensors: Sequence[Tensor]) -> str:
    shown = [describe(tensor) for tensor in tensors]
    if len(shown) > 1 and len(set(shown)) == 1:
        return f"{len(shown)} x {shown[0]}"
    return ", ".join(shown)


def _same_dtype(*tensors: Tensor) -> None:
    kinds = {str(tensor.dtype) for tensor in tensors}
    if len(kinds) > 1:
        raise UsageError(f"tensors of different dtypes in one call: {', '.join(sorted(kinds))}")


def _fits(numel: int, expected: int, what: str) -> None:
    if numel != expected:
        raise UsageError(f"{what} has {numel} elements, {expected} are needed")


def allreduce(tensors: Sequence[Tensor], how: Reduction, size: int) -> Task:
    """In place; several tensors of one dtype travel together."""
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            if how.op.name != "SUM" or how.factor is not None:
                raise UsageError(f"{how.name} of sparse tensors; SUM and AVG are possible")
        elif tensor.layout is not torch.strided:
            raise UsageError(f"allreduce of a tensor of layout {tensor.layout}")
        else:
            how.check(tensor)
    what = f"{_listed(tensors)}, {how.name}"

    def job(transport: Transport) -> None:
        dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                allreduce_sparse(transport, tensor, how)
        kinds = dict.fromkeys(tensor.dtype for tensor in dense)
        for kind in kinds:
            flats = [Flat(tensor) for tensor in dense if tensor.dtype is kind]
            loaded = [how.load(flat) for flat in flats]
            together = loaded[0] if len(loaded) == 1 else np.concatenate(loaded)
            transport.allreduce(together, how.op, how.scale(size))
            start = 0
            for flat in flats:
                numbers = flat.numbers
                part = together[start : start + numbers.size]
                start += numbers.size
                if not np.may_share_memory(part, numbers):
                    np.copyto(numbers, part)
                flat.store()

    return Task(what, job)


def broadcast(tensor: Tensor, root: int) -> Task:
    """In place, from `root`."""

    def job(transport: Transport) -> None:
        flat = Flat(tensor)
        transport.broadcast(flat.bytes, root)
        if transport.rank != root:
            flat.store()

    return Task(f"{describe(tensor)} from rank {root}", job)


def allgather(outputs: Sequence[Tensor], own: Tensor, rank: int, size: int) -> Task:
    """Rank r's `own` fills ``outputs[r]``; or all of them, one after the other, one output."""
    _same_dtype(*outputs, own)
    width = own.element_size()
    if len(outputs) == 1 and size > 1:
        _fits(outputs[0].numel(), own.numel() * size, "the output")
        counts = [own.numel() * width] * size
    else:
        _fits(len(outputs), size, "the list of outputs")
        _fits(own.numel(), outputs[rank].numel(), "the input")
        counts = [output.numel() * width for output in outputs]

    def job(transport: Transport) -> None:
        source = Flat(own).bytes
        if len(outputs) == 1:
            flat = Flat(outputs[0])
            transport.allgather(source, flat.bytes, counts)
            flat.store()
            return
        together = np.empty(sum(counts), np.uint8)
        transport.allgather(source, together, counts)
        _unpack(together, outputs)

    return Task(f"into {_listed(outputs)}", job)


def _unpack(memory: Buffer, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        flat = Flat(tensor)
        place = flat.bytes
        np.copyto(place, memory[start : start + place.size])
        start += place.size
        flat.store()


def reduce_scatter(
    output: Tensor, inputs: Sequence[Tensor], how: Reduction, rank: int, size: int
) -> Task:
    """``inputs[r]`` of all ranks, reduced, fills rank r's `output`; or one input in equal parts."""
    _same_dtype(output, *inputs)
    how.check(output)
    if len(inputs) == 1 and size > 1:
        _fits(inputs[0].numel(), output.numel() * size, "the input")
        counts = [output.numel()] * size
    else:
        _fits(len(inputs), size, "the list of inputs")
        _fits(output.numel(), inputs[rank].numel(), "the output")
        counts = [tensor.numel() for tensor in inputs]

    def job(transport: Transport) -> None:
        loaded = [how.load(Flat(tensor)) for tensor in inputs]
        flat = Flat(output)
        target = flat.numbers
        source = loaded[0] if len(loaded) == 1 else np.concatenate(loaded)
        if len(loaded) == 1 and np.may_share_memory(source, target):
            source = source.copy()
        transport.reducescatter(source, target, how.op, counts, how.scale(size))
        flat.store()

    return Task(f"of {_listed(inputs)}, {how.name}", job)


def reduce(tensor: Tensor, root: int, how: Reduction) -> Task:
    """The reduced values reach `root`'s tensor; the others' stay as they are."""
    how.check(tensor)

    def job(transport: Transport) -> None:
        flat = Flat(tensor)
        loaded = how.load(flat)
        counts = [loaded.size if rank == root else 0 for rank in range(transport.size)]
        target = np.empty(counts[transport.rank], loaded.dtype)
        transport.reducescatter(loaded, target, how.op, counts, how.scale(transport.size))
        if transport.rank == root:
            np.copyto(flat.numbers, target)
            flat.store()

    return Task(f"{describe(tensor)} to rank {root}, {how.name}", job)


def gather(outputs: Sequence[Tensor], own: Tensor, root: int, rank: int, size: int) -> Task:
    """Rank r's `own` fills ``outputs[r]`` on `root`; the other ranks pass no outputs."""
    if rank == root:
        _same_dtype(*outputs, own)
        _fits(len(outputs), size, "the list of outputs")
        for output in outputs:
            _fits(output.numel(), own.numel(), "an output")
    elif outputs:
        raise UsageError(f"only the destination, rank {root}, passes outputs to gather")
    nbytes = own.numel() * own.element_size()

    def job(transport: Transport) -> None:
        send = [nbytes if peer == root else 0 for peer in range(size)]
        receive = [nbytes if rank == root else 0] * size
        together = np.empty(sum(receive), np.uint8)
        transport.alltoall(Flat(own).bytes, together, send, receive)
        _unpack(together, outputs)

    return Task(f"{describe(own)} to rank {root}", job)


def scatter(output: Tensor, inputs: Sequence[Tensor], root: int, rank: int, size: int) -> Task:
    """Rank r's `output` becomes ``inputs[r]`` of `root`; the other ranks pass no inputs."""
    if rank == root:
        _same_dtype(output, *inputs)
        _fits(len(inputs), size, "the list of inputs")
        for tensor in inputs:
            _fits(tensor.numel(), output.numel(), "an input")
    elif inputs:
        raise UsageError(f"only the source, rank {root}, passes inputs to scatter")
    nbytes = output.numel() * output.element_size()

    def job(transport: Transport) -> None:
        send = [nbytes if rank == root else 0] * size
        receive = [nbytes if peer == root else 0 for peer in range(size)]
        parts = [Flat(tensor).bytes for tensor in inputs]
        source = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        flat = Flat(output)
        transport.alltoall(source, flat.bytes, send, receive)
        flat.store()

    return Task(f"{describe(output)} from rank {root}", job)


def alltoall(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    send: Sequence[int],
    receive: Sequence[int],
) -> Task:
    """Block r of the inputs goes to rank r; block r of the outputs came from rank r.

    Args:
        outputs: One tensor per rank, or one for all.
        inputs: One tensor per rank, or one for all.
        send: Length of each block in elements.
        receive: Length of each block in elements.
    """
    _same_dtype(*outputs, *inputs)
    _fits(sum(tensor.numel() for tensor in inputs), sum(send), "the input")
    _fits(sum(tensor.numel() for tensor in outputs), sum(receive), "the output")
    width = outputs[0].element_size()

    def job(transport: Transport) -> None:
        size = transport.size
        mine = np.array([*send, *receive], np.int64)
        lengths = np.empty(2 * size * size, np.int64)
        transport.allgather(mine, lengths, [2 * size] * size)
        table = lengths.reshape(size, 2, size)
        # What rank a sends to b must be what b expects from a; all ranks see the whole table.
        for a, b in np.argwhere(table[:, 0] != table[:, 1].T):
            raise MismatchError(
                f"rank {a} sends {table[a, 0, b]} elements to rank {b}, which expects "
                f"{table[b, 1, a]}"
            )
        parts = [Flat(tensor).bytes for tensor in inputs]
        source = parts[0] if len(parts) == 1 else np.concatenate(parts)
        bytes_out = [count * width for count in send]
        bytes_in = [count * width for count in receive]
        if len(outputs) == 1:
            flat = Flat(outputs[0])
            target = flat.bytes
            if np.may_share_memory(source, target):
                source = source.copy()
            transport.alltoall(source, target, bytes_out, bytes_in)
            flat.store()
            return
        together = np.empty(sum(bytes_in), np.uint8)
        transport.alltoall(source, together, bytes_out, bytes_in)
        _unpack(together, outputs)

    return Task(str(outputs[0].dtype).removeprefix("torch."), job)
