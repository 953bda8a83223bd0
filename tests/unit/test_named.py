"""Named operations on thread ranks: matched by name in any order, errors on every rank."""

from __future__ import annotations

import logging
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from ringplug.backend import coordinator, named, ops
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import (
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RingplugError,
    StalledError,
    UsageError,
)
from ringplug.backend.execution import Work
from ringplug.backend.request import Request
from tests.ranks import Together

SUM = ReduceOp.SUM
F = np.float32
AVERAGE = ReduceOp.AVERAGE


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


@SIZES
def test_every_operation(ranks, size):
    def rank(r):
        for turn in range(3):  # the second time, names are known by number
            total = ops.allreduce(np.full((2, 3), r, np.float32), SUM, name="sum")
            assert total.shape == (2, 3)
            assert (total == sum(range(size))).all()
            mean = ops.allreduce(np.float64(r), name="mean")
            assert mean == (size - 1) / 2
            rows = ops.allgather(np.full((r, 2), r, np.int16), name="rows")
            assert rows.tolist() == [[q, q] for q in range(size) for _ in range(q)]
            for root in range(size):
                got = ops.broadcast(np.array([r, turn]), root, name=f"root {root}")
                assert got.tolist() == [root, turn]
            ops.barrier(name="barrier")
            thing = ops.broadcast_object({"from": r}, size - 1, name="object")
            assert thing == {"from": size - 1}
            assert ops.allgather_object("x" * r, name="objects") == ["x" * q for q in range(size)]
            low = ops.allreduce(np.array([r, -r]), ReduceOp.MIN, name="min")
            assert low.tolist() == [0, 1 - size]
            assert ops.allreduce(2, ReduceOp.PRODUCT, name="product") == 2**size

    ranks(rank, size)


@SIZES
def test_results_keep_the_kind_of_the_input(ranks, size):
    def rank(r):
        assert type(ops.allreduce(3, SUM, name="int")) is int
        assert type(ops.allreduce(0.5, name="float")) is float
        assert type(ops.allreduce(True, ReduceOp.MIN, name="bool")) is bool
        assert ops.allreduce([1.0, 2.0], name="list").tolist() == [1.0, 2.0]
        for dtype in ("?", "i1", "u8", "f2", ml_dtypes.bfloat16, "f8", "c8", "c16"):
            array = np.ones((2, 0, 3) if dtype == "c16" else (), dtype)
            result = ops.allreduce(array, ReduceOp.PRODUCT, name=f"of {np.dtype(dtype)}")
            assert (result.dtype, result.shape) == (array.dtype, array.shape)
            assert result is not array

    ranks(rank, size)


def test_strided_and_foreign_order(ranks):
    def rank(r):
        wide = np.arange(24.0, dtype=np.float32).reshape(4, 6)
        assert (ops.allreduce(wide.T[::2], SUM, name="strided") == 2 * wide.T[::2]).all()
        assert (ops.allreduce(wide[:, ::-1], SUM, name="reversed") == 2 * wide[:, ::-1]).all()
        # Big-endian on one rank only: values are what counts, not bytes.
        mixed = np.arange(5, dtype=">f4" if r else "<f4")
        assert ops.allreduce(mixed, SUM, name="endian").tolist() == [0, 2, 4, 6, 8]
        assert wide[1, 1] == 7

    ranks(rank, 2, transport="ring")


def test_the_input_is_not_changed(ranks):
    def rank(r):
        array = np.full(5, float(r))
        result = ops.allreduce(array, SUM, name="x", prescale_factor=2.0, postscale_factor=0.5)
        assert (result == 1).all()
        assert (array == r).all()
        result[:] = 7
        assert (array == r).all()
        sent = ops.broadcast(array, 0, name="b")
        sent[:] = 9
        assert (array == r).all()

    ranks(rank, 2)


def test_scales(ranks):
    def rank(r):
        x = np.full(3, r + 1.0, np.float32)
        assert (ops.allreduce(x, SUM, "a", None, None, 2.0, 3.0) == 36).all()
        assert (ops.allreduce(x, AVERAGE, "b", None, None, 2.0, 3.0) == 12).all()
        big = np.full(3, 60_000, np.float16)
        assert (ops.allreduce(big, AVERAGE, "no overflow") == big).all()
        whole = np.full(3, -1 - 2 * r, np.int32)
        assert (ops.allreduce(whole, AVERAGE, "int") == int(-9 / 3)).all()
        odd = np.full(3, -1 - r, np.int32)
        assert (ops.allreduce(odd, AVERAGE, "odd") == -2).all()

    ranks(rank, 3)


