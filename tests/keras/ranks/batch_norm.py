"""Batch normalisation over all ranks is that of one process with the whole batch."""

import os
import tempfile

import keras
import numpy as np

import ringplug
import ringplug.keras as ring
from tests.keras.ranks import equivalence, task

BACKEND = keras.backend.backend()
LAYER = ring.SyncBatchNormalization
PLAIN = keras.layers.BatchNormalization


def value(tensor):
    return np.array(keras.ops.convert_to_numpy(tensor))


def gradients(layer, x, mask, weights):
    """Outputs, and gradients of their weighted sum, by the inputs and by gamma and beta."""

    def loss(x):
        y = layer(x, training=True, **({} if mask is None else {"mask": mask}))
        return keras.ops.sum(y * keras.ops.convert_to_tensor(weights)), y

    if BACKEND == "torch":
        x = keras.ops.convert_to_tensor(x).requires_grad_()
        total, y = loss(x)
        total.backward()
        found = [x.grad, layer.gamma.value.grad, layer.beta.value.grad]
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total, y = loss(x)
        found = tape.gradient(total, [x, layer.gamma.value, layer.beta.value])
    else:
        import jax

        trainable, other = layer.trainable_variables, layer.non_trainable_variables

        def stateless(x, values):
            mapping = list(zip(trainable, values, strict=True))
            with keras.StatelessScope(mapping) as scope:
                total, y = loss(x)
            return total, (y, [scope.get_current_value(v) for v in other])

        step = jax.value_and_grad(stateless, argnums=(0, 1), has_aux=True)
        if x.ndim > 2 or len(x) < 4:
            step = jax.jit(step)  # op by op is slow
        (_, (y, states)), (by_x, by_weights) = step(x, [v.value for v in trainable])
        for variable, state in zip(other, states, strict=True):
            variable.assign(state)
        found = [by_x, *by_weights]
    return [value(y), *map(value, found), value(layer.moving_mean), value(layer.moving_variance)]


def parts(total):
    """Uneven parts of so many samples: where each rank's begin."""
    size = ring.size()
    return [0, *(total * (rank + 1) * (rank + 2) // (size * (size + 1)) for rank in range(size))]


def like_the_whole_batch():
    rng = np.random.default_rng(2)
    for shape, axis, masked, samples in (
        ((5,), -1, False, 12),
        ((4, 3, 6), -1, False, 12),
        ((6, 3, 4), 1, False, 12),
        ((7, 5), -1, True, 12),
        ((5,), -1, False, ring.size() - 1),  # a rank without any sample
    ):
        x = rng.normal(3.0, 1.0, size=(samples, *shape)).astype("float32")
        w = rng.normal(size=x.shape).astype("float32")
        mask = rng.random(x.shape[:-1]) < 0.6 if masked else None
        cuts = parts(samples)
        here = slice(cuts[ring.rank()], cuts[ring.rank() + 1])
        ours, alone = (kind(axis=axis, momentum=0.5, epsilon=0.5) for kind in (LAYER, PLAIN))
        for layer in (ours, alone):
            layer.build(x.shape)
        own = gradients(ours, x[here], None if mask is None else mask[here], w[here])
        whole = gradients(alone, x, mask, w)
        for got, wanted, name in zip(own[:2], whole[:2], ("outputs", "gradients"), strict=True):
            error = np.abs(got - wanted[here]).max(initial=0)
            assert error < 1e-5, (shape, name, error)
        for got, wanted in zip(own[2:4], whole[2:4], strict=True):
            total = np.sum(ring.allgather(got[None]), axis=0)
            np.testing.assert_allclose(total, wanted, rtol=1e-4, atol=1e-4)
        for got, wanted in zip(own[4:], whole[4:], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4)
        task.assert_ranks_equal(own[4:])


def large_means_cost_no_digits():
    x = np.random.default_rng(3).normal(5000.0, 1.0, size=(64, 3)).astype("float32")
    layer = LAYER(momentum=0.0)
    layer.build(x.shape)
    layer(x[ring.rank() :: ring.size()], training=True)
    np.testing.assert_allclose(value(layer.moving_mean), x.mean(0, "float64"), rtol=1e-6)
    np.testing.assert_allclose(value(layer.moving_variance), x.var(0, dtype="float64"), rtol=1e-3)


def make_model(kind):
    def make():
        keras.utils.set_random_seed(4)
        inputs = keras.layers.Input((8,))
        x = keras.layers.Dense(12)(inputs)
        # Side by side: neither waits for the other's numbers.
        x = keras.layers.Concatenate()([kind()(x), kind()(keras.layers.Dense(5)(x)), kind()(x)])
        return keras.Model(inputs, keras.layers.Dense(3)(kind()(x)))

    return make


def trains_like_one_process():
    for mode, how in equivalence.MODES.items():
        if (BACKEND, mode) == ("jax", "eager"):
            continue  # a minute; the check above is eager too
        x, y = task.data()
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.05))
        ours, plain = make_model(LAYER)(), make_model(PLAIN)()
        task.fit(ours, optimizer, task.mine(x), task.mine(y), task.BATCH, **how)
        task.fit(plain, keras.optimizers.SGD(0.05), x, y, task.BATCH * ring.size(), **how)
        weights = ours.get_weights()
        assert task.difference(weights, plain.get_weights()) < 2e-5, mode
        task.assert_ranks_equal(weights)
        before = ours.predict(x[: ring.rank() + 1], verbose=0)  # needs no other rank
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            ours.save(path)
            again = keras.models.load_model(path)
        assert sum(type(layer) is LAYER for layer in again.layers) == 4
        np.testing.assert_allclose(
            again.predict(x[: ring.rank() + 1], verbose=0), before, rtol=1e-6
        )


def what_it_refuses():
    for arguments in ({"fused": True}, {"fused": None}, {"synchronized": False}):
        task.assert_raises_everywhere(
            ValueError, "SyncBatchNormalization", lambda a=arguments: LAYER(**a)
        )
    layer = LAYER(fused=False, momentum=0.7, name="norm")
    config = layer.get_config()
    assert "synchronized" not in config
    again = LAYER.from_config(config)
    assert (again.momentum, again.name) == (0.7, "norm")
    saved = keras.saving.serialize_keras_object(layer)
    assert saved["registered_name"] == "ringplug>SyncBatchNormalization"
    assert type(keras.saving.deserialize_keras_object(saved)) is LAYER


def ranks_that_differ_are_told():
    layer = LAYER()
    width = 3 + ring.rank()
    layer.build((None, width))
    task.assert_raises_everywhere(
        ringplug.MismatchError,
        "statistics of",
        lambda: layer(np.ones((4, width), "float32"), training=True),
    )
    layer = LAYER()
    layer.build((None, 3))
    layer(np.ones((4, 3), "float32"), training=True)


CHECKS = [
    like_the_whole_batch,
    large_means_cost_no_digits,
    trains_like_one_process,
    what_it_refuses,
]
if ring.size() > 1:
    CHECKS.append(ranks_that_differ_are_told)
