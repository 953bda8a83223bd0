"""Collectives on lists of dense tensors, which gradients flow through. No arguments are checked.

Every rank's backward pass runs the collective named here, so all ranks of the process set have
to run it, as they ran the forward pass. Gradients are those of the ranks' own losses, not of
their sum, and so the rules are Horovod's conventions: an averaged result passes on averaged
gradients, a summed one summed gradients.

========================  ==================================================================
forward                   gradient
========================  ==================================================================
allreduce                 allreduce with the same reduction, scales and compression; for Min,
                          Max, Product and Adasum too, where that is not the derivative
allgather                 this rank's rows of the average
broadcast                 the average on the root, zeros elsewhere
alltoall                  alltoall back
reducescatter             allgather, times the scales, and times the set's size for a Sum
========================  ==================================================================

All of them can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from ringplug.backend import ops, runtime
from ringplug.backend.buffers import Array, ReduceOp, split_evenly
from ringplug.backend.errors import MismatchError
from ringplug.backend.process_set import ProcessSet
from ringplug.tensorflow import ffi
from ringplug.tensorflow.bridge import Result, name_in_graph, run

__all__ = [
    "Options",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "differentiable",
    "reducescatter",
    "set_size",
]

Backward: TypeAlias = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Options:
    """How to do a collective; fields without a meaning for it are ignored.

    Attributes:
        name: What ranks match by; None to number it.
        process_set: Which ranks take part; None for all.
        op: The reduction.
        prescale: Factor before the reduction.
        postscale: Factor after it.
        compression: The engine's codec.
        grouped: Whether the tensors are one operation, also if there is but one.
    """

    name: str | None = None
    process_set: ProcessSet | None = None
    op: Any = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Any = None
    grouped: bool = False

    def back(self, **changes: Any) -> Options:
        """Options for the gradient."""
        return replace(self, name=None if self.name is None else f"{self.name}.grad", **changes)


def set_size(process_set: ProcessSet | None) -> int:
    """How many ranks take part."""
    return runtime.current().size_of(process_set)


def _place(process_set: ProcessSet | None) -> int:
    """This rank among those that take part."""
    if process_set is None or process_set.process_set_id == 0:
        return runtime.current().world.rank
    return process_set.rank()


def allreduce(tensors: Sequence[Any], options: Options) -> list[Any]:
    """Each tensor reduced over the ranks."""
    name = name_in_graph("allreduce", options.name, tensors[0])
    shared = {
        "name": name,
        "op": options.op,
        "prescale_factor": options.prescale,
        "postscale_factor": options.postscale,
        "process_set": options.process_set,
        "compression": options.compression,
    }

    def job(arrays: Sequence[Array]) -> Sequence[Array]:
        if options.grouped:
            return ops.grouped_allreduce(list(arrays), **shared)
        return [ops.allreduce(arrays[0], **shared)]

    results = [Result(t.dtype, t.shape) for t in tensors]
    return differentiable(
        tensors,
        lambda given: run(job, given, results, "allreduce"),
        lambda grads: allreduce(grads, options.back()),
    )


def allgather(tensors: Sequence[Any], options: Options) -> list[Any]:
    """Each tensor's rows of all ranks, in rank order."""
    compiled = _compiled()
    name = name_in_graph("allgather", options.name, tensors[0])
    members = set_size(options.process_set)
    process_set = options.process_set

    def job(arrays: Sequence[Array]) -> Sequence[Array]:
        if options.grouped:
            made = ops.grouped_allgather(list(arrays), name=name, process_set=process_set)
        else:
            made = [ops.allgather(arrays[0], name=name, process_set=process_set)]
        if compiled:
            _same_rows("allgather", arrays, process_set)
        return made

    def rows(tensor: Any) -> int | None:
        known = tensor.shape[0] if compiled and tensor.shape.rank else None
        return None if known is None else known * members

    results = [_with_rows(tensor, rows(tensor)) for tensor in tensors]

    def backward(grads: list[Any]) -> list[Any]:
        averaged = allreduce(grads, options.back(op=ReduceOp.AVERAGE))
        starts = _starts(tensors, process_set, compiled)
        return [
            _rows_of(grad, start, tensor)
            for grad, start, tensor in zip(averaged, starts, tensors, strict=True)
        ]

    return differentiable(
        tensors,
        lambda given: run(
            job, given, results, "allgather", "Give all ranks the same number of rows"
        ),
        backward,
    )