def test_thousands_in_any_order(ranks):
    count = 3000

    def rank(r):
        order = np.random.default_rng(r).permutation(count)
        handles = {
            int(i): ops.allreduce_async(np.full(3, i, np.float64), SUM, name=f"g{i}") for i in order
        }
        for i in np.random.default_rng(r + 10).permutation(count):
            result = ops.synchronize(handles[int(i)])
            assert (result == 3 * i).all()
            assert ops.poll(handles[int(i)])

    ranks(rank, 3)


def test_nobody_waits_and_it_still_gets_done(ranks):
    def rank(r):
        handles = [ops.allreduce_async(np.ones(2), SUM, name=f"n{i}") for i in range(20)]
        deadline = time.monotonic() + 20
        while not all(ops.poll(handle) for handle in handles):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        # The others may still need this rank's worker; synchronize is all that is left to do.
        return [ops.synchronize(handle)[0] for handle in handles]

    assert ranks(rank, 3) == [[3.0] * 20] * 3


def test_several_threads_per_rank(ranks):
    threads, each = 4, 50

    def rank(r):
        rt = ranks.current()
        failures = []

        def work(number):
            ranks.adopt(rt)
            try:
                for i in range(each):
                    x = np.full(number + 1, i, np.float32)
                    name = f"t{number} step {i}"
                    if (i + number) % 3:
                        total = ops.allreduce(x, SUM, name=name)
                    else:
                        total = ops.allreduce_async(x, SUM, name=name).wait()
                    assert total.tolist() == [2 * i] * (number + 1)
            except BaseException as error:
                failures.append(error)

        order = range(threads) if r == 0 else reversed(range(threads))
        workers = [threading.Thread(target=work, args=(n,)) for n in order]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(40)
            assert not worker.is_alive()
        if failures:
            raise failures[0]

    ranks(rank, 2)


def submit(lane, name, array, dtype=None, op="SUM", **scales):
    request = Request(name, "allreduce", (array.dtype.name,), (array.shape,), op, **scales)
    return lane.submit(Work(request, [array], op=ReduceOp[op]), background=False)


def test_what_is_agreed_together_travels_together(ranks):
    count = 100
    both = Together(2)

    def rank(r):
        lane = ranks.current().named
        handles = []
        for i in range(count):
            handles.append(submit(lane, f"g{i}", np.full(3, i, np.float32)))
        both()
        traffic = lane._lane.transport.traffic
        before = traffic.calls
        for i, handle in enumerate(handles):
            assert (lane.wait(handle)[0] == 2 * i).all()
        return traffic.calls - before, lane._lane.transport.traffic.sent

    calls = ranks(rank, 2)
    assert [c for c, _ in calls] == [1, 1]
    assert sum(sent for _, sent in calls) == 2 * count * 3 * 4


@pytest.mark.parametrize(
    "different",
    [
        {"dtype": "float64"},
        {"op": "MAX"},
        {"prescale": 2.0},
        {"postscale": 2.0},
    ],
    ids=str,
)
def test_what_differs_does_not_share_a_buffer(ranks, different):
    both = Together(2)

    def rank(r):
        lane = ranks.current().named
        handles = [
            submit(lane, "a", np.full(2, r + 1, F)),
            submit(lane, "b", np.full(2, r + 1, different.get("dtype", F)), **different),
            submit(lane, "c", np.full(2, r + 1, F)),
        ]
        both()
        before = lane._lane.transport.traffic.calls
        results = [lane.wait(handle)[0][0] for handle in handles]
        return results, lane._lane.transport.traffic.calls - before

    results = ranks(rank, 2)
    assert results[0] == results[1]
    (a, b, c), calls = results[0]
    assert (a, c) == (3, 3)
    assert b == {"MAX": 2, "SUM": 3}[different.get("op", "SUM")] * 2 ** (
        "prescale" in different or "postscale" in different
    )
    # What differs in dtype only is agreed together, and then reduced apart.
    assert calls == (2 if "dtype" in different else 3)


def test_a_batch_is_at_most_one_bucket(ranks):
    both = Together(2)

    def rank(r):
        lane = ranks.current().named
        handles = [submit(lane, f"g{i}", np.full(10, i, F)) for i in range(10)]
        both()
        before = lane._lane.transport.traffic.calls
        assert [lane.wait(h)[0][0] for h in handles] == [2 * i for i in range(10)]
        return lane._lane.transport.traffic.calls - before

    assert ranks(rank, 2, fusion_bytes=85) == [5, 5]


def two(first, second):
    """What the last rank does differs from what the others do."""
    return lambda r, size: second() if r == size - 1 else first()


