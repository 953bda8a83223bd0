"""Every optimizer that Keras ships, given rank-dependent gradients; run as one rank of two."""

import inspect

import keras
import numpy as np

import ringplug.keras as ring
from tests.keras.ranks import task

WRAPPERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")


def kinds():
    found = [
        (name, kind)
        for name, kind in vars(keras.optimizers).items()
        if inspect.isclass(kind)
        and issubclass(kind, keras.optimizers.Optimizer)
        and name not in WRAPPERS
    ]
    assert len(found) >= 12, found
    return found


def variables():
    rng = np.random.default_rng(5)
    return [
        keras.Variable(rng.normal(size=shape).astype("float32"), name=name)
        for name, shape in (("kernel", (4, 6)), ("bias", (6,)), ("scalar", ()))
    ]


def gradients(step, rank):
    rng = np.random.default_rng(100 * step + rank)
    return [rng.normal(size=shape).astype("float32") for shape in ((4, 6), (6,), ())]


def means(step):
    parts = [gradients(step, rank) for rank in range(ring.size())]
    return [np.mean(pair, axis=0, dtype="float32") for pair in zip(*parts, strict=True)]


def every_optimizer_applies_the_mean():
    for name, kind in kinds():
        ours, plain = variables(), variables()
        distributed = ring.DistributedOptimizer(kind(), scale_lr=None)
        alone = kind()
        assert type(distributed).__name__ == type(alone).__name__
        for step in range(3):
            # numpy arrays on purpose: Keras takes them, so must we.
            distributed.apply(gradients(step, ring.rank()), ours)
            alone.apply([keras.ops.convert_to_tensor(g) for g in means(step)], plain)
        a = [keras.ops.convert_to_numpy(v) for v in ours]
        b = [keras.ops.convert_to_numpy(v) for v in plain]
        start = [keras.ops.convert_to_numpy(v) for v in variables()]
        assert task.difference(a, start) > 0, name
        assert task.difference(a, b) <= 1e-5, (name, task.difference(a, b))
        task.assert_ranks_equal(a)
        assert distributed.ringplug.meter.updates == 3
        slots = [np.array(keras.ops.convert_to_numpy(v)) for v in distributed.variables]
        task.assert_ranks_equal([s.astype("float64") for s in slots])


def every_optimizer_saves_as_itself():
    for name, kind in kinds():
        plain = keras.optimizers.serialize(kind(name="same"))
        ours = keras.optimizers.serialize(
            ring.DistributedOptimizer(kind(name="same"), scale_lr=None)
        )
        assert ours["class_name"] == name
        assert ours["module"] == "keras.optimizers", ours
        assert ours["config"] == plain["config"], (ours, plain)
        assert "ringplug" not in str(ours)
        again = keras.saving.deserialize_keras_object(ours)
        assert type(again).__name__ == name, (type(again), ours)
        assert not hasattr(again, "ringplug")


CHECKS = [
    every_optimizer_applies_the_mean,
    every_optimizer_saves_as_itself,
]
