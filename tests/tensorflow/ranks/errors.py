"""What ranks get that do not agree, or ask for what cannot be; the process goes on after it."""

import pickle

import numpy as np
import pytest
import tensorflow as tf

import ringplug
import ringplug.tensorflow as ring
from ringplug.tensorflow.failures import latched
from tests.checks import check
from tests.tensorflow.ranks.modes import MODES, UNCOMPILED


def still_works(size):
    assert float(ring.allreduce(1.0, op=ring.Sum)) == size
    assert float(tf.function(lambda x: ring.allreduce(x, op=ring.Sum))(1.0)) == size


def mismatch(function, *args, modes=MODES, match):
    """`function` fails alike on all ranks, in each mode, and all is well afterwards."""
    for name, mode in modes.items():
        with pytest.raises(tf.errors.FailedPreconditionError, match=match) as caught:
            mode(function)(*args)
        if name == "eager":
            assert isinstance(caught.value, ringplug.MismatchError)
            assert isinstance(caught.value, ring.HorovodInternalError)
            assert isinstance(caught.value, RuntimeError)
        else:
            cause = latched.take()
            assert isinstance(cause, ringplug.MismatchError)
            assert str(cause) in str(caught.value)
        still_works(ring.size())


@check
def ranks_that_disagree(rank, size):
    if size < 2:
        return
    odd = rank % 2
    numbers = tf.ones((2, size + odd))
    mismatch(ring.allreduce, numbers, match="shapes: ranks? 0")
    mismatch(ring.allreduce, tf.ones(3, tf.int32 if odd else tf.float32), match="data types")
    mismatch(ring.allreduce, tf.ones([6] if odd else [2, 3]), match="shapes")
    mismatch(
        lambda x: ring.allreduce(x, op=ring.Sum if odd else ring.Max), numbers[:, :1], match="red"
    )
    mismatch(lambda x: ring.allreduce(x, prescale_factor=1.0 + odd), numbers[:, :1], match="scale")
    mismatch(ring.allgather, numbers, match="dimensions")
    mismatch(ring.allgather, tf.ones(3, tf.int32 if odd else tf.float32), match="data types")
    mismatch(lambda x: ring.broadcast(x, 0), numbers, match="shapes")
    mismatch(lambda x: ring.broadcast(x, odd), tf.ones(3), match="root")
    mismatch(ring.alltoall, tf.ones((size, 2 + odd)), match="dimensions")
    mismatch(ring.reducescatter, tf.ones((size, 2 + odd)), match="shapes")
    mismatch(ring.grouped_allreduce, [tf.ones(2)] * (1 + odd), match="Mismatched", modes=UNCOMPILED)
    mismatch(
        lambda x: (ring.allgather if odd else ring.allreduce)(x, name="both"),
        tf.ones(2),
        match="operations",
    )


@check
def what_one_rank_must_not_ask(rank, size):
    """It gets ValueError and InvalidArgumentError; the others hear of it."""
    if size < 2:
        return
    wrong = rank == size - 1
    cases = [
        (lambda: ring.alltoall(tf.ones(size + 1 if wrong else size)), "evenly"),
        (lambda: ring.alltoall(tf.ones(size), [1 + wrong] * size), "splits"),
        (lambda: ring.alltoall(tf.ones(size), [1] * (size - wrong)), "splits"),
        (lambda: ring.broadcast(tf.ones(2), 77 if wrong else 0), "root"),
        (lambda: ring.allreduce(tf.constant([True]) if wrong else tf.ones(1)), "bool"),
        (lambda: ring.reducescatter(tf.ones(size), op=ring.Min if wrong else ring.Sum), "op="),
    ]
    for call, text in cases:
        for mode in UNCOMPILED.values():
            kind = tf.errors.InvalidArgumentError if wrong else tf.errors.FailedPreconditionError
            with pytest.raises(kind, match=text) as caught:
                mode(call)()
            if mode is UNCOMPILED["eager"]:
                other = ValueError if wrong else ringplug.MismatchError
                assert isinstance(caught.value, other)
            still_works(size)


