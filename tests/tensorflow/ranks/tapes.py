"""Gradient tapes whose gradients are reduced."""

import threading
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringplug.tensorflow as ring
from ringplug.backend import runtime
from tests.checks import check
from tests.tensorflow.ranks.modes import MODES, UNCOMPILED


def mean(size):
    return (size + 1) / 2


def gradients(mode, variables, loss, tape_of=ring.DistributedGradientTape, sources=None, **options):
    def function():
        with tf.GradientTape() as tape:
            value = loss()
        wrapped = tape_of(tape, **options)
        return wrapped.gradient(value, variables if sources is None else sources)

    return mode(function)()


def close(result, expected):
    if isinstance(result, tf.IndexedSlices):
        result = tf.convert_to_tensor(result)
    np.testing.assert_allclose(result.numpy(), np.broadcast_to(expected, result.shape), rtol=1e-3)


@check
def join_without_a_single_step(rank, size):
    """Rank r has r steps: the first has joined before there was any plan."""
    assert runtime.current().groups.everyone.plans is None
    variable = tf.Variable([1.0, 2.0])
    for mode in UNCOMPILED.values():

        @mode
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * 2)
            return ring.DistributedGradientTape(tape, op=ring.Sum).gradient(loss, variable)

        for number in range(rank):
            # Ranks up to `number` have joined.
            close(step(), 2 * (size - 1 - number))
        assert int(ring.join()) == size - 1


@check
def averages_and_sums(rank, size):
    a, b = tf.Variable([1.0, 2.0]), tf.Variable(3.0, dtype=tf.float64)

    def loss():
        return tf.reduce_sum(a) * (rank + 1) + tf.cast(b, tf.float32) * (rank + 1) * 2

    for mode in MODES.values():
        first, second = gradients(mode, [a, b], loss)
        close(first, mean(size))
        close(second, mean(size) * 2)
        assert second.dtype == tf.float64
        first, second = gradients(mode, [a, b], loss, op=ring.Sum)
        close(first, mean(size) * size)
        for options in (
            {"gradient_predivide_factor": 4.0},
            {"compression": ring.Compression.fp16},
            {"compression": ring.Compression.bf16},
            {"groups": 1},
            {"groups": 2},
            {"groups": 5},
            {"groups": [[a, b]]},
            {"groups": [[b]]},
        ):
            first, second = gradients(mode, [a, b], loss, **options)
            close(first, mean(size))
            close(second, mean(size) * 2)


@check
def it_is_the_same_kind_of_tape(rank, size):
    class Tape(tf.GradientTape):
        own = 1

    x = tf.Variable(2.0)
    with Tape(persistent=True) as tape:
        y = x * x * (rank + 1)
    wrapped = ring.DistributedGradientTape(tape)
    assert isinstance(wrapped, Tape)
    assert wrapped.own == 1
    for _ in range(2):
        close(wrapped.gradient(y, x), 4 * mean(size))
    # The tape itself, and the Jacobian of either, are of this rank only.
    close(tape.gradient(y, x), 4 * (rank + 1))
    close(wrapped.jacobian(y, x), 4 * (rank + 1))
    close(wrapped.gradient(y, x), 4 * mean(size))
    with ring.DistributedGradientTape(tf.GradientTape()) as tape:
        y = x * x * (rank + 1)
    close(tape.gradient(y, x), 4 * mean(size))
    with pytest.raises(RuntimeError, match="persistent"):
        tape.gradient(y, x)
    with pytest.raises(ValueError, match="already"):
        ring.DistributedGradientTape(wrapped)
    with pytest.raises(ValueError, match="GradientTape"):
        ring.DistributedGradientTape(x)
    with tf.GradientTape() as tape:
        y = x * (rank + 1)
        # Inside of the block too.
        result = ring.DistributedGradientTape(tape).gradient(y, x)
    close(result, mean(size))


@check
def join_after_some_steps(rank, size):
    variable = tf.Variable([1.0, 2.0])
    for mode in MODES.values():

        @mode
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * 2)
            return ring.DistributedGradientTape(tape).gradient(loss, variable)

        for number in range(rank + 1):
            close(step(), 2 * (size - number) / size)
        assert int(ring.join()) == size - 1
    if size > 1:
        assert runtime.current().groups.everyone.plans is not None


