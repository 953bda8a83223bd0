"""Named operations that move values as they are: `allgather`, `broadcast`, `alltoall`, `barrier`.

They match by name as the reductions do, and take CPU tensors of any strides and of every dtype
that numpy has, and bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringplug.backend import ops, runtime
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.torch import autograd
from ringplug.torch.autograd import Call, as_tensors
from ringplug.torch.compilation import untraced
from ringplug.torch.handles import Handle, begin

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "join",
]


@untraced
def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Put the ranks' tensors one below the other, in rank order.

    Args:
        tensor: Of one dimension at least. The first may differ between ranks; the others, and
            the dtype, are the same.
        name: What the ranks match by.
        process_set: The ranks that take part.

    Returns:
        A new tensor, the same on every rank. Gradients flow through it: a rank gets its rows of
        the ranks' average gradient.

    Raises:
        HorovodInternalError: On every rank, when ranks passed different things, or tensors
            without dimensions; on the others, when one of them was refused.
        UsageError: A ValueError: the tensor or an argument cannot work.
        StalledError, PeerLostError: Some rank is late or gone.
    """
    return autograd.allgather(Call(name, process_set), [tensor], False)[0]


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start an `allgather`; no gradients flow through it.

    The tensor must not change until the operation is done. Returns a handle for `poll` and
    `synchronize`, which gives the new tensor.
    """
    return begin(ops.allgather_async, tensor, name, process_set)


@untraced
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> list[Tensor]:
    """An `allgather` of several tensors as one operation, which fails or works whole."""
    return autograd.allgather(Call(name, process_set), list(tensors), True)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `grouped_allgather`; one handle for the group, whose result is the list."""
    return begin(ops.grouped_allgather_async, list(tensors), name, process_set)


@untraced
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Give every rank the tensor of one.

    Args:
        tensor: Same shape and dtype on every rank. Unchanged.
        root_rank: Whose values everybody gets: its rank among all ranks, also for a process
            set. The same on every rank.
        name: What the ranks match by.
        process_set: The ranks that take part.

    Returns:
        A new tensor. Gradients flow through it: the root gets the ranks' average gradient, the
        others zeros.

    Raises:
        HorovodInternalError: On every rank, when ranks passed different things; on the others,
            when one of them was refused.
        UsageError: A ValueError: the tensor cannot be sent, or `root_rank` is no member.
        StalledError, PeerLostError: Some rank is late or gone.
    """
    result: Tensor = autograd.broadcast(Call(name, process_set, root=root_rank), tensor)
    return result


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `broadcast`; no gradients flow through it. See `allgather_async`."""
    return begin(ops.broadcast_async, tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `broadcast` into the tensor itself; autograd does not notice.

    The tensor must be left alone until `synchronize`, which returns it.
    """
    return begin(ops.broadcast_async_, tensor, root_rank, name, process_set)


@untraced
def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """A `broadcast` into the tensor itself, which is returned; autograd does not notice."""
    return ops.broadcast_(tensor, root_rank, name, process_set)


@untraced
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows to every rank and get rows from every rank.

    Args:
        tensor: Of one dimension at least. The first may differ between ranks; the others, and
            the dtype, are the same. Unchanged.
        splits: How many rows go to each rank of the set, in order: a list, or a tensor of int32,
            with one number per rank and a sum that is at most the number of rows. None sends
            everybody the same number of rows, which must then divide evenly.
        name: What the ranks match by.
        process_set: The ranks that take part.

    Returns:
        A new tensor with the rows from every rank, in rank order; with `splits` also an int32
        tensor of how many came from each. Gradients flow back to where the rows came from.

    Raises:
        HorovodInternalError: On every rank, when ranks passed different things, or tensors
            without dimensions; on the others, when one of them was refused.
        UsageError: A ValueError: the tensor or the splits cannot work.
        StalledError, PeerLostError: Some rank is late or gone.
    """
    explicit = _explicit(tensor, splits, name, process_set)
    result, received = autograd.alltoall(Call(name, process_set), tensor, explicit)
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start an `alltoall`; no gradients flow through it.

    Returns:
        A handle; `synchronize` gives the pair of tensor and received splits, also where `splits`
        was None.
    """
    splits = _explicit(tensor, splits, name, process_set)
    return begin(ops.alltoall_async, tensor, splits, name, process_set, finish=as_tensors)


@untraced
def _explicit(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet | None) -> Any:
    """The splits written out, so that the result tells what came from whom.

    What is wrong with them is left to the operation to find, which also tells the other ranks.
    """
    if splits is None:
        size = runtime.current().size_of(process_set)
        shape = np.shape(tensor)
        return [shape[0] // size] * size if shape and shape[0] % size == 0 else None
    if isinstance(splits, Tensor) and splits.dtype is not torch.int32:
        problem = f"alltoall splits must be int32, not {splits.dtype}"
        ops.start("alltoall", [tensor], name=name, process_set=process_set, problem=problem)
    return splits


@untraced
def barrier(process_set: ProcessSet | None = global_process_set) -> None:
    """Wait until every rank of the process set has called this."""
    ops.barrier(process_set)


@untraced
def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until every rank has said so.

    Meanwhile the rank takes part in the others' allreduces with values that change nothing:
    zeros in a sum. An average is still divided by the number of all ranks. The other operations
    raise on ranks that have not joined, while somebody has.

    Args:
        device: Where Horovod puts its zeros; without effect here.

    Returns:
        The rank that joined last; the same on every rank.
    """
    return ops.join(device)
