"""Every transport does what the protocol in ringplug/backend/transport says."""

from __future__ import annotations

import numpy as np
import pytest

from ringplug.backend import stall
from ringplug.backend.buffers import BFLOAT16, ReduceOp, split_evenly
from ringplug.backend.errors import MismatchError, PeerLostError, StalledError
from tests.ranks import Together, run_transports

# name, number of ranks, hosts
WORLDS = [
    pytest.param("alone", 1, None, id="alone-1"),
    *(
        pytest.param(kind, size, None, id=f"{kind}-{size}")
        for kind in ("threads", "shared_memory", "ring", "hierarchical")
        for size in (1, 2, 3, 4)
    ),
    pytest.param("hierarchical", 4, "aabb", id="hierarchical-2+2"),
    pytest.param("hierarchical", 4, "abab", id="hierarchical-interleaved"),
    pytest.param("hierarchical", 3, "abb", id="hierarchical-1+2"),
    pytest.param("hierarchical", 4, "aaab", id="hierarchical-3+1"),
    pytest.param("hierarchical", 3, "abc", id="hierarchical-1+1+1"),
]
SEVERAL = [world for world in WORLDS if world.values[1] > 1]

FLOATS = [np.float16, BFLOAT16, np.float32, np.float64]
INTEGERS = [
    *(np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64),
]
DTYPES = [np.dtype(d) for d in (np.bool_, *INTEGERS, *FLOATS, np.complex64, np.complex128)]

# Small pieces, so that these counts need many of them: staging takes 16 KiB at least.
PIECES = {"staging_bytes": 1, "segment_bytes": 4096}
LARGE = 30_011

SUM, AVERAGE = ReduceOp.SUM, ReduceOp.AVERAGE


def counts(size):
    return sorted({0, 1, size - 1, size + 1, 4099, LARGE})


def values(rank, count, dtype):
    """Small numbers that differ by rank and place; sums and products of 4 fit every dtype."""
    whole = (np.arange(count) * 7 + rank * 3) % 5
    if dtype == np.bool_:
        return whole % 2 == 0
    if dtype.kind in "ub":
        return whole.astype(dtype)
    if dtype.kind == "c":
        return (whole - 2 + 1j * ((whole + rank) % 3)).astype(dtype)
    return (whole - 2).astype(dtype)


def run(world, fn, **settings):
    """Run `fn` twice on each rank's transport: the second call finds used state."""
    kind, size, hosts = world

    def rank(transport):
        assert (transport.size, transport.name) == (size, kind)
        first = fn(transport)
        fn(transport)
        return first

    return run_transports(rank, size, kind, hosts, **{**PIECES, **settings})


def parametrize(worlds):
    return pytest.mark.parametrize(("kind", "size", "hosts"), worlds)


_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def expected(op, size, count, dtype):
    total = values(0, count, dtype)
    for rank in range(1, size):
        total = _UFUNCS[op](total, values(rank, count, dtype)).astype(dtype)
    return total


