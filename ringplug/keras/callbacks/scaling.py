"""The learning rate for all ranks together."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from ringplug.backend import runtime
from ringplug.keras import learning_rate
from ringplug.keras.callbacks.base import RingCallback
from ringplug.keras.optimizer import reduction_of

__all__ = ["ScaleLearningRateCallback", "scale_for_all"]


@dataclass
class Decision:
    """What was decided about an optimizer that is not distributed itself."""

    may_scale: bool = True
    scaled: float = 1.0


_plain: weakref.WeakKeyDictionary[Any, Decision] = weakref.WeakKeyDictionary()


class ScaleLearningRateCallback(RingCallback):
    """Multiply the learning rate by the number of ranks, once in an optimizer's life.

    It does nothing where that was decided already: by ``DistributedOptimizer(scale_lr=...)``,
    by an earlier `fit`, or by `load_model`. `default` includes it. A checkpoint that is restored
    when training begins brings the learning rate that it was saved with.

    Args:
        scale_lr: ``"linear"``; ``"sqrt"`` for the square root of the number; None leaves the
            learning rate alone.
    """

    def __init__(self, scale_lr: str | None = "linear") -> None:
        super().__init__()
        learning_rate.factor(scale_lr, 1)
        self.scale_lr = scale_lr

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        scale_for_all(model, self.scale_lr)


def scale_for_all(model: Any, scale_lr: str | None) -> None:
    """Multiply the learning rate of a model's optimizer; see `ScaleLearningRateCallback`."""
    optimizer = model.optimizer
    if runtime.current().world.size == 1:
        return
    decision = reduction_of(optimizer) or _plain.setdefault(optimizer, Decision())
    if learning_rate.scale_once(optimizer, decision, scale_lr):
        model.train_function = None
