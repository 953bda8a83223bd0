"""Gradients of several backward passes added up on each rank, for one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringplug.backend.errors import UsageError

__all__ = ["GradientAccumulator", "after", "counter", "local_variable"]

Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def local_variable(shape: Any, dtype: Any) -> Any:
    """A variable of zeros that is this rank's own, made once where a function is traced.

    In a graph of ``tf.compat.v1`` it is a local variable: run
    ``tf.compat.v1.local_variables_initializer()``.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False)
        return tf.compat.v1.Variable(
            lambda: tf.zeros(shape, dtype),
            trainable=False,
            use_resource=True,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        )


def counter() -> Any:
    """A `local_variable` that counts."""
    return local_variable((), tf.int64)


class GradientAccumulator:
    """Adds up gradients and reduces their sum on every so-manieth call.

    Args:
        passes: How many calls make one exchange.
        average: Whether the sum is divided by `passes`.
        reduce: The exchange.
    """

    def __init__(self, passes: int, average: bool, reduce: Reduce) -> None:
        self._passes = passes
        self._average = average
        self._reduce = reduce
        self._counter: Any = None
        self._sums: list[Any] = []

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add gradients.

        Args:
            gradients: Dense, the same ones present in every call.
            variables: Whose they are.

        Returns:
            The reduced sum on the last call of an exchange, and otherwise what was given.

        Raises:
            UsageError: A gradient is sparse, or other gradients are present than before.
        """
        gradients = list(gradients)
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            raise UsageError(
                "backward_passes_per_step above 1 adds up dense gradients; pass "
                "sparse_as_dense=True"
            )
        present = [at for at, gradient in enumerate(gradients) if gradient is not None]
        if self._counter is None:
            self._counter = counter()
            self._sums = [
                None if g is None else local_variable(g.shape, g.dtype) for g in gradients
            ]
        if [at for at, value in enumerate(self._sums) if value is not None] != present:
            raise UsageError("other variables have gradients than in the first backward pass")
        added = [self._sums[at].assign_add(gradients[at]) for at in present]
        with after(added):
            count = self._counter.assign_add(1)

        def exchange() -> list[Any]:
            sums = [None if value is None else value.read_value() for value in self._sums]
            reduced = self._reduce(sums, variables)
            with after([value for value in reduced if value is not None]):
                cleared = [self._sums[at].assign(tf.zeros_like(self._sums[at])) for at in present]
                cleared.append(self._counter.assign(0))
            with after(cleared):
                factor = 1.0 / self._passes if self._average else 1.0
                return [reduced[at] * tf.cast(factor, reduced[at].dtype) for at in present]

        def wait() -> list[Any]:
            return [tf.identity(gradients[at]) for at in present]

        with after([count]):
            results = tf.cond(tf.equal(count, self._passes), exchange, wait)
        if not isinstance(results, (list, tuple)):
            results = [results]
        for at, value in zip(present, results, strict=True):
            gradients[at] = value
        return gradients

    def when_due(
        self, gradients: Sequence[Any], apply: Callable[[], Any], otherwise: Callable[[], Any]
    ) -> Any:
        """Call `apply` after the last call of an exchange, else `otherwise`.

        Args:
            gradients: What `add` returned.
            apply: Returns an operation, or None.
            otherwise: The same.
        """
        if self._counter is None:
            return apply()
        if tf.executing_eagerly():
            return apply() if self._counter.numpy() == 0 else otherwise()

        def operation(function: Callable[[], Any]) -> Any:
            made = function()
            with after([] if made is None else [made]):
                return tf.constant(0)

        with after([gradient for gradient in gradients if gradient is not None]):
            due = tf.equal(self._counter.read_value(), 0)
            done = tf.cond(due, lambda: operation(apply), lambda: operation(otherwise))
        return tf.group(done)


def after(operations: Sequence[Any]) -> Any:
    """A context in which graphs do what is built there after `operations`; eager code does."""
    return tf.control_dependencies([] if tf.executing_eagerly() else list(operations))
