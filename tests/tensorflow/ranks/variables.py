"""Variables and objects between ranks, elastic states."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringplug.tensorflow as ring
from ringplug.backend import ops, runtime
from tests.checks import check
from tests.tensorflow.ranks.modes import MODES, UNCOMPILED


def of_every_kind(rank):
    kinds = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.int64, tf.uint16, tf.bool]
    made = [tf.Variable(tf.cast(tf.fill([2, n], rank), kind)) for n, kind in enumerate(kinds)]
    return [*made, tf.Variable(float(rank)), keras.Variable(np.full(3, rank, "float32"))]


def broadcasting(variables, root):
    # A tf.function would make tensors of Keras variables that are its arguments.
    return lambda: ring.broadcast_variables(variables, root_rank=root)


@check
def broadcast_variables(rank, size):
    for mode in MODES.values():
        for root in {0, size - 1}:
            variables = of_every_kind(rank)
            mode(broadcasting(variables, root))()
            for variable in variables:
                assert set(np.asarray(variable).reshape(-1).astype(int)) <= {int(bool(root)), root}
    assert ring.broadcast_variables([tf.Variable(1.0)], 0, inplace=True) is None
    assert ring.broadcast_variables([], 0) is None


@check
def many_variables_are_one_message(rank, size):
    calls = []
    start = ops.start

    def counting(*args, **kwargs):
        calls.append(args[0])
        return start(*args, **kwargs)

    ops.start = counting
    try:
        variables = [tf.Variable(tf.fill([5], float(rank))) for _ in range(300)]
        ring.broadcast_variables(variables, 0)
    finally:
        ops.start = start
    assert calls == ["broadcast"]
    assert all(variable.numpy().tolist() == [0.0] * 5 for variable in variables)


@check
def large_variables_are_several(rank, size):
    pieces = [tf.Variable(tf.fill([9 * 2**20], float(rank))) for _ in range(2)]
    ring.broadcast_variables(pieces, size - 1)
    assert all((piece.numpy() == size - 1).all() for piece in pieces)


@check
def broadcast_in_place(rank, size):
    for mode in MODES.values():
        variables = [tf.Variable([float(rank)]), tf.Variable([[rank]])]

        def function(variables=variables):
            return ring.broadcast_(variables, size - 1, "in_place")

        values = mode(function)()
        for value, variable in zip(values, variables, strict=True):
            assert value.dtype == variable.dtype
            assert value.numpy().item() == variable.numpy().item() == size - 1


@check
def variables_that_differ(rank, size):
    if size < 2:
        return
    for mode in UNCOMPILED.values():
        for variables in (
            [tf.Variable(tf.ones(2 + rank % 2))],
            [tf.Variable(tf.ones(2, tf.float64 if rank % 2 else tf.float32))],
            [tf.Variable(1.0)] * (1 + rank % 2),
        ):
            with pytest.raises(tf.errors.FailedPreconditionError):
                mode(broadcasting(variables, 0))()


@check
def in_process_sets(rank, size):
    if size < 2:
        return
    evens = ring.add_process_set(range(0, size, 2))
    odds = ring.add_process_set(range(1, size, 2))
    mine, root = (odds, 1) if rank % 2 else (evens, 0)
    variable = tf.Variable([rank])
    ring.broadcast_variables([variable], root_rank=root, process_set=mine)
    assert variable.numpy().tolist() == [root]
    assert ring.broadcast_object({"from": rank}, root, process_set=mine) == {"from": root}
    assert ring.allgather_object(rank, process_set=mine) == list(range(root, size, 2))
    ring.remove_process_set(odds)
    ring.remove_process_set(evens)


@check
def objects(rank, size):
    wanted = {"hello": 123, 0: [1, 2]}
    assert ring.broadcast_object(wanted if rank == 0 else {}, root_rank=0) == wanted
    assert ring.broadcast_object(wanted if rank == 0 else None) == wanted
    assert ring.broadcast_object_fn(root_rank=size - 1)(rank) == size - 1
    assert ring.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert ring.broadcast_object(lambda x: x + rank, name="function")(1) == 1


@check
def there_are_no_global_variables(rank, size):
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        ring.broadcast_global_variables(root_rank=0)


@check
def elastic_state_of_variables(rank, size):
    # Horovod's own use of it.
    variables = [tf.Variable([[rank + 1.0, rank + 1.0]]), tf.Variable(rank + 1.0)]
    state = ring.elastic.TensorFlowState(variables, batch=20 + rank, epoch=10 + rank)
    state.sync()
    assert [float(np.mean(v)) for v in variables] == [1.0, 1.0]
    assert (state.batch, state.epoch) == (20, 10)
    variables[1].assign(5.0)
    state.batch = 21
    state.restore()
    assert (float(variables[1]), state.batch) == (1.0, 20)
    variables[1].assign(5.0)
    state.batch = 21
    state.commit()
    variables[1].assign(6.0)
    state.restore()
    assert (float(variables[1]), state.batch) == (5.0, 21)


@check
def elastic_state_of_keras(rank, size):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    for variable in model.variables:
        variable.assign(tf.ones_like(variable) * rank)
    state = ring.elastic.TensorFlowKerasState(model, batch=rank)
    state.sync()
    assert all((np.asarray(v) == 0).all() for v in model.variables)
    assert state.batch == 0
    state.commit()
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert int(model.optimizer.iterations) == 1
    state.restore()
    assert all((np.asarray(v) == 0).all() for v in model.variables)
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(ValueError, match="build"):
        ring.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))


@check
def elastic_run_restores(rank, size):
    if size < 2:
        return
    variable = tf.Variable(float(rank))
    state = ring.elastic.TensorFlowState([variable], step=0)
    step = tf.function(lambda x: ring.allreduce(x, name="elastic"), reduce_retracing=True)

    @ring.elastic.run
    def train(state):
        assert float(variable) == 0.0
        variable.assign(1.0)
        state.step = 1
        state.commit()
        variable.assign(2.0)
        step(tf.ones(1 + rank % 2))

    with pytest.raises(ring.HorovodInternalError, match="Mismatched"):
        train(state)
    assert (float(variable), state.step) == (1.0, 1)

    @ring.elastic.run
    def other(state):
        raise tf.errors.UnknownError(None, None, "of another kind")

    with pytest.raises(tf.errors.UnknownError, match="of another kind") as caught:
        other(state)
    assert not isinstance(caught.value, ring.HorovodInternalError)
    assert runtime.is_initialized()
