"""Horovod's reductions: allreduce and reducescatter; `movement` says what all operations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringplug.backend import ops
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import NotSupportedError
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.tensorflow import collectives
from ringplug.tensorflow.collectives import Options
from ringplug.tensorflow.compression import Compression, CompressionChoice, split_compression
from ringplug.tensorflow.failures import entry
from ringplug.tensorflow.movement import dense

__all__ = ["allreduce", "grouped_allreduce", "grouped_reducescatter", "reducescatter"]


@entry
def allreduce(  # noqa: PLR0913, PLR0917 - Horovod's signature
    tensor: Any,
    average: Any = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionChoice = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over the ranks.

    Args:
        tensor: Same shape and dtype on every rank; or ``tf.IndexedSlices``, whose rows are
            gathered from all ranks, divided by their number for an average.
        average: Horovod's older spelling of `op`.
        device_dense: Without effect.
        device_sparse: Without effect.
        compression: What floats travel as: a member of `Compression`, or a class of your own
            with static methods ``compress`` and ``decompress``.
        op: Average (the default; of integers, truncated toward zero), Sum, Adasum, Min, Max
            or Product.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the result.
        name: What the ranks match by.
        process_set: Who takes part.
        ignore_name_scope: Without effect.

    Returns:
        A tensor of the same shape and dtype, with the same bits on every rank; for
        IndexedSlices, IndexedSlices.

    Raises:
        MismatchError, tf.errors.FailedPreconditionError: On every rank, when the ranks passed
            different things.
        UsageError, tf.errors.InvalidArgumentError: This rank cannot take part; the others get
            a MismatchError.
        NotImplementedError: For IndexedSlices with other reductions than Average and Sum, or
            with factors.
        ValueError: Both `op` and `average`.
    """
    del device_dense, device_sparse, ignore_name_scope
    op = ops.resolve_op(op, average)
    options = _reduction(compression, op, prescale_factor, postscale_factor, name, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse([tensor], options[0])[0]
    return _compressed([dense(tensor)], *options, collectives.allreduce)[0]


@entry
def grouped_allreduce(  # noqa: PLR0913, PLR0917 - Horovod's signature
    tensors: Sequence[Any],
    average: Any = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionChoice = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors over the ranks, as one operation.

    Args:
        tensors: As many on every rank. Dtypes may differ, and some may be IndexedSlices.
        average: As for `allreduce`, like the others.
        device_dense: Without effect.
        device_sparse: Without effect.
        compression: See `allreduce`.
        op: See there.
        prescale_factor: See there.
        postscale_factor: See there.
        process_set: See there.
        ignore_name_scope: Without effect.
        name: What the ranks match by.

    Returns:
        The results in the order of the inputs.
    """
    del device_dense, device_sparse, ignore_name_scope
    if not tensors:
        return list(tensors)
    op = ops.resolve_op(op, average)
    options, compressor = _reduction(
        compression, op, prescale_factor, postscale_factor, name, process_set, True
    )
    result = list(tensors)
    sparse = [i for i, t in enumerate(result) if isinstance(t, tf.IndexedSlices)]
    others = [i for i in range(len(result)) if i not in sparse]
    if sparse:
        for at, made in zip(sparse, _sparse([result[i] for i in sparse], options), strict=True):
            result[at] = made
    if others:
        given = [dense(result[i]) for i in others]
        reduced = _compressed(given, options, compressor, collectives.allreduce)
        for at, made in zip(others, reduced, strict=True):
            result[at] = made
    return result


@entry
def reducescatter(  # noqa: PLR0913, PLR0917 - Horovod's signature
    tensor: Any,
    device_dense: str = "",
    compression: CompressionChoice = Compression.none,
    op: Any = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks and give each rank a part of its rows.

    Args:
        tensor: With one dimension at least; same shape and dtype on every rank.
        device_dense: Without effect.
        compression: As for `allreduce`.
        op: Average or Sum.
        name: What the ranks match by.
        process_set: Who takes part.
        ignore_name_scope: Without effect.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        This rank's rows: of n rows among s ranks, ``n // s``, and one more on the first
        ``n % s`` ranks.
    """
    del device_dense, ignore_name_scope
    options = _reduction(compression, op, prescale_factor, postscale_factor, name, process_set)
    return _compressed([dense(tensor)], *options, collectives.reducescatter)[0]


@entry
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: CompressionChoice = Compression.none,
    op: Any = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """A `reducescatter` of several tensors, as one operation; see there.

    Args:
        tensors: As many on every rank.
        device_dense: Without effect.
        compression: See `reducescatter`.
        op: See there.
        process_set: See there.
        prescale_factor: See there.
        postscale_factor: See there.
        name: What the ranks match by.
    """
    del device_dense
    if not tensors:
        return list(tensors)
    options = _reduction(
        compression, op, prescale_factor, postscale_factor, name, process_set, True
    )
    given = [dense(tensor) for tensor in tensors]
    return _compressed(given, *options, collectives.reducescatter)


def _reduction(
    compression: CompressionChoice,
    op: Any,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: Any,
    grouped: bool = False,
) -> tuple[Options, Any]:
    """The options, and the user's own compressor or None."""
    codec, compressor = split_compression(compression)
    return Options(
        name, process_set, op, float(prescale), float(postscale), codec, grouped
    ), compressor


def _compressed(
    tensors: Sequence[Any],
    options: Options,
    compressor: Any,
    collective: Callable[[Sequence[Any], Options], list[Any]],
) -> list[Any]:
    """The collective, with the user's own compressor around it if there is one."""
    if compressor is None:
        return collective(tensors, options)
    pairs = [compressor.compress(tensor) for tensor in tensors]
    reduced = collective([payload for payload, _ in pairs], options)
    return [compressor.decompress(t, ctx) for t, (_, ctx) in zip(reduced, pairs, strict=True)]


def _sparse(slices: Sequence[Any], options: Options) -> list[Any]:
    """Every rank's rows and their indices: their sum is the sum of what they stand for."""
    if options.op == ReduceOp.ADASUM:
        raise NotSupportedError(
            "Adasum does not reduce IndexedSlices; pass sparse_as_dense=True, or "
            "tf.convert_to_tensor(...)"
        )
    if options.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotSupportedError("IndexedSlices can be reduced by Average and Sum only")
    if (options.prescale, options.postscale) != (1.0, 1.0):
        raise NotSupportedError(
            "prescale_factor and postscale_factor do not work with IndexedSlices"
        )
    named = [None if options.name is None else f"{options.name}.{part}" for part in ("v", "i")]
    values = collectives.allgather(
        [tf.convert_to_tensor(part.values) for part in slices],
        Options(name=named[0], process_set=options.process_set, grouped=options.grouped),
    )
    indices = collectives.allgather(
        [tf.convert_to_tensor(part.indices) for part in slices],
        Options(name=named[1], process_set=options.process_set, grouped=options.grouped),
    )
    if options.op == ReduceOp.AVERAGE:
        members = collectives.set_size(options.process_set)
        values = [value / tf.cast(members, value.dtype) for value in values]
    return [
        tf.IndexedSlices(value, index, dense_shape=part.dense_shape)
        for value, index, part in zip(values, indices, slices, strict=True)
    ]
