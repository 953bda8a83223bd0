"""What Horovod's Keras users may pass, on any number of ranks: optimizers, values, callbacks."""

import os
import tempfile
import warnings

import keras
import numpy as np

import ringplug.keras as ring
from tests.keras.ranks import equivalence, task

BACKEND = keras.backend.backend()
SETS = {}


def begin_with_process_sets():
    """The first check: the world again, with two sets in it."""
    size = ring.size()
    ring.shutdown()
    even = ring.ProcessSet(range(0, size, 2))
    odd = ring.ProcessSet(range(1, size, 2)) if size > 1 else None
    ring.init(process_sets=[one for one in (even, odd) if one is not None and one.ranks != [0]])
    SETS["even"] = even if even.process_set_id is not None else None
    assert ring.global_process_set.size() == size
    assert ring.size() == size


def value(tensor):
    return np.array(keras.ops.convert_to_numpy(tensor))


def variable(*numbers):
    return keras.Variable(np.array(numbers, "float32"))


def step(optimizer, *pairs):
    """Apply gradients: lists of numbers for variables."""
    gradients = [keras.ops.convert_to_tensor(np.array(g, "float32")) for g, _ in pairs]
    optimizer.apply(gradients, [v for _, v in pairs])


def sgd(**arguments):
    return ring.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)


def process_set_of_an_optimizer():
    even = SETS["even"]
    members = range(0, ring.size(), 2) if even else range(ring.size())
    rank = ring.rank()
    for op in (ring.Average, ring.Sum):
        w = variable(0.0)
        step(sgd(process_set=even, op=op), ([float(rank)], w))
        expected = rank
        if rank in members:
            expected = sum(members) / (1 if op == ring.Sum else len(members))
        np.testing.assert_allclose(value(w), [-expected])


def process_set_in_fit():
    even = SETS["even"]
    if even is None:
        return
    x, y = task.data()
    rank, members = ring.rank(), list(range(0, ring.size(), 2))
    for how in equivalence.MODES.values():
        if how.get("run_eagerly"):
            continue
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=even)
        model = task.make_model()
        callbacks = [
            ring.callbacks.BroadcastGlobalVariablesCallback(0, process_set=even),
            ring.callbacks.MetricAverageCallback(process_set=even),
        ]
        # The ranks outside train on other numbers of batches, and wait for nobody.
        mine = np.concatenate([x[8 * rank + k : 8 * rank + k + 8] for k in (0, 32)])
        theirs = np.concatenate([y[8 * rank + k : 8 * rank + k + 8] for k in (0, 32)])
        epochs = 2 if rank in members else 1
        weights = task.fit(model, optimizer, mine, theirs, 8, epochs, callbacks, **how)
        if rank in members:
            whole = [
                np.concatenate([a[8 * r + k : 8 * r + k + 8] for k in (0, 32) for r in members])
                for a in (x, y)
            ]
            alone = task.fit(
                task.make_model(), keras.optimizers.SGD(0.05), *whole, 8 * len(members), 2
            )
        else:
            alone = task.fit(task.make_model(), keras.optimizers.SGD(0.05), mine, theirs, 8, 1)
        assert task.difference(weights, alone) < 1e-5, (rank, how)


def local_variables():
    size, rank = ring.size(), ring.rank()
    for scaled in (True, False):
        optimizer = sgd(scale_local_gradients=scaled)
        own, shared = variable(0.0, 0.0), variable(0.0)
        optimizer.register_local_var(own)
        for _ in range(2):
            step(optimizer, ([rank + 1.0, 2.0], own), ([rank + 1.0], shared))
        by = size if scaled else 1
        np.testing.assert_allclose(value(own), [-2 * (rank + 1) / by, -4 / by], rtol=1e-6)
        np.testing.assert_allclose(value(shared), [-(size + 1)], rtol=1e-6)
    task.assert_raises_everywhere(
        ValueError, "variable", lambda: optimizer.register_local_var("kernel")
    )