def broadcast(tensor: Any, root_rank: int, options: Options) -> Any:
    """The tensor of one rank."""
    name = name_in_graph("broadcast", options.name, tensor)

    def job(arrays: Sequence[Array]) -> Sequence[Array]:
        return [ops.broadcast(arrays[0], root_rank, name=name, process_set=options.process_set)]

    def backward(grads: list[Any]) -> list[Any]:
        (averaged,) = allreduce(grads, options.back(op=ReduceOp.AVERAGE))
        if runtime.current().world.rank == root_rank:
            return [averaged]
        # Even where the values are not needed the other ranks need this one to take part.
        with tf.control_dependencies([averaged]):
            return [tf.zeros_like(grads[0])]

    (result,) = differentiable(
        [tensor],
        lambda given: run(job, given, [Result(tensor.dtype, tensor.shape)], "broadcast"),
        backward,
    )
    return result


def alltoall(tensor: Any, splits: Any, options: Options) -> tuple[Any, Any]:
    """What the ranks send to this one, and how many rows each of them sent.

    Args:
        tensor: This rank's rows for all ranks.
        splits: How many of them go to each rank; None for as many to each.
        options: How to do it.
    """
    compiled = _compiled()
    name = name_in_graph("alltoall", options.name, tensor)
    members, process_set = set_size(options.process_set), options.process_set

    def job(arrays: Sequence[Array]) -> Sequence[Array]:
        array = arrays[0]
        if splits is not None:
            wanted: Any = arrays[1]
        elif array.ndim and len(array) % members == 0:
            # Saying it gets the numbers of rows received, which the gradient needs.
            wanted = np.full(members, len(array) // members, np.int32)
        else:
            return ops.alltoall(array, name=name, process_set=process_set)  # raises
        made: Sequence[Array] = ops.alltoall(array, wanted, name=name, process_set=process_set)
        if compiled:
            _same_rows("alltoall", arrays, process_set)
        return made

    operands = [tensor] if splits is None else [tensor, splits]
    rows = tensor.shape[0] if compiled and splits is None and tensor.shape.rank else None
    results = [_with_rows(tensor, rows), Result(tf.int32, (members if compiled else None,))]
    received: list[Any] = []

    def forward(given: list[Any]) -> list[Any]:
        advice = "Leave splits out, with the same number of rows on all ranks"
        output, counts = run(job, [*given, *operands[1:]], results, "alltoall", advice)
        received[:] = [counts]
        return [output]

    def backward(grads: list[Any]) -> list[Any]:
        back = None if compiled else received[0]
        gradient, _ = alltoall(grads[0], back, options.back())
        if not compiled:
            # Rows beyond the sum of the splits went nowhere.
            missing = tf.shape(tensor)[0] - tf.shape(gradient)[0]
            gradient = tf.pad(gradient, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))
        return [tf.ensure_shape(gradient, tensor.shape)]

    (output,) = differentiable([tensor], forward, backward)
    return output, received[0]