@check
def join_announced_late(rank, size):
    """The last to join is the one that trained longest, whoever's announcement comes last."""
    if size < 3:
        return
    named = runtime.current().groups.everyone.named
    variable = tf.Variable(1.0)
    for _ in range(rank + 1):
        with tf.GradientTape() as tape:
            loss = variable * 2
        ring.DistributedGradientTape(tape).gradient(loss, variable)
    if rank == size - 2:
        join, wait, done = named.join, named.wait, []
        thread = threading.Thread(target=lambda: (time.sleep(0.3), done.append(join())))
        named.join = lambda: thread.start() or done

        def waiting(handle):
            thread.join()
            return wait(done[0] if handle is done else handle)

        named.wait = waiting
    assert int(ring.join()) == size - 1
    if rank == size - 2:
        del named.join, named.wait


@check
def nested_and_unconnected_sources(rank, size):
    a, b, c = tf.Variable(1.0), tf.Variable([2.0]), tf.Variable([[3.0]])

    def loss():
        return (a + tf.reduce_sum(b)) * (rank + 1)

    for mode in MODES.values():
        result = gradients(mode, None, loss, sources={"x": [a], "y": (b, c)})
        close(result["x"][0], mean(size))
        close(result["y"][0], mean(size))
        assert result["y"][1] is None
        assert type(result["y"]) is tuple
        close(gradients(mode, a, loss), mean(size))

        def zeros():
            with tf.GradientTape() as tape:
                value = loss()
            tape = ring.DistributedGradientTape(tape)
            return tape.gradient(value, [a, c], unconnected_gradients=tf.UnconnectedGradients.ZERO)

        first, second = mode(zeros)()
        close(first, mean(size))
        close(second, 0)


@check
def missing_on_some_ranks(rank, size):
    a, b, c = tf.Variable([1.0, 1.0]), tf.Variable(1.0), tf.Variable(1.0)

    def loss():
        return tf.reduce_sum(a) + (b * 3 if rank == 0 else 0.0)

    for options in ({}, {"groups": 2}, {"op": ring.Sum}, {"compression": ring.Compression.fp16}):
        factor = size if "op" in options else 1
        first, second, third = gradients(MODES["eager"], [a, b, c], loss, **options)
        close(first, factor)
        close(second, 3 * factor / size)
        assert third is None
    if size > 1:
        with pytest.raises(tf.errors.FailedPreconditionError):
            gradients(MODES["graph"], [a, b], loss)


@check
def sparse_gradients(rank, size):
    table, dense = tf.Variable(tf.ones((6, 2))), tf.Variable(1.0)

    def loss(rows):
        looked_up = tf.nn.embedding_lookup(table, tf.range(rows) % 6)
        return tf.reduce_sum(looked_up) * (rank + 1) * dense

    for name, mode in MODES.items():
        rows = [2] * size if name == "xla" else [r + 1 for r in range(size)]
        expected = np.zeros((6, 1))
        for r in range(size):
            for row in range(rows[r]):
                expected[row % 6] += (r + 1) / size
        sparse, other = gradients(mode, [table, dense], lambda rows=rows: loss(rows[rank]))
        if name != "xla":
            assert isinstance(sparse, tf.IndexedSlices)
        close(sparse, expected)
        close(other, 2 * sum(rows[r] * (r + 1) for r in range(size)) / size)
        (densified,) = gradients(
            mode, [table], lambda rows=rows: loss(rows[rank]), sparse_as_dense=True
        )
        assert not isinstance(densified, tf.IndexedSlices)
        close(densified, expected)
    if size > 1:
        for op in (ring.Adasum, ring.Max):
            with pytest.raises(NotImplementedError):
                gradients(MODES["eager"], [table], lambda: loss(2), op=op)


@check
def process_sets(rank, size):
    if size < 2:
        return
    evens = ring.add_process_set(range(0, size, 2))
    x = tf.constant(float(rank))
    for mode in MODES.values():

        def function():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            return ring.DistributedGradientTape(tape, process_set=evens).gradient(y, [x])

        (result,) = mode(function)()
        members = range(0, size, 2)
        close(result, 2.0 * rank if rank % 2 else 2.0 * sum(members) / len(members))
    ring.remove_process_set(evens)


@check
def local_sources(rank, size):
    a, b = tf.Variable(1.0), tf.Variable(tf.ones((2, 2)))

    def loss():
        return (a + tf.reduce_sum(tf.gather(b, [0, 0]))) * (rank + 1)

    for mode in MODES.values():
        for scale, factor in ((True, 1 / size), (False, 1)):

            def local(tape, scale=scale):
                tape = ring.DistributedGradientTape(tape, scale_local_gradients=scale)
                tape.register_local_source(b)
                return tape

            first, second = gradients(mode, [a, b], loss, local)
            close(first, mean(size))
            close(second, np.array([[2.0], [0]]) * (rank + 1) * factor)