def local_variables_and_passes():
    size, rank = ring.size(), ring.rank()
    for mean in (False, True):
        optimizer = sgd(backward_passes_per_step=3, average_aggregated_gradients=mean)
        own, shared = variable(0.0), variable(0.0)
        optimizer.register_local_var(own)
        for micro in range(7):
            step(optimizer, ([rank + 1.0], own), ([(rank + 1.0) * (micro + 1)], shared))
        # Two updates: of the micro-batches 1, 2, 3 and 4, 5, 6.
        by = 3 if mean else 1
        np.testing.assert_allclose(value(own), [-6 * (rank + 1) / size / by], rtol=1e-6)
        np.testing.assert_allclose(value(shared), [-21 * (size + 1) / 2 / by], rtol=1e-6)


def two_layers(rank):
    made = keras.initializers.Constant(0.1 * (rank + 1))
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(4, kernel_initializer=made, name="own"),
            keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.3), name="all"),
        ]
    )


def local_layers():
    x, y = (array[8 * ring.rank() : 8 * ring.rank() + 8] for array in task.data())
    size = ring.size()
    for mode, how in equivalence.MODES.items():
        if (BACKEND, mode) == ("jax", "eager"):
            continue  # the checks of local variables are eager
        alone, start = two_layers(ring.rank()), two_layers(ring.rank()).get_weights()
        alone.compile(keras.optimizers.SGD(1.0), "mse", **how)
        alone.train_on_batch(x, y)
        own = [a - b for a, b in zip(start, alone.get_weights(), strict=True)]
        for scaled in (True, False):
            model = two_layers(ring.rank())
            optimizer = ring.PartialDistributedOptimizer(
                keras.optimizers.SGD(1.0),
                local_layers=model.layers[:1],
                scale_local_gradients=scaled,
            )
            with warnings.catch_warnings():
                # The layers differ, and are meant to.
                warnings.filterwarnings("error", message="the ranks start")
                model.compile(optimizer, "mse", **how)
                model.train_on_batch(x, y)
            got = [a - b for a, b in zip(start, model.get_weights(), strict=True)]
            for a, b in zip(got[:2], own[:2], strict=True):
                np.testing.assert_allclose(a, b / (size if scaled else 1), rtol=1e-4, atol=1e-5)
            for a, b in zip(got[2:], own[2:], strict=True):
                mean = value(ring.allreduce(b))
                np.testing.assert_allclose(a, mean, rtol=1e-4, atol=1e-5)
    ring.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=model.layers[0])
    for wrong in ("own", [model.layers[0], 3]):
        task.assert_raises_everywhere(
            ValueError,
            "not a Keras layer",
            lambda wrong=wrong: ring.PartialDistributedOptimizer("sgd", local_layers=wrong),
        )


class Halves(ring.Compressor):
    """Sends half of each number."""

    @staticmethod
    def compress(tensor):
        return keras.ops.reshape(tensor, (-1,)) / 2, tuple(tensor.shape)

    @staticmethod
    def decompress(tensor, ctx):
        return keras.ops.reshape(tensor, ctx) * 2


def compression_of_ones_own():
    size = ring.size()
    for codec in (Halves, Halves(), ring.Compression.none, ring.Compression.fp16, "bf16"):
        w = variable([0.0, 0.0], [0.0, 0.0])
        step(sgd(compression=codec), ([[ring.rank()] * 2] * 2, w))
        np.testing.assert_allclose(value(w), np.full((2, 2), -(size - 1) / 2), rtol=1e-2)
        mean = ring.allreduce(np.full((3,), ring.rank(), "float32"), compression=codec)
        np.testing.assert_allclose(value(mean), np.full(3, (size - 1) / 2), rtol=1e-2)
    compiled = next(iter(equivalence.MODES.values()))
    together, alone, _ = task.distributed_and_alone(
        lambda: keras.optimizers.SGD(0.1), {"compression": Halves}, **compiled
    )
    assert task.difference(together, alone) < 1e-5
    tensor, context = ring.Compression.fp16.compress(keras.ops.convert_to_tensor([0.1, 2.0]))
    assert keras.backend.standardize_dtype(tensor.dtype) == "float16"
    again = ring.Compression.fp16.decompress(tensor, context)
    assert keras.backend.standardize_dtype(again.dtype) == "float32"


