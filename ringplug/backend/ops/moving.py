"""Named operations that move data, and those that only wait. Layer 8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringplug.backend import runtime
from ringplug.backend.ops.submission import Pending, Set, start

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
    "poll",
    "synchronize",
]


def allgather(tensor: Any, name: str | None = None, process_set: Set = None) -> Any:
    """Concatenate the ranks' tensors along the first dimension, in rank order.

    Args:
        tensor: With one dimension at least; the first may differ by rank.
        name: What the ranks match by.
        process_set: Whose ranks.

    Returns:
        A new tensor, the same on every rank.
    """
    return start("allgather", [tensor], name=name, process_set=process_set, wait=True).wait()


def allgather_async(tensor: Any, name: str | None = None, process_set: Set = None) -> Pending:
    """Start an `allgather`."""
    return start("allgather", [tensor], name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: Set = None
) -> list[Any]:
    """An `allgather` of several tensors, as one operation under one name."""
    pending = start(
        "allgather", tensors, name=name, process_set=process_set, single=False, wait=True
    )
    made: list[Any] = pending.wait()
    return made


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: Set = None
) -> Pending:
    """Start a `grouped_allgather`."""
    return start("allgather", tensors, name=name, process_set=process_set, single=False)


def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: Set = None) -> Any:
    """Give every rank the tensor of `root_rank`.

    Args:
        tensor: Same shape and dtype on every rank.
        root_rank: The rank, in the world, whose values everybody gets; the same on every rank.
        name: What the ranks match by.
        process_set: Whose ranks.

    Returns:
        A new tensor with root's values.
    """
    pending = start(
        "broadcast", [tensor], name=name, process_set=process_set, root=root_rank, wait=True
    )
    return pending.wait()


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Set = None
) -> Pending:
    """Start a `broadcast`."""
    return start("broadcast", [tensor], name=name, process_set=process_set, root=root_rank)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Set = None
) -> Any:
    """A `broadcast` that overwrites the tensor, which is returned."""
    pending = start(
        "broadcast",
        [tensor],
        name=name,
        process_set=process_set,
        root=root_rank,
        in_place=True,
        wait=True,
    )
    return pending.wait()


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Set = None
) -> Pending:
    """Start a `broadcast_`."""
    return start(
        "broadcast", [tensor], name=name, process_set=process_set, root=root_rank, in_place=True
    )


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: Set = None
) -> Any:
    """Send rows of a tensor to every rank, and concatenate what comes from them.

    Args:
        tensor: With one dimension at least; shapes may differ in the first.
        splits: How many rows each rank gets, in rank order: integers, one per rank. By
            default all get as many, and the rows must divide evenly.
        name: What the ranks match by.
        process_set: Whose ranks.

    Returns:
        The received rows in the order of the senders' ranks; with `splits` a pair of that and
        the numbers of rows, int32, that came from each rank.
    """
    pending = start(
        "alltoall", [tensor], splits=splits, name=name, process_set=process_set, wait=True
    )
    return pending.wait()


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: Set = None
) -> Pending:
    """Start an `alltoall`."""
    return start("alltoall", [tensor], splits=splits, name=name, process_set=process_set)


def barrier(process_set: Set = None, name: str | None = None) -> None:
    """Wait until every rank has called this."""
    start("barrier", [], name=name, process_set=process_set, single=False, wait=True).wait()


def join(device: int = -1) -> int:
    """Take part in nothing more until all ranks have joined, for uneven amounts of data.

    Meanwhile this rank contributes values that change nothing to what the others reduce:
    zeros to sums and averages, whose divisor stays the number of all ranks. Operations that
    have no such values (allgather, broadcast, alltoall, reducescatter) are errors meanwhile.

    Args:
        device: Without effect; Horovod's scripts pass one.

    Returns:
        The rank that joined last.
    """
    del device
    return runtime.current().join()


def poll(handle: Any) -> bool:
    """Whether an asynchronous operation has ended; `synchronize` then returns at once."""
    return bool(handle.done())


def synchronize(handle: Any) -> Any:
    """The result of an asynchronous operation; raises what it raised."""
    return handle.wait()
