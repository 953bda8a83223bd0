"""What each callback does, value by value; run as one rank of two."""

import io
import os
import shutil
import tempfile
from contextlib import redirect_stdout

import keras
import numpy as np

import ringplug
import ringplug.keras as ring
from ringplug.backend import ops
from tests.keras.ranks import task

BACKEND = keras.backend.backend()
STEPS = 6  # batches per epoch and rank


class Rates(keras.callbacks.Callback):
    """The learning rate that each batch was trained with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


class Logs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def sgd(rate=0.01, **kw):
    return ring.DistributedOptimizer(keras.optimizers.SGD(rate, **kw))


def fit(optimizer, callbacks, epochs=1, seed=3, **kw):
    model = task.make_model(seed)
    x, y = task.data()
    compile_with = {k: kw.pop(k) for k in ("metrics", "steps_per_execution") if k in kw}
    model.compile(optimizer, "mse", **compile_with)
    history = model.fit(
        task.mine(x),
        task.mine(y),
        batch_size=task.BATCH,
        epochs=epochs,
        shuffle=False,
        **{"verbose": 0, **kw},
        callbacks=callbacks,
    )
    return model, history


def warmup():
    rates = Rates()
    callback = ring.callbacks.LearningRateWarmupCallback(warmup_epochs=2, verbose=1)
    said = io.StringIO()
    with redirect_stdout(said):
        _, history = fit(sgd(), [callback, rates], epochs=3)
    target = 0.02  # 0.01, scaled for two ranks
    expected = [
        target / 2 * (1 + (e + (b + 1) / STEPS) / 2) for e in range(2) for b in range(STEPS)
    ]
    expected += [target] * STEPS
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], [0.015, 0.02, 0.02], rtol=1e-6)
    assert ("Epoch 2: finished" in said.getvalue()) == (ring.rank() == 0), said.getvalue()


def warmup_to_a_given_rate():
    # A script that scales by hand: initial_lr is its scaled rate, and stays so.
    rates = Rates()
    optimizer = sgd(0.02)
    callback = ring.callbacks.LearningRateWarmupCallback(initial_lr=0.02, warmup_epochs=1)
    fit(optimizer, [callback, rates], epochs=2)
    expected = [0.01 * (1 + (b + 1) / STEPS) for b in range(STEPS)] + [0.02] * STEPS
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)


def warmup_of_a_schedule():
    from ringplug.keras import schedules

    plain = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.5)
    optimizer = sgd(plain)
    assert type(optimizer._learning_rate) is type(plain), "saved files must not need ringplug"
    rates = Rates()
    callback = ring.callbacks.LearningRateWarmupCallback(warmup_epochs=1)
    model, _ = fit(optimizer, [callback, rates], epochs=2)
    steps = np.arange(2 * STEPS)
    factor = np.minimum((1 + (steps + 1) / STEPS) / 2, 1.0)
    np.testing.assert_allclose(rates.seen, 0.02 * 0.5 ** (steps / 10) * factor, rtol=1e-5)
    assert type(model.optimizer._learning_rate) is type(plain), "restored after the warm-up"
    saved = keras.saving.serialize_keras_object(schedules.Warmup(plain, 7, 2))
    again = keras.saving.deserialize_keras_object(saved)
    assert float(again(3)) == float(schedules.Warmup(plain, 7, 2)(3))
    assert np.isclose(float(schedules.Scaled(plain, 3.0)(10)), 0.015)


def warmup_with_several_steps_per_execution():
    if BACKEND == "torch":
        return
    rates = Rates()
    callback = ring.callbacks.LearningRateWarmupCallback(warmup_epochs=1)
    model, _ = fit(sgd(), [callback, rates], epochs=1, steps_per_execution=3)
    np.testing.assert_allclose(rates.seen, [0.01 * (1 + 1 / 6), 0.01 * (1 + 4 / 6)], rtol=1e-6)
    assert np.isclose(float(model.optimizer.learning_rate), 0.02)


def schedule():
    rates = Rates()
    callbacks = [
        ring.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1, end_epoch=3),
        ring.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 1 / (1 + epoch), start_epoch=3, staircase=False
        ),
        rates,
    ]
    _, history = fit(sgd(0.1), callbacks, epochs=4)
    expected = [0.1] * STEPS + [0.1] * STEPS + [0.05] * STEPS
    expected += [0.1 / (4 + b / STEPS) for b in range(STEPS)]
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], expected[STEPS - 1 :: STEPS], rtol=1e-6)
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.5)
    task.assert_raises_everywhere(
        ringplug.UsageError, "LearningRateSchedule", lambda: fit(sgd(rate), callbacks[:1])
    )


def broadcast():
    """Weights, slots, iterations and learning rate of root, before the first batch."""

    class First(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                model = self.model
                variables = model.variables + model.optimizer.variables
                self.values = [np.array(keras.ops.convert_to_numpy(v)) for v in variables]

    for root in (0, 1):
        first = First()
        model = task.make_model(seed=10 + ring.rank())
        x, y = task.data()
        optimizer = ring.DistributedOptimizer(
            keras.optimizers.Adam(0.01 * (1 + ring.rank())), scale_lr=None
        )
        optimizer.build(model.trainable_variables)
        for variable in optimizer.variables[2:]:
            variable.assign(np.full(variable.shape, 5.0 + ring.rank(), "float32"))
        model.compile(optimizer, "mse")
        before = ops.broadcast_object([np.array(w) for w in model.get_weights()], root, "before")
        model.fit(
            task.mine(x),
            task.mine(y),
            batch_size=task.BATCH,
            verbose=0,
            callbacks=[ring.callbacks.BroadcastGlobalVariablesCallback(root), first],
        )
        assert task.difference(first.values[: len(before)], before) == 0
        task.assert_ranks_equal([v.astype("float64") for v in first.values])
        slots = first.values[len(before) + 2 :]
        assert all((slot == 5 + root).all() for slot in slots), slots
        task.assert_ranks_equal(model.get_weights())


def broadcast_finds_different_models():
    width = 4 + ring.rank()
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(width)])
    model.compile(sgd(), "mse")
    error = task.assert_raises_everywhere(
        ringplug.MismatchError,
        "the ranks' models differ",
        lambda: model.fit(
            np.ones((8, 8)),
            np.ones((8, width)),
            batch_size=4,
            verbose=0,
            callbacks=[ring.callbacks.BroadcastGlobalVariablesCallback(0)],
        ),
    )
    assert "float32[8, 4]" in str(error)
    assert "float32[8, 5]" in str(error)


def seeds_differ():
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dropout(0.5, seed=7), keras.layers.Dense(1)]
    )
    model.compile(sgd(), "mse")
    state = [v for v in model.variables if v.name == "seed_generator_state"]
    model.fit(
        np.ones((8, 8)),
        np.ones((8, 1)),
        batch_size=4,
        verbose=0,
        callbacks=[ring.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    assert len(state) == 1
    assert keras.ops.convert_to_numpy(state[0])[0] == 7 + ring.rank()


def restored_by_root():
    """BackupAndRestore on rank 0: all ranks go on at its epoch with its state."""
    folder = ops.broadcast_object(tempfile.mkdtemp() if ring.rank() == 0 else None, 0, "folder")

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    def callbacks(*more):
        backup = keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))
        return ring.callbacks.default([backup, *more])

    def adam():
        return ring.DistributedOptimizer(keras.optimizers.Adam(0.01))

    try:
        fit(adam(), callbacks(Interrupt()), epochs=4)
        raise AssertionError("not interrupted")
    except InterruptedError:
        pass
    model, history = fit(adam(), callbacks(), epochs=4, seed=77 + ring.rank())
    assert history.epoch == [2, 3], history.epoch
    whole, _ = fit(adam(), callbacks(), epochs=4)
    assert task.difference(model.get_weights(), whole.get_weights()) <= 1e-6
    task.assert_ranks_equal(model.get_weights())
    ringplug.barrier()
    if ring.rank() == 0:
        shutil.rmtree(folder)


def labelled(samples, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 8)).astype("float32")
    y = (x[:, :1] + 0.7 * rng.normal(size=(samples, 1)) > 0).astype("float32")
    return x, y


def classifier():
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(1, activation="sigmoid")]
    )
    model.compile(
        sgd(0.0),  # the weights stay, so training metrics can be compared with one process's
        "binary_crossentropy",
        metrics=[
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
            keras.metrics.R2Score(name="r2"),
            keras.metrics.TruePositives(name="hits"),
        ],
    )
    return model


def metrics_are_those_of_all_data():
    x, y = labelled(96, 1)
    vx, vy = labelled(64, 2)
    vpart = slice(0, 40) if ring.rank() == 0 else slice(40, 64)  # uneven on purpose
    model = classifier()
    seen = Logs()
    history = model.fit(
        task.mine(x),
        task.mine(y),
        batch_size=task.BATCH,
        validation_data=(vx[vpart], vy[vpart]),
        epochs=2,
        verbose=0,
        callbacks=[ring.callbacks.MetricAverageCallback(), seen],
    )
    alone = classifier()
    train = alone.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    valid = alone.evaluate(vx, vy, batch_size=16, verbose=0, return_dict=True)
    for key in ("loss", "accuracy", "auc", "precision", "recall", "r2", "hits"):
        for epoch in seen.epochs:
            np.testing.assert_allclose(epoch[key], train[key], rtol=2e-6, err_msg=key)
            np.testing.assert_allclose(epoch["val_" + key], valid[key], rtol=2e-6, err_msg=key)
        assert history.history["val_" + key] == [epoch["val_" + key] for epoch in seen.epochs]
    mean = ring.allreduce(
        alone.evaluate(vx[vpart], vy[vpart], verbose=0, return_dict=True)["auc"], name="mean auc"
    )
    assert abs(mean - valid["auc"]) > 1e-4, "a mean of ranks' results would pass this test"
    assert ops.allgather_object(seen.epochs, "logs")[0] == seen.epochs


def metrics_with_validation_on_one_rank():
    x, y = labelled(96, 1)
    model = classifier()
    seen = Logs()
    validation = {"validation_data": labelled(32, 3)} if ring.rank() == 0 else {}
    model.fit(
        task.mine(x),
        task.mine(y),
        batch_size=task.BATCH,
        epochs=1,
        verbose=0,
        callbacks=[ring.callbacks.MetricAverageCallback(), seen],
        **validation,
    )
    valid = classifier().evaluate(*labelled(32, 3), verbose=0, return_dict=True)
    np.testing.assert_allclose(seen.epochs[0]["val_auc"], valid["auc"], rtol=1e-6)


class Reporting(keras.callbacks.Callback):
    """Adds values to the logs that are not results of metrics."""

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = float(ring.rank())
        logs["accuracy"] = 10.0 * ring.rank()
        logs["note"] = "text"
        logs[f"only {ring.rank()}"] = 3.0


def other_values_are_averaged():
    x, y = labelled(96, 1)
    count = 32 if ring.rank() == 0 else 96  # samples are the weights
    model = classifier()
    seen = Logs()
    model.fit(
        np.resize(x, (count, 8)),
        np.resize(y, (count, 1)),
        batch_size=count // 4,
        verbose=0,
        callbacks=[Reporting(), ring.callbacks.MetricAverageCallback(), seen],
    )
    (logs,) = seen.epochs
    assert np.isclose(logs["mine"], 0.75)
    assert np.isclose(logs["accuracy"], 7.5)
    assert logs["note"] == "text"
    assert logs["only 0"] == logs["only 1"] == 3.0


def root_only_and_best_checkpoint():
    folder = ops.broadcast_object(tempfile.mkdtemp() if ring.rank() == 0 else None, 0, "folder2")
    calls = []

    class Count(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            calls.append(epoch)

        def on_train_batch_end(self, batch, logs=None):
            calls.append("batch")

    path = os.path.join(folder, f"best{ring.rank()}.keras")
    best = ring.callbacks.BestModelCheckpoint(monitor="loss", filepath=path)
    model, _ = fit(
        sgd(), [ring.callbacks.MetricAverageCallback(), ring.callbacks.RootOnly(Count()), best]
    )
    assert calls == (["batch"] * STEPS + [0] if ring.rank() == 0 else [])
    assert os.path.exists(path) == (ring.rank() == 0)
    if ring.rank() == 0:
        loaded = keras.models.load_model(path)
        assert task.difference(loaded.get_weights(), model.get_weights()) == 0
        shutil.rmtree(folder)
    ringplug.barrier()
    task.assert_raises_everywhere(
        ringplug.UsageError, "filepath", lambda: fit(sgd(), [ring.callbacks.BestModelCheckpoint()])
    )


def batch_norm_statistics():
    def train(callbacks):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        )
        model.compile(sgd(), "mse")
        x, y = task.data()
        model.fit(
            task.mine(x) * (1 + ring.rank()),
            task.mine(y),
            batch_size=task.BATCH,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        layer = model.layers[0]
        return [keras.ops.convert_to_numpy(v) for v in (layer.moving_mean, layer.moving_variance)]

    local = train([])
    averaged = train([ring.callbacks.SyncBatchNormStatsCallback()])
    every = ops.allgather_object(local, "local statistics")
    for index in range(2):
        mean = np.mean([rank[index] for rank in every], axis=0)
        assert np.abs(every[0][index] - every[1][index]).max() > 1e-3
        np.testing.assert_allclose(averaged[index], mean, rtol=1e-6)
    task.assert_ranks_equal(averaged)


class StopAt(keras.callbacks.Callback):
    """One rank wants to stop after a batch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.when = (epoch, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if ring.rank() == 1 and (self.epoch, batch) == self.when:
            self.model.stop_training = True


def stop_together():
    for every, expected in ((None, [0, 1]), (2, [0, 1])):
        batches = Rates()
        optimizer = sgd()
        callbacks = [StopAt(1, 1), batches, ring.callbacks.StopTogetherCallback(every)]
        model, history = fit(optimizer, callbacks, epochs=4)
        assert history.epoch == expected
        # in the second epoch: agreed before its batch 2, in which all stop
        count = STEPS * 2 if every is None else STEPS + 3
        assert len(batches.seen) == count, (every, len(batches.seen))
        assert model.stop_training
        task.assert_ranks_equal(model.get_weights())

    class EarlyOnOne(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if ring.rank() == 0 and epoch == 1:
                self.model.stop_training = True

    _, history = fit(sgd(), ring.callbacks.default([EarlyOnOne()]), epochs=5)
    assert history.epoch == [0, 1]


def nan_on_one_rank():
    x, y = (task.mine(array) for array in task.data())
    if ring.rank() == 1:
        y[-3] = np.nan
    model = task.make_model()
    model.compile(sgd(), "mse")
    callbacks = ring.callbacks.default([keras.callbacks.TerminateOnNaN()])
    history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    assert history.epoch == [0]


def uneven_batches():
    count = 16 + 8 * ring.rank()
    model = task.make_model()
    model.compile(sgd(), "mse")
    error = task.assert_raises_everywhere(
        ringplug.MismatchError,
        "different numbers of batches",
        lambda: model.fit(
            np.ones((count, 8)),
            np.ones((count, 3)),
            batch_size=8,
            verbose=0,
            callbacks=[ring.callbacks.MetricAverageCallback()],
        ),
    )
    assert "rank 0: 2, rank 1: 3" in str(error)


def steps_that_were_not_reduced():
    x, y = task.data()
    x, y = task.mine(x), task.mine(y)

    def fit_plain(callbacks, prepare, optimizer=None):
        model = task.make_model()
        model.compile(optimizer or keras.optimizers.SGD(0.01), "mse")
        prepare(model)
        model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)

    def never(model):
        pass

    def too_late(model):
        # The step is traced with the plain optimizer, then the optimizer is swapped.
        model.fit(x, y, batch_size=8, verbose=0)
        ring.DistributedOptimizer(model.optimizer)

    def replaced(model):
        model.optimizer = keras.optimizers.SGD(0.01)

    ours = [ring.callbacks.MetricAverageCallback()]
    expect = task.assert_raises_everywhere
    kind = ringplug.NotReducedError
    expect(kind, "does not combine gradients", lambda: fit_plain(ours, never))
    expect(kind, "does not combine gradients", lambda: fit_plain(ours, replaced, sgd()))
    if BACKEND != "torch":  # whose steps are eager, so that the swap takes effect at once
        expect(kind, "without combining", lambda: fit_plain(ours, too_late))
        # without any of our callbacks, fit itself raises
        expect(kind, "without combining", lambda: fit_plain([], too_late))


def quiet_but_on_rank_zero():
    said = io.StringIO()
    with redirect_stdout(said):
        # many batches, without a callback that makes Keras run the progress bar synchronously
        fit(sgd(), [ring.callbacks.MetricAverageCallback()], epochs=2, verbose="auto")
        fit(sgd(), ring.callbacks.default(), epochs=2, verbose=2)
        fit(sgd(), None, epochs=2, verbose=1)
    if ring.rank() == 0:
        assert "Epoch 2/2" in said.getvalue(), said.getvalue()
        assert "loss:" in said.getvalue()
    else:
        assert said.getvalue() == "", said.getvalue()


def order_of_the_defaults():
    names = ring.callbacks
    mine = names.MetricAverageCallback()
    checkpoint = keras.callbacks.ModelCheckpoint("x.keras")
    stopping = keras.callbacks.EarlyStopping()
    backup = keras.callbacks.BackupAndRestore("backup")
    made = names.default([checkpoint, mine, stopping, backup], root_rank=1)
    assert isinstance(made[0], names.RootOnly)
    assert made[0].callback is backup
    assert isinstance(made[1], names.BroadcastGlobalVariablesCallback)
    assert made[1].root_rank == 1
    assert made[2] is mine
    assert isinstance(made[3], names.SyncBatchNormStatsCallback)
    assert isinstance(made[4], names.ScaleLearningRateCallback)
    assert made[5].callback is checkpoint
    assert made[6] is stopping
    assert isinstance(made[7], names.StopTogetherCallback)
    assert len(made) == 8


def values():
    rank = ring.rank()
    assert ring.allreduce(float(rank), name="number") == 0.5
    assert ring.allreduce(rank, op=ring.Sum, name="int") == 1
    variable = keras.Variable(np.full((2,), rank, "float32"))
    mean = ring.allreduce(variable, name="variable")
    np.testing.assert_allclose(keras.ops.convert_to_numpy(mean), [0.5, 0.5])
    gathered = ring.allgather(np.full((1 + rank, 2), rank), name="rows")
    np.testing.assert_array_equal(gathered[:, 0], [0, 1, 1])
    assert ring.broadcast(10.0 + rank, 1, name="root") == 11.0
    ring.broadcast_global_variables(1, variable)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), [1.0, 1.0])
    assert (ring.local_rank(), ring.local_size()) == (rank, 2)
    assert (ring.cross_rank(), ring.cross_size()) == (0, 1)


CHECKS = [
    warmup,
    warmup_to_a_given_rate,
    warmup_of_a_schedule,
    warmup_with_several_steps_per_execution,
    schedule,
    broadcast,
    broadcast_finds_different_models,
    seeds_differ,
    restored_by_root,
    metrics_are_those_of_all_data,
    metrics_with_validation_on_one_rank,
    other_values_are_averaged,
    root_only_and_best_checkpoint,
    batch_norm_statistics,
    stop_together,
    nan_on_one_rank,
    uneven_batches,
    steps_that_were_not_reduced,
    quiet_but_on_rank_zero,
    order_of_the_defaults,
    values,
]
