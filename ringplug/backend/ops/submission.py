"""From tensors of any framework to a named operation, and back. Layer 7."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ringplug.backend import adapters, runtime
from ringplug.backend.buffers import Array, ReduceOp, check_reducible
from ringplug.backend.compression import Compressor, get_compressor
from ringplug.backend.compression.none import NoCompression
from ringplug.backend.errors import ConfigError, NotSupportedError, UsageError
from ringplug.backend.execution import Work
from ringplug.backend.groups import Group
from ringplug.backend.handle import Handle
from ringplug.backend.process_set import ProcessSet
from ringplug.backend.reduction import Reduction
from ringplug.backend.request import Request

__all__ = ["Op", "Pending", "Set", "resolve_op", "start"]

_PLAIN = NoCompression()

Op = ReduceOp | Reduction | int
Set = ProcessSet | int | None

_REDUCTIONS = (
    ReduceOp.AVERAGE,
    ReduceOp.SUM,
    ReduceOp.ADASUM,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.PRODUCT,
)
_SCATTERED = (ReduceOp.AVERAGE, ReduceOp.SUM)


class Pending:
    """An asynchronous operation; give it to `poll` and `synchronize`.

    Args:
        group: Whose operation it is.
        handle: Its outcome.
        tensors: The inputs, which the results are like.
        single: Whether the result is one tensor rather than a list.
        in_place: Whether the results are the inputs.
        received: Whether the result comes with what each rank sent, as for an alltoall.
    """

    __slots__ = ("_group", "_handle", "_in_place", "_received", "_single", "_tensors")

    def __init__(
        self,
        group: Group,
        handle: Handle,
        tensors: Sequence[Any],
        single: bool,
        in_place: bool = False,
        received: bool = False,
    ) -> None:
        self._group = group
        self._handle = handle
        self._tensors = tensors
        self._single = single
        self._in_place = in_place
        self._received = received

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._handle.done()

    def arrays(self) -> list[Array]:
        """The results as arrays; see `wait`."""
        results: list[Array] = self._group.named.wait(self._handle)
        return results

    def wait(self) -> Any:
        """The result, tensors of the inputs' framework; raises what the operation raised."""
        arrays = self.arrays()
        if self._in_place:
            made = list(self._tensors)
        else:
            made = [
                adapters.like(array, tensor)
                for array, tensor in zip(arrays, self._tensors, strict=False)
            ]
        if self._received:
            return made[0], adapters.like(arrays[1], np.asarray(0))
        return made[0] if self._single else made