def ops_of(dtype):
    ops = [ReduceOp.SUM, ReduceOp.PRODUCT]
    if dtype.kind != "c":
        ops += [ReduceOp.MIN, ReduceOp.MAX]
    if dtype.kind in "iub":
        ops += [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    return ops


@parametrize(WORLDS)
def test_allreduce_of_every_dtype_and_count(kind, size, hosts):
    def rank(t):
        for dtype in DTYPES:
            for count in counts(size):
                for op in ops_of(dtype) if count in (size + 1, 4099) else [SUM]:
                    buffer = values(t.rank, count, dtype)
                    t.allreduce(buffer, op)
                    wanted = expected(op, size, count, dtype)
                    np.testing.assert_array_equal(buffer, wanted, f"{op.name} {dtype} {count}")

    run((kind, size, hosts), rank)


@parametrize(WORLDS)
def test_allreduce_in_allocated_memory(kind, size, hosts):
    def rank(t):
        memory = t.allocate(LARGE * 8 + 24)
        assert memory.dtype == np.uint8
        assert memory.size == LARGE * 8 + 24
        assert not memory.any()
        other = t.allocate(50_000)
        assert t.allocate(0).size == 0
        for dtype in map(np.dtype, (np.float32, BFLOAT16, np.int64)):
            for start in (0, 3):
                buffer = memory[start * 8 :].view(np.uint8)[: LARGE * dtype.itemsize].view(dtype)
                buffer[:] = values(t.rank, LARGE, dtype)
                other[:] = t.rank
                t.allreduce(buffer, SUM)
                np.testing.assert_array_equal(buffer, expected(SUM, size, LARGE, dtype))
                assert (other == t.rank).all()
        # Allocated here, ordinary memory there; and at another place of the area.
        big = 12_000
        apart = np.empty(big, np.float32) if t.rank == 0 else memory[: big * 4].view(np.float32)
        apart[:] = values(t.rank, big, apart.dtype)
        t.allreduce(apart, SUM)
        np.testing.assert_array_equal(apart, expected(SUM, size, big, apart.dtype))
        moved = memory[256 * t.rank :][: big * 4].view(np.float32)
        moved[:] = values(t.rank, big, moved.dtype)
        t.allreduce(moved, SUM)
        np.testing.assert_array_equal(moved, expected(SUM, size, big, moved.dtype))

    run((kind, size, hosts), rank)


@parametrize(WORLDS)
def test_ranks_end_with_the_same_bits(kind, size, hosts):
    def rank(t):
        random = np.random.default_rng(t.rank)
        results = []
        for dtype in map(np.dtype, FLOATS):
            for count in (1, size + 1, 5001, LARGE):
                source = (random.standard_normal(count) * 100).astype(dtype)
                buffer = source.copy()
                t.allreduce(buffer, SUM, 1 / 3)
                results.append(buffer.tobytes())
                streamed = np.empty_like(source)
                fill, drain = copier(source, streamed)
                t.allreduce_stream(count, dtype, SUM, 1 / 3, fill, drain)
                results.append(streamed.tobytes())
        return results

    everyone = run((kind, size, hosts), rank)
    assert all(other == everyone[0] for other in everyone)


def copier(source, target):
    def fill(memory, place):
        memory[:] = source[place]

    def drain(memory, place):
        target[place] = memory

    return fill, drain


def exact_sum(dtype, size, count):
    """The ranks' random values of a 16-bit dtype, and their sum in float64."""
    parts = [
        (np.random.default_rng(rank).standard_normal(count) * 8).astype(dtype)
        for rank in range(size)
    ]
    return parts, sum(part.astype(np.float64) for part in parts)


@parametrize(WORLDS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_16_bit_sums_are_rounded_once(kind, size, hosts, dtype):
    """Twice where they are reduced inside hosts and then across."""
    levels = 2 if kind == "hierarchical" and len(set(hosts or "a")) not in (1, size) else 1

    def rank(t):
        for count in (17, 5001, LARGE):
            parts, exact = exact_sum(dtype, size, count)
            buffer = parts[t.rank].copy()
            t.allreduce(buffer, SUM, 0.25)
            if levels == 1:
                # float64 sums of so few 16-bit values are exact, and so are float32 ones.
                np.testing.assert_array_equal(
                    buffer, (exact * 0.25).astype(np.float32).astype(dtype)
                )
            spacing = 2.0**-10 if dtype == np.float16 else 2.0**-7
            magnitude = sum(np.abs(part.astype(np.float64)) for part in parts) * 0.25
            error = np.abs(buffer.astype(np.float64) - exact * 0.25)
            assert (error <= magnitude * spacing * (levels / 2) + 2.0**-24).all()
            target = np.empty(count, dtype)
            source = np.concatenate([parts[t.rank]] * size)
            t.reducescatter(source, target, SUM, [count] * size, 0.25)
            np.testing.assert_array_equal(target, (exact * 0.25).astype(np.float32).astype(dtype))

    run((kind, size, hosts), rank)


@parametrize(WORLDS)
def test_means_of_halves_do_not_overflow(kind, size, hosts):
    def rank(t):
        for count in (3, 20_000):
            buffer = np.full(count, 60_000, np.float16)
            t.allreduce(buffer, AVERAGE, 1 / size)
            np.testing.assert_allclose(buffer.astype(np.float64), 60_000, rtol=1e-3)
            allocated = t.allocate(count * 2).view(np.float16)
            allocated[:] = -60_000
            t.allreduce(allocated, AVERAGE, 1 / size)
            np.testing.assert_allclose(allocated.astype(np.float64), -60_000, rtol=1e-3)

    run((kind, size, hosts), rank)


@parametrize(WORLDS)
def test_factors(kind, size, hosts):
    def rank(t):
        for count in (5, 20_000):
            x = np.full(count, t.rank + 1, np.float32)
            t.allreduce(x, SUM, 0.5)
            assert (x == sum(range(1, size + 1)) * 0.5).all()
            # Integers are truncated toward zero, once.
            negative = np.full(count, -1 - t.rank, np.int32)
            t.allreduce(negative, AVERAGE, 1 / size)
            assert (negative == int(-sum(range(1, size + 1)) / size)).all()
            z = np.full(count, 1 + 2j, np.complex64)
            t.allreduce(z, SUM, 0.5)
            assert (z == size * (0.5 + 1j)).all()
            # The factor belongs to the result, whatever the reduction.
            for op, wanted in (
                (ReduceOp.PRODUCT, 3.0 * 2.0**size),
                (ReduceOp.MIN, -3.0 * -size),
                (ReduceOp.MAX, -3.0 * -1.0),
            ):
                y = np.full(count, 2.0 if op is ReduceOp.PRODUCT else -1.0 - t.rank, np.float64)
                t.allreduce(y, op, 3.0 if op is ReduceOp.PRODUCT else -3.0)
                np.testing.assert_array_equal(y, wanted, f"{op.name} times a factor")

    run((kind, size, hosts), rank)


@parametrize(WORLDS)
def test_special_values(kind, size, hosts):
    def rank(t):
        for dtype in map(np.dtype, FLOATS):
            for count in (4, 20_000):
                x = np.zeros(count, dtype)
                x[0] = np.nan if t.rank == 0 else 1
                x[1] = np.inf
                x[2] = -np.inf if t.rank == size - 1 else 1
                t.allreduce(x, SUM)
                assert np.isnan(x[0].astype(np.float32))
                assert x[1] == np.inf
                assert x[2] == -np.inf
                assert not x[3:].any()

    run((kind, size, hosts), rank)


@parametrize(WORLDS)
def test_allreduce_stream(kind, size, hosts):
    def rank(t):
        for dtype in map(np.dtype, (np.float32, BFLOAT16, np.int16)):
            for count in counts(size):
                source = values(t.rank, count, dtype)
                before = source.copy()
                target = np.zeros_like(source)
                filled, drained = [], []

                def fill(memory, place, source=source, filled=filled):
                    assert memory.size == place.stop - place.start
                    assert memory.dtype == source.dtype
                    filled.append(place)
                    memory[:] = source[place]

                def drain(memory, place, target=target, filled=filled, drained=drained):
                    assert filled[-1].stop >= place.stop
                    drained.append(place)
                    target[place] = memory

                t.allreduce_stream(count, dtype, SUM, 1.0, fill, drain)
                np.testing.assert_array_equal(target, expected(SUM, size, count, dtype))
                np.testing.assert_array_equal(source, before)
                for places in (filled, drained):
                    covered = [i for place in places for i in (place.start, place.stop)]
                    assert covered == sorted(covered), "pieces out of order"
                    assert sum(p.stop - p.start for p in places) == count

    run((kind, size, hosts), rank)


def uneven(size):
    """Block sizes that exercise empty, small and large blocks."""
    yield [5] * size
    yield [0] * size
    yield [3 * r for r in range(size)]
    yield [9_001 if r == size - 1 else 0 for r in range(size)]
    yield [7_013 + 11 * r for r in range(size)]


@parametrize(WORLDS)
def test_reducescatter(kind, size, hosts):
    def rank(t):
        for dtype in DTYPES:
            for blocks in uneven(size):
                source = values(t.rank, sum(blocks), dtype)
                before = source.copy()
                target = np.zeros(blocks[t.rank], dtype)
                t.reducescatter(source, target, SUM, blocks, 1.0)
                start = sum(blocks[: t.rank])
                wanted = expected(SUM, size, sum(blocks), dtype)
                np.testing.assert_array_equal(target, wanted[start : start + blocks[t.rank]])
                np.testing.assert_array_equal(source, before)

    run((kind, size, hosts), rank)


@parametrize(WORLDS)
def test_allgather(kind, size, hosts):
    def rank(t):
        for dtype in DTYPES:
            for blocks in uneven(size):
                target = np.zeros(sum(blocks), dtype)
                t.allgather(values(t.rank, blocks[t.rank], dtype), target, blocks)
                wanted = [values(r, blocks[r], dtype) for r in range(size)]
                np.testing.assert_array_equal(target, np.concatenate(wanted))

    run((kind, size, hosts), rank)


@parametrize(WORLDS)
def test_broadcast(kind, size, hosts):
    def rank(t):
        for dtype in DTYPES:
            for root in range(size):
                for count in counts(size):
                    buffer = values(t.rank, count, dtype)
                    t.broadcast(buffer, root)
                    np.testing.assert_array_equal(buffer, values(root, count, dtype))

    run((kind, size, hosts), rank)


def lengths(frm, to):
    """Elements that rank `frm` sends to rank `to`: none, few, or many."""
    return [0, 3, 2_500, 9_001][(frm * 2 + to) % 4]


@parametrize(WORLDS)
def test_alltoall(kind, size, hosts):
    def rank(t):
        for dtype in DTYPES:
            for empty in (False, True):
                send = [0 if empty else lengths(t.rank, to) for to in range(size)]
                receive = [0 if empty else lengths(frm, t.rank) for frm in range(size)]
                source = values(t.rank, sum(send), dtype)
                target = np.zeros(sum(receive), dtype)
                t.alltoall(source, target, send, receive)
                at = 0
                for frm in range(size):
                    row = [0 if empty else lengths(frm, to) for to in range(size)]
                    start = sum(row[: t.rank])
                    wanted = values(frm, sum(row), dtype)[start : start + receive[frm]]
                    np.testing.assert_array_equal(target[at : at + receive[frm]], wanted)
                    at += receive[frm]

    run((kind, size, hosts), rank)


def measured(world, fn):
    """Bytes sent, summed over the ranks, and the calls of rank 0, of one operation."""
    kind, size, hosts = world

    def rank(t):
        before = t.traffic
        calls, sent = before.calls, before.sent
        fn(t)
        return t.traffic.calls - calls, t.traffic.sent - sent

    results = run_transports(rank, size, kind, hosts, **PIECES)
    return sum(sent for _, sent in results), results[0][0]


@parametrize(WORLDS)
def test_bytes_moved(kind, size, hosts):
    """What an operation costs; a rank that sends too much or nothing is seen here."""
    world = (kind, size, hosts)
    count = 12 * 2_500
    nbytes = count * 4
    floats = [np.zeros(count, np.float32) for _ in range(size)]

    # Hosts of unequal size: what the leader got goes back to the others of its host.
    lengths_ = [list(hosts or "a").count(host) for host in set(hosts or "a")]
    back = sum(n - 1 for n in lengths_) if len(set(lengths_)) > 1 else 0

    sent, calls = measured(world, lambda t: t.allreduce(floats[t.rank], SUM))
    assert sent == (2 * (size - 1) + back) * nbytes
    assert calls == (1 if kind != "hierarchical" else pytest.approx(3, abs=1))

    fill, drain = copier(floats[0], np.empty_like(floats[0]))
    sent, _ = measured(
        world, lambda t: t.allreduce_stream(count, np.dtype("f4"), SUM, 1, fill, drain)
    )
    assert sent == (2 * (size - 1) + back) * nbytes

    halves = [np.zeros(count, np.float16) for _ in range(size)]
    sent, _ = measured(world, lambda t: t.allreduce(halves[t.rank], SUM))
    assert sent == (2 * (size - 1) + back) * nbytes // 2

    sent, calls = measured(world, lambda t: t.broadcast(floats[t.rank], 0))
    assert sent == (size - 1) * nbytes
    assert calls == 1

    everything = [np.zeros(count * size, np.float32) for _ in range(size)]
    sent, calls = measured(
        world, lambda t: t.allgather(floats[t.rank], everything[t.rank], [count] * size)
    )
    assert sent == size * (size - 1) * nbytes
    assert calls == 1

    share = count // size
    sent, calls = measured(
        world,
        lambda t: t.reducescatter(
            floats[t.rank], np.empty(share, np.float32), SUM, [share] * size, 1.0
        ),
    )
    assert sent == (size - 1) * nbytes
    assert calls == 1

    sent, calls = measured(
        world,
        lambda t: t.alltoall(
            floats[t.rank], np.empty(count, np.float32), [share] * size, [share] * size
        ),
    )
    assert (size - 1) * nbytes <= sent <= (size - 1) * nbytes + 8 * size * size
    assert calls == 1


@parametrize(WORLDS)
def test_empty_operations_move_nothing(kind, size, hosts):
    empty = np.empty(0, np.float32)
    zeros = [0] * size

    def everything(t):
        t.allreduce(empty, SUM)
        t.broadcast(empty, size - 1)
        t.allgather(empty, empty, zeros)
        t.reducescatter(empty, empty, SUM, zeros, 1.0)

    sent, _ = measured((kind, size, hosts), everything)
    assert sent == 0


@parametrize(WORLDS)
def test_agreement(kind, size, hosts):
    def rank(t):
        for step in range(5):
            t.agree(2**63 - 1 - step, f"step {step}")
            t.barrier()
        t.agree(0, "zero")

    run((kind, size, hosts), rank)


@parametrize(SEVERAL)
def test_disagreement_is_an_error_everywhere_and_work_goes_on(kind, size, hosts):
    def rank(t):
        last = t.rank == size - 1
        with pytest.raises(MismatchError) as caught:
            t.agree(8 if last else 7, f"sum of {'seven' if last else 'six'}\nboth\nline {last}")
        text = str(caught.value)
        x = np.ones(5, np.float32)
        t.allreduce(x, SUM)
        assert (x == size).all()
        return text

    texts = run((kind, size, hosts), rank)
    assert len(set(texts)) == 1
    assert f"rank {size - 1}: sum of seven" in texts[0]
    assert "0" in texts[0].splitlines()[1]
    assert "sum of six" in texts[0]
    assert "line True" in texts[0]
    assert "line False" in texts[0]
    assert "both" not in texts[0]


@parametrize(SEVERAL)
def test_a_barrier_waits_for_everybody(kind, size, hosts):
    arrived = []

    def rank(t):
        for step in range(20):
            arrived.append((step, t.rank))
            t.barrier()
            assert {r for s, r in arrived if s == step} == set(range(size))
            t.barrier()

    run_transports(rank, size, kind, hosts)


OPERATIONS = {
    "barrier": lambda t: t.barrier(),
    "small": lambda t: t.allreduce(np.ones(3, np.float32), SUM),
    "large": lambda t: t.allreduce(np.ones(LARGE, np.float32), SUM),
}


@pytest.fixture
def no_grace(monkeypatch):
    """Messages between threads don't travel: nothing is under way from a rank that left."""
    monkeypatch.setattr(stall, "_GRACE", 0.05)


@parametrize(SEVERAL)
@pytest.mark.parametrize("operation", ["barrier", "large"])
def test_a_rank_that_left_is_named(kind, size, hosts, operation, no_grace):
    def rank(t):
        t.allreduce(np.ones(LARGE, np.float32), SUM)
        if t.rank == size - 1:
            t.control.leave()
            t.close()
            return None
        with pytest.raises(PeerLostError) as caught:
            OPERATIONS[operation](t)
        t.control.leave()
        t.close()
        return caught.value

    lost = run_transports(rank, size, kind, hosts, **PIECES)[:-1]
    # Its neighbours see it leave; the others may see those leave who gave up because of it.
    assert any(size - 1 in error.ranks for error in lost)
    assert all(error.ranks for error in lost)
    assert all("left" in str(error) for error in lost)


@parametrize(SEVERAL)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_late_rank_is_named(kind, size, hosts, operation):
    everybody = Together(size)

    def rank(t):
        OPERATIONS[operation](t)
        if t.rank == size - 1:
            everybody()
            return None
        try:
            with pytest.raises(StalledError) as caught:
                OPERATIONS[operation](t)
        finally:
            everybody()
        return caught.value

    errors = run_transports(rank, size, kind, hosts, timeout=0.3, **PIECES)[:-1]
    assert any(size - 1 in error.absent for error in errors)
    for error in errors:
        assert error.seconds >= 0.3
        assert "rank" in str(error)
        if kind in ("threads", "shared_memory"):
            assert error.absent == (size - 1,)


def test_shares_cover_everything():
    for count in (0, 1, 5, 17):
        for parts in (1, 2, 3, 7):
            shares = split_evenly(count, parts)
            lengths_ = [share.stop - share.start for share in shares]
            assert [i for share in shares for i in range(count)[share]] == list(range(count))
            assert max(lengths_) - min(lengths_) <= 1