def reducescatter(tensors: Sequence[Any], options: Options) -> list[Any]:
    """This rank's share of the rows of each tensor, reduced over the ranks."""
    compiled = _compiled()
    name = name_in_graph("reducescatter", options.name, tensors[0])
    members = set_size(options.process_set)
    shared = {
        "name": name,
        "op": options.op,
        "prescale_factor": options.prescale,
        "postscale_factor": options.postscale,
        "process_set": options.process_set,
    }

    def job(arrays: Sequence[Array]) -> Sequence[Array]:
        if options.grouped:
            return ops.grouped_reducescatter(list(arrays), **shared)
        return [ops.reducescatter(arrays[0], compression=options.compression, **shared)]

    def rows(tensor: Any) -> int | None:
        if not (compiled and tensor.shape.rank) or tensor.shape[0] is None:
            return None
        share = split_evenly(tensor.shape[0], members)[_place(options.process_set)]
        return share.stop - share.start

    def backward(grads: list[Any]) -> list[Any]:
        factor = options.prescale * options.postscale
        if ReduceOp(options.op) is ReduceOp.SUM:
            factor *= members
        scaled = [grad if factor == 1.0 else grad * tf.cast(factor, grad.dtype) for grad in grads]
        gathered = allgather(scaled, options.back())
        return [
            tf.ensure_shape(grad, tensor.shape)
            for grad, tensor in zip(gathered, tensors, strict=True)
        ]

    results = [_with_rows(tensor, rows(tensor)) for tensor in tensors]
    return differentiable(
        tensors, lambda given: run(job, given, results, "reducescatter"), backward
    )


def differentiable(
    tensors: Sequence[Any], forward: Callable[[list[Any]], list[Any]], backward: Backward
) -> list[Any]:
    """`forward` of the tensors, with `backward` for its gradient.

    Args:
        tensors: What gradients flow to.
        forward: Results, one or more, of a list like `tensors`.
        backward: Gradients of a list like `tensors`, of those of the results.
    """
    floating = any(t.dtype.is_floating or t.dtype.is_complex for t in tensors)
    if not floating or (tf.executing_eagerly() and not _recording()):
        return forward(list(tensors))

    @tf.custom_gradient
    def operation(*given: Any) -> Any:
        outputs = forward(list(given))

        def gradient(*upstream: Any) -> list[Any]:
            # It may be sparse, and of another dtype where TensorFlow made up zeros.
            grads = [
                tf.cast(tf.convert_to_tensor(grad), output.dtype)
                for grad, output in zip(upstream, outputs, strict=True)
            ]
            return backward(grads)

        return outputs, gradient

    return list(operation(*tensors))


def _recording() -> bool:
    """Whether a tape may be interested; TensorFlow has no public way to ask."""
    try:
        from tensorflow.python.eager.record import could_possibly_record
    except ImportError:
        return True
    return bool(could_possibly_record())


def _compiled() -> bool:
    return not tf.executing_eagerly() and ffi.in_xla()


def _with_rows(tensor: Any, rows: int | None) -> Result:
    if tensor.shape.rank is None:
        return Result(tensor.dtype, tf.TensorShape(None))
    return Result(tensor.dtype, tf.TensorShape([rows, *tensor.shape[1:]]))


def _same_rows(kind: str, arrays: Sequence[Array], process_set: ProcessSet | None) -> None:
    """A compiled program has room for as many rows of each rank as this one has."""
    mine = np.array([array.shape[0] for array in arrays if array.ndim], np.int64)
    counts = ops.allgather(mine, process_set=process_set).reshape(-1, len(mine))
    if (counts != counts[0]).any():
        # Seen alike by all ranks, so all of them raise.
        raise MismatchError(
            f"{kind}: ranks have {', '.join(str(row.tolist()) for row in counts)} rows, and a "
            "function that XLA compiles needs the same number on all. Use "
            "tf.function(jit_compile=False), or give all ranks the same number of rows"
        )


def _starts(tensors: Sequence[Any], process_set: ProcessSet | None, compiled: bool) -> list[Any]:
    """Where this rank's rows begin among those of all ranks, for each tensor."""
    if compiled:
        place = _place(process_set)
        return [place * tensor.shape[0] for tensor in tensors]

    def job(arrays: Sequence[Array]) -> Sequence[Array]:
        counts = ops.allgather(arrays[0], process_set=process_set).reshape(-1, len(tensors))
        return [counts[: _place(process_set)].sum(axis=0, dtype=np.int64)]

    mine = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors])
    (starts,) = run(job, [mine], [Result(tf.int64, (len(tensors),))], "allgather")
    return list(tf.unstack(starts))


def _rows_of(grad: Any, start: Any, tensor: Any) -> Any:
    rows = grad[start : start + tf.shape(tensor, tf.int64)[0]]
    return tf.ensure_shape(rows, tensor.shape)
