"""Named operations that reduce: allreduce and reducescatter. Layer 8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringplug.backend.buffers import ReduceOp
from ringplug.backend.compression import Compressor
from ringplug.backend.ops.submission import Op, Pending, Set, start

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

Compression = str | Compressor | None


def allreduce(
    tensor: Any,
    average: bool | Op | None = None,
    name: str | None = None,
    compression: Compression = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = None,
) -> Any:
    """Reduce a tensor over all ranks.

    Args:
        tensor: Same shape and dtype on every rank. Unchanged.
        average: Horovod's older spelling of `op`; a reduction in its place is taken as `op`.
        name: What the ranks match by.
        compression: What floats travel as: ``none``, ``fp16``, ``bf16``, or a compressor.
        op: Average (the default; of integers, truncated toward zero), Sum, Min, Max, Product,
            Adasum (a power of two of ranks), or a `Reduction` of your own.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the result.
        process_set: Whose ranks.

    Returns:
        A new tensor of the same framework, shape and dtype, with the same bits on every rank.

    Raises:
        MismatchError: On every rank, when the ranks passed different things.
        UsageError: The tensor cannot be reduced; the other ranks get a MismatchError.
        StalledError, PeerLostError: Some rank is late or gone.
    """
    scales = (prescale_factor, postscale_factor)
    return _reduce(
        [tensor], (op, average), name, scales, process_set, compression, wait=True
    ).wait()


def allreduce_async(
    tensor: Any,
    average: bool | Op | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = None,
) -> Pending:
    """Start an `allreduce`; the tensor must not change until it is done."""
    scales = (prescale_factor, postscale_factor)
    return _reduce([tensor], (op, average), name, scales, process_set)


def allreduce_(
    tensor: Any,
    average: bool | Op | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = None,
) -> Any:
    """An `allreduce` whose result is written into the tensor, which is returned.

    Raises:
        UsageError: Also when the tensor cannot be written, as TensorFlow's and JAX's.
    """
    scales = (prescale_factor, postscale_factor)
    return _reduce(
        [tensor], (op, average), name, scales, process_set, wait=True, in_place=True
    ).wait()


def allreduce_async_(
    tensor: Any,
    average: bool | Op | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = None,
) -> Pending:
    """Start an `allreduce_`."""
    scales = (prescale_factor, postscale_factor)
    return _reduce([tensor], (op, average), name, scales, process_set, in_place=True)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | Op | None = None,
    name: str | None = None,
    compression: Compression = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = None,
) -> list[Any]:
    """An `allreduce` of several tensors, as one operation under one name.

    Args:
        tensors: As many on every rank; dtypes may differ within the group.
        average: As for `allreduce`, like the others.
        name: See there.
        compression: See there.
        op: See there.
        prescale_factor: See there.
        postscale_factor: See there.
        process_set: See there.

    Returns:
        New tensors, in the order of the inputs.
    """
    scales = (prescale_factor, postscale_factor)
    pending = _reduce(
        tensors, (op, average), name, scales, process_set, compression, single=False, wait=True
    )
    made: list[Any] = pending.wait()
    return made


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | Op | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = None,
) -> Pending:
    """Start a `grouped_allreduce`."""
    scales = (prescale_factor, postscale_factor)
    return _reduce(tensors, (op, average), name, scales, process_set, single=False)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | Op | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = None,
) -> list[Any]:
    """A `grouped_allreduce` whose results are written into the tensors."""
    scales = (prescale_factor, postscale_factor)
    pending = _reduce(
        tensors, (op, average), name, scales, process_set, single=False, wait=True, in_place=True
    )
    made: list[Any] = pending.wait()
    return made


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | Op | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = None,
) -> Pending:
    """Start a `grouped_allreduce_`."""
    scales = (prescale_factor, postscale_factor)
    return _reduce(tensors, (op, average), name, scales, process_set, single=False, in_place=True)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compression = None,
    op: Op = ReduceOp.AVERAGE,
    process_set: Set = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks and give each rank a part of the rows.

    Args:
        tensor: With one dimension at least; same shape and dtype on every rank.
        name: What the ranks match by.
        compression: As for `allreduce`.
        op: Average or Sum.
        process_set: Whose ranks.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        This rank's rows: of n rows among s ranks, ``n // s``, and one more on the first
        ``n % s`` ranks.
    """
    scales = (prescale_factor, postscale_factor)
    return _scatter([tensor], op, name, scales, process_set, compression, wait=True).wait()


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: Op = ReduceOp.AVERAGE,
    process_set: Set = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Start a `reducescatter`."""
    return _scatter([tensor], op, name, (prescale_factor, postscale_factor), process_set)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compression = None,
    op: Op = ReduceOp.AVERAGE,
    process_set: Set = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """A `reducescatter` of several tensors, as one operation under one name."""
    scales = (prescale_factor, postscale_factor)
    pending = _scatter(tensors, op, name, scales, process_set, compression, single=False, wait=True)
    made: list[Any] = pending.wait()
    return made


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Op = ReduceOp.AVERAGE,
    process_set: Set = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Start a `grouped_reducescatter`."""
    scales = (prescale_factor, postscale_factor)
    return _scatter(tensors, op, name, scales, process_set, single=False)


def _reduce(  # noqa: PLR0913 - the common part of eight functions
    tensors: Sequence[Any],
    reduction: tuple[Op | None, bool | Op | None],
    name: str | None,
    scales: tuple[float, float],
    process_set: Set,
    compression: Compression = None,
    *,
    single: bool = True,
    wait: bool = False,
    in_place: bool = False,
) -> Pending:
    return start(
        "allreduce",
        tensors,
        name=name,
        process_set=process_set,
        single=single,
        wait=wait,
        op=reduction[0],
        average=reduction[1],
        prescale=scales[0],
        postscale=scales[1],
        compression=compression,
        in_place=in_place,
    )


def _scatter(
    tensors: Sequence[Any],
    op: Op,
    name: str | None,
    scales: tuple[float, float],
    process_set: Set,
    compression: Compression = None,
    *,
    single: bool = True,
    wait: bool = False,
) -> Pending:
    return start(
        "reducescatter",
        tensors,
        name=name,
        process_set=process_set,
        single=single,
        wait=wait,
        op=op,
        prescale=scales[0],
        postscale=scales[1],
        compression=compression,
    )
