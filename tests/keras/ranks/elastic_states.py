"""States of elastic training, and the callbacks that keep them."""

import keras
import numpy as np

import ringplug.keras as ring
from tests.keras.ranks import task

BACKEND = keras.backend.backend()


def value(tensor):
    return np.array(keras.ops.convert_to_numpy(tensor))


def filled(model, number):
    model.set_weights([np.full(w.shape, number, "float32") for w in model.get_weights()])


def a_state_is_that_of_rank_zero():
    rank = ring.rank()
    model = task.make_model()
    filled(model, 1.0 + rank)
    optimizer = keras.optimizers.Adam(0.001 * (1 + rank))
    state = ring.elastic.KerasState(model, optimizer, batch=20 + rank, epoch=10 + rank)
    state.sync()
    assert all((w == 1).all() for w in state.model.get_weights())
    assert (state.batch, state.epoch) == (20, 10)
    assert np.isclose(value(optimizer.learning_rate), 0.001)
    task.assert_ranks_equal([value(v).astype("float64") for v in optimizer.variables])

    filled(model, 7.0)
    for slot in optimizer.variables[2:]:
        slot.assign(np.full(slot.shape, 3.0, "float32"))
    state.batch, state.epoch = 21, 11
    state.restore()
    assert all((w == 1).all() for w in model.get_weights())
    assert all((value(slot) == 0).all() for slot in optimizer.variables[2:])
    assert (state.batch, state.epoch) == (20, 10)

    filled(model, 7.0)
    state.batch, state.epoch = 21, 11
    state.commit()
    filled(model, 8.0)
    state.restore()
    assert all((w == 7).all() for w in model.get_weights())
    assert (state.batch, state.epoch) == (21, 11)


class Stop(Exception):
    """Ends a training."""


class Interrupt(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise Stop


class Commits:
    """Counts what a callback asks of a state."""

    def __init__(self):
        self.commits = 0

    def commit(self):
        self.commits += 1


def commits_are_counted():
    x, y = task.data()
    for every, expected in ((1, 2 * 6 + 2), (4, 2 * 1 + 2), (100, 2)):
        counted = Commits()
        callback = ring.elastic.CommitStateCallback(counted, batches_per_commit=every)
        model = task.make_model()
        model.compile("sgd", "mse")
        if every == 4:  # a new epoch does not begin to count anew: 4, 8, 12 of 12 batches
            expected = 3 + 2
        model.fit(x[:48], y[:48], batch_size=8, epochs=2, verbose=0, callbacks=[callback])
        assert counted.commits == expected, (every, counted.commits)
    task.assert_raises_everywhere(
        ValueError, "batches_per_commit", lambda: ring.elastic.CommitStateCallback(counted, 0)
    )


def training_goes_on_from_the_last_commit():
    x, y = task.data()
    # As many batches on every rank.
    rows = 8 * 3 * ring.size()
    mine, its = task.mine(x[:rows]), task.mine(y[:rows])
    steps = len(mine) // 4
    elastic = ring.elastic
    optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model = task.make_model(seed=5 + ring.rank())
    model.compile(optimizer, "mse")
    state = elastic.KerasState(model, batch=0, epoch=0)
    seen = []

    @elastic.run
    def train(state, interrupt):
        callbacks = [
            elastic.UpdateBatchStateCallback(state),
            elastic.UpdateEpochStateCallback(state),
            elastic.CommitStateCallback(state, batches_per_commit=2),
            *interrupt,
        ]
        while state.epoch < 3:
            skip = state.batch * 4
            state.model.fit(
                mine[skip:],
                its[skip:],
                batch_size=4,
                epochs=state.epoch + 1,
                initial_epoch=state.epoch,
                shuffle=False,
                verbose=0,
                callbacks=callbacks,
            )
            seen.append((state.epoch, state.batch))
        return "done"

    try:
        train(state, [Interrupt(1, 3)])
        raise AssertionError("not interrupted")
    except Stop:
        pass
    assert seen == [(1, 0)]
    assert (state.epoch, state.batch) == (1, 3)
    state.restore()
    assert (state.epoch, state.batch) == (1, 2), (state.epoch, state.batch)
    assert train(state, []) == "done"
    assert seen == [(1, 0), (2, 0), (3, 0)]
    weights = model.get_weights()
    task.assert_ranks_equal(weights)

    whole = [np.concatenate([a[k : k + 4] for k in order(steps)]) for a in (x, y)]
    alone = task.fit(
        task.make_model(seed=5),
        keras.optimizers.SGD(0.05, momentum=0.9),
        *whole,
        4 * ring.size(),
    )
    assert task.difference(weights, alone) < 1e-5


def order(steps):
    """Where the samples begin that all ranks take in one step, in fours."""
    size, starts = ring.size(), []
    for step in range(steps):
        for rank in range(size):
            # `task.mine` deals in eights.
            eight, half = divmod(step, 2)
            starts.append(8 * (eight * size + rank) + 4 * half)
    return starts


CHECKS = [
    a_state_is_that_of_rank_zero,
    commits_are_counted,
    training_goes_on_from_the_last_commit,
]