def arguments():
    def call(**kw):
        return lambda: ring.DistributedOptimizer(keras.optimizers.SGD(), **kw)

    a, b = variable(1.0), variable(2.0)
    for wrong, text in (
        ({"op": ring.Adasum}, "Average or Sum"),
        ({"op": ring.Min}, "Average or Sum"),
        ({"op": 17}, "Average or Sum"),
        ({"op": ring.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"groups": 0}, "groups=0"),
        ({"groups": -1}, "groups=-1"),
        ({"groups": [a, b]}, "list of lists"),
        ({"groups": [[a, b], [b]]}, "two groups"),
        ({"compression": "int8"}, "compression='int8'"),
        ({"process_set": ring.ProcessSet([0])}, "add_process_set"),
    ):
        task.assert_raises_everywhere(ValueError, text, call(**wrong))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(num_groups=2)()
    found = [one.category for one in caught if "num_groups" in str(one.message)]
    assert found == [DeprecationWarning]
    # Horovod's order of parameters.
    w = variable(0.0)
    optimizer = ring.DistributedOptimizer(
        keras.optimizers.SGD(1.0), "name", "", "", ring.Compression.none, False, 2.0, ring.Average,
        1, False, 0, [[w]], ring.global_process_set, True,
    )  # fmt: skip
    step(optimizer, ([2.0 * ring.rank()], w))
    np.testing.assert_allclose(value(w), [1.0 - ring.size()])
    assert ring.DistributedOptimizer(optimizer) is optimizer
    task.assert_raises_everywhere(
        ValueError, "already", lambda: ring.DistributedOptimizer(optimizer, op=ring.Sum)
    )
    config = optimizer.get_config()
    assert optimizer.from_config(config).get_config() == config


def values():
    size, rank = ring.size(), ring.rank()
    total = size * (size - 1) / 2
    number = ring.allreduce(float(rank), "number", op=ring.Sum, prescale_factor=2.0)
    np.testing.assert_allclose(number, 2 * total)
    np.testing.assert_allclose(ring.allreduce([rank, 1], op=ring.Max), [size - 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_allclose(ring.allreduce([float(rank)], average=False), [total])
    task.assert_raises_everywhere(
        ValueError, "average", lambda: ring.allreduce(1.0, average=True, op=ring.Sum)
    )
    gathered = value(ring.allgather(np.full((rank + 1, 2), rank), "rows"))
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    np.testing.assert_allclose(ring.broadcast([rank, rank], size - 1), [size - 1] * 2)
    share = value(ring.reducescatter(np.arange(2 * size + 1, dtype="float32"), op=ring.Sum))
    rows = np.array_split(np.arange(2 * size + 1, dtype="float32"), size)[rank]
    np.testing.assert_allclose(share, rows * size)
    kind = {"tensorflow": "EagerTensor", "jax": "ndarray", "torch": "ndarray"}[BACKEND]
    assert type(gathered := ring.allgather(np.ones(1))).__name__ == kind, type(gathered)
    if BACKEND == "tensorflow":
        assert ring.allreduce(1.5).numpy() == 1.5
        import tensorflow as tf

        inside = tf.function(lambda x: ring.allreduce(x, op=ring.Sum, name="in a graph"))
        np.testing.assert_allclose(inside(tf.constant([1.0, 2.0])), [size, 2.0 * size])
    assert ring.is_initialized()
    assert ring.mpi_built()
    assert not ring.nccl_built()
    assert ring.is_homogeneous()
    even = SETS["even"]
    if even is not None and even.included():
        found = value(ring.allgather([rank], process_set=even))
        assert found.tolist() == list(range(0, size, 2))


def broadcast_but_for_local_variables():
    rank, root = ring.rank(), ring.size() - 1
    for one in (False, True):
        model = two_layers(rank)
        for layer in model.layers:
            for weight in layer.weights:
                weight.assign(np.full(weight.shape, rank, "float32"))
        optimizer = ring.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.0, momentum=0.9), local_layers=model.layers[:1]
        )
        optimizer.build(model.trainable_variables)
        for slot in optimizer.momentums:
            slot.assign(np.full(slot.shape, rank, "float32"))
        model.compile(optimizer, "mse")
        local = model.layers[0].kernel if one else model.layers[0].variables
        callback = ring.callbacks.BroadcastGlobalVariablesCallback(root, "", local)
        if one:
            callback.register_local_var(model.layers[0].bias)
        callback.set_model(model)
        callback.set_params({"steps": 1})
        callback.on_train_begin()
        own, shared = model.layers
        for weight in own.weights:
            assert (value(weight) == rank).all(), (rank, weight.path)
        for weight in shared.weights:
            assert (value(weight) == root).all(), (rank, weight.path)
        marks = [float(value(slot).flat[0]) for slot in optimizer.momentums]
        assert marks == [rank, rank, root, root], marks
    task.assert_raises_everywhere(
        ValueError,
        "a variable is expected",
        lambda: ring.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"]),
    )