MISMATCHES = {
    "dtype": (
        two(
            lambda: ops.allreduce(np.zeros(3, F), name="x"),
            lambda: ops.allreduce(np.zeros(3, int), name="x"),
        ),
        "Mismatched data types.*float32.*int64",
    ),
    "operation": (
        two(
            lambda: ops.allreduce(np.zeros(3, F), name="x"),
            lambda: ops.broadcast(np.zeros(3, F), 0, name="x"),
        ),
        "Mismatched operations.*ALLREDUCE.*BROADCAST",
    ),
    "shape": (
        two(
            lambda: ops.allreduce(np.zeros(3), name="x"),
            lambda: ops.allreduce(np.zeros(4), name="x"),
        ),
        r"Mismatched ALLREDUCE tensor shapes.*\[3\].*\[4\]",
    ),
    "dimensions": (
        two(
            lambda: ops.allreduce(np.zeros((3, 1)), name="x"),
            lambda: ops.allreduce(np.zeros(3), name="x"),
        ),
        r"Mismatched ALLREDUCE tensor shapes.*\[3, 1\].*\[3\]",
    ),
    "reduction": (
        two(
            lambda: ops.allreduce(np.zeros(3), SUM, name="x"),
            lambda: ops.allreduce(np.zeros(3), ReduceOp.MAX, name="x"),
        ),
        "Mismatched reduction operations.*SUM.*MAX",
    ),
    "prescale": (
        two(
            lambda: ops.allreduce(np.zeros(3), name="x"),
            lambda: ops.allreduce(np.zeros(3), name="x", prescale_factor=2.0),
        ),
        "Mismatched prescale and/or postscale factors",
    ),
    "postscale": (
        two(
            lambda: ops.allreduce(np.zeros(3), name="x"),
            lambda: ops.allreduce(np.zeros(3), name="x", postscale_factor=2.0),
        ),
        "Mismatched prescale and/or postscale factors",
    ),
    "root": (
        two(
            lambda: ops.broadcast(np.zeros(3), 0, name="x"),
            lambda: ops.broadcast(np.zeros(3), 1, name="x"),
        ),
        "Mismatched BROADCAST root ranks",
    ),
    "broadcast shape": (
        two(
            lambda: ops.broadcast(np.zeros(3), 0, name="x"),
            lambda: ops.broadcast(np.zeros(2), 0, name="x"),
        ),
        "Mismatched BROADCAST tensor shapes",
    ),
    "object root": (
        two(
            lambda: ops.broadcast_object("a", 0, name="x"),
            lambda: ops.broadcast_object("b", 1, name="x"),
        ),
        "root ranks",
    ),
    "gather rank": (
        two(
            lambda: ops.allgather(np.zeros((1, 2)), name="x"),
            lambda: ops.allgather(np.zeros(2), name="x"),
        ),
        "Mismatched ALLGATHER numbers of dimensions",
    ),
    "gather row": (
        two(
            lambda: ops.allgather(np.zeros((1, 2)), name="x"),
            lambda: ops.allgather(np.zeros((5, 3)), name="x"),
        ),
        "Mismatched ALLGATHER dimensions after the first",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
@pytest.mark.parametrize("size", [2, 3])
def test_mismatch_is_an_error_on_every_rank(ranks, size, case):
    call, pattern = MISMATCHES[case]

    def rank(r):
        with pytest.raises(MismatchError, match=pattern) as caught:
            call(r, size)
        # The process can go on, under the same name too.
        assert (ops.allreduce(np.ones(2), SUM, name="x") == size).all()
        assert (ops.allreduce(np.ones(2), SUM, name="y") == size).all()
        return str(caught.value)

    texts = ranks(rank, size)
    assert len(set(texts)) == 1
    assert texts[0].startswith("x: ")
    assert f"rank {size - 1}: " in texts[0]


def test_mismatch_in_the_midst_of_others(ranks):
    def rank(r):
        good = [ops.allreduce_async(np.ones(2), SUM, name=f"g{i}") for i in range(10)]
        bad = ops.allreduce_async(np.ones(2 + r), SUM, name="bad")
        more = [ops.allreduce_async(np.ones(2), SUM, name=f"h{i}") for i in range(10)]
        for handle in more + good:
            assert handle.wait().tolist() == [2.0, 2.0]
        with pytest.raises(MismatchError, match="bad: "):
            bad.wait()

    ranks(rank, 2)


REFUSALS = {
    "strings": lambda: ops.allreduce(np.array(["a"]), name="x"),
    "objects": lambda: ops.broadcast(np.array([None]), 0, name="x"),
    "ragged": lambda: ops.allreduce([[1.0], [1.0, 2.0]], name="x"),
    "no such op": lambda: ops.allreduce(np.zeros(3), op=77, name="x"),
    "bitwise": lambda: ops.allreduce(np.zeros(3), op=ReduceOp.BAND, name="x"),
    "complex order": lambda: ops.allreduce(np.zeros(3, np.complex64), ReduceOp.MAX, name="x"),
    "record": lambda: ops.allreduce(np.zeros(3, [("a", "f4")]), name="x"),
    "root": lambda: ops.broadcast(np.zeros(3), 5, name="x"),
    "negative root": lambda: ops.broadcast(np.zeros(3), -1, name="x"),
    "object root": lambda: ops.broadcast_object(1, 5, name="x"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_refuses_fails_everywhere(ranks, case, who):
    both = Together(2)

    def rank(r):
        if r == who:
            with pytest.raises(UsageError, match="x: "):
                REFUSALS[case]()
        else:
            with pytest.raises(MismatchError, match=f"rank {who} cannot take part"):
                ops.allreduce(np.zeros(3), name="x")
        both()
        assert ops.allreduce(1, SUM, name="next") == 2

    ranks(rank, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_a_refused_name_can_be_used_again_at_once(ranks, size):
    def rank(r):
        for _ in range(20):
            with pytest.raises(UsageError, match="no tensor of numbers"):
                ops.allreduce(np.array(["a"]), name="x")
            assert ops.allreduce(1, SUM, name="x") == size

    ranks(rank, size)


def test_an_object_that_does_not_pickle(ranks):
    def rank(r):
        if r == 0:
            with pytest.raises(UsageError, match="thing: .*pickle"):
                ops.broadcast_object(threading.Lock(), 0, name="thing")
            with pytest.raises(UsageError, match="things: .*pickle"):
                ops.allgather_object(threading.Lock(), name="things")
        else:
            with pytest.raises(MismatchError, match="rank 0 cannot take part"):
                ops.broadcast_object(None, 0, name="thing")
            with pytest.raises(MismatchError, match="rank 0 cannot take part"):
                ops.allgather_object(1, name="things")
        assert ops.allreduce(1, SUM, name="next") == 2

    ranks(rank, 2)


def test_gathering_scalars_is_refused(ranks):
    def rank(r):
        with pytest.raises(MismatchError, match="without dimensions"):
            ops.allgather(np.float32(1), name="x")

    ranks(rank, 2)


def test_a_name_in_flight_is_refused_locally(ranks):
    both = Together(2)

    def rank(r):
        if r == 0:
            first = ops.allreduce_async(np.ones(2), SUM, name="x")
            with pytest.raises(UsageError, match="x is already pending on this rank"):
                ops.allreduce_async(np.ones(2), SUM, name="x")
            both()
        else:
            both()
            first = ops.allreduce_async(np.ones(2), SUM, name="x")
        assert (first.wait() == 2).all()
        assert (ops.allreduce(np.ones(2), SUM, name="x") == 2).all()

    ranks(rank, 2)


def test_an_unexpected_failure_reaches_every_waiter(ranks, monkeypatch):
    """Whatever goes wrong while operations run, no handle stays open."""

    def broken(transport, works, shown):
        raise MemoryError("no room")

    monkeypatch.setattr(named, "enact", broken)

    def rank(r):
        handles = [ops.allreduce_async(np.ones(2), SUM, name=f"g{i}") for i in range(3)]
        for handle in handles:
            with pytest.raises((MemoryError, RingplugError)):
                handle._handle.wait(10)
            assert handle.done()

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    ranks(rank, 2)


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_does_not_come_is_named(ranks, late, monkeypatch):
    monkeypatch.setattr(named, "_GRACE", 0.3)
    together = Together(3)

    def rank(r):
        ops.allreduce(1, SUM, name="first")
        if r == late:
            together()
            return
        try:
            with pytest.raises(StalledError, match=f"rank {late} did not") as caught:
                ops.allreduce(np.ones(3), name="gradients")
            assert caught.value.absent == (late,)
        finally:
            together()

    ranks(rank, 3, timeout=0.4)


def test_after_a_stall_the_others_go_on(ranks):
    together = Together(2)

    def rank(r):
        if r == 0:
            with pytest.raises(StalledError, match="x: rank 1 did not submit it within 0.4 s"):
                ops.allreduce(1, name="x")
            together()
        else:
            together()
        return ops.allreduce(2, SUM, name="y")

    assert ranks(rank, 2, timeout=0.4) == [4, 4]


def test_a_wait_is_logged_once_with_the_ranks(ranks, caplog):
    def rank(r):
        if r == 1:
            time.sleep(0.5)
        assert ops.allreduce(1, SUM, name="slow") == 2

    with caplog.at_level(logging.WARNING, logger="ringplug"):
        ranks(rank, 2, stall_warning=0.1)
    texts = [record.getMessage() for record in caplog.records if "slow" in record.getMessage()]
    assert len(texts) == 1
    assert "rank 1" in texts[0]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_left_is_named(ranks, leaver, monkeypatch):
    monkeypatch.setattr(named, "_SETTLE", 0.1)

    def rank(r):
        ops.allreduce(1, SUM, name="first")
        if r == leaver:
            ranks.current().close()
            return
        with pytest.raises(PeerLostError, match=f"rank {leaver}.* left") as caught:
            ops.allreduce(np.ones(3), name="gradients")
        assert caught.value.ranks == (leaver,)

    ranks(rank, 2)


def test_what_was_announced_before_leaving_counts(ranks):
    """A rank that ends its script right after its last operation must not fail the others."""

    def rank(r):
        return [ops.allreduce(1, SUM, name=f"x{i}") for i in range(3)]

    for _ in range(10):
        assert ranks(rank, 3) == [[3] * 3] * 3


def test_shutdown_fails_what_is_pending(ranks):
    def rank(r):
        if r == 0:
            pending = ops.allreduce_async(np.ones(3), name="x")
            ranks.current().close()
            with pytest.raises(NotInitializedError, match="x: ringplug was shut down"):
                pending.wait()
            with pytest.raises(NotInitializedError, match="y: ringplug was shut down"):
                ops.allreduce(np.ones(3), name="y")

    ranks(rank, 2)


def test_ranks_of_a_hang_do_not_spin(ranks):
    """Waiting for a late rank is asleep, not busy: 4 waiting ranks cost a fraction of a core."""

    def rank(r):
        if r == 3:
            time.sleep(1.0)
        ops.allreduce(1, SUM, name="x")

    before = time.process_time()
    ranks(rank, 4)
    assert time.process_time() - before < 0.7


def test_a_late_rank_meets_the_failure_and_the_next_round_is_right(ranks):
    asked_again = threading.Event()

    def rank(r):
        if r == 0:
            with pytest.raises(StalledError, match="rank 1 did not submit it"):
                ops.allreduce(np.ones(2, np.float32), SUM, name="x")
            asked_again.set()
        else:
            assert asked_again.wait(20)
            with pytest.raises(StalledError, match="rank 1 did not submit it"):
                ops.allreduce(np.ones(2, np.float32), SUM, name="x")
        assert ops.allreduce(np.full(2, 10.0 * (r + 1)), SUM, name="x").tolist() == [30, 30]

    ranks(rank, 2, timeout=0.3)


def test_a_rank_that_gives_up_takes_its_request_back(ranks, monkeypatch):
    monkeypatch.setattr(named, "_GRACE", 0.1)
    gave_up = threading.Event()

    def rank(r):
        if r == 1:
            with pytest.raises(StalledError, match="rank 0 did not submit it"):
                ops.allreduce(1.0, SUM, name="y")
            gave_up.set()
        else:
            assert gave_up.wait(20)
            with pytest.raises(StalledError, match="rank 1 gave up waiting for it"):
                ops.allreduce(1.0, SUM, name="y")
        assert ops.allreduce(float(r), SUM, name="y") == 3.0

    ranks(rank, 3, timeout=0.4)


def test_many_names_are_not_all_remembered(ranks, monkeypatch):
    monkeypatch.setattr(named, "MOST_KNOWN", 3)
    monkeypatch.setattr(coordinator, "MOST_KNOWN", 3)

    def rank(r):
        for turn in range(2):
            for i in range(6):
                assert ops.allreduce(float(i + turn), SUM, name=f"n{i}") == 2.0 * (i + turn)
        lane = ranks.current().named
        known = lane._coordinator._known[1] if r == 0 else lane._announced
        assert len(known) == 3

    ranks(rank, 2)


@SIZES
def test_averages_of_integers_do_not_overflow(ranks, size):
    def rank(r):
        for dtype in (np.uint8, np.int8, np.int16, np.uint16, np.int32):
            most = np.iinfo(dtype).max
            assert ops.allreduce(np.full(3, most, dtype)).tolist() == [most] * 3
        large = np.full(100_000, 200, np.uint8)
        assert (ops.allreduce(large) == 200).all()
        with pytest.raises(UsageError, match="AVERAGE of bool"):
            ops.allreduce(np.array([True]))

    ranks(rank, size)
