"""Momentum correction: velocities follow the learning rate that is in them.

SGD's and RMSprop's velocity is a sum of earlier steps, each with the learning rate of its time.
When the learning rate changes from a to b, the velocity is multiplied by b/a, once, as if it had
been b all the time (Goyal et al., "Accurate, Large Minibatch SGD", section 2.2, remark 3).
Horovod multiplies the factor of momentum instead, for one batch, which comes to the same; Keras 3
compiles that factor into the step.
"""

from __future__ import annotations

from typing import Any

import keras

from ringplug.keras import learning_rate

__all__ = ["correct_momentum"]


def correct_momentum(optimizer: Any, before: list[float], after: list[float]) -> None:
    """Multiply velocities, of optimizers with momentum, by what their learning rate changed by.

    Args:
        optimizer: Any Keras optimizer.
        before: Its learning rates, one for each of the optimizers inside.
        after: The new ones.
    """
    leaves = learning_rate.leaves(optimizer)
    for leaf, old, new in zip(leaves, before, after, strict=True):
        # What is read back has the digits of float32.
        if old == 0 or abs(new / old - 1) < 1e-6:
            continue
        for velocity in _velocities(leaf):
            velocity.assign(velocity * (new / old))


def _velocities(leaf: Any) -> list[Any]:
    if not isinstance(leaf, (keras.optimizers.SGD, keras.optimizers.RMSprop)):
        return []
    if not leaf.built or not leaf.momentum:
        return []
    is_sgd = isinstance(leaf, keras.optimizers.SGD)
    found = leaf.momentums if is_sgd else leaf._momentums
    return [velocity for velocity in found if velocity is not None]
