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
    other_distribution_is_refused,
    xla_without_a_way_out,
]
