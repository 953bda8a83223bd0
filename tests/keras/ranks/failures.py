"""Errors that all ranks meet in a step, and are to raise from fit; run as one rank of two."""

import warnings

import keras
import numpy as np

import ringplug
import ringplug.keras as ring
from tests.keras.ranks import task

BACKEND = keras.backend.backend()
MODES = {
    "torch": [{}],
    "jax": [{}, {"run_eagerly": True}],
    "tensorflow": [{}, {"jit_compile": True}, {"run_eagerly": True}],
}[BACKEND]


def different_models(callbacks, mode):
    """Ranks build different models: the first exchange finds out, inside the compiled step."""
    width = 4 + ring.rank()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(width)])
    model.compile(ring.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", **mode)
    x, y = np.ones((32, 8), "float32"), np.ones((32, width), "float32")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)


def errors_of_a_compiled_step_are_raised_by_fit():
    for mode in MODES:
        error = task.assert_raises_everywhere(
            ringplug.MismatchError,
            "float32[8, 4]",
            lambda mode=mode: different_models([ring.callbacks.MetricAverageCallback()], mode),
        )
        assert "float32[8, 5]" in str(error)
        # the process goes on
        assert ring.allreduce(1.0 + ring.rank(), name="after") == 1.5


def without_callbacks_too():
    kinds = [ringplug.MismatchError]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        # The framework's own error, with our text, where no callback of ours translates it.
        kinds.append(tf.errors.OpError)
    if BACKEND == "jax":
        import jax

        kinds.append(jax.errors.JaxRuntimeError)
    for mode in MODES:
        task.assert_raises_everywhere(
            tuple(kinds), "float32[8, 4]", lambda mode=mode: different_models([], mode)
        )
    optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_lr=None)
    x, y = task.data()
    weights = task.fit(task.make_model(), optimizer, task.mine(x), task.mine(y), task.BATCH)
    task.assert_ranks_equal(weights)


def leave_early(mode, how, callbacks):
    """Rank 1 has fewer batches than rank 0, or stops, or has fewer epochs."""
    x, y = (task.mine(array) for array in task.data())
    count = 3 if how == "batches" and ring.rank() == 1 else 5

    def batches():
        while True:
            for at in range(count):
                yield x[at * 8 : at * 8 + 8], y[at * 8 : at * 8 + 8]
            if how == "batches":
                return

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if how == "stop" and ring.rank() == 1 and batch == 1:
                self.model.stop_training = True

    model = task.make_model()
    model.compile(ring.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", **mode)
    epochs = 1 if how == "epochs" and ring.rank() == 1 else 2
    steps = None if how == "batches" else 5
    model.fit(
        batches(), steps_per_epoch=steps, epochs=epochs, verbose=0, callbacks=[*callbacks, Stop()]
    )


def ranks_that_leave_early_are_found():
    for mode in MODES:
        for how, place in (
            ("batches", "end of epoch 1, after 3 exchanges"),
            ("stop", "end of epoch 1, after 2 exchanges"),
            ("epochs", "end of training"),
        ):
            error = task.assert_raises_everywhere(
                ringplug.MismatchError,
                place,
                lambda mode=mode, how=how: leave_early(
                    mode, how, [ring.callbacks.MetricAverageCallback()]
                ),
            )
            assert "StopTogetherCallback" in str(error)
            assert "gradients of SGD" in str(error)
    # Between an agreement to stop and the end of an epoch, too. TensorFlow and JAX begin the
    # batch that a generator does not have, so there both ranks agree before rank 1 ends.
    place = "agreement whether to stop" if BACKEND == "torch" else "end of epoch 1"
    task.assert_raises_everywhere(
        ringplug.MismatchError,
        place,
        lambda: leave_early({}, "batches", [ring.callbacks.StopTogetherCallback(3)]),
    )
    assert ring.allreduce(1.0 + ring.rank(), name="after leaving") == 1.5


def a_forgotten_broadcast_is_noticed():
    x, y = (task.mine(array) for array in task.data())
    eager = {} if BACKEND == "torch" else {"run_eagerly": True}
    for seeds, callbacks, compression, expected in (
        (1, [], "none", True),
        (1, [], "bf16", True),
        (0, [], "bf16", False),
        (1, [ring.callbacks.BroadcastGlobalVariablesCallback()], "none", False),
    ):
        optimizer = ring.DistributedOptimizer(
            keras.optimizers.SGD(0.1), scale_lr=None, compression=compression
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = task.make_model(3 + seeds * ring.rank())
            task.fit(model, optimizer, x, y, 8, epochs=1, callbacks=callbacks, **eager)
        count = sum("start from different weights" in str(w.message) for w in caught)
        assert count == int(expected and ring.rank() == 0), (seeds, compression, count)


def root_ranks_exist():
    for name, make in (
        ("BroadcastGlobalVariablesCallback", ring.callbacks.BroadcastGlobalVariablesCallback),
        ("RootOnly", lambda root: ring.callbacks.RootOnly(keras.callbacks.Callback(), root)),
    ):
        task.assert_raises_everywhere(
            ringplug.UsageError, f"{name}(root_rank=9)", lambda make=make: make(9)
        )


def other_distribution_is_refused():
    def wrap():
        return ring.DistributedOptimizer(keras.optimizers.SGD())

    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            task.assert_raises_everywhere(ringplug.UsageError, "tf.distribute", wrap)
            model = task.make_model()
        task.assert_raises_everywhere(
            ringplug.UsageError,
            "tf.distribute",
            lambda: task.fit(model, wrap(), *task.data(), 8, callbacks=ring.callbacks.default()),
        )
    if BACKEND == "jax":
        devices = keras.distribution.list_devices()
        assert len(devices) == 2, devices  # XLA_FLAGS of this test
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        try:
            task.assert_raises_everywhere(ringplug.UsageError, "keras.distribution", wrap)
        finally:
            keras.distribution.set_distribution(None)
    if BACKEND == "torch":
        import torch

        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        version, keras.__version__ = keras.__version__, "3.16.0"
        try:
            task.assert_raises_everywhere(ringplug.UsageError, "torch.distributed", wrap)
        finally:
            keras.__version__ = version
            torch.distributed.destroy_process_group()


def xla_without_a_way_out():
    if BACKEND != "tensorflow":
        return
    ring.shutdown()
    ring.init(keras_path="callback")
    x, y = task.data()

    def fit(callbacks):
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_lr=None)
        model = task.make_model()
        task.fit(
            model, optimizer, task.mine(x), task.mine(y), 8, callbacks=callbacks, jit_compile=True
        )
        return model

    task.assert_raises_everywhere(ringplug.UnavailableError, "jit_compile=False", lambda: fit([]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit([ring.callbacks.MetricAverageCallback()])
    assert any("jit_compile=True is turned off" in str(w.message) for w in caught)
    assert not model.jit_compile
    task.assert_ranks_equal(model.get_weights())


CHECKS = [
    errors_of_a_compiled_step_are_raised_by_fit,
    without_callbacks_too,
    ranks_that_leave_early_are_found,
    a_forgotten_broadcast_is_noticed,
    root_ranks_exist,
    other_distribution_is_refused,
    xla_without_a_way_out,
]