def resolve_op(op: Op | None, average: bool | Op | None) -> ReduceOp | Reduction:
    """The reduction that Horovod's two arguments ask for; the average by default.

    Args:
        op: The reduction.
        average: Horovod's older spelling: whether to average rather than to sum. A reduction
            in its place is taken as `op`.

    Raises:
        UsageError: Both were given, or there is no such reduction.
    """
    if isinstance(average, (ReduceOp, Reduction)):
        op, average = average if op is None else op, None if op is None else average
    if average is not None:
        if op is not None:
            raise UsageError("op and average were both given; average is the older spelling of op")
        warnings.warn(
            "average= is the older spelling: use op=Average or op=Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if isinstance(op, Reduction):
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        raise UsageError(f"op={op!r} is not a reduction") from None


def start(  # noqa: PLR0913 - one operation, field by field
    kind: str,
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    process_set: Set = None,
    single: bool = True,
    wait: bool = False,
    op: Op | None = None,
    average: bool | Op | None = None,
    root: int | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: str | Compressor | None = None,
    splits: Any = None,
    in_place: bool = False,
    problem: str = "",
) -> Pending:
    """Submit an operation; one that this rank must refuse is refused on the others too.

    Args:
        kind: See `Request`.
        tensors: This rank's inputs, of any frameworks.
        name: What the ranks match by; by default they count unnamed operations.
        process_set: Who takes part.
        single: Whether the result is one tensor rather than a list.
        wait: Whether the caller waits at once, and so makes progress itself.
        op: The reduction, for an allreduce or a reducescatter.
        average: See `resolve_op`.
        root: The sending rank, in the world.
        prescale: Multiplies the inputs.
        postscale: Multiplies the results.
        compression: What an allreduce travels as; None is ``none``.
        splits: Rows for each rank, for an alltoall; equal ones by default.
        in_place: Whether the inputs become the results.
        problem: Why the caller refuses it.

    Raises:
        UsageError, ConfigError: It cannot be, here.
    """
    current = runtime.current()
    group = current.groups.find(process_set)
    key = group.named.next_name() if name is None else str(name)
    try:
        if problem:
            raise UsageError(problem)
        codec = _PLAIN if compression in (None, "none") else get_compressor(compression)
        reduction: ReduceOp | Reduction | None = None
        if kind in ("allreduce", "reducescatter"):
            reduction = resolve_op(op, average)
            _check_op(kind, reduction, len(group.ranks))
        arrays = [_array(tensor, reduction) for tensor in tensors]
        targets = [_target(tensor) for tensor in tensors] if in_place else None
        scales = _factor("prescale", prescale), _factor("postscale", postscale)
        at = 0 if root is None and kind != "broadcast" else group.index(root, "root_rank")
        numbers = _rows(arrays[0], splits, len(group.ranks)) if kind == "alltoall" else ()
    except (UsageError, ConfigError) as error:
        refusal = f"{key}: {error}"
        group.named.submit(Work(Request(key, kind, refused=str(error)), []), background=True)
        raise type(error)(refusal) from None
    request = Request(
        name=key,
        kind=kind,
        dtypes=tuple(_dtype_name(array.dtype) for array in arrays),
        shapes=tuple(array.shape for array in arrays),
        op=_op_name(reduction),
        root=at,
        prescale=scales[0],
        postscale=scales[1],
        codec=codec.name,
        numbers=numbers,
    )
    work = Work(request, arrays, targets, ReduceOp.SUM if reduction is None else reduction, codec)
    handle = group.named.submit(work, background=not wait)
    return Pending(group, handle, tensors, single, in_place, received=splits is not None)


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name


def _factor(which: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{which}_factor={value!r} is not a number") from None


def _check_op(kind: str, op: ReduceOp | Reduction, size: int) -> None:
    possible = _SCATTERED if kind == "reducescatter" else _REDUCTIONS
    if isinstance(op, Reduction):
        if kind == "reducescatter":
            raise UsageError("reducescatter works with Average and Sum")
    elif op not in possible:
        names = ", ".join(known.name.capitalize() for known in possible)
        raise UsageError(f"op={op.name} is not possible in {kind}; expected one of {names}")
    elif op is ReduceOp.ADASUM and size & (size - 1):
        raise NotSupportedError(f"Adasum works on 1, 2, 4, 8, ... ranks; these are {size}")


def _op_name(op: ReduceOp | Reduction | None) -> str:
    if op is None:
        return ""
    return op.name if isinstance(op, ReduceOp) else f"custom {op.name}"


def _array(tensor: Any, op: ReduceOp | Reduction | None) -> Array:
    """Contiguous and in this machine's byte order, so that equal dtypes mean equal bytes."""
    array = adapters.view(tensor)
    if isinstance(op, ReduceOp):
        check_reducible(array.dtype, op)
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return flat.reshape(array.shape)


def _target(tensor: Any) -> Array:
    array = adapters.view(tensor)
    if not array.flags.writeable:
        raise UsageError(
            f"{type(tensor).__module__}.{type(tensor).__name__} cannot be written in place"
        )
    return array


def _rows(array: Array, splits: Any, size: int) -> tuple[int, ...]:
    """The splits of an alltoall, checked."""
    if not array.shape:
        # Refused by rank 0, as Horovod does.
        return (0,) * size
    rows = array.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(
                f"alltoall of {rows} rows cannot be divided evenly among {size} ranks; pass splits"
            )
        return (rows // size,) * size
    given = adapters.view(splits) if not isinstance(splits, (list, tuple)) else np.array(splits)
    if given.ndim != 1:
        raise UsageError(f"alltoall splits must have one dimension, not {given.ndim}")
    if given.size and given.dtype.kind not in "iu":
        raise UsageError(f"alltoall splits must be integers, not {given.dtype}")
    counts = tuple(int(count) for count in given)
    if len(counts) != size:
        raise UsageError(f"alltoall has {len(counts)} splits for {size} ranks")
    if any(count < 0 for count in counts) or sum(counts) > rows:
        raise UsageError(f"alltoall splits {list(counts)} do not fit a tensor of {rows} rows")
    return counts
