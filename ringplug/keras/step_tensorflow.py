"""Keras on TensorFlow: eager steps, graphs, and graphs compiled by XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringplug.backend import runtime
from ringplug.backend.adapters import view
from ringplug.backend.buffers import Array
from ringplug.backend.errors import UnavailableError, UsageError
from ringplug.keras.exchange import DenseExchange, SparseExchange
from ringplug.keras.latch import take_latched
from ringplug.tensorflow import ffi
from ringplug.tensorflow.aligned import aligned_empty

__all__ = [
    "densify",
    "ffi_reason",
    "gather",
    "is_eager",
    "is_sparse",
    "is_tensor",
    "refuse",
    "run",
    "run_flagged",
    "settle",
    "settle_model",
    "summed",
    "times",
    "translate_errors",
    "uncompiled",
]

_TRANSLATED = "_ringplug_translated"


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor or IndexedSlices."""
    return isinstance(value, (tf.Tensor, tf.IndexedSlices, tf.Variable))


def is_sparse(value: Any) -> bool:
    """Whether it is IndexedSlices, the gradient of an embedding."""
    return isinstance(value, tf.IndexedSlices)


def densify(value: Any) -> Any:
    """IndexedSlices as a tensor; rows that occur several times are added."""
    return tf.convert_to_tensor(value)


def times(value: Any, factor: float) -> Any:
    """A tensor or IndexedSlices times `factor`, in its own dtype."""
    if not is_sparse(value):
        return tf.convert_to_tensor(value) * factor
    return tf.IndexedSlices(value.values * factor, value.indices, value.dense_shape)


def is_eager(tensors: Sequence[Any]) -> bool:
    """Whether this is outside of ``tf.function``."""
    del tensors
    return bool(tf.executing_eagerly())


def run(exchange: DenseExchange, tensors: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The reduced tensors: at once, by a host callback in the graph, or by a custom call."""
    del variables
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if is_eager(tensors):
        return _now(exchange, tensors, [])[0]
    tensors = [
        tf.ensure_shape(tensor, spec.shape)
        for tensor, spec in zip(tensors, exchange.specs, strict=True)
    ]
    if _use_ffi():
        target = ffi.target_of(exchange, exchange)
        shapes = [
            (spec.shape, tensor.dtype) for spec, tensor in zip(exchange.specs, tensors, strict=True)
        ]
        return ffi.call(target, tensors, shapes, alias=True)

    def callback(*given: Any) -> list[Array]:
        # Tensors without dimensions come as numpy scalars.
        sources = [np.asarray(array) for array in given]
        targets = [aligned_empty(source.shape, source.dtype) for source in sources]
        exchange(sources, targets)
        return targets

    outputs = tf.numpy_function(callback, tensors, [t.dtype for t in tensors], stateful=True)
    for output, spec in zip(outputs, exchange.specs, strict=True):
        output.set_shape(spec.shape)
    return list(outputs)


def run_flagged(
    exchange: DenseExchange, tensors: Sequence[Any], variables: Sequence[Any], flags: Array
) -> tuple[list[Any], Array]:
    """Eager: the reduced tensors and flags."""
    del variables
    reduced, more = _now(exchange, [tf.convert_to_tensor(t) for t in tensors], [flags])
    return reduced, more[0]


def summed(exchanges: tuple[DenseExchange, DenseExchange], tensor: Any) -> Any:
    """The sum over the ranks, differentiable; what arrives at a rank's tensor is summed too."""
    forward, backward = exchanges

    @tf.custom_gradient
    def total(given: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return summed((backward, backward), upstream)

        return run(forward, [given], [])[0], gradient

    return total(tensor)


def _now(
    exchange: DenseExchange, tensors: Sequence[Any], extra: list[Array]
) -> tuple[list[Any], list[Array]]:
    sources = [view(tensor) for tensor in tensors]
    targets = [aligned_empty(source.shape, source.dtype) for source in sources]
    more = [np.empty_like(array) for array in extra]
    exchange([*sources, *extra], [*targets, *more])
    return [tf.convert_to_tensor(target) for target in targets], more


def gather(exchange: SparseExchange, gradient: Any) -> Any:
    """IndexedSlices with the rows of all ranks.

    Raises:
        UnavailableError: In a program that XLA compiles, where custom calls are not available.
    """
    values, indices = gradient.values, gradient.indices
    values = tf.ensure_shape(values, (None, *exchange.row))
    if is_eager([values]):
        rows, where = exchange(view(values), view(indices))
        return tf.IndexedSlices(
            tf.convert_to_tensor(rows), tf.convert_to_tensor(where), gradient.dense_shape
        )
    if _in_xla():
        _require_ffi()
        rows, where = _gather_in_xla(exchange, values, indices)
    else:
        rows, where = tf.numpy_function(
            lambda v, i: list(exchange(v, i)),
            [values, indices],
            [values.dtype, indices.dtype],
            stateful=True,
        )
        rows.set_shape((None, *exchange.row))
        where.set_shape((None,))
    return tf.IndexedSlices(rows, where, gradient.dense_shape)


def _gather_in_xla(exchange: SparseExchange, values: Any, indices: Any) -> list[Any]:
    if indices.shape[0] is None:
        raise UsageError(
            "the number of rows of an embedding's gradient is not known to XLA; "
            "use DistributedOptimizer(..., sparse_as_dense=True) or jit_compile=False"
        )
    total = indices.shape[0] * exchange.size
    shapes = [((total, *exchange.row), values.dtype), ((total,), indices.dtype)]
    target = ffi.target_of(exchange, exchange.into)
    return ffi.call(target, [values, indices], shapes, alias=False)


def _in_xla() -> bool:
    """Whether the graph being traced is going to be compiled by XLA."""
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def _use_ffi() -> bool:
    """Whether the graph being traced needs, or was asked for, a custom call."""
    path = runtime.current().config.keras_path
    if _in_xla() or path == "ffi":
        _require_ffi()
        return True
    return False


def ffi_reason() -> str:
    """Why a program compiled by XLA cannot reach ringplug; "" if it can."""
    if runtime.current().config.keras_path == "callback":
        return "keras_path=callback was asked for, and XLA cannot compile host callbacks"
    return ffi.probe()


def _require_ffi() -> None:
    reason = ffi_reason()
    if reason:
        raise UnavailableError(
            f"a training step compiled by XLA cannot reach ringplug here: {reason}. "
            "Use model.compile(..., jit_compile=False)"
        )


def refuse() -> None:
    """Raise where TensorFlow distributes already.

    Raises:
        UsageError: A ``tf.distribute`` strategy is active.
    """
    if tf.distribute.has_strategy():
        raise UsageError(
            "a tf.distribute strategy is active; use either that or ringplug, "
            "which needs one process per device and no strategy"
        )


def settle(optimizer: Any) -> bool:
    """Nothing to wait for: a graph has run when its call returns."""
    del optimizer
    return True


def settle_model(model: Any) -> bool:
    """Nothing to wait for; see `settle`."""
    del model
    return True


def translate_errors(model: Any) -> None:
    """Let `fit` raise what an exchange raised, instead of TensorFlow's error about it.

    TensorFlow knows an error of a callback or custom call by its text only.
    """
    step = model.train_function
    if hasattr(step, _TRANSLATED):
        return

    def train_function(iterator: Any) -> Any:
        try:
            return step(iterator)
        except tf.errors.OpError as error:
            cause = take_latched(model.optimizer)
            if cause is None:
                raise
            raise cause from error

    setattr(train_function, _TRANSLATED, True)
    model.train_function = train_function


def uncompiled(function: Any) -> Any:
    """The function itself: it is traced."""
    return function
