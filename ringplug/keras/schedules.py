"""Learning rate schedules that Keras can save: another schedule scaled, or warmed up.

A file with one of these loads where ringplug is installed and imported. The schedules that
Keras ships are scaled by changing their own parameters instead, so their files need nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from ringplug.backend.errors import UsageError

__all__ = ["Scaled", "ScaledCallable", "Warmup", "scaled"]

_RATES = {
    "ExponentialDecay": ("initial_learning_rate",),
    "InverseTimeDecay": ("initial_learning_rate",),
    "PolynomialDecay": ("initial_learning_rate", "end_learning_rate"),
    "CosineDecay": ("initial_learning_rate", "warmup_target"),
    "CosineDecayRestarts": ("initial_learning_rate",),
    "PiecewiseConstantDecay": ("values",),
}
"""The parameters that are learning rates: each of these schedules is linear in them."""


@keras.saving.register_keras_serializable(package="ringplug")
class Scaled(keras.optimizers.schedules.LearningRateSchedule):
    """Another schedule times a constant.

    Args:
        schedule: The schedule.
        factor: What every value of it is multiplied by.
    """

    def __init__(self, schedule: Any, factor: float) -> None:
        super().__init__()
        self.schedule = schedule
        self.factor = float(factor)

    def __call__(self, step: Any) -> Any:
        return self.schedule(step) * self.factor

    def get_config(self) -> dict[str, Any]:
        return {
            "schedule": keras.saving.serialize_keras_object(self.schedule),
            "factor": self.factor,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Scaled:
        return cls(keras.saving.deserialize_keras_object(config["schedule"]), config["factor"])


@keras.saving.register_keras_serializable(package="ringplug")
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises linearly to another schedule's, or to a constant.

    At step s (from 0) before `steps`, the value is the schedule's own at s times
    ``(1 + (s + 1) * (size - 1) / steps) / size``: from about ``1/size`` of it to all of it,
    reached in the last warm-up step. That is `LearningRateWarmupCallback`'s rule.

    Args:
        schedule: A schedule, or a number.
        steps: Number of warm-up steps.
        size: Number of ranks, by which the target was scaled.
        start: The step, counted by the optimizer, at which the warm-up begins.
    """

    def __init__(self, schedule: Any, steps: int, size: int, start: int = 0) -> None:
        super().__init__()
        if steps < 1 or size < 1:
            raise UsageError(f"Warmup(steps={steps}, size={size}): both must be 1 or more")
        self.schedule = schedule
        self.steps = int(steps)
        self.size = int(size)
        self.start = int(start)

    def __call__(self, step: Any) -> Any:
        target = self.schedule(step) if callable(self.schedule) else self.schedule
        done = keras.ops.cast(step - self.start + 1, "float32")
        done = keras.ops.clip(done, 0.0, float(self.steps))
        return target * ((1.0 + done * ((self.size - 1) / self.steps)) / self.size)

    def get_config(self) -> dict[str, Any]:
        given = self.schedule
        return {
            "schedule": keras.saving.serialize_keras_object(given) if callable(given) else given,
            "steps": self.steps,
            "size": self.size,
            "start": self.start,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Warmup:
        config = dict(config)
        if isinstance(config["schedule"], dict):
            config["schedule"] = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(**config)


@keras.saving.register_keras_serializable(package="ringplug")
class ScaledCallable:
    """A function that returns a learning rate, times a constant."""

    def __init__(self, function: Callable[[], Any], factor: float) -> None:
        self.function = function
        self.factor = float(factor)

    def __call__(self) -> Any:
        return self.function() * self.factor

    def get_config(self) -> dict[str, Any]:
        return {
            "function": keras.saving.serialize_keras_object(self.function),
            "factor": self.factor,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ScaledCallable:
        return cls(keras.saving.deserialize_keras_object(config["function"]), config["factor"])


def scaled(schedule: Any, factor: float) -> Any:
    """`schedule` times `factor`: with other parameters where it is Keras' own, else `Scaled`."""
    if isinstance(schedule, Warmup):
        inner = schedule.schedule
        target = scaled(inner, factor) if callable(inner) else inner * factor
        return Warmup(target, schedule.steps, schedule.size, schedule.start)
    own = getattr(keras.optimizers.schedules, type(schedule).__name__, None)
    if own is not type(schedule) or type(schedule).__name__ not in _RATES:
        return Scaled(schedule, factor)
    config = schedule.get_config()
    for key in _RATES[type(schedule).__name__]:
        rate = config.get(key)
        if isinstance(rate, (list, tuple)):
            config[key] = [value * factor for value in rate]
        elif rate is not None:
            config[key] = rate * factor
    return type(schedule).from_config(config)
