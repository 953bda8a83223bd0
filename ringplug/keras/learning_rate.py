"""Reading, setting and scaling the learning rate of any Keras optimizer."""

from __future__ import annotations

import math
import sys
from typing import Any

import keras

from ringplug.backend import runtime
from ringplug.backend.errors import UsageError
from ringplug.keras import schedules

__all__ = [
    "BY_CALLBACKS",
    "assign",
    "current",
    "factor",
    "inner_optimizers",
    "leaves",
    "scale",
    "scale_once",
]

BY_CALLBACKS = "callbacks"
"""The choice that leaves the learning rate to ringplug's own callbacks."""


def factor(scale_lr: str | None, size: int) -> float:
    """What a learning rate is multiplied by at once with `size` ranks."""
    if scale_lr is None or scale_lr == BY_CALLBACKS:
        return 1.0
    if scale_lr not in ("linear", "sqrt"):
        raise UsageError(f"scale_lr={scale_lr!r}: expected 'linear', 'sqrt' or None")
    return float(size) if scale_lr == "linear" else math.sqrt(size)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that a LossScaleOptimizer or MultiOptimizer hands gradients to."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    return list(optimizer.optimizers) if is_multi(optimizer) else []


def is_multi(optimizer: Any) -> bool:
    """Whether it is a MultiOptimizer, which not every Keras has."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers that have a learning rate of their own."""
    inner = inner_optimizers(optimizer)
    if not inner:
        return [] if is_multi(optimizer) else [optimizer]
    return [leaf for one in inner for leaf in leaves(one)]


def scale(optimizer: Any, by: float, announce: bool = True) -> None:
    """Multiply every learning rate of `optimizer`; rank 0 prints what changed.

    Raises:
        UsageError: A MultiOptimizer that has not chosen its optimizers yet.
    """
    found = leaves(optimizer)
    if not found:
        raise UsageError(
            "this MultiOptimizer chooses its optimizers while it is built, so their learning "
            "rates cannot be scaled now; use scale_lr=None and scale them yourself"
        )
    for leaf in found:
        rate = leaf._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            leaf._learning_rate = schedules.scaled(rate, by)
            _print(f"{type(leaf).__name__}: learning rate schedule x {by:g}", announce)
        elif isinstance(rate, keras.Variable):
            before = float(keras.ops.convert_to_numpy(rate))
            rate.assign(before * by)
            _print(f"{type(leaf).__name__}: learning rate {before:g} -> {before * by:g}", announce)
        else:
            leaf._learning_rate = schedules.ScaledCallable(rate, by)
            _print(f"{type(leaf).__name__}: learning rate function x {by:g}", announce)


def scale_once(optimizer: Any, decision: Any, scale_lr: str | None) -> bool:
    """Multiply the learning rate because a callback says so, unless that was decided before.

    Args:
        optimizer: Any.
        decision: What remembers: ``may_scale``, and by how much it was ``scaled``.
        scale_lr: ``"linear"``, ``"sqrt"``, or None: it stays as it is.

    Returns:
        Whether a step that was compiled before has the old learning rate in it.
    """
    by = factor(scale_lr, runtime.current().world.size)
    if not decision.may_scale:
        return False
    decision.may_scale = False
    if by == 1.0:
        return False
    scale(optimizer, by)
    decision.scaled = by
    return not all(isinstance(leaf._learning_rate, keras.Variable) for leaf in leaves(optimizer))


def _print(what: str, announce: bool) -> None:
    world = runtime.current().world
    if announce and world.rank == 0:
        text = f"ringplug: {what} for {world.size} ranks (scale_lr=None leaves it alone)\n"
        sys.stdout.write(text)
        sys.stdout.flush()


def current(optimizer: Any) -> list[float]:
    """The learning rates in use now, one for each leaf."""
    return [float(keras.ops.convert_to_numpy(leaf.learning_rate)) for leaf in leaves(optimizer)]


def assign(optimizer: Any, rates: list[float]) -> None:
    """Set the learning rates, one for each leaf.

    Raises:
        UsageError: A learning rate is a schedule or a function.
    """
    for leaf, rate in zip(leaves(optimizer), rates, strict=True):
        if not isinstance(leaf._learning_rate, keras.Variable):
            raise UsageError(
                f"the learning rate of {type(leaf).__name__} is a "
                f"{type(leaf._learning_rate).__name__}, which cannot be set"
            )
        leaf.learning_rate = rate
