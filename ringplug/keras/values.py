"""Collectives on values: numbers, arrays, and tensors of the Keras backend in use."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ringplug.backend import ops
from ringplug.backend.buffers import ReduceOp

__all__ = ["allgather", "allreduce", "broadcast"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
) -> Any:
    """Combine a value over all ranks.

    Args:
        value: A number, list, array, tensor or Keras variable; same shape and dtype on every
            rank.
        name: What the ranks match by; the order of calls by default.
        average: Horovod's older way to say ``op=Average`` (True) or ``op=Sum`` (False).
        prescale_factor: Multiplies the value before.
        postscale_factor: Multiplies the result.
        op: ``Average`` (default) or ``Sum``, or any other of ringplug's.

    Returns:
        The result, of the kind that was passed: a number for a number, an array for a list.
    """
    if op is None:
        op = ReduceOp.SUM if average is False else ReduceOp.AVERAGE
    made = ops.allreduce(_plain(value), op, name, prescale_factor, postscale_factor)
    return _like_input(made, value)


def allgather(value: Any, name: str | None = None) -> Any:
    """The ranks' values, concatenated along the first dimension, which may differ by rank.

    A number counts as an array of one.
    """
    plain = _plain(value)
    return ops.allgather(np.atleast_1d(plain) if np.isscalar(plain) else plain, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Rank `root_rank`'s value, on every rank; shape and dtype are the same everywhere."""
    return _like_input(ops.broadcast(_plain(value), root_rank, name), value)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, keras.Variable) else value


def _like_input(result: Any, value: Any) -> Any:
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(result).item()
    return result
