"""Named operations on any framework's tensors. Layer 7.

Ranks match operations by name, in any order; unnamed ones are matched in the order in which
each rank submits them. What does not fit together is an error on every rank, with both sides,
and the process can go on.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from ringplug.backend import adapters, runtime
from ringplug.backend.buffers import Array, ReduceOp, check_reducible
from ringplug.backend.errors import UsageError
from ringplug.backend.handle import Handle
from ringplug.backend.request import Request

__all__ = [
    "Pending",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "poll",
    "synchronize",
]

_REDUCTIONS = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


class Pending:
    """An asynchronous operation; give it to `poll` and `synchronize`."""

    __slots__ = ("_handle", "_tensor")

    def __init__(self, handle: Handle, tensor: Any) -> None:
        self._handle = handle
        self._tensor = tensor

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._handle.done()

    def wait(self) -> Any:
        """The result, a new tensor of the input's framework; raises what the operation raised."""
        return adapters.like(runtime.current().named.wait(self._handle), self._tensor)


def allreduce(
    tensor: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks.

    Args:
        tensor: A numpy, torch, TensorFlow or JAX tensor on the CPU, a number or a list. Same
            shape and dtype on every rank. Unchanged.
        op: AVERAGE, SUM, MIN, MAX or PRODUCT. An average of integers is truncated toward zero.
        name: What the ranks match by.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A new tensor of the same framework, shape and dtype, with the same bits on every rank.

    Raises:
        MismatchError: On every rank, when the ranks passed different things.
        UsageError: The tensor cannot be reduced; the other ranks get a MismatchError.
        StalledError, PeerLostError: Some rank is late or gone.
    """
    return _allreduce(tensor, op, name, prescale_factor, postscale_factor, False).wait()


def allreduce_async(
    tensor: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Start an `allreduce`; the tensor must not change until it is done."""
    return _allreduce(tensor, op, name, prescale_factor, postscale_factor, True)


def allgather(tensor: Any, name: str | None = None) -> Any:
    """Concatenate the ranks' tensors along the first dimension, in rank order.

    Args:
        tensor: As for `allreduce`, with one dimension at least; the first may differ by rank.
        name: What the ranks match by.

    Returns:
        A new tensor, the same on every rank.
    """
    return allgather_async(tensor, name, _background=False).wait()


def allgather_async(tensor: Any, name: str | None = None, *, _background: bool = True) -> Pending:
    """Start an `allgather`."""
    return _start("allgather", tensor, name, _background)


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Give every rank the tensor of `root_rank`.

    Args:
        tensor: As for `allreduce`; same shape and dtype on every rank.
        root_rank: The rank whose values everybody gets; the same on every rank.
        name: What the ranks match by.

    Returns:
        A new tensor with root's values.
    """
    return broadcast_async(tensor, root_rank, name, _background=False).wait()


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, *, _background: bool = True
) -> Pending:
    """Start a `broadcast`."""
    size = runtime.current().world.size
    problem = "" if 0 <= root_rank < size else f"root_rank {root_rank} is not in 0..{size - 1}"
    return _start("broadcast", tensor, name, _background, root=root_rank, problem=problem)


def barrier(name: str | None = None) -> None:
    """Wait until every rank has called this."""
    _start("barrier", np.empty(0, np.uint8), name, False).wait()


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Give every rank a copy of root's object, pickled.

    Only ranks of the same job can send it: this trusts them as it trusts the script itself.

    Args:
        obj: Any object that pickles (else UsageError here, MismatchError on the others);
            ignored on the other ranks.
        root_rank: Whose object it is.
        name: What the ranks match by.

    Returns:
        `obj` itself on root, a copy elsewhere.
    """
    rt = runtime.current()
    if not 0 <= root_rank < rt.world.size:
        problem = f"root_rank {root_rank} is not in 0..{rt.world.size - 1}"
        _start("allgather", np.empty(0, np.uint8), name, False, problem=problem, root=root_rank)
    mine = rt.world.rank == root_rank
    payload, problem = _pickle(obj) if mine else (b"", "")
    array = np.frombuffer(payload, np.uint8)
    gathered = _start("allgather", array, name, False, root=root_rank, problem=problem).wait()
    return obj if mine else pickle.loads(gathered)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, pickled, in rank order. See `broadcast_object`."""
    payload, problem = _pickle(obj)
    framed = np.frombuffer(len(payload).to_bytes(8, "little") + payload, np.uint8)
    gathered = _start("allgather", framed, name, False, problem=problem).wait().tobytes()
    objects, at = [], 0
    while at < len(gathered):
        length = int.from_bytes(gathered[at : at + 8], "little")
        objects.append(pickle.loads(gathered[at + 8 : at + 8 + length]))
        at += 8 + length
    return objects


def _pickle(obj: Any) -> tuple[bytes, str]:
    """The object as bytes, or why it cannot be: the other ranks must hear of that."""
    try:
        return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), ""
    except Exception as error:  # noqa: BLE001 - the object's own code runs here
        return b"", f"cannot pickle {type(obj).__name__}: {error}"


def poll(handle: Pending) -> bool:
    """Whether an asynchronous operation has ended; `synchronize` then returns at once."""
    return handle.done()


def synchronize(handle: Pending) -> Any:
    """The result of an asynchronous operation; raises what it raised."""
    return handle.wait()


def _name(kind: str, name: str | None) -> str:
    return f"unnamed.{kind}.{next(runtime.current().unnamed)}" if name is None else name


def _allreduce(
    tensor: Any, op: ReduceOp, name: str | None, prescale: float, postscale: float, wait: bool
) -> Pending:
    problem = ""
    try:
        op = ReduceOp(op)
    except ValueError:
        problem = f"op={op!r} is not a reduction"
    else:
        if op not in _REDUCTIONS:
            problem = f"op={op.name} is not possible here; expected one of " + ", ".join(
                known.name for known in _REDUCTIONS
            )
    return _start(
        "allreduce",
        tensor,
        name,
        wait,
        op=op,
        prescale=float(prescale),
        postscale=float(postscale),
        problem=problem,
    )


def _start(  # noqa: PLR0913 - one request, field by field
    kind: str,
    tensor: Any,
    name: str | None,
    background: bool,
    *,
    op: ReduceOp | None = None,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    problem: str = "",
) -> Pending:
    """Submit an operation; one that this rank must refuse is refused on the others too."""
    named = runtime.current().named
    key = _name(kind, name)
    error: UsageError | None = UsageError(f"{key}: {problem}") if problem else None
    array: Array = np.empty(0, np.uint8)
    if error is None:
        try:
            array = adapters.view(tensor)
            if op is not None:
                check_reducible(array.dtype, op)
        except UsageError as refusal:
            error = UsageError(f"{key}: {refusal}")
    if error is not None:
        request = Request(key, kind, refused=str(error))
        named.submit(request, array, background=True)
        raise error
    request = Request(
        name=key,
        kind=kind,
        dtype=array.dtype.name,
        shape=array.shape,
        op=op.name if op is not None else "",
        root=root,
        prescale=prescale,
        postscale=postscale,
    )
    # Contiguous and in this machine's byte order, so that equal dtypes mean equal bytes.
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    return Pending(named.submit(request, flat, background), tensor)
