"""What every operation computes, eagerly, in graphs and under XLA."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import ringplug.tensorflow as ring
from tests.checks import check
from tests.tensorflow.ranks.modes import MODES, UNCOMPILED

INTEGERS = [tf.uint8, tf.int8, tf.int32, tf.int64]
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
MOVED = [tf.uint16, tf.int16, tf.bool, *INTEGERS, *FLOATS]


def of_rank(rank, shape=(3, 2), dtype=tf.float32):
    """Small numbers that depend on the rank."""
    numbers = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape) + rank
    return tf.cast(numbers % 2 if dtype == tf.bool else numbers, dtype)


def total(size, shape=(3, 2)):
    return sum(of_rank(r, shape, tf.float64).numpy() for r in range(size))


def equal(result, expected, dtype=None):
    if dtype is not None:
        assert result.dtype == dtype, (result.dtype, dtype)
    result = np.asarray(tf.cast(result, tf.float64))
    np.testing.assert_allclose(result, np.asarray(expected, np.float64), rtol=1e-2)
    assert result.shape == np.shape(expected)


@check
def allreduce_every_dtype_and_shape(rank, size):
    for name, mode in MODES.items():
        shapes = [(), (4,), (2, 3), (2, 1, 2), (0, 3)]
        given = [of_rank(rank, s, d) for d in [*INTEGERS, *FLOATS] for s in shapes]
        results = mode(lambda *ts: [ring.allreduce(t, op=ring.Sum) for t in ts])(*given)
        for result, tensor in zip(results, given, strict=True):
            assert result.shape == tensor.shape, name
            equal(result, total(size, tensor.shape), tensor.dtype)
        results = mode(lambda *ts: [ring.allreduce(t) for t in ts])(*given)
        for result, tensor in zip(results, given, strict=True):
            mean = total(size, tensor.shape) / size
            equal(result, np.trunc(mean) if tensor.dtype.is_integer else mean, tensor.dtype)


@check
def other_reductions_and_scales(rank, size):
    x = of_rank(rank)
    every = np.stack([of_rank(r).numpy() for r in range(size)])
    for mode in MODES.values():
        smallest, largest, product, scaled = mode(
            lambda x: (
                ring.allreduce(x, op=ring.Min),
                ring.allreduce(x, op=ring.Max),
                ring.allreduce(x, op=ring.Product),
                ring.allreduce(x, op=ring.Sum, prescale_factor=0.5, postscale_factor=3.0),
            )
        )(x)
        equal(smallest, every.min(0))
        equal(largest, every.max(0))
        equal(product, every.prod(0))
        equal(scaled, every.sum(0) * 1.5)
        if size in (2, 4):
            # All ranks the same: their sum would count it twice, Adasum counts it once.
            same = mode(lambda x: ring.allreduce(x, op=ring.Adasum))(of_rank(0))
            equal(same, of_rank(0))
    if size == 3:
        with pytest.raises(NotImplementedError):
            ring.allreduce(x, op=ring.Adasum)


@check
def what_a_tensor_may_be(rank, size):
    import keras

    mean = (size - 1) / 2
    equal(ring.allreduce(float(rank)), mean)
    equal(ring.allreduce(np.full(2, rank, np.float32)), [mean] * 2, tf.float32)
    equal(ring.allreduce([float(rank)]), [mean])
    equal(ring.allreduce(tf.Variable([float(rank)])), [mean])
    equal(ring.allreduce(keras.Variable(np.full(2, rank, "float32"))), [mean] * 2)


@check
def average_is_an_older_spelling(rank, size):
    x = of_rank(rank)
    for flag, expected in ((True, total(size) / size), (False, total(size))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            equal(ring.allreduce(x, flag), expected)
        assert any(issubclass(w.category, DeprecationWarning) for w in caught)
    for grouped in (ring.allreduce, lambda x, **kw: ring.grouped_allreduce([x], **kw)):
        with pytest.raises(ValueError, match="op and average"):
            grouped(x, average=True, op=ring.Sum)


@check
def horovods_positions(rank, size):
    """The signatures are Horovod's, position by position."""
    x, everyone = of_rank(rank), ring.global_process_set
    result = ring.allreduce(
        x, None, "", "", ring.Compression.none, ring.Sum, 1.0, 2.0, "position", everyone, True
    )
    equal(result, total(size) * 2)
    (result,) = ring.grouped_allreduce(
        [x], None, "", "", ring.Compression.none, ring.Sum, 1.0, 2.0, everyone, True, "group"
    )
    equal(result, total(size) * 2)
    assert ring.allgather(x, "gather", True, everyone).shape[0] == 3 * size
    equal(ring.broadcast(x, 0, "cast", True, everyone), of_rank(0))
    rows = tf.repeat(x[:1], size, 0)
    assert ring.alltoall(rows, None, "all", True, everyone).shape == rows.shape
    none = ring.Compression.none
    result = ring.reducescatter(rows, "", none, ring.Sum, "scatter", everyone, True, 1.0, 2.0)
    equal(result, total(size)[:1] * 2)
    (result,) = ring.grouped_reducescatter([rows], "", none, ring.Sum, everyone, 1.0, 2.0)
    equal(result, total(size)[:1] * 2)
    assert int(ring.size_op(0, "n")) == size


