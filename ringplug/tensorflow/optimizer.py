"""Optimizers whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.tensorflow.aggregation import GradientAccumulator, after, counter, local_variable
from ringplug.tensorflow.compression import Compression, CompressionChoice
from ringplug.tensorflow.failures import entry
from ringplug.tensorflow.gradients import GradientReducer

__all__ = ["DistributedOptimizer"]


@entry
def DistributedOptimizer(  # noqa: PLR0913, PLR0917 - Horovod's name and signature
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionChoice = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that reduces gradients over the ranks before it uses them.

    Args:
        optimizer: A Keras optimizer, which is given to ``ringplug.keras.DistributedOptimizer``
            with all arguments and comes back changed; or an optimizer of ``tf.compat.v1.train``,
            around which another one is put.
        name: What the ranks match by; "Distributed" and the optimizer's class by default.
        use_locking: For ``tf.compat.v1``: see there.
        device_dense: Without effect.
        device_sparse: Without effect.
        compression: What gradients travel as; see `allreduce`.
        sparse_as_dense: Whether IndexedSlices are made dense, rather than their rows gathered.
        backward_passes_per_step: Micro-batches per update, whose gradients are added up.
        op: How gradients are combined. Adasum, for ``tf.compat.v1`` only, combines what the
            updates change instead.
        gradient_predivide_factor: Divides the gradients before they are averaged; the result is
            multiplied by it.
        average_aggregated_gradients: Whether the sum over micro-batches is divided by their
            number.
        num_groups: Older spelling of `groups`.
        groups: Into how many operations the gradients are divided, or lists of the variables
            whose gradients belong together. Adasum does its own to each variable anyway.
        process_set: Whose ranks take part; the others use their own gradients.
        scale_local_gradients: Whether gradients of variables given to ``register_local_var``
            are divided by the number of ranks.

    Returns:
        The optimizer.

    Raises:
        ValueError: An argument has a value that makes no sense, two do not go together, or the
            optimizer is of neither kind.
    """
    op = ReduceOp(op)
    if op is ReduceOp.ADASUM and average_aggregated_gradients:
        raise UsageError("Adasum does not work with average_aggregated_gradients=True")
    if backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step={backward_passes_per_step}: expected 1 or more")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        kind = type(optimizer).__name__
        label = name or f"Distributed{'Delta' if op is ReduceOp.ADASUM else ''}{kind}"
        reducer = GradientReducer(
            label,
            compression,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            num_groups,
            groups,
            process_set,
            scale_local_gradients,
        )
        if op is ReduceOp.ADASUM:
            return _Delta(optimizer, label, use_locking, reducer, backward_passes_per_step)
        accumulator = None
        if backward_passes_per_step > 1:
            accumulator = GradientAccumulator(
                backward_passes_per_step, average_aggregated_gradients, reducer.reduce
            )
        return _Reducing(optimizer, label, use_locking, reducer, accumulator)
    if not _is_keras(optimizer):
        raise UsageError(
            f"{optimizer!r} is neither an optimizer of Keras 3 nor one of tf.compat.v1.train"
        )
    if op is ReduceOp.ADASUM:
        raise UsageError("Adasum does not work with Keras optimizers; use Average or Sum")
    from ringplug.keras import DistributedOptimizer as distribute

    return distribute(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def _is_keras(optimizer: Any) -> bool:
    if not any(kind.__module__.split(".")[0] == "keras" for kind in type(optimizer).__mro__):
        return False
    import keras

    return isinstance(optimizer, keras.optimizers.Optimizer)


class _Wrapping(tf.compat.v1.train.Optimizer):
    """What the wrappers around an optimizer of ``tf.compat.v1.train`` have in common."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer

    @entry
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's."""
        return list(self._optimizer.compute_gradients(*args, **kwargs))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.variables(*args, **kwargs)


class _Reducing(_Wrapping):
    """Reduces gradients where they are computed."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        use_locking: bool,
        reducer: GradientReducer,
        accumulator: GradientAccumulator | None,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reducer = reducer
        self._accumulator = accumulator

    def register_local_var(self, var: Any) -> None:
        """Leave the gradients of a variable on this rank."""
        self._reducer.register_local(var)

    @entry
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's gradients, reduced over the ranks, and their variables."""
        pairs = list(self._optimizer.compute_gradients(*args, **kwargs))
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._accumulator is None:
            reduced = self._reducer.reduce(gradients, variables)
        else:
            gradients = self._reducer.densified(gradients)
            reduced = self._accumulator.add(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    @entry
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """The wrapped optimizer's update; on the last of several backward passes only."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        if self._accumulator is None:
            return apply()

        def count() -> Any:
            return None if global_step is None else global_step.assign_add(1)

        return self._accumulator.when_due([g for g, _ in pairs], apply, count)


class _Delta(_Wrapping):
    """Lets each rank update its weights, and combines what that changed by Adasum."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, reducer: GradientReducer, passes: int
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reducer = reducer
        self._passes = passes
        self._count: Any = None
        self._starts: dict[int, Any] = {}

    @entry
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """The wrapped optimizer's update, and on every so-manieth one the exchange."""
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        if self._count is None:
            self._count = counter()
        for variable in variables:
            if id(variable) not in self._starts:
                self._starts[id(variable)] = local_variable(variable.shape, variable.dtype)
        starts = [self._starts[id(variable)] for variable in variables]

        def remember() -> Any:
            return _all(
                [start.assign(variable) for start, variable in zip(starts, variables, strict=True)]
            )

        def exchange() -> Any:
            deltas = [v - start for v, start in zip(variables, starts, strict=True)]
            if self._reducer.members > 1 and self._reducer.included:
                deltas, _ = self._reducer.exchange(f"{self._reducer.name}.deltas", deltas)
            return _all(
                [
                    variable.assign(start + delta)
                    for variable, start, delta in zip(variables, starts, deltas, strict=True)
                ]
            )

        def nothing() -> Any:
            return tf.constant(0)

        due = tf.equal(self._count.read_value() % self._passes, 0)
        begun = tf.cond(due, remember, nothing)
        with after([begun]):
            applied = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with after([] if applied is None else [applied]):
            count = self._count.assign_add(1)
        with after([count]):
            done = tf.cond(tf.equal(count % self._passes, 0), exchange, nothing)
        return None if tf.executing_eagerly() else tf.group(done)


def _all(operations: Sequence[Any]) -> Any:
    """A number that is there when all is done: what a branch of a condition can return."""
    with after(operations):
        return tf.constant(0)
