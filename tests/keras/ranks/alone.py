"""A world of one: everything is as if ringplug were not there."""

import io
from contextlib import redirect_stdout

import keras
import numpy as np

import ringplug
import ringplug.keras as ring
from tests.keras.ranks import task


def same_bits_as_keras():
    x, y = task.data()
    for make in (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    ):
        plain = task.fit(task.make_model(), make(), x, y, 16)
        optimizer = ring.DistributedOptimizer(make())
        ours = task.fit(
            task.make_model(),
            optimizer,
            x,
            y,
            16,
            callbacks=ring.callbacks.default(
                [ring.callbacks.LearningRateWarmupCallback(warmup_epochs=2)]
            ),
        )
        assert task.difference(plain, ours) == 0
        assert optimizer.ringplug.meter.updates == 0


def prints_nothing_of_its_own():
    said = io.StringIO()
    with redirect_stdout(said):
        ring.DistributedOptimizer(keras.optimizers.SGD(0.1))
    assert said.getvalue() == ""


def bad_arguments():
    for arguments, text in (
        ({"compression": "int8"}, "compression='int8'"),
        ({"op": ringplug.Max}, "Average or Sum"),
        ({"scale_lr": "cubic"}, "scale_lr='cubic'"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"gradient_predivide_factor": 2.0, "op": ring.Sum}, "needs op=Average"),
    ):
        task.assert_raises_everywhere(
            ringplug.UsageError,
            text,
            lambda arguments=arguments: ring.DistributedOptimizer(
                keras.optimizers.SGD(), **arguments
            ),
        )
    built = keras.optimizers.SGD()
    built.build([keras.Variable(np.zeros(2))])
    task.assert_raises_everywhere(
        ringplug.UsageError,
        "not built yet",
        lambda: ring.DistributedOptimizer(built, backward_passes_per_step=2),
    )
    task.assert_raises_everywhere(
        ringplug.UsageError, "no global variables", lambda: ring.broadcast_global_variables(0)
    )


def bad_arguments_of_callbacks():
    made = ring.callbacks
    for kind, arguments, text in (
        (made.LearningRateWarmupCallback, {"warmup_epochs": -1}, "warmup_epochs=-1"),
        (made.LearningRateWarmupCallback, {"steps_per_epoch": 0}, "steps_per_epoch=0"),
        (made.LearningRateWarmupCallback, {"initial_lr": -0.1}, "initial_lr=-0.1"),
        (
            made.LearningRateScheduleCallback,
            {"initial_lr": 0.1, "multiplier": 1.0, "start_epoch": -1},
            "start_epoch=-1",
        ),
        (
            made.LearningRateScheduleCallback,
            {"initial_lr": 0.1, "multiplier": 1.0, "start_epoch": 3, "end_epoch": 2},
            "end_epoch=2",
        ),
        (made.BroadcastGlobalVariablesCallback, {"root_rank": -1}, "root_rank=-1"),
    ):
        task.assert_raises_everywhere(
            ringplug.UsageError,
            f"{kind.__name__}({text}",
            lambda kind=kind, arguments=arguments: kind(**arguments),
        )


def learning_rates_are_in_the_history():
    x, y = task.data()
    model = task.make_model()
    model.compile(ring.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    warmup = ring.callbacks.LearningRateWarmupCallback(warmup_epochs=1)
    history = model.fit(x, y, epochs=2, verbose=0, callbacks=[warmup])
    np.testing.assert_allclose(history.history["lr"], [0.1, 0.1], rtol=1e-6)


def names_of_horovod():
    optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(), compression=ring.Compression.bf16)
    assert optimizer.ringplug.options.compression == "bf16"
    assert ring.broadcast_object({"a": 1}, 0) == {"a": 1}
    assert ring.allgather_object("b") == ["b"]
    for op in (ring.Min, ring.Max, ring.Product):
        assert ring.allreduce(2.0, op=op) == 2.0


def init_comes_first():
    ring.shutdown()
    assert not ring.is_initialized()
    task.assert_raises_everywhere(
        ringplug.NotInitializedError,
        "init()",
        lambda: ring.DistributedOptimizer(keras.optimizers.SGD()),
    )
    ring.init()
    assert ring.is_initialized()


CHECKS = [
    init_comes_first,
    same_bits_as_keras,
    prints_nothing_of_its_own,
    bad_arguments,
    bad_arguments_of_callbacks,
    learning_rates_are_in_the_history,
    names_of_horovod,
]
