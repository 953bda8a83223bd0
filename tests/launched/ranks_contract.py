"""Named operations as a user calls them, on 1 to 4 ranks; started by test_contract.py."""

import os
import sys
import threading

import numpy as np

import ringplug as r
from tests.checks import check, run_checks

if len(sys.argv) > 1:
    os.environ["RINGPLUG_HOST_ID"] = sys.argv[1][int(os.environ["OMPI_COMM_WORLD_RANK"])]


def raises(kind, call, text=""):
    try:
        call()
    except kind as error:
        assert text in str(error), error  # noqa: PT017 - ranks have no pytest
        return
    raise AssertionError(f"no {kind}")


@check
def in_place(rank, size):
    total = size * (size - 1) // 2
    x = np.arange(5, dtype=np.float32) + rank
    assert r.allreduce_(x, op=r.Sum) is x
    assert np.allclose(x, size * np.arange(5) + total)
    y = np.full((4, 6), rank, np.float32)
    r.allreduce_(y[:, ::2], op=r.Max)
    assert (y[:, ::2] == size - 1).all()
    assert (y[:, 1::2] == rank).all()
    pair = [np.full(3, rank), np.full(2, 1.0 * rank)]
    handle = r.grouped_allreduce_async_(pair, op=r.Sum)
    assert r.synchronize(handle)[0] is pair[0]
    assert pair[0].tolist() == [total] * 3
    assert pair[1].tolist() == [total] * 2
    for strided in (False, True):
        z = np.full((3, 4), rank)
        part = z[:, 1:3] if strided else z
        r.broadcast_(part, size - 1)
        assert (part == size - 1).all()
        assert strided is False or (z[:, 0] == rank).all()
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    raises(r.UsageError, lambda: r.allreduce_(frozen), "in place")


@check
def grouped(rank, size):
    x = np.arange(5, dtype=np.float32)
    one, two, three = r.grouped_allreduce([x, x.astype(np.float64), np.arange(3)], op=r.Sum)
    assert (one.dtype, two.dtype) == (np.float32, np.float64)
    assert three.tolist() == [0, size, 2 * size]
    rows, ones = r.grouped_allgather([np.full((rank + 1, 2), rank), np.full(1, rank)], name="g")
    assert rows[:, 0].tolist() == [q for q in range(size) for _ in range(q + 1)]
    assert ones.tolist() == list(range(size))
    a, b = r.grouped_reducescatter([np.ones((size, 2)), np.ones(2 * size)], op=r.Sum)
    assert a.tolist() == [[size, size]]
    assert b.tolist() == [size] * 2
    assert r.grouped_allreduce([]) == []
    if size > 1:
        text = "Mismatched ALLREDUCE tensor shapes"
        tensors = [np.ones(2)] * (1 + (rank == 0))
        raises(r.MismatchError, lambda: r.grouped_allreduce(tensors, name="n"), "Mismatched")
        tensors = [np.ones(2), np.ones(2 + rank)]
        raises(r.MismatchError, lambda: r.grouped_allreduce(tensors, name="n"), text)


@check
def alltoall(rank, size):
    splits = list(range(1, size + 1))
    sent = np.arange(sum(splits)) + 100 * rank
    got, received = r.alltoall(sent, splits=splits)
    assert received.dtype == np.int32
    assert received.tolist() == [rank + 1] * size
    first = rank * (rank + 1) // 2
    assert got.tolist() == [100 * q + first + i for q in range(size) for i in range(rank + 1)]
    # Splits need not use all rows, and may be zero.
    got, received = r.alltoall(np.ones((size + 3, 2)), splits=np.eye(1, size, size - 1, int)[0])
    assert got.shape == ((size if rank == size - 1 else 0), 2)
    assert r.alltoall(np.arange(size) + 10 * rank).tolist() == [10 * q + rank for q in range(size)]
    for wrong, text in (
        ([[1] * size], "one dimension"),
        ([0.5] * size, "integers"),
        ([1] * (size + 1), f"{size + 1} splits"),
        ([9] * size, "do not fit"),
        ([-1] * size, "do not fit"),
    ):
        raises(r.UsageError, lambda w=wrong: r.alltoall(np.ones(size), splits=w), text)
    if size > 1:
        raises(r.UsageError, lambda: r.alltoall(np.ones(size + 1)), "evenly")
        raises(r.MismatchError, lambda: r.alltoall(np.ones((size, 1 + rank))), "after the first")
    raises(r.MismatchError, lambda: r.alltoall(np.float32(1)), "without dimensions")


