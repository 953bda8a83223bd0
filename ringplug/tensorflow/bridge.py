"""One way into ringplug for eager code, ``tf.function`` and XLA.

A *job* works on arrays: it takes the operands' values and returns the results'. `run` does it at
once in eager code, by a host callback in a graph, and by a custom call in a program that XLA
compiles. Callbacks and custom calls are stateful: a ``tf.function`` runs them one after the
other, in program order, so that every rank submits its operations in the same order whatever
was traced when. Graphs of ``tf.compat.v1`` have no such order; see `name_in_graph`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from ringplug.backend.adapters import view
from ringplug.backend.buffers import Array
from ringplug.backend.errors import (
    MismatchError,
    NotSupportedError,
    RingplugError,
    UnavailableError,
)
from ringplug.tensorflow import ffi
from ringplug.tensorflow.failures import latched

__all__ = ["Job", "Result", "name_in_graph", "ordered", "run"]

Job: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]
"""One that has a method ``into(sources, targets)`` writes to XLA's memory itself."""

_failures: dict[int, RingplugError] = {}
_numbers = itertools.count(1)
_NAMES = "_ringplug_names"


@dataclass(frozen=True)
class Result:
    """What is known of a result before the job runs.

    Attributes:
        dtype: Its dtype.
        shape: What is known of its shape.
    """

    dtype: Any
    shape: Any


def run(
    job: Job, tensors: Sequence[Any], results: Sequence[Result], what: str, advice: str = ""
) -> list[Any]:
    """Do a job now, or when the graph that is being traced runs.

    Args:
        job: Takes one array for each tensor and returns one for each result.
        tensors: Dense tensors.
        results: What the job returns.
        what: Names it in errors.
        advice: What to do where XLA cannot compile it.

    Raises:
        NotSupportedError: XLA is to compile it, and a result's shape is not known beforehand.
        UnavailableError: XLA is to compile it, and this TensorFlow has no way out of there.
        RingplugError: What the job raises; in a graph that runs later, TensorFlow's error of
            the same kind.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(array) for array in job([view(t) for t in tensors])]
    if ffi.in_xla():
        return _compiled(job, tensors, results, what, advice)
    return _called_back(job, tensors, results)


def _called_back(job: Job, tensors: Sequence[Any], results: Sequence[Result]) -> list[Any]:
    coded = ffi.reachable()
    dtypes = [result.dtype for result in results]

    def callback(*given: Any) -> list[Array]:
        # Tensors without dimensions come as numpy scalars.
        try:
            done = [np.asarray(array) for array in job([np.asarray(array) for array in given])]
        except RingplugError as error:
            latched.put(error)
            if not coded:
                raise
            number = next(_numbers)
            _failures[number] = error
            nothing = [np.zeros((0,), dtype.as_numpy_dtype) for dtype in dtypes]
            return [*nothing, np.asarray(number, np.int64)]
        return [*done, np.asarray(0, np.int64)]

    # A device scope may say that the operands are on a GPU; host memory is where callbacks are.
    with tf.device("CPU:0"):
        *outputs, failed = tf.numpy_function(callback, tensors, [*dtypes, tf.int64], stateful=True)
        failed.set_shape(())
        if coded:
            raised = tf.cond(failed > 0, lambda: _raise(failed), lambda: failed)
            with tf.control_dependencies([raised]):
                outputs = [tf.identity(output) for output in outputs]
    for output, result in zip(outputs, results, strict=True):
        output.set_shape(result.shape)
    return outputs


def _raise(failed: Any) -> Any:
    """A host callback can raise few of TensorFlow's errors, a custom call all of them."""
    (number,) = ffi.call(_raising(), [failed], [((), tf.int64)], alias=True)
    return number


@functools.cache
def _raising() -> str:
    def body(sources: Sequence[Array], targets: Sequence[Array]) -> None:
        del targets
        raise _failures.pop(int(sources[0]))

    return ffi.register(body)


def _compiled(
    job: Job, tensors: Sequence[Any], results: Sequence[Result], what: str, advice: str
) -> list[Any]:
    reason = ffi.probe()
    if reason:
        raise UnavailableError(
            f"{what} in a function that XLA compiles cannot reach ringplug here: {reason}. Use "
            "tf.function(jit_compile=False)"
        )
    unknown = [t for t in (*tensors, *results) if not tf.TensorShape(t.shape).is_fully_defined()]
    if unknown:
        raise NotSupportedError(
            f"{what}: XLA needs to know every shape while it compiles, and one is "
            f"{tf.TensorShape(unknown[0].shape)}. {advice or 'Use tensors of known shapes'}, or "
            "call it outside of jit_compile=True"
        )

    into = getattr(job, "into", None)

    def body(sources: Sequence[Array], targets: Sequence[Array]) -> None:
        try:
            if into is not None:
                into(sources, targets)
                return
            for array, target in zip(job(sources), targets, strict=True):
                if np.shape(array) != target.shape:
                    raise MismatchError(
                        f"{what}: the result has shape {list(np.shape(array))}, and XLA has "
                        f"compiled the function for {list(target.shape)}"
                    )
                target[...] = array
        except RingplugError as error:
            latched.put(error)
            raise

    shapes = [(tuple(tf.TensorShape(r.shape).as_list()), r.dtype) for r in results]
    return ffi.call(ffi.register(body), list(tensors), shapes, alias=False)


def ordered() -> bool:
    """Whether operations run in program order: not in a graph of ``tf.compat.v1``."""
    return bool(tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function)


def name_in_graph(kind: str, name: str | None, tensor: Any) -> str | None:
    """The name by which ranks match an operation.

    Eager operations and those in a ``tf.function`` without a name are numbered when they run:
    all ranks run them in the same order. A graph of ``tf.compat.v1`` runs what does not depend
    on each other in any order and at once, so that there the names have to differ: an operation
    is named after its tensor there, and numbered where names would be equal.

    Args:
        kind: Of the operation.
        name: What the user calls it.
        tensor: What it works on.
    """
    if ordered():
        return name
    graph = tf.compat.v1.get_default_graph()
    taken: dict[str, int] = getattr(graph, _NAMES, {})
    setattr(graph, _NAMES, taken)
    wanted = name or f"{kind}.{tensor.name if tensor is not None else ''}"
    taken[wanted] = taken.get(wanted, 0) + 1
    return wanted if taken[wanted] == 1 else f"{wanted}#{taken[wanted]}"