@check
def grouped_allreduce_of_mixed_kinds(rank, size):
    slices = tf.ones((1, 2)) * float(rank + 1)

    def function(a, b, values):
        sparse = tf.IndexedSlices(values, tf.constant([rank]), tf.constant([size, 2]))
        return ring.grouped_allreduce([a, sparse, b])

    for mode in MODES.values():
        a, sparse, b = mode(function)(of_rank(rank), of_rank(rank, (4,), tf.float64), slices)
        equal(a, total(size) / size, tf.float32)
        equal(b, total(size, (4,)) / size, tf.float64)
        expected = np.repeat(np.arange(1, size + 1)[:, None] / size, 2, 1)
        equal(tf.convert_to_tensor(sparse), expected)
    assert ring.grouped_allreduce([]) == []


@check
def indexed_slices(rank, size):
    def function(values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([4, 2]))
        return ring.allreduce(slices), ring.allreduce(slices, op=ring.Sum)

    for name, mode in MODES.items():
        # As many rows on each rank as XLA wants, and more on higher ranks otherwise.
        rows = 2 if name == "xla" else rank + 1
        values, indices = tf.ones((rows, 2)), tf.range(rows) % 4
        mean, summed = mode(function)(values, indices)
        assert isinstance(mean, tf.IndexedSlices)
        expected = np.zeros((4, 2))
        for r in range(size):
            for row in range(2 if name == "xla" else r + 1):
                expected[row % 4] += 1
        equal(tf.convert_to_tensor(summed), expected)
        equal(tf.convert_to_tensor(mean), expected / size)


@check
def allgather_rows_of_all_ranks(rank, size):
    for name, mode in MODES.items():
        rows = [2] * size if name == "xla" else [r + 1 for r in range(size)]
        given = [of_rank(rank, (rows[rank], 3), dtype) for dtype in MOVED]
        results = mode(lambda *ts: [ring.allgather(t) for t in ts])(*given)
        grouped = mode(lambda *ts: ring.grouped_allgather(list(ts)))(*given)
        for result, again, dtype in zip(results, grouped, MOVED, strict=True):
            expected = tf.concat([of_rank(r, (rows[r], 3), dtype) for r in range(size)], 0)
            equal(result, tf.cast(expected, tf.float64), dtype)
            equal(again, tf.cast(expected, tf.float64), dtype)
    assert ring.grouped_allgather([]) == []


@check
def broadcast_from_every_root(rank, size):
    for mode in MODES.values():
        for root in range(size):
            given = [of_rank(rank, (2, 2), dtype) for dtype in MOVED]
            results = mode(lambda *ts, root=root: [ring.broadcast(t, root) for t in ts])(*given)
            for result, dtype in zip(results, MOVED, strict=True):
                expected = tf.cast(of_rank(root, (2, 2), dtype), tf.float64)
                equal(result, expected, dtype)