def optimizers_with_nothing_to_combine():
    x, y = task.data()
    x, y = x[:16], y[:16]
    rank, root = ring.rank(), ring.size() - 1
    every = [
        ring.callbacks.BroadcastGlobalVariablesCallback(root),
        ring.callbacks.MetricAverageCallback(),
        ring.callbacks.LearningRateWarmupCallback(0.1, 1),
    ]
    # Nothing is trained, so a plain optimizer will do.
    model = two_layers(rank)
    model.trainable = False
    model.compile(loss="mse", metrics=["mae"])
    model.fit(x, y, batch_size=8, verbose=0, callbacks=every)
    np.testing.assert_allclose(model.get_weights()[0], 0.1 * (root + 1), rtol=1e-6)
    # Every layer is local.
    model = two_layers(rank)
    optimizer = ring.PartialDistributedOptimizer("sgd", local_layers=model.layers)
    task.fit(model, optimizer, x, y, 8, 1, every)
    # Sparse gradients only, where there are any.
    embedding = keras.Sequential([keras.layers.Embedding(5, 3), keras.layers.Flatten()])
    optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.1))
    task.fit(embedding, optimizer, np.arange(16)[:, None] % 5, y, 8, 1, every)
    task.assert_ranks_equal(embedding.get_weights())
    if ring.size() > 1:
        assert optimizer.ringplug.meter.updates == 2


def tapes_in_an_own_step():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    import ringplug.tensorflow as hvd

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    x, y = task.data()
    model = Own(task.make_model().layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [ring.callbacks.BroadcastGlobalVariablesCallback(0)]
        weights = task.fit(
            model, keras.optimizers.SGD(0.1), task.mine(x), task.mine(y), 8, 1, callbacks
        )
    told = any("its train_step has to do that" in str(one.message) for one in caught)
    assert told == (ring.rank() == 0 and ring.size() > 1)
    task.assert_ranks_equal(weights)


class OneNumber(keras.layers.Layer):
    """Its output is a weight, so the gradient of the mean is 1."""

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x * 0 + self.w


def momentum_correction():
    """Horovod's rule, with a gradient of 1: v = m * new/old * v - new; w += v."""
    for corrected in (True, False):
        model = keras.Sequential([keras.layers.Input((1,)), OneNumber()])
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
        model.compile(optimizer, loss=lambda y, p: keras.ops.mean(p))
        callback = ring.callbacks.LearningRateScheduleCallback(
            0.5, lambda epoch: 2.0**-epoch, momentum_correction=corrected
        )
        x = np.ones((4, 1), "float32")
        model.fit(x, x, batch_size=2, epochs=3, verbose=0, callbacks=[callback])
        w = v = 0.0
        old = 0.5
        for epoch in range(3):
            for _ in range(2):
                new = 0.5 * 2.0**-epoch
                v = 0.5 * (new / old if corrected else 1) * v - new
                w, old = w + v, new
        np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-6)


