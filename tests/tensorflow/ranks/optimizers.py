"""`DistributedOptimizer`: around optimizers of tf.compat.v1.train, and for Keras'."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringplug.tensorflow as ring
from tests.checks import check
from tests.tensorflow.ranks.modes import UNCOMPILED

v1 = tf.compat.v1


def mean(size):
    return (size + 1) / 2


def close(result, expected):
    result = np.asarray(result)
    np.testing.assert_allclose(result, np.broadcast_to(expected, result.shape), rtol=1e-5)


def minimizing(optimizer, loss, variables):
    def step():
        optimizer.minimize(loss, var_list=variables)

    return step


@check
def of_compat_v1(rank, size):
    for mode in UNCOMPILED.values():
        for options, factor in (
            ({}, 1),
            ({"op": ring.Sum}, size),
            ({"gradient_predivide_factor": 2.0}, 1),
            ({"compression": ring.Compression.fp16}, 1),
            ({"groups": 2}, 1),
        ):
            a, b = tf.Variable([1.0, 2.0]), tf.Variable(0.0)
            inner = v1.train.MomentumOptimizer(0.5, 0.9)
            optimizer = ring.DistributedOptimizer(inner, **options)
            assert isinstance(optimizer, v1.train.Optimizer)

            def loss(a=a, b=b):
                return (tf.reduce_sum(a) + 2 * b) * (rank + 1)

            mode(minimizing(optimizer, loss, [a, b]))()
            close(a, [1 - 0.5 * mean(size) * factor, 2 - 0.5 * mean(size) * factor])
            close(b, -mean(size) * factor)
            assert optimizer.get_slot_names() == inner.get_slot_names() == ["momentum"]
            close(optimizer.get_slot(b, "momentum"), 2 * mean(size) * factor)
            assert len(optimizer.variables()) == len(inner.variables()) == 2


@check
def local_variables_of_compat_v1(rank, size):
    for scale in (True, False):
        a, b = tf.Variable(0.0), tf.Variable(0.0)
        inner = v1.train.GradientDescentOptimizer(1.0)
        optimizer = ring.DistributedOptimizer(inner, scale_local_gradients=scale)
        optimizer.register_local_var(b)
        optimizer.minimize(lambda a=a, b=b: (a + b) * (rank + 1), var_list=[a, b])
        close(a, -mean(size))
        close(b, -(rank + 1) / (size if scale else 1))


@check
def several_backward_passes(rank, size):
    for mode in UNCOMPILED.values():
        for average in (False, True):
            a, b = tf.Variable([0.0, 0.0]), tf.Variable(0.0)
            steps = tf.Variable(0, dtype=tf.int64)
            optimizer = ring.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0),
                backward_passes_per_step=3,
                average_aggregated_gradients=average,
            )

            def step(x, optimizer=optimizer, a=a, b=b, steps=steps):
                pairs = optimizer.compute_gradients(
                    lambda: tf.reduce_sum(a) * x * (rank + 1), var_list=[a, b]
                )
                assert pairs[1][0] is None
                optimizer.apply_gradients(pairs, global_step=steps)

            step = mode(step)
            for number in range(6):
                step(tf.constant(float(number)))
                done = sum(range(3)) * (number >= 2) + sum(range(3, 6)) * (number >= 5)
                close(a, -done * mean(size) / (3 if average else 1))
                assert int(steps) == number + 1
    table = tf.Variable(tf.zeros((3, 2)))

    def loss():
        return tf.reduce_sum(tf.gather(table, [0, 0])) * (rank + 1)

    inner = v1.train.GradientDescentOptimizer(1.0)
    optimizer = ring.DistributedOptimizer(inner, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="sparse_as_dense"):
        optimizer.minimize(loss, var_list=[table])
    optimizer = ring.DistributedOptimizer(inner, backward_passes_per_step=2, sparse_as_dense=True)
    for _ in range(2):
        optimizer.minimize(loss, var_list=[table])
    close(table, np.array([[-4 * mean(size)], [0], [0]]))


@check
def adasum_of_updates(rank, size):
    if size not in (2, 4):
        return
    for mode in UNCOMPILED.values():
        for passes in (1, 2):
            a, b = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
            optimizer = ring.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(0.5),
                op=ring.Adasum,
                backward_passes_per_step=passes,
            )

            def loss(a=a, b=b):
                return tf.reduce_sum(a) * 2 + b

            step = mode(minimizing(optimizer, loss, [a, b]))
            for number in range(4):
                step()
                # All ranks change the same: Adasum takes that once.
                close(a, [-number, 1.0 - number])
                close(b, 3 - 0.5 * (number + 1))
    variable = tf.Variable([0.0] * size)
    optimizer = ring.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=ring.Adasum)
    optimizer.minimize(lambda: variable[rank], var_list=[variable])
    # Ranks change different elements: Adasum adds them.
    close(variable, -1.0)


@check
def of_keras(rank, size):
    for op, factor in ((ring.Average, 1), (ring.Sum, size)):
        variable = keras.Variable(0.0)
        given = keras.optimizers.SGD(1.0)
        optimizer = ring.DistributedOptimizer(given, op=op, groups=1)
        assert isinstance(optimizer, keras.optimizers.SGD)
        optimizer.apply_gradients([(tf.constant(float(rank + 1)), variable)])
        close(variable, -mean(size) * factor)
    variable = keras.Variable(0.0)
    optimizer = ring.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        name="mine",
        compression=ring.Compression.fp16,
        sparse_as_dense=True,
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
        gradient_predivide_factor=2.0,
        scale_local_gradients=False,
    )
    for number in range(2):
        optimizer.apply_gradients([(tf.constant(float(rank + 1 + number)), variable)])
    close(variable, -(mean(size) + 0.5))


@check
def arguments_are_checked(rank, size):
    sgd = v1.train.GradientDescentOptimizer(1.0)
    for optimizer, options in (
        (sgd, {"gradient_predivide_factor": 2.0, "op": ring.Sum}),
        (sgd, {"op": ring.Adasum, "average_aggregated_gradients": True}),
        (sgd, {"groups": -1}),
        (sgd, {"backward_passes_per_step": 0}),
        (sgd, {"op": 99}),
        (keras.optimizers.SGD(1.0), {"op": ring.Adasum}),
        (keras.optimizers.SGD(1.0), {"groups": -1}),
        ("sgd", {}),
        (object(), {}),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - each has a message of its own
            ring.DistributedOptimizer(optimizer, **options)


@check
def sync_batch_normalization(rank, size):
    rows = np.random.default_rng(1).normal(size=(4 * size, 3)).astype("float32")
    alone, together = keras.layers.BatchNormalization(), ring.SyncBatchNormalization()
    expected = alone(rows, training=True)[rank * 4 : rank * 4 + 4]
    close(together(rows[rank * 4 : rank * 4 + 4], training=True).numpy() + 9, expected + 9)
    close(together.moving_mean, alone.moving_mean)