@check
def alltoall_with_and_without_splits(rank, size):
    for name, mode in MODES.items():
        given = tf.repeat(tf.range(size), 2 if name == "xla" else rank + 1)
        result = mode(ring.alltoall)(given)
        expected = size * 2 if name == "xla" else size * (size + 1) // 2
        assert result.numpy().tolist() == [rank] * expected
    for mode in UNCOMPILED.values():
        # Rank r sends r + 1 rows to each rank but the last, which gets nothing.
        splits = [rank + 1] * (size - 1) + [0]
        given = tf.repeat(tf.range(size), splits)
        result, received = mode(lambda x, s: ring.alltoall(x, s))(given, tf.constant(splits))
        rows = [r + 1 for r in range(size)] if rank < size - 1 else [0] * size
        assert received.numpy().tolist() == rows
        assert received.dtype == tf.int32
        assert result.numpy().tolist() == [rank] * sum(rows)
    result, received = ring.alltoall(tf.zeros((0, 4)), [0] * size)
    assert result.shape == (0, 4)
    assert received.numpy().tolist() == [0] * size


@check
def reducescatter_of_uneven_rows(rank, size):
    rows = 2 * size + 1
    starts = [0, 3, 5, 7][rank], [3, 5, 7, 9][rank]
    for mode in MODES.values():
        for dtype in (tf.int32, tf.int64, tf.float16, tf.float32, tf.float64):
            given = of_rank(rank, (rows, 2), dtype)
            summed, mean, (again, other) = mode(
                lambda x: (
                    ring.reducescatter(x, op=ring.Sum, prescale_factor=2.0),
                    ring.reducescatter(x),
                    ring.grouped_reducescatter([x, x * 2], op=ring.Sum),
                )
            )(given)
            expected = total(size, (rows, 2))[starts[0] : starts[1]]
            equal(summed, expected * 2, dtype)
            equal(mean, np.trunc(expected / size) if dtype.is_integer else expected / size, dtype)
            equal(again, expected, dtype)
            equal(other, expected * 2, dtype)


@check
def join_with_uneven_data(rank, size):
    for mode in UNCOMPILED.values():
        steps = rank + 1
        step = mode(lambda x: ring.allreduce(x, op=ring.Sum))
        for number in range(steps):
            # Ranks below `number` have joined.
            assert float(step(tf.constant(1.0))) == size - number
        last = mode(ring.join)()
        assert last.dtype == tf.int32
        assert int(last) == size - 1


@check
def barriers_and_queries(rank, size):
    for mode in MODES.values():

        def function():
            ring.barrier()
            return (
                ring.rank_op(),
                ring.size_op(),
                ring.local_rank_op(),
                ring.local_size_op(),
                ring.process_set_included_op(),
                ring.process_set_included_op(77),
            )

        found = [int(number) for number in mode(function)()]
        assert found == [rank, size, ring.local_rank(), ring.local_size(), 1, -3]
    assert ring.rank_op().dtype == tf.int32


@check
def process_sets(rank, size):
    if size < 2:
        return
    evens = ring.add_process_set(range(0, size, 2))
    odds = ring.add_process_set(range(1, size, 2))
    mine, members = (odds, range(1, size, 2)) if rank % 2 else (evens, range(0, size, 2))
    for mode in MODES.values():

        def function(x):
            return (
                ring.allreduce(x, op=ring.Sum, process_set=mine),
                ring.allreduce(x, process_set=mine),
                ring.allgather(x, process_set=mine),
                ring.broadcast(x, members[-1], process_set=mine),
                ring.reducescatter(tf.repeat(x, len(members), 0), process_set=mine),
                ring.size_op(mine.process_set_id),
                ring.process_set_included_op(evens.process_set_id),
            )

        results = mode(function)(tf.fill([1, 2], float(rank)))
        equal(results[0], [[sum(members)] * 2])
        equal(results[1], [[sum(members) / len(members)] * 2])
        equal(results[2], [[r] * 2 for r in members])
        equal(results[3], [[members[-1]] * 2])
        equal(results[4], [[sum(members) / len(members)] * 2])
        assert int(results[5]) == len(members)
        assert int(results[6]) == 1 - rank % 2
    ring.remove_process_set(odds)
    ring.remove_process_set(evens)


