"""Named operations that reduce: `allreduce`, `reducescatter`, and their relatives.

Ranks match them by `name`, in any order; those without a name in the order in which each rank
calls them. What does not fit together is an error on every rank, after which all can go on.

Tensors lie on the CPU, may have any strides, and are bool, integer, floating (bfloat16 included)
or complex, as far as the reduction makes sense. An average of integers is truncated toward zero;
narrow floats are added in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ringplug.backend import ops
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import ConfigError
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.backend.reduction import Reduction
from ringplug.torch import autograd
from ringplug.torch.autograd import Call
from ringplug.torch.compilation import untraced
from ringplug.torch.compression import (
    Compression,
    CompressionChoice,
    user_compressor,
    wire_codec,
)
from ringplug.torch.handles import Handle, begin

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


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: CompressionChoice = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """Reduce a tensor over the ranks; gradients flow through it.

    Args:
        tensor: Same shape and dtype on every rank. Unchanged.
        average: Deprecated: True for ``op=Average``, False for ``op=Sum``.
        name: What the ranks match by.
        compression: What the values travel as; see `ringplug.torch.compression`.
        op: Average (the default), Sum, Min, Max, Product, Adasum, or a `ringplug.Reduction`.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A new tensor of the same shape and dtype, with the same bits on every rank. Its gradient
        goes back through an allreduce with the same arguments.

    Raises:
        HorovodInternalError: On every rank, when ranks passed different things; on the others,
            when one of them was refused.
        UsageError: A ValueError: the tensor or an argument cannot work.
        StalledError, PeerLostError: Some rank is late or gone.
    """
    op, average = _newer(op, average)
    call = Call(name, process_set, op, prescale_factor, postscale_factor, average)
    return _compressed("allreduce", call, [tensor], False, compression)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start an `allreduce`; no gradients flow through it.

    Args:
        tensor: As for `allreduce`; it must not change until the operation is done.
        average: As for `allreduce`, like all that follow.
        name: A name that is not in flight already.
        op: The reduction.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`, which gives the new tensor.

    Raises:
        UsageError: A ValueError: the arguments cannot work, or the name is in flight.
    """
    op, average = _newer(op, average)
    return begin(
        ops.allreduce_async,
        tensor,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start an `allreduce` into the tensor itself; autograd does not notice.

    The tensor must be left alone until `synchronize`, which returns it. The arguments and errors
    are those of `allreduce_async`.
    """
    op, average = _newer(op, average)
    return begin(
        ops.allreduce_async_,
        tensor,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Tensor:
    """An `allreduce` into the tensor itself, which is returned; autograd does not notice.

    The arguments and errors are those of `allreduce`.
    """
    op, average = _newer(op, average)
    scales = (prescale_factor, postscale_factor)
    result: Tensor = _run(ops.allreduce_, tensor, average, name, op, *scales, process_set)
    return result


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: CompressionChoice = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation: ranks agree once, and it fails or works whole.

    Args:
        tensors: At every position the same shape and dtype on every rank; dtypes may differ
            between positions.
        average: As for `allreduce`, like all that follow.
        name: What the ranks match the group by.
        compression: What the values travel as.
        op: The reduction.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the results.
        process_set: The ranks that take part.

    Returns:
        New tensors, in the same order; gradients flow through them, back as a group too.

    Raises:
        HorovodInternalError, UsageError: As for `allreduce`.
    """
    op, average = _newer(op, average)
    call = Call(name, process_set, op, prescale_factor, postscale_factor, average)
    return _compressed("allreduce", call, list(tensors), True, compression)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce`; one handle for the group, whose result is the list."""
    op, average = _newer(op, average)
    return begin(
        ops.grouped_allreduce_async,
        list(tensors),
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce` into the tensors themselves; see `allreduce_async_`."""
    op, average = _newer(op, average)
    return begin(
        ops.grouped_allreduce_async_,
        list(tensors),
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> list[Tensor]:
    """A `grouped_allreduce` into the tensors themselves, which are returned."""
    op, average = _newer(op, average)
    scales = (prescale_factor, postscale_factor)
    result: list[Tensor] = _run(
        ops.grouped_allreduce_, list(tensors), average, name, op, *scales, process_set
    )
    return result


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: CompressionChoice = Compression.none,
    op: Any = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the ranks and give each its share of the rows.

    Args:
        tensor: Same shape and dtype on every rank, with one dimension at least. Unchanged.
        name: What the ranks match by.
        compression: What the values travel as.
        op: Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A new tensor with this rank's rows of the result, in rank order; the first
        ``rows % size`` ranks have one more than the others. Gradients flow through it.

    Raises:
        HorovodInternalError, UsageError: As for `allreduce`.
    """
    call = Call(name, process_set, op, prescale_factor, postscale_factor)
    return _compressed("reducescatter", call, [tensor], False, compression)[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Any = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`; no gradients flow through it. See `allreduce_async`."""
    return begin(
        ops.reducescatter_async, tensor, name, op, process_set, prescale_factor, postscale_factor
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: CompressionChoice = Compression.none,
    op: Any = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """A `reducescatter` of several tensors as one operation; see `grouped_allreduce`."""
    call = Call(name, process_set, op, prescale_factor, postscale_factor)
    return _compressed("reducescatter", call, list(tensors), True, compression)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter`; one handle for the group, whose result is the list."""
    return begin(
        ops.grouped_reducescatter_async,
        list(tensors),
        name,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
    )


@untraced
def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _newer(op: Any, average: Any) -> tuple[Any, Any]:
    """Horovod's older argument `average` as `op`.

    Both together are left to the operation, whose refusal the other ranks hear of.
    """
    if isinstance(average, (ReduceOp, Reduction)):
        return (average, None) if op is None else (op, average)
    if average is None or op is not None:
        return op, average
    text = "average= is the older spelling: use op=Average or op=Sum"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM, None


@untraced
def _compressed(
    kind: str,
    call: Call,
    tensors: Sequence[Any],
    grouped: bool,
    compression: CompressionChoice,
) -> list[Any]:
    """The collective, on the wire as the engine's codec or inside the user's compressor."""
    collective = autograd.allreduce if kind == "allreduce" else autograd.reducescatter
    try:
        call = call.with_codec(wire_codec(compression))
    except ConfigError as error:
        ops.start(kind, [], name=call.name, process_set=call.process_set, problem=str(error))
    mine = user_compressor(compression)
    if mine is None:
        return collective(call, tensors, grouped)
    packed = [mine.compress(tensor) for tensor in tensors]
    reduced = collective(call, [payload for payload, _ in packed], grouped)
    return [mine.decompress(result, ctx) for result, (_, ctx) in zip(reduced, packed, strict=True)]