def learning_rates():
    """Horovod's callbacks leave what the script has scaled; ringplug's own scale."""
    size = ring.size()
    x, y = task.data()
    made = ring.callbacks
    cases = (
        ([made.BroadcastGlobalVariablesCallback(0), made.MetricAverageCallback()], 0.01, {}),
        (made.default(), 0.01 * size, {}),
        (made.default(scale_lr="sqrt"), 0.01 * size**0.5, {}),
        (made.default(scale_lr=None), 0.01, {}),
        (made.default(), 0.01, {"scale_lr": None}),
        (made.default(), 0.01 * size, {"scale_lr": "linear"}),
        ([made.LearningRateWarmupCallback(warmup_epochs=1)], 0.01 * size, {}),
        (made.default([made.LearningRateWarmupCallback(0.03, 1)]), 0.03, {}),
        ([made.LearningRateWarmupCallback(0.03, 1)], 0.03, {}),
    )
    if BACKEND != "torch":
        cases = cases[:2]  # each compiles a step anew
    for callbacks, expected, arguments in cases:
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.01), **arguments)
        model = task.make_model()
        for _ in range(2):
            task.fit(model, optimizer, x[:16], y[:16], 8, 1, callbacks)
            np.testing.assert_allclose(value(optimizer.learning_rate), expected, rtol=1e-6)


class Own(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


def loading():
    x, y = task.data()
    with tempfile.TemporaryDirectory() as folder:
        cases = (
            (Own, "keras", {"custom_optimizers": [Own]}),
            (Own, "keras", {"custom_objects": {"Own": Own}}),
            (
                Own,
                "keras",
                {"custom_objects": {"Own": lambda **kw: ring.DistributedOptimizer(Own(**kw))}},
            ),
            (keras.optimizers.Adam, "keras", {}),
            (keras.optimizers.Adam, "h5", {"compression": ring.Compression.fp16}),
        )
        for kind, suffix, how in cases if BACKEND == "torch" else cases[-1:]:
            optimizer = ring.DistributedOptimizer(kind(0.01))
            model = task.make_model()
            model.compile(optimizer, keras.losses.MeanSquaredError())
            model.train_on_batch(x[:8], y[:8])
            path = os.path.join(folder, f"model.{suffix}")
            model.save(path)
            again = ring.load_model(path, **how)
            assert type(again.optimizer).__name__ == kind.__name__
            assert hasattr(again.optimizer, "ringplug")
            for a, b in zip(optimizer.variables, again.optimizer.variables, strict=True):
                np.testing.assert_array_equal(value(a), value(b))
            again.train_on_batch(x[8:16], y[8:16])
            if "compression" in how:
                assert again.optimizer.ringplug.options.compression == "fp16"
        task.assert_raises_everywhere(
            ValueError, "legacy_opts", lambda: ring.load_model(path, None, None, None, True)
        )


CHECKS = [
    begin_with_process_sets,
    process_set_of_an_optimizer,
    process_set_in_fit,
    local_variables,
    local_variables_and_passes,
    local_layers,
    compression_of_ones_own,
    arguments,
    values,
    broadcast_but_for_local_variables,
    optimizers_with_nothing_to_combine,
    tapes_in_an_own_step,
    momentum_correction,
    learning_rates,
    loading,
]
