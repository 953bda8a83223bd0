"""Whether a distributed optimizer went on, whether its gradients were combined, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ringplug.backend.buffers import Array
from ringplug.backend.errors import NotReducedError
from ringplug.keras import learning_rate, step
from ringplug.keras.latch import OF_LAYERS, take_latched
from ringplug.keras.reduce import Reduction

__all__ = ["check_reduced", "forget_progress", "raise_latched", "restore"]


def raise_latched(optimizer: Any) -> None:
    """Raise the error of an earlier step of `optimizer`, if one waits."""
    latches = (optimizer.ringplug.meter.latch, OF_LAYERS)
    if all(latch.waiting() is None for latch in latches):
        return
    step.settle(optimizer)
    error = take_latched(optimizer)
    if error is not None:
        raise error


def check_reduced(optimizer: Any) -> None:
    """Raise where an optimizer has made updates whose gradients were not combined.

    Raises:
        NotReducedError: It went on since the last check, without a single exchange.
        RingplugError: What a step met, if that was not raised yet.
    """
    reduction: Reduction = optimizer.ringplug
    if not reduction.active:
        return
    well = step.settle(optimizer)
    raise_latched(optimizer)
    if not well or getattr(optimizer._iterations, "_value", True) is None:
        # JAX's fit is being left by an exception, which is the one to show.
        return
    updates, iterations = reduction.meter.updates, _iterations(optimizer)
    before = reduction.checked
    reduction.checked = (iterations, updates)
    went_on = before is not None and iterations > before[0]
    if before is not None and went_on and updates == before[1] and not reduction.idle:
        raise NotReducedError(
            f"{type(optimizer).__name__} made {iterations - before[0]} updates without combining "
            "gradients over the ranks: its training step was built before DistributedOptimizer. "
            "Call DistributedOptimizer before model.compile, or compile again"
        )


def forget_progress(optimizer: Any) -> None:
    """Take the optimizer's iterations for granted, whoever set them."""
    reduction: Reduction = optimizer.ringplug
    reduction.checked = (_iterations(optimizer), reduction.meter.updates)


def restore(optimizer: Any, values: Sequence[Array]) -> None:
    """Set the optimizer's variables, now where they exist, the others when it is built."""
    variables = optimizer.variables_quietly()
    reduction: Reduction = optimizer.ringplug
    complete = len(variables) == len(values)
    reduction.pending = () if complete else tuple(values)
    if complete or not learning_rate.inner_optimizers(optimizer):
        # Before slots exist an optimizer has its iterations and its learning rate only.
        for variable, value in zip(variables, values, strict=False):
            variable.assign(value)
    if values:
        forget_progress(optimizer)


def _iterations(optimizer: Any) -> int:
    value = keras.ops.convert_to_numpy(optimizer.iterations)
    return int(value)
