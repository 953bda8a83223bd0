"""Graphs and sessions of tf.compat.v1, which still work."""

import numpy as np
import pytest
import tensorflow as tf

import ringplug.tensorflow as ring
from tests.checks import check

v1 = tf.compat.v1


@check
def operations_in_a_session(rank, size):
    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.ones(3) * (rank + 1)
        summed, again = ring.allreduce(x, op=ring.Sum), ring.allreduce(x, op=ring.Sum)
        root = ring.broadcast(x, size - 1)
        results = session.run([summed, again, root, ring.rank_op(), ring.size_op()])
        total = size * (size + 1) / 2
        np.testing.assert_allclose(results[0], total)
        np.testing.assert_allclose(results[1], total)
        np.testing.assert_allclose(results[2], size)
        assert results[3:] == [rank, size]
        (gradient,) = tf.gradients(summed, x)
        np.testing.assert_allclose(session.run(gradient), size)
        if size > 1:
            with pytest.raises(tf.errors.FailedPreconditionError, match="shapes"):
                session.run(ring.allreduce(tf.ones(2 + rank % 2)))
            assert ring.broadcast_object(rank) == 0


@check
def global_variables(rank, size):
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("a", initializer=float(rank))
        v1.get_variable("b", initializer=rank)
        session.run(v1.global_variables_initializer())
        session.run(ring.broadcast_global_variables(root_rank=size - 1))
        assert [float(v) for v in session.run(v1.global_variables())] == [size - 1.0] * 2


@check
def the_hook(rank, size):
    with tf.Graph().as_default():
        variable = v1.get_variable("a", initializer=float(rank))
        hook = ring.BroadcastGlobalVariablesHook(size - 1)
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable) == size - 1


@check
def an_optimizer(rank, size):
    with tf.Graph().as_default(), v1.Session() as session:
        a = v1.get_variable("a", initializer=[1.0, 2.0])
        b = v1.get_variable("b", initializer=[1.0])
        loss = (tf.reduce_sum(a) + tf.reduce_sum(b)) * (rank + 1)
        optimizer = ring.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), groups=2)
        update = optimizer.minimize(loss)
        session.run(v1.global_variables_initializer())
        session.run(update)
        np.testing.assert_allclose(session.run(b), 1 - (size + 1) / 2)


@check
def several_backward_passes(rank, size):
    for sparse in (False, True):
        with tf.Graph().as_default(), v1.Session() as session:
            variable = v1.get_variable("v", initializer=[0.0, 0.0])
            part = tf.gather(variable, [0]) if sparse else variable
            loss = tf.reduce_sum(part) * (rank + 1)
            steps = v1.get_variable("step", initializer=tf.constant(0, tf.int64))
            optimizer = ring.DistributedOptimizer(
                v1.train.MomentumOptimizer(1.0, 0.0),
                backward_passes_per_step=4,
                average_aggregated_gradients=True,
                sparse_as_dense=sparse,
            )
            update = optimizer.minimize(loss, global_step=steps, var_list=[variable])
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for number in range(10):
                session.run(update)
                done = (number + 1) // 4 * (size + 1) / 2
                assert session.run(variable)[0] == -done
                assert session.run(steps) == number + 1


@check
def adasum_of_updates(rank, size):
    if size not in (2, 4):
        return
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=[1.0, 2.0])
        optimizer = ring.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), op=ring.Adasum, backward_passes_per_step=2
        )
        update = optimizer.minimize(tf.reduce_sum(variable), var_list=[variable])
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for number in range(4):
            session.run(update)
            np.testing.assert_allclose(session.run(variable), [-number, 1 - number])
