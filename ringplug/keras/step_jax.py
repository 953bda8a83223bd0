"""Keras on JAX: programs being traced, and concrete arrays in eager steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from ringplug.backend import runtime
from ringplug.backend.adapters import view
from ringplug.backend.buffers import Array
from ringplug.backend.errors import UnavailableError, UsageError
from ringplug.keras import ffi_jax
from ringplug.keras.exchange import DenseExchange, SparseExchange
from ringplug.keras.latch import take_latched

__all__ = [
    "densify",
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
    """Whether it is a JAX array, concrete or traced, or a sparse one."""
    return isinstance(value, jax.Array) or is_sparse(value)


def is_sparse(value: Any) -> bool:
    """Whether it is an array of ``jax.experimental.sparse``."""
    return hasattr(value, "todense") and not isinstance(value, (jax.Array, np.ndarray))


def densify(value: Any) -> Any:
    """A dense array of the same values."""
    return value.todense()


def times(value: Any, factor: float) -> Any:
    """The array, sparse or not, times `factor`, in its own dtype."""
    return value * factor


def is_eager(tensors: Sequence[Any]) -> bool:
    """Whether no program is being traced."""
    return not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


def run(exchange: DenseExchange, tensors: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The reduced arrays: at once, by a custom call, or by an ordered host callback."""
    del variables
    if is_eager(tensors):
        return _now(exchange, tensors, [])[0]
    _forget_failures()
    shapes = [(spec.shape, spec.dtype) for spec in exchange.specs]
    if _use_ffi():
        target = ffi_jax.target_of(exchange, exchange)
        return ffi_jax.call(target, tensors, shapes, alias=True)

    def callback(*given: Any) -> list[Array]:
        sources = [np.ascontiguousarray(array) for array in given]
        targets = [np.empty_like(source) for source in sources]
        exchange(sources, targets)
        return targets

    wanted = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return list(io_callback(callback, wanted, *tensors, ordered=True))


def run_flagged(
    exchange: DenseExchange, tensors: Sequence[Any], variables: Sequence[Any], flags: Array
) -> tuple[list[Any], Array]:
    """Eager: the reduced arrays and flags."""
    del variables
    reduced, more = _now(exchange, tensors, [flags])
    return reduced, more[0]


def summed(exchanges: tuple[DenseExchange, DenseExchange], array: Any) -> Any:
    """The sum over the ranks, differentiable; what arrives at a rank's array is summed too."""
    forward, backward = exchanges

    @jax.custom_vjp
    def total(given: Any) -> Any:
        return run(forward, [given], [])[0]

    def total_forward(given: Any) -> tuple[Any, None]:
        return total(given), None

    def total_backward(_: None, cotangent: Any) -> tuple[Any]:
        return (summed((backward, backward), cotangent),)

    total.defvjp(total_forward, total_backward)
    return total(array)


def _now(
    exchange: DenseExchange, tensors: Sequence[Any], extra: list[Array]
) -> tuple[list[Any], list[Array]]:
    sources = [view(jax.numpy.asarray(tensor)) for tensor in tensors]
    targets = [np.empty(source.shape, source.dtype) for source in sources]
    more = [np.empty_like(array) for array in extra]
    exchange([*sources, *extra], [*targets, *more])
    return [jax.numpy.asarray(target) for target in targets], more


def gather(exchange: SparseExchange, gradient: Any) -> Any:
    """Not possible: gradients of Keras layers are dense on JAX.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"a sparse gradient ({type(gradient).__name__}) reached the optimizer; "
        "use DistributedOptimizer(..., sparse_as_dense=True)"
    )


def refuse() -> None:
    """Raise where Keras distributes already.

    Raises:
        UsageError: A Keras distribution with several devices is active.
    """
    import keras

    distribution = keras.distribution.distribution()
    if distribution is not None and distribution.device_mesh.devices.size > 1:
        raise UsageError(
            f"keras.distribution is set to {type(distribution).__name__} over "
            f"{distribution.device_mesh.devices.size} devices; use either that or ringplug, "
            "which needs one device per process"
        )


def settle(optimizer: Any) -> bool:
    """Wait until the steps that were started have run; whether they went well."""
    # During an epoch Keras detaches the values from the variables; `value` would fail then.
    values = [getattr(v, "_value", None) for v in optimizer.variables_quietly()]
    well = True
    try:
        jax.block_until_ready([value for value in values if value is not None])
    except jax.errors.JaxRuntimeError:
        well = False
    _forget_failures()
    return well


def settle_model(model: Any) -> bool:
    """Wait until the steps of a `fit` under way have run; whether they went well."""
    # During an epoch the values are in this state only.
    state = getattr(model, "_jax_state", None)
    well = True
    try:
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError:
        well = False
    return settle(model.optimizer) and well


def _forget_failures() -> None:
    """Make JAX accept programs with ordered effects again after one has failed.

    The token of the failed one, which it would pass to the next, carries the error for ever.
    """
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        from jax._src import dispatch

        dispatch.runtime_tokens.clear()


def translate_errors(model: Any) -> None:
    """Let `fit` raise what an exchange raised, instead of JAX's error about it.

    JAX knows an error of a custom call by its text only, and says so when the next step
    starts, or not at all.
    """
    step = model.train_function
    if hasattr(step, _TRANSLATED):
        return

    def train_function(state: Any, iterator: Any) -> Any:
        try:
            return step(state, iterator)
        except jax.errors.JaxRuntimeError as error:
            cause = take_latched(model.optimizer)
            if cause is None:
                raise
            _forget_failures()
            raise cause from error

    setattr(train_function, _TRANSLATED, True)
    model.train_function = train_function


def _use_ffi() -> bool:
    path = runtime.current().config.keras_path
    if path == "callback":
        return False
    reason = ffi_jax.probe()
    if reason and path == "ffi":
        raise UnavailableError(f"keras_path=ffi is not available: {reason}")
    return not reason


def uncompiled(function: Any) -> Any:
    """The function itself: it is traced."""
    return function
