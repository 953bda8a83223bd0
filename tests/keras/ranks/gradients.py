"""Gradients that are not plain dense tensors, and ways to train that are not plain fit."""

import keras
import numpy as np

import ringplug
import ringplug.keras as ring
from tests.keras.ranks import task

BACKEND = keras.backend.backend()


def missing_gradients():
    """Eager: missing on one rank counts as zero, missing everywhere stays missing."""
    kernel = keras.Variable(np.ones((3,), "float32"), name="a")
    other = keras.Variable(np.ones((2,), "float32"), name="b")
    unused = keras.Variable(np.ones((2,), "float32"), name="c")
    optimizer = ring.DistributedOptimizer(
        keras.optimizers.SGD(1.0, weight_decay=0.5), scale_lr=None
    )
    gradients = [
        np.full((3,), 4.0, "float32"),
        np.full((2,), 8.0, "float32") if ring.rank() == 1 else None,
        None,
    ]
    optimizer.apply(gradients, [kernel, other, unused])
    # weight decay (1 - 0.5) first, then minus the mean gradient
    np.testing.assert_allclose(keras.ops.convert_to_numpy(kernel), 0.5 - 4.0)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(other), 0.5 - 4.0)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(unused), 1.0)


def overwritten_variables():
    """float8 scales: Keras replaces the variable by its gradient; ranks take the largest."""
    scale = keras.Variable(np.ones((2,), "float32"), name="scale")
    scale.overwrite_with_gradient = True
    kernel = keras.Variable(np.ones((2,), "float32"), name="kernel")
    optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_lr=None)
    rank = float(ring.rank())
    optimizer.apply(
        [np.array([rank, -rank], "float32"), np.full((2,), rank, "float32")], [scale, kernel]
    )
    np.testing.assert_allclose(keras.ops.convert_to_numpy(scale), [1.0, 0.0])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(kernel), 0.5)


def one_overflow_skips_all():
    """A rank alone overflows: all skip that update and halve their scale together."""
    x, y = task.data()
    x, y = task.mine(x), task.mine(y)
    bad = np.array(x)
    if ring.rank() == 1:
        bad[: task.BATCH] = np.inf
    optimizer = ring.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0),
        scale_lr=None,
    )
    weights = task.fit(task.make_model(), optimizer, bad, y, task.BATCH, epochs=1)
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 32.0
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == len(x) // task.BATCH - 1
    assert all(np.isfinite(w).all() for w in weights)
    task.assert_ranks_equal(weights)


def mixed_precision_by_policy():
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_lr=None)
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        x, y = task.data()
        model = task.make_model()
        weights = task.fit(model, optimizer, task.mine(x), task.mine(y), task.BATCH)
        assert model.optimizer is optimizer
        task.assert_ranks_equal(weights)
        assert optimizer.ringplug.meter.updates > 0
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