@check
def what_no_rank_may_ask(rank, size):
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))
    for mode in UNCOMPILED.values():
        for op in (ring.Adasum, ring.Min, ring.Max, ring.Product):
            with pytest.raises(NotImplementedError):
                mode(lambda op=op: ring.allreduce(slices, op=op))()
            with pytest.raises(NotImplementedError):
                mode(lambda op=op: ring.grouped_allreduce([slices], op=op))()
        for factor in ("prescale_factor", "postscale_factor"):
            with pytest.raises(NotImplementedError):
                mode(lambda factor=factor: ring.allreduce(slices, **{factor: 2.0}))()
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            mode(lambda: ring.allgather(slices))()
        with pytest.raises(ValueError, match="not a reduction"):
            mode(lambda: ring.allreduce(1.0, op=77))()
    with pytest.raises(tf.errors.FailedPreconditionError):
        ring.allgather(tf.constant(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError):
        ring.allreduce(tf.constant(["text"]))
    still_works(size)


@check
def what_xla_cannot_do(rank, size):
    compiled = MODES["xla"]
    with pytest.raises(NotImplementedError, match="Leave splits out"):
        compiled(lambda x: ring.alltoall(x, [1] * size))(tf.ones(size))

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([None], tf.float32)])
    def inner(x):
        return ring.allreduce(x)

    with pytest.raises(NotImplementedError, match="known shape"):
        inner(tf.ones(2))
    if size > 1:
        rows = tf.ones((rank + 1, 2))
        mismatch(ring.allgather, rows, match="same number", modes={"xla": compiled})
        rows = tf.ones(((rank + 1) * size, 2))
        mismatch(ring.alltoall, rows, match="same number", modes={"xla": compiled})
    still_works(size)


@check
def process_sets_of_others(rank, size):
    if size < 2:
        return
    first = ring.add_process_set([0])
    rest = ring.add_process_set(range(1, size))
    other = rest if rank == 0 else first
    for mode in UNCOMPILED.values():
        for operation in (ring.allreduce, ring.allgather, ring.alltoall, ring.reducescatter):

            def call(x, operation=operation):
                return operation(x, process_set=other)

            with pytest.raises(tf.errors.InvalidArgumentError):
                mode(call)(tf.ones(size))
        unknown = ring.ProcessSet([0])
        unknown.process_set_id = 10

        def reduce(unknown=unknown):
            return ring.allreduce(1.0, process_set=unknown)

        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            mode(reduce)()
    with pytest.raises(ValueError, match="there is a process set"):
        ring.add_process_set([0])
    ring.remove_process_set(rest)
    ring.remove_process_set(first)
    still_works(size)


@check
def errors_can_be_pickled(rank, size):
    with pytest.raises(ValueError, match="splits") as caught:
        ring.alltoall(tf.ones(size), [1, 2, 3, 4, 5])
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)
    assert isinstance(again, tf.errors.InvalidArgumentError)


@check
def a_failing_update_changes_nothing(rank, size):
    """What comes after a failed operation in a function does not happen."""
    if size < 2:
        return
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def update(gradient):
        variable.assign_sub(ring.allreduce(gradient, name="update")[:2])

    with pytest.raises(tf.errors.FailedPreconditionError):
        update(tf.ones(2 + rank % 2))
    np.testing.assert_array_equal(variable.numpy(), [1, 2])


@check
def nothing_works_after_shutdown(rank, size):
    ring.shutdown()
    assert not ring.is_initialized()
    for mode in UNCOMPILED.values():
        with pytest.raises((ValueError, tf.errors.FailedPreconditionError)):
            mode(lambda: ring.allreduce(1.0))()
    with pytest.raises(ValueError, match="init"):
        ring.size()
    with pytest.raises(tf.errors.FailedPreconditionError, match="init"):
        ring.allreduce(1.0)
    assert int(ring.process_set_included_op()) == -1
    ring.init()
    still_works(size)