@check
def local_layers(rank, size):
    keras.utils.set_random_seed(1)
    shared, own = keras.layers.Dense(2), keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((3,)), shared, own])
    x = tf.ones((1, 3)) * (rank + 1)

    def loss():
        return tf.reduce_sum(model(x))

    plain = gradients(MODES["eager"], model.trainable_variables, loss, lambda tape: tape)
    for layers in (own, [own]):
        results = gradients(
            MODES["graph"],
            model.trainable_variables,
            loss,
            ring.PartialDistributedGradientTape,
            local_layers=layers,
        )
        close(results[0], plain[0].numpy() * mean(size) / (rank + 1))
        close(results[2], plain[2].numpy() / size)
    everything = gradients(
        MODES["eager"], model.trainable_variables, loss, ring.PartialDistributedGradientTape
    )
    close(everything[0], plain[0].numpy() * mean(size) / (rank + 1))
    with pytest.raises(ValueError, match="layers"):
        ring.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[own, "dense"])


@check
def a_compressor_of_ones_own(rank, size):
    class Negative(ring.Compressor):
        @staticmethod
        def compress(tensor):
            return tf.cast(-tensor, tf.float64), tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tf.cast(-tensor, ctx)

    a, b = tf.Variable([1.0]), tf.Variable(1.0)

    def loss():
        return tf.reduce_sum(a) * (rank + 1)

    for mode in MODES.values():
        first, second = gradients(mode, [a, b], loss, compression=Negative)
        close(first, mean(size))
        assert first.dtype == tf.float32
        assert second is None


@check
def arguments_are_checked(rank, size):
    tape = tf.GradientTape()
    x = tf.Variable(1.0)
    for options in (
        {"gradient_predivide_factor": 2.0, "op": ring.Sum},
        {"gradient_predivide_factor": 0.0},
        {"groups": 0},
        {"groups": -1},
        {"groups": "all"},
        {"groups": [x]},
        {"groups": [[x], [x]]},
        {"op": 99},
        {"compression": "zip"},
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - each has a message of its own
            ring.DistributedGradientTape(tape, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ring.DistributedGradientTape(tape, num_groups=2)
    assert [w.category for w in caught] == [DeprecationWarning]


@check
def adasum(rank, size):
    if size not in (2, 4):
        return
    a = tf.Variable([1.0, 2.0])
    for mode in MODES.values():
        # Equal gradients count once, orthogonal ones are added.
        (same,) = gradients(mode, [a], lambda: tf.reduce_sum(a * [3.0, 4.0]), op=ring.Adasum)
        close(same, [3.0, 4.0])


@check
def reduced_gradients_have_gradients(rank, size):
    x = tf.Variable(float(rank + 1))
    for mode in MODES.values():

        def function():
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    y = x**3
                first = ring.DistributedGradientTape(inner, op=ring.Sum).gradient(y, x)
            return first, outer.gradient(first, x)

        first, second = mode(function)()
        close(first, 3 * sum((r + 1) ** 2 for r in range(size)))
        close(second, 6 * (rank + 1) * size)


@check
def n_ranks_train_as_one_process(rank, size):
    """With batches of b on N ranks, and of N * b on one."""

    def build():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh")])
        model.add(keras.layers.Dense(1))
        return model, keras.optimizers.Adam(0.05)

    generator = np.random.default_rng(5)
    batches = [
        (generator.normal(size=(12, 4)).astype("float32"), generator.normal(size=(12, 1)))
        for _ in range(6)
    ]

    def train(mode, distributed):
        model, optimizer = build()
        optimizer.build(model.trainable_variables)
        if distributed and rank:
            for variable in model.trainable_variables:
                variable.assign(variable * 2)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            if distributed:
                tape = ring.DistributedGradientTape(tape)
            optimizer.apply(tape.gradient(loss, model.trainable_variables))
            return loss

        step = mode(step)
        if distributed:
            ring.broadcast_variables(model.variables, root_rank=0)
            ring.broadcast_variables(optimizer.variables, root_rank=0)
        for x, y in batches:
            y = y.astype("float32")
            if distributed:
                x, y = x[rank::size], y[rank::size]
            step(tf.constant(x), tf.constant(y))
        return [variable.numpy() for variable in model.trainable_variables]

    expected = train(UNCOMPILED["graph"], distributed=False)
    for mode in MODES.values():
        for value, wanted in zip(train(mode, distributed=True), expected, strict=True):
            np.testing.assert_allclose(value, wanted, atol=2e-5)