def compile_puts_loss_scale_around():
    """The nesting that compile builds is an error, or is put right by a callback."""

    def nested():
        with_policy = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(3, dtype="mixed_float16")]
        )
        with_policy.dtype_policy = keras.dtype_policies.get("mixed_float16")
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.01), scale_lr=None)
        with_policy.compile(optimizer, "mse")
        assert type(with_policy.optimizer).__name__ == "LossScaleOptimizer"
        return with_policy, optimizer

    x, y = task.data()
    model, inner = nested()
    task.assert_raises_everywhere(
        ringplug.UsageError,
        "LossScaleOptimizer is around DistributedOptimizer",
        lambda: model.fit(task.mine(x), task.mine(y), batch_size=8, verbose=0),
    )
    model, inner = nested()
    model.fit(
        task.mine(x),
        task.mine(y),
        batch_size=8,
        verbose=0,
        callbacks=[ring.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    assert model.optimizer.ringplug.meter.updates == 6
    assert not hasattr(inner, "ringplug")
    task.assert_ranks_equal(model.get_weights())


class Own(keras.Model):
    """A model with a train_step of its own and two optimizers."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4, activation="tanh")
        self.second = keras.layers.Dense(3)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, *args):
        if BACKEND == "torch":
            (data,) = args
            x, y = data[0], data[1]
            self.zero_grad()
            loss = keras.ops.mean((self(x) - y) ** 2)
            loss.backward()
            for optimizer, layer in self.pairs():
                weights = layer.trainable_weights
                optimizer.apply([w.value.grad for w in weights], weights)
            return {"own": loss.detach()}
        import tensorflow as tf

        (data,) = args
        x, y = data[0], data[1]
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        for optimizer, layer in self.pairs():
            weights = layer.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"own": loss}

    def pairs(self):
        return [(self.optimizer, self.first), (self.extra, self.second)]


def two_optimizers_in_an_own_step():
    if BACKEND == "jax":
        two_optimizers_in_a_jitted_function()
        return
    x, y = task.data()

    def train(wrap, x, y, batch, **how):
        keras.utils.set_random_seed(1)
        model = Own()
        model(np.zeros((1, 8), "float32"))
        model.extra = wrap(keras.optimizers.Adam(0.01))
        model.extra.build(model.second.trainable_weights)
        optimizer = wrap(keras.optimizers.SGD(0.1))
        optimizer.build(model.first.trainable_weights)
        weights = task.fit(model, optimizer, x, y, batch, loss=None, **how)
        return weights, model

    modes = [{}] if BACKEND == "torch" else [{}, {"jit_compile": True}]
    for how in modes:
        together, model = train(
            lambda o: ring.DistributedOptimizer(o, scale_lr=None),
            task.mine(x),
            task.mine(y),
            task.BATCH,
            **how,
        )
        alone, _ = train(lambda o: o, x, y, task.BATCH * 2, **how)
        assert task.difference(together, alone) <= 1e-5, how
        task.assert_ranks_equal(together)
        assert model.extra.ringplug.meter.updates == 18
        assert model.optimizer.ringplug.meter.updates == 18


def two_optimizers_in_a_jitted_function():
    import jax

    shapes = [(4,), (3,)]

    def build(wrap):
        variables = [
            keras.Variable(np.ones(s, "float32"), name=f"v{i}") for i, s in enumerate(shapes)
        ]
        optimizers = [wrap(keras.optimizers.SGD(0.1)), wrap(keras.optimizers.Adam(0.1))]
        for optimizer, variable in zip(optimizers, variables, strict=True):
            optimizer.build([variable])
        return optimizers, variables

    def step(optimizers, states, values, x):
        results = []
        for optimizer, state, value in zip(optimizers, states, values, strict=True):
            new, state = optimizer.stateless_apply(state, [value * x], [value])
            results.append((new[0], state))
        return [r[0] for r in results], [r[1] for r in results]

    def train(wrap, inputs):
        optimizers, variables = build(wrap)
        compiled = jax.jit(lambda s, v, x: step(optimizers, s, v, x))
        states = [[v.value for v in o.variables] for o in optimizers]
        values = [v.value for v in variables]
        for x in inputs:
            values, states = compiled(states, values, x)
        return [np.asarray(v) for v in values], optimizers

    together, optimizers = train(
        lambda o: ring.DistributedOptimizer(o, scale_lr=None),
        [1.0 + ring.rank() + k for k in range(20)],
    )
    alone, _ = train(lambda o: o, [1.5 + k for k in range(20)])
    assert task.difference(together, alone) <= 1e-5
    task.assert_ranks_equal(together)
    assert [o.ringplug.meter.updates for o in optimizers] == [20, 20]


def batches_one_by_one():
    x, y = task.data()

    def train(optimizer, x, y, batch):
        model = task.make_model()
        model.compile(optimizer, "mse")
        for at in range(0, len(x), batch):
            model.train_on_batch(x[at : at + batch], y[at : at + batch])
        return model.get_weights()

    optimizer = ring.DistributedOptimizer(keras.optimizers.Adam(0.01), scale_lr=None)
    together = train(optimizer, task.mine(x), task.mine(y), task.BATCH)
    alone = train(keras.optimizers.Adam(0.01), x, y, task.BATCH * 2)
    assert task.difference(together, alone) <= 1e-5
    assert optimizer.ringplug.meter.updates == 6


def raw_tape():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    for compiled in (False, True):
        variable = tf.Variable([1.0, 2.0])
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_lr=None)

        def step(x, variable=variable, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * x)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

        (tf.function(step) if compiled else step)(tf.constant(float(ring.rank())))
        np.testing.assert_allclose(variable.numpy(), [0.5, 1.5])


def embeddings():
    """Sparse gradients: gathered they equal one process; dense they equal one dense process."""
    rng = np.random.default_rng(2)
    x = rng.integers(0, 12, size=(96, 5)).astype("int32")
    y = rng.normal(size=(96, 2)).astype("float32")

    def model():
        keras.utils.set_random_seed(4)
        return keras.Sequential(
            [
                keras.layers.Input((5,), dtype="int32"),
                keras.layers.Embedding(12, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )

    modes = [{}] + (
        [{"jit_compile": True}, {"run_eagerly": True}] if BACKEND == "tensorflow" else []
    )
    for how in modes:
        for make in (
            lambda: keras.optimizers.SGD(0.1),
            lambda: keras.optimizers.Adam(0.01),
            lambda: keras.optimizers.Adagrad(0.05),
        ):
            optimizer = ring.DistributedOptimizer(make(), scale_lr=None)
            together = task.fit(model(), optimizer, task.mine(x), task.mine(y), task.BATCH, **how)
            alone = task.fit(model(), make(), x, y, task.BATCH * 2, **how)
            assert task.difference(together, alone) <= 1e-5, (how, task.difference(together, alone))
            task.assert_ranks_equal(together)
    dense = ring.DistributedOptimizer(
        keras.optimizers.SGD(0.1), scale_lr=None, sparse_as_dense=True
    )
    together = task.fit(model(), dense, task.mine(x), task.mine(y), task.BATCH)
    alone = task.fit(model(), keras.optimizers.SGD(0.1), x, y, task.BATCH * 2)
    assert task.difference(together, alone) <= 1e-5


class Scale(keras.layers.Layer):
    """One number, whose gradient has no dimensions."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.factor


def numbers_as_variables():
    def model():
        made = task.make_model()
        made.add(Scale())
        return made

    modes = [{}, {"jit_compile": True}] if BACKEND == "tensorflow" else [{}]
    for how in modes:
        together, alone, _ = task.distributed_and_alone(
            lambda: keras.optimizers.SGD(0.1), model=model, **how
        )
        assert together[-1] != 1.0
        assert task.difference(together, alone) <= 1e-5
        task.assert_ranks_equal(together)


def float8_layers():
    if BACKEND == "torch":
        return  # Keras quantizes to float8 on the other two only.
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    model.quantize("float8")
    overwritten = [v for v in model.trainable_variables if v.overwrite_with_gradient]
    assert overwritten
    x, y = task.data()
    optimizer = ring.DistributedOptimizer(keras.optimizers.Adam(0.01), scale_lr=None)
    task.fit(model, optimizer, task.mine(x) * (1 + ring.rank()), task.mine(y), task.BATCH)
    values = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    task.assert_ranks_equal([value.astype("float32") for value in values])


CHECKS = [
    numbers_as_variables,
    float8_layers,
    missing_gradients,
    overwritten_variables,
    one_overflow_skips_all,
    mixed_precision_by_policy,
    compile_puts_loss_scale_around,
    two_optimizers_in_an_own_step,
    batches_one_by_one,
    raw_tape,
    embeddings,
]
