"""Horovod's operations that move tensors, in eager code, in ``tf.function`` and under XLA.

What they share:

* A tensor is a ``tf.Tensor``, a ``tf.Variable``, a Keras variable, or what ``tf.constant`` takes.
* Ranks match operations by `name`, and those without a name in the order in which they run. An
  operation in a ``tf.function`` runs whenever the function does, in program order; name scopes
  play no part.
* `process_set`: whose ranks take part, all by default; every one of them calls the operation.
* `device_dense`, `device_sparse` and `ignore_name_scope` are accepted for Horovod's scripts and
  have no effect: tensors are on the CPU, and names are taken as they are given.
* Gradients flow through all that return floats; see `collectives` for the rules.
* Errors are ringplug's and TensorFlow's at once in eager code, TensorFlow's in a graph; see
  `failures`. Unless ranks were lost, the process can go on after them.
* XLA (``jit_compile=True``) compiles only what has a known shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringplug.backend import ops
from ringplug.backend.errors import NotSupportedError
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.tensorflow import collectives
from ringplug.tensorflow.bridge import Result, run
from ringplug.tensorflow.collectives import Options
from ringplug.tensorflow.failures import entry

__all__ = [
    "allgather",
    "alltoall",
    "barrier",
    "broadcast",
    "dense",
    "grouped_allgather",
    "join",
]


@entry
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the ranks' tensors along the first dimension, in rank order.

    Args:
        tensor: With one dimension at least; shapes may differ in the first, unless XLA compiles.
        name: What the ranks match by.
        ignore_name_scope: Without effect.
        process_set: Who takes part.

    Returns:
        A tensor, the same on every rank.
    """
    del ignore_name_scope
    return collectives.allgather([dense(tensor)], _movement(name, process_set))[0]


@entry
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """An `allgather` of several tensors, as one operation; see there.

    Args:
        tensors: As many on every rank.
        name: What the ranks match by.
        ignore_name_scope: Without effect.
        process_set: Who takes part.
    """
    del ignore_name_scope
    if not tensors:
        return list(tensors)
    options = _movement(name, process_set, grouped=True)
    return collectives.allgather([dense(tensor) for tensor in tensors], options)


@entry
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the tensor of `root_rank`.

    Args:
        tensor: Same shape and dtype on every rank.
        root_rank: A rank among all ranks, the same on every rank.
        name: What the ranks match by.
        ignore_name_scope: Without effect.
        process_set: Who takes part.

    Returns:
        A new tensor with the root's values.
    """
    del ignore_name_scope
    return collectives.broadcast(dense(tensor), root_rank, _movement(name, process_set))


@entry
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of a tensor to every rank, and concatenate what comes from them.

    Args:
        tensor: With one dimension at least; shapes may differ in the first.
        splits: How many rows each rank gets, in rank order: integers, one per rank. By default
            all get as many, and the rows must divide evenly. Not with XLA.
        name: What the ranks match by.
        ignore_name_scope: Without effect.
        process_set: Who takes part.

    Returns:
        The received rows in the order of the senders' ranks; with `splits` a pair of that and
        the numbers of rows, int32, that came from each rank.
    """
    del ignore_name_scope
    wanted = None if splits is None else _splits(splits)
    output, received = collectives.alltoall(dense(tensor), wanted, _movement(name, process_set))
    return output if splits is None else (output, received)


@entry
def join() -> Any:
    """Take part in nothing more until all ranks have joined, for uneven amounts of data.

    Meanwhile this rank contributes values that change nothing to what the others reduce: zeros
    to sums and averages, whose divisor stays the number of all ranks. Operations that have no
    such values (allgather, broadcast, alltoall, reducescatter) are errors meanwhile.

    Returns:
        The rank that joined last, an int32 tensor without dimensions.
    """
    (last,) = run(lambda _: [np.array(ops.join(), np.int32)], [], [Result(tf.int32, ())], "join")
    return last


@entry
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Wait until every rank has come here.

    Args:
        process_set: Who waits.
        name: What the ranks match by.
    """

    def job(arrays: Any) -> Any:
        del arrays
        ops.barrier(process_set=process_set, name=name)
        return []

    run(job, [], [], "barrier")


def _splits(splits: Any) -> Any:
    # An empty list would become floats.
    given = tf.convert_to_tensor(splits)
    return tf.cast(given, tf.int32) if given.shape == (0,) else given


def _movement(name: str | None, process_set: Any, grouped: bool = False) -> Options:
    return Options(name=name, process_set=process_set, grouped=grouped)


def dense(tensor: Any) -> Any:
    """What was given as a tensor."""
    if isinstance(tensor, tf.IndexedSlices):
        raise NotSupportedError(
            "IndexedSlices can be reduced by allreduce only; use tf.convert_to_tensor"
        )
    return tf.convert_to_tensor(tensor)
