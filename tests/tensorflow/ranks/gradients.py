"""How gradients flow through the operations."""

import numpy as np
import tensorflow as tf

import ringplug.tensorflow as ring
from tests.checks import check
from tests.tensorflow.ranks.modes import MODES, UNCOMPILED


def gradient(mode, operation, x, upstream=None):
    """Of `operation`, for upstream gradients of one (or `upstream`)."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(x)
        return tape.gradient(y, x, upstream)

    return np.asarray(mode(function)(x))


def close(result, expected):
    np.testing.assert_allclose(result, np.broadcast_to(expected, result.shape), rtol=1e-6)


@check
def of_allreduce(rank, size):
    for mode in MODES.values():
        for dtype in (tf.float32, tf.float64):
            x = tf.fill([3, 2], tf.cast(rank + 1, dtype))
            up = tf.fill([3, 2], tf.cast(rank, dtype))
            mean = (size - 1) / 2
            close(gradient(mode, lambda x: ring.allreduce(x, op=ring.Sum), x, up), mean * size)
            close(gradient(mode, ring.allreduce, x, up), mean)
            scaled = gradient(
                mode,
                lambda x: ring.allreduce(x, op=ring.Sum, prescale_factor=2.0, postscale_factor=3.0),
                x,
                up,
            )
            close(scaled, 6 * mean * size)


@check
def of_grouped_allreduce(rank, size):
    def function(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            a, b = ring.grouped_allreduce([x, y], op=ring.Sum)
            # What is not used has a gradient of zeros, of another dtype.
            used = tf.reduce_sum(a) * float(rank + 1)
            del b
        return tape.gradient(used, [x, y], unconnected_gradients="zero")

    for mode in MODES.values():
        first, second = mode(function)(tf.ones(2), tf.ones(3, tf.float64))
        close(first.numpy(), size * (size + 1) / 2)
        close(second.numpy(), 0)


@check
def of_allgather(rank, size):
    for name, mode in MODES.items():
        rows = [2] * size if name == "xla" else [r + 1 for r in range(size)]
        x = tf.ones((rows[rank], 2))
        # Rank r's rows of the gathered tensor have gradients of r + own rank.
        up = tf.concat([tf.fill([rows[r], 2], float(r + rank)) for r in range(size)], 0)
        close(gradient(mode, ring.allgather, x, up), rank + (size - 1) / 2)

        def function(x, y, up=up):
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                a, b = ring.grouped_allgather([x, y])
                loss = tf.reduce_sum(a * up) + 2 * tf.reduce_sum(tf.cast(b, up.dtype) * up)
            return tape.gradient(loss, [x, y])

        first, second = mode(function)(x, tf.cast(x, tf.float64))
        close(first.numpy(), rank + (size - 1) / 2)
        close(second.numpy(), 2 * (rank + (size - 1) / 2))


@check
def of_broadcast(rank, size):
    for mode in MODES.values():
        for root in range(size):
            up = tf.fill([3], float(rank + 1))
            result = gradient(mode, lambda x, root=root: ring.broadcast(x, root), tf.ones(3), up)
            close(result, (size + 1) / 2 if rank == root else 0)


@check
def of_alltoall(rank, size):
    for mode in MODES.values():
        # What goes to rank r comes back times r + 1.
        x = tf.ones((2 * size, 2))
        up = tf.fill([2 * size, 2], float(rank + 1))
        expected = np.repeat(np.arange(1, size + 1), 2)[:, None]
        close(gradient(mode, ring.alltoall, x, up), expected)
    for mode in UNCOMPILED.values():
        splits = [rank + 1] * size
        # One row more than is sent: it has no gradient, rather than too few rows.
        x = tf.ones((sum(splits) + 1, 2))

        def operation(x, splits=splits):
            return ring.alltoall(x, tf.constant(splits))[0] * float(rank + 1)

        expected = [*np.repeat(np.arange(1, size + 1), rank + 1), 0]
        close(gradient(mode, operation, x), np.array(expected)[:, None])


@check
def of_reducescatter(rank, size):
    for name, mode in MODES.items():
        rows = 2 * size if name == "xla" else 2 * size + 1
        x = tf.ones((rows, 2))
        for op, factor in ((ring.Sum, size), (ring.Average, 1)):

            def operation(x, op=op):
                return ring.reducescatter(x, op=op, prescale_factor=2.0) * float(rank + 1)

            share = [rows // size + (r < rows % size) for r in range(size)]
            expected = np.repeat(np.arange(1, size + 1), share)[:, None] * factor * 2
            close(gradient(mode, operation, x), expected)


@check
def of_indexed_slices(rank, size):
    values = tf.fill([2, 3], float(rank))

    def operation(values):
        return ring.allreduce(tf.IndexedSlices(values, tf.constant([0, 1]))).values

    for mode in MODES.values():
        close(gradient(mode, operation, values), 1 / size)


@check
def of_variables_and_of_gradients(rank, size):
    for mode in MODES.values():
        variable = tf.Variable([float(rank), 2.0])

        def function(variable=variable):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    y = ring.allreduce(variable**3, op=ring.Sum)
                first = inner.gradient(y, variable)
            return first, outer.gradient(first, variable)

        first, second = mode(function)()
        # d/dv sum(v**3) = 3 v**2 * size; and of that, 6 v * size.
        close(first.numpy(), np.array([3.0 * rank**2, 12.0]) * size)
        close(second.numpy(), np.array([6.0 * rank, 12.0]) * size)


@check
def sparse_upstream_gradients(rank, size):
    for mode in UNCOMPILED.values():
        result = gradient(
            mode, lambda x: tf.gather(ring.allreduce(x, op=ring.Sum), [0, 0]), tf.ones((3, 2))
        )
        close(result, np.array([2.0 * size, 0, 0])[:, None])


@check
def upstream_of_another_dtype(rank, size):
    """Horovod's test passes upstream gradients of float32 for results of float64."""
    with tf.GradientTape() as tape:
        x = tf.Variable(tf.ones(3, tf.float64))
        y = ring.allreduce(x, op=ring.Sum)
    close(np.asarray(tape.gradient(y, x, tf.ones(3))), size)
