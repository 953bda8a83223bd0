"""N ranks with batch b train as one process with batch N*b; run as one rank of two."""

import keras
import numpy as np

import ringplug.keras as ring
from tests.keras.ranks import task

BACKEND = keras.backend.backend()
STEPS = task.EPOCHS * task.SAMPLES // (task.BATCH * 2)


def same(name, make_optimizer, updates=STEPS, tolerance=1e-5, options=None, **compile_with):
    together, alone, optimizer = task.distributed_and_alone(make_optimizer, options, **compile_with)
    assert task.difference(together, alone) <= tolerance, (
        name,
        task.difference(together, alone),
    )
    start = task.make_model().get_weights()
    assert task.difference(together, start) > 1e-3, f"{name}: nothing was learned"
    task.assert_ranks_equal(together)
    assert optimizer.ringplug.meter.updates == updates, (
        name,
        optimizer.ringplug.meter.updates,
        updates,
    )


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01)


def clipped():
    return keras.optimizers.SGD(0.1, global_clipnorm=0.1, weight_decay=0.01)


MODES = {
    "torch": {"eager": {}},
    "jax": {"jit": {"jit_compile": True}, "eager": {"run_eagerly": True}},
    "tensorflow": {
        "graph": {},
        "jit": {"jit_compile": True},
        "eager": {"run_eagerly": True},
    },
}[BACKEND]


def three_optimizers_in_every_mode():
    for mode, how in MODES.items():
        for make in (momentum, adam, clipped):
            same(f"{make.__name__} {mode}", make, **how)


def accumulation_exchanges_once_per_update():
    # 18 micro-steps in threes.
    for mode, how in MODES.items():
        if (BACKEND, mode) == ("jax", "eager"):
            continue  # Keras itself retraces its conditionals in each step: half a minute.
        same(
            f"accumulation {mode}",
            lambda: keras.optimizers.Adam(
                0.01, gradient_accumulation_steps=3, global_clipnorm=0.05
            ),
            updates=STEPS // 3,
            **how,
        )


def passes_per_step_is_accumulation():
    x, y = task.data()
    for mean, rate in ((True, 0.1), (False, 0.05)):
        optimizer = ring.DistributedOptimizer(
            keras.optimizers.SGD(rate),
            backward_passes_per_step=2,
            average_aggregated_gradients=mean,
        )
        together = task.fit(task.make_model(), optimizer, task.mine(x), task.mine(y), task.BATCH)
        plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        alone = task.fit(task.make_model(), plain, x, y, task.BATCH * 2)
        assert optimizer.gradient_accumulation_steps == 2
        assert task.difference(together, alone) <= 1e-5, (mean, task.difference(together, alone))
        assert optimizer.ringplug.meter.updates == STEPS // 2


def other_features():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 20)
    same("ema", lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=4))
    same("clipnorm", lambda: keras.optimizers.SGD(0.1, clipnorm=0.05))
    same("clipvalue", lambda: keras.optimizers.SGD(0.1, clipvalue=0.01))
    same("schedule", lambda: keras.optimizers.SGD(schedule))
    same("loss scale factor", lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    same(
        "loss scale",
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), dynamic_growth_steps=4
        ),
    )
    same("predivided", momentum, options={"gradient_predivide_factor": 2.0})
    if hasattr(keras.optimizers, "MultiOptimizer"):
        same("multi", multi)
    if BACKEND != "torch":
        same("steps per execution", adam, steps_per_execution=4)
    if hasattr(keras.optimizers, "Muon"):
        same("muon", lambda: keras.optimizers.Muon(0.01))


def multi():
    first = keras.optimizers.SGD(0.1)
    names = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), {".*bias": first})
    return keras.optimizers.MultiOptimizer(names)


def sum_is_size_times_average():
    x, y = task.data()
    weights = []
    for op, rate in ((ring.Sum, 0.05), (ring.Average, 0.1)):
        optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(rate), op=op, scale_lr=None)
        weights.append(
            task.fit(task.make_model(), optimizer, task.mine(x), task.mine(y), task.BATCH)
        )
    assert task.difference(*weights) <= 1e-5


def compression_is_close_and_equal():
    for compression in ("fp16", "bf16"):
        together, alone, optimizer = task.distributed_and_alone(
            momentum, {"compression": compression}
        )
        distance = task.difference(together, alone)
        assert 1e-6 < distance < 0.05, (compression, distance)
        task.assert_ranks_equal(together)
        assert optimizer.ringplug.options.compression == compression


def learning_rate_scales_on_request():
    def rate(optimizer):
        return float(optimizer.learning_rate)

    two = keras.optimizers.SGD(0.1)
    assert ring.DistributedOptimizer(two) is two
    assert np.isclose(rate(two), 0.1), "a script of Horovod's scales by itself"
    linear = ring.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_lr="linear")
    assert np.isclose(rate(linear), 0.2)
    ring.DistributedOptimizer(linear, scale_lr="linear")
    assert np.isclose(rate(linear), 0.2), "scaled twice"
    root = ring.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_lr="sqrt")
    assert np.isclose(rate(root), 0.1 * 2**0.5)


CHECKS = [
    three_optimizers_in_every_mode,
    accumulation_exchanges_once_per_update,
    passes_per_step_is_accumulation,
    other_features,
    sum_is_size_times_average,
    compression_is_close_and_equal,
    learning_rate_scales_on_request,
]