@check
def reducescatter(rank, size):
    extra = 1 if rank == 0 else 0
    x = np.arange(2 * (size + 1)).reshape(-1, 2) * 1.0
    got = r.reducescatter(x, op=r.Sum)
    first = rank + (1 - extra if size > 1 else 0)
    rows = 2 if rank == 0 else 1
    assert np.allclose(got, size * x[first : first + rows]), (got, rank)
    assert np.allclose(r.reducescatter(x), x[first : first + rows])
    scaled = r.reducescatter(x, op=r.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert np.allclose(scaled, got)
    whole = r.reducescatter(np.full(size, -3), op=r.Average)
    assert whole.tolist() == [-3]
    raises(r.UsageError, lambda: r.reducescatter(x, op=r.Max), "Average, Sum")
    raises(r.MismatchError, lambda: r.reducescatter(np.float32(1)), "without dimensions")
    if size > 1:
        raises(
            r.MismatchError,
            lambda: r.reducescatter(x, op=r.Sum if rank else r.Average, name="op"),
            "Mismatched reduction operations",
        )
        raises(
            r.MismatchError,
            lambda: r.reducescatter(x, prescale_factor=1.0 + rank, name="scale"),
            "Mismatched prescale",
        )
        raises(
            r.MismatchError,
            lambda: r.reducescatter(np.ones(size + rank), name="shape"),
            "Mismatched REDUCESCATTER tensor shapes",
        )


@check
def compression(rank, size):
    for codec in ("fp16", "bf16"):
        x = np.full(3, 0.5 + rank)
        mean = 0.5 + (size - 1) / 2
        assert np.allclose(r.allreduce(x, compression=codec), mean)
        assert np.allclose(r.allreduce(x, compression=codec, op=r.Sum), mean * size)
        assert np.allclose(r.reducescatter(np.ones(size), compression=codec, op=r.Sum), size)
        assert r.allreduce(np.arange(3), compression=codec).tolist() == [0, 1, 2]
    raises(ValueError, lambda: r.allreduce(np.ones(3), compression="zip"), "compression='zip'")


@check
def old_spelling(rank, size):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert r.allreduce(np.ones(2), average=False).tolist() == [size, size]
        assert r.allreduce(np.ones(2), average=True).tolist() == [1, 1]
    assert [w.category for w in caught] == [DeprecationWarning] * 2
    raises(ValueError, lambda: r.allreduce(np.ones(2), average=True, op=r.Sum), "both")


@check
def any_order_from_several_threads(rank, size):
    failures = []

    def work(thread):
        try:
            order = np.random.default_rng([rank, thread]).permutation(200)
            handles = [
                (i, r.allreduce_async(np.full(3, i), op=r.Sum, name=f"{thread}.{i}")) for i in order
            ]
            for i, handle in handles:
                assert (r.synchronize(handle) == size * i).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@check
def polling(rank, size):
    handles = [r.allreduce_async(np.ones(10), name=f"poll {i}") for i in range(200)]
    unfinished = sum(not r.poll(handle) for handle in handles)
    for handle in handles:
        r.synchronize(handle)
        assert r.poll(handle)
    assert unfinished > 0


@check
def duplicate_names(rank, size):
    if size == 1:
        return
    if rank == 0:
        handle = r.allreduce_async(np.ones(3), name="twice")
        raises(ValueError, lambda: r.allreduce_async(np.ones(3), name="twice"), "already pending")
        r.barrier()
    else:
        r.barrier()
        handle = r.allreduce_async(np.ones(3), name="twice")
    assert handle.wait().tolist() == [1, 1, 1]


@check
def objects(rank, size):
    double = r.broadcast_object((lambda x: 2 * x) if rank == 0 else None)
    assert double(rank) == 2 * rank
    assert r.allgather_object({"rank": rank}) == [{"rank": q} for q in range(size)]


@check
def process_sets(rank, size):
    if size == 1:
        return
    evens = r.add_process_set(range(0, size, 2)) if size > 2 else r.add_process_set([0])
    if evens.included():
        n = evens.size()
        assert r.allreduce(1, op=r.Sum, process_set=evens) == n
        handles = [
            r.allreduce_async(np.full(2, i), op=r.Sum, name=f"e{i}", process_set=evens)
            for i in np.random.default_rng(rank).permutation(50)
        ]
        for handle in handles:
            r.synchronize(handle)
        if n > 1 and n & (n - 1) == 0:
            assert np.allclose(r.allreduce(np.ones(3), op=r.Adasum, process_set=evens), 1)
    else:
        raises(ValueError, lambda: r.allreduce(1, process_set=evens), "only they may use it")
    # The same name in two sets at a time.
    everyone = r.allreduce_async(np.ones(2), op=r.Sum, name="both")
    if evens.included():
        some = r.allreduce_async(np.ones(2), op=r.Sum, name="both", process_set=evens)
        assert some.wait()[0] == evens.size()
    assert everyone.wait()[0] == size
    assert r.remove_process_set(evens)
    assert not r.remove_process_set(r.global_process_set)


@check
def join(rank, size):
    for step in range(rank + 1):
        total = r.allreduce(np.ones(2), op=r.Sum)
        assert total[0] == size - step
    assert r.join() == size - 1
    if rank == 0:
        raises(r.HorovodInternalError, lambda: r.allgather(np.ones(2), name="g")) if size > 1 else 0
    elif size > 1:
        raises(r.HorovodInternalError, lambda: r.allgather(np.ones((2, 2)), name="g"))
    assert r.allreduce(1, op=r.Sum) == size


@check
def other_frameworks(rank, size):
    import ml_dtypes

    x = np.full(3, rank, ml_dtypes.bfloat16)
    assert r.allreduce_(x, op=r.Max) is x
    assert x.astype(int).tolist() == [size - 1] * 3
    import torch

    t = torch.full((2, 3), float(rank)).t()
    got = r.allreduce_(t, op=r.Sum)
    assert got is t
    assert (t == size * (size - 1) / 2).all()


r.init(process_sets="dynamic")
run_checks(r.rank(), r.size())