class Halves(ring.Compression.none):
    """A user's own: sends half of everything."""

    calls = 0

    @staticmethod
    def compress(tensor):
        Halves.calls += 1
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tf.cast(tensor * 4, ctx)


@check
def compression(rank, size):
    # 1 + 2**-9 needs ten bits: fp16 has eleven, bf16 has eight.
    x = tf.fill([4], 1.0 + 2.0**-9)
    for mode in MODES.values():
        for codec, expected in (
            (ring.Compression.none, 1 + 2**-9),
            (ring.Compression.fp16, 1 + 2**-9),
            (ring.Compression.bf16, 1.0),
            ("bf16", 1.0),
        ):
            result = mode(lambda x, codec=codec: ring.allreduce(x, compression=codec))(x)
            assert result.dtype == tf.float32
            assert result.numpy().tolist() == [expected] * 4, codec
        Halves.calls = 0
        equal(mode(lambda x: ring.allreduce(x, compression=Halves))(x), [2 * (1 + 2**-9)] * 4)
        assert Halves.calls == 1
    for dtype in (tf.int32, tf.bool):
        payload, ctx = ring.Compression.fp16.compress(tf.cast([1, 0], dtype))
        assert payload.dtype == ring.Compression.fp16.decompress(payload, ctx).dtype == dtype
    for dtype in (tf.float16, tf.float32, tf.float64):
        payload, ctx = ring.Compression.fp16.compress(tf.ones(2, dtype))
        assert payload.dtype == tf.float16
        assert ring.Compression.fp16.decompress(payload, ctx).dtype == dtype
    with pytest.raises(ValueError, match="compression"):
        ring.allreduce(x, compression=int)


@check
def ranks_may_trace_differently(rank, size):
    """What is traced when, how often and under which names is each rank's own affair."""

    @tf.function
    def first(x):
        with tf.name_scope(f"scope_of_rank_{rank}"):
            return ring.allreduce(x, op=ring.Sum)

    @tf.function
    def second(x):
        return ring.allgather(x), ring.allreduce(x * 2, op=ring.Sum)

    if rank % 2:
        second.get_concrete_function(tf.TensorSpec([1], tf.float32))
        first.get_concrete_function(tf.TensorSpec([1], tf.float32))
        first.get_concrete_function(tf.TensorSpec([2], tf.float32))
    for _ in range(2):
        equal(first(tf.ones(1)), [size])
        gathered, doubled = second(tf.ones(1))
        assert gathered.shape == (size,)
        equal(doubled, [2 * size])


@check
def one_name_twice_in_a_function(rank, size):
    for mode in MODES.values():

        def function(x):
            a = ring.allreduce(x, name="twice", op=ring.Sum)
            b = ring.allreduce(x * 2, name="twice", op=ring.Sum)
            return a, b

        function = mode(function)
        for _ in range(2):
            a, b = function(tf.ones(2))
            equal(a, [size] * 2)
            equal(b, [2 * size] * 2)


@check
def in_loops_and_branches(rank, size):
    @tf.function
    def function(x):
        sums = tf.zeros(())
        for number in tf.range(5):
            if number % 2 == 0:
                sums += ring.allreduce(x * tf.cast(number, x.dtype), op=ring.Sum)
        return sums

    equal(function(tf.constant(1.0)), 6 * size)


@check
def shapes_unknown_while_tracing(rank, size):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def function(x):
        return ring.allreduce(x, op=ring.Sum), ring.broadcast(x, 0), ring.allgather(x)

    for shape in ((2,), (3, 2)):
        summed, root, gathered = function(tf.ones(shape))
        equal(summed, np.full(shape, size))
        equal(root, np.ones(shape))
        assert gathered.shape == (shape[0] * size, *shape[1:])
