"""Collectives on values: numbers, lists, arrays, and tensors of the Keras backend in use.

With Keras on TensorFlow everything becomes a TensorFlow tensor, as in Horovod: a script may call
``.numpy()`` on a result. Inside ``tf.function`` the operation becomes a part of the graph.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ringplug.backend import ops
from ringplug.backend.buffers import ReduceOp
from ringplug.keras.compression import user_compressor, wire_codec

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = None,
    process_set: Any = None,
) -> Any:
    """Combine a value over all ranks.

    Args:
        value: A number, list, array, tensor or Keras variable; same shape and dtype on every
            rank.
        name: What the ranks match by; the order of calls by default.
        average: Horovod's older way to say ``op=Average`` (True) or ``op=Sum`` (False).
        prescale_factor: Multiplies the value before.
        postscale_factor: Multiplies the result.
        op: ``Average`` (default), ``Sum``, or any other of ringplug's.
        compression: What it travels as; see `Compression`.
        process_set: Who takes part; None: all ranks.

    Returns:
        The result, of the kind that was passed: a number for a number, an array for a list. With
        Keras on TensorFlow: a tensor.

    Raises:
        UsageError: Both `op` and `average`, or something else that cannot work.
        MismatchError: On every rank, when their values differ in shape or dtype.
    """
    tensor = _given(value)
    codec, context = user_compressor(compression), None
    if codec is not None:
        tensor, context = codec.compress(keras.ops.convert_to_tensor(tensor))
    made = _operations().allreduce(
        tensor,
        average=average,
        name=name,
        compression=wire_codec(compression),
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    if codec is not None:
        made = codec.decompress(made, context)
    return _like_input(made, value)


def allgather(value: Any, name: str | None = None, process_set: Any = None) -> Any:
    """The ranks' values, concatenated along the first dimension, which may differ by rank.

    Args:
        value: As for `allreduce`; a number counts as an array of one.
        name: See there.
        process_set: See there.
    """
    tensor = _given(value)
    if np.ndim(tensor) == 0:
        tensor = keras.ops.reshape(tensor, (1,)) if _ON_TENSORFLOW else np.atleast_1d(tensor)
    return _operations().allgather(tensor, name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """Rank `root_rank`'s value, on every rank.

    Args:
        value: As for `allreduce`; shape and dtype are the same everywhere.
        root_rank: Whose; a number among all ranks, also with `process_set`.
        name: See there.
        process_set: See there.
    """
    made = _operations().broadcast(_given(value), root_rank, name=name, process_set=process_set)
    return _like_input(made, value)


def reducescatter(
    value: Any, name: str | None = None, op: Any = ReduceOp.AVERAGE, process_set: Any = None
) -> Any:
    """This rank's share of the combined value, which is cut along its first dimension.

    Args:
        value: A list, array or tensor; same shape and dtype on every rank.
        name: As for `allreduce`.
        op: ``Average`` or ``Sum``.
        process_set: As for `allreduce`.

    Returns:
        Rows ``n // size``, and one more on the first ``n % size`` ranks.
    """
    return _operations().reducescatter(_given(value), name=name, op=op, process_set=process_set)


def _operations() -> Any:
    if _ON_TENSORFLOW:
        import tensorflow as tf

        if not tf.executing_eagerly():
            from ringplug import tensorflow as in_graphs

            return in_graphs
    return ops


def _given(value: Any) -> Any:
    plain = value.value if isinstance(value, keras.Variable) else value
    if _ON_TENSORFLOW:
        import tensorflow as tf

        return tf.convert_to_tensor(plain)
    return plain


def _like_input(result: Any, value: Any) -> Any:
    if isinstance(value, (bool, int, float, complex)) and not _ON_TENSORFLOW:
        return np.asarray(result).item()
    return result
