"""Every control plane does what the protocol in ringplug/backend/control says.

The same over MPI is in tests/launched/test_backend.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from ringplug.backend import stall
from ringplug.backend.control.alone import AloneControl
from ringplug.backend.errors import PeerLostError, StalledError, TransportError, UsageError
from tests.ranks import Together, run_threads


def on_alone(fn, size, hosts=None):
    return [fn(AloneControl())]


def on_threads(fn, size, hosts=None):
    return run_threads(lambda control, _: fn(control), size, hosts)


WORLDS = pytest.mark.parametrize(
    ("run", "size"),
    [(on_alone, 1), *((on_threads, size) for size in (1, 2, 3, 4))],
    ids=["alone", "threads-1", "threads-2", "threads-3", "threads-4"],
)


@WORLDS
def test_exchange(run, size):
    def rank(control):
        r = control.world.rank
        for turn in range(5):
            for length in (0, 1, 2_000_000):
                shown = control.exchange(bytes([r + turn]) * (length + r), 20)
                assert shown == [bytes([q + turn]) * (length + q) for q in range(size)]

    run(rank, size)


@WORLDS
def test_posts_keep_the_order_of_their_sender(run, size):
    def rank(control):
        r = control.world.rank
        assert control.poll() is None
        control.exchange(b"", 20)
        for i in range(50):
            for to in range(size):
                control.post(to, f"{r} {i}".encode())
        control.exchange(b"", 20)
        got = {q: [] for q in range(size)}
        while (message := control.poll()) is not None:
            got[message[0]].append(message[1].decode())
        assert got == {q: [f"{q} {i}" for i in range(50)] for q in range(size)}

    run(rank, size)


def finish(*pending):
    for _ in range(10_000_000):
        if all([item.done() for item in pending]):
            return
    raise AssertionError("never done")


@WORLDS
@pytest.mark.parametrize("count", [0, 1, 100_001])
def test_send_and_receive(run, size, count):
    def rank(control):
        r = control.world.rank
        right, left = (r + 1) % size, (r - 1) % size
        # Tags keep messages apart, whatever the order in which they are received.
        sends = [
            control.isend(np.full(count, r * 1.5), right, 1),
            control.isend(np.full(count, r, np.int16), right, 2),
            control.isend(np.full(count, r + 1, np.int16), right, 2),
        ]
        a = np.empty(count)
        b, c = np.empty(count, np.int16), np.empty(count, np.int16)
        receives = [control.irecv(b, left, 2)]
        finish(receives[0])
        receives += [control.irecv(c, left, 2), control.irecv(a, left, 1)]
        finish(*receives, *sends)
        assert (a == left * 1.5).all()
        assert (b == left).all()
        assert (c == left + 1).all()

    run(rank, size)


@WORLDS
def test_a_sent_buffer_may_change_when_the_send_is_done(run, size):
    def rank(control):
        r = control.world.rank
        sent, got = np.full(10, r), np.empty(10, int)
        finish(control.isend(sent, (r + 1) % size))
        sent[:] = 99
        finish(control.irecv(got, (r - 1) % size))
        assert (got == (r - 1) % size).all()

    run(rank, size)


@WORLDS
def test_subsets(run, size):
    def rank(control):
        r = control.world.rank
        everyone = control.subset(range(size), 20)
        assert everyone.world.rank == r
        flipped = control.subset(range(size)[::-1], 20)
        assert flipped.world.rank == size - 1 - r
        assert flipped.world.origin == tuple(range(size)[::-1])
        assert flipped.exchange(bytes([r]), 20) == [bytes([q]) for q in range(size)[::-1]]
        # A channel is private: what is posted on one never comes out of another.
        flipped.post(0, b"flipped")
        flipped.exchange(b"", 20)
        assert everyone.poll() is None
        assert control.poll() is None
        if flipped.world.rank == 0:
            assert [flipped.poll()[1] for _ in range(size)] == [b"flipped"] * size
        again = control.subset(range(size), 20)
        again.post(r, b"again")
        assert everyone.poll() is None
        assert again.poll() == (r, b"again")
        mine = control.subset([r], 20)
        assert (mine.world.rank, mine.world.size) == (0, 1)
        assert mine.exchange(b"me", 20) == [b"me"]

    run(rank, size)


@WORLDS
def test_a_subset_without_oneself(run, size):
    def rank(control):
        with pytest.raises(UsageError):
            control.subset([(control.world.rank + 1) % size] if size > 1 else [5], 20)

    run(rank, size)


@WORLDS
def test_leaving(run, size):
    def rank(control):
        assert control.departed() == frozenset()
        control.exchange(b"", 20)
        private = control.subset(range(size), 20)
        if control.world.rank == 0 and size > 1:
            private.leave()
        control.exchange(b"", 20)
        assert private.departed() == (frozenset({0}) if size > 1 else frozenset())
        assert control.departed() == frozenset()
        control.exchange(b"", 20)
        private.close()

    run(rank, size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_late_rank_is_named(size):
    together = Together(size)

    def rank(control):
        if control.world.rank != size - 1:
            with pytest.raises(StalledError, match=f"rank {size - 1}") as caught:
                control.exchange(b"", 0.2)
            assert caught.value.absent == (size - 1,)
        together()

    on_threads(rank, size)


def test_a_rank_that_left_is_named(monkeypatch):
    monkeypatch.setattr(stall, "_GRACE", 0.05)

    def rank(control):
        private = control.subset([2, 1, 0], 20)
        if control.world.rank == 2:
            private.leave()
            return
        with pytest.raises(PeerLostError, match="rank 2 left") as caught:
            private.exchange(b"", 20)
        assert caught.value.ranks == (2,)

    on_threads(rank, 3)


def test_sizes_must_fit():
    def rank(control):
        if control.world.rank == 0:
            control.isend(np.zeros(3), 1)
        else:
            pending = control.irecv(np.zeros(2), 0)
            with pytest.raises(TransportError, match="sent 24 bytes, expected 16"):
                finish(pending)

    on_threads(rank, 2)


def test_hosts():
    def rank(control):
        world = control.world
        return world.hosts, world.local_rank, world.local_size, world.cross_rank

    got = on_threads(rank, 4, "abba")
    assert got == [
        ((0, 1, 1, 0), 0, 2, 0),
        ((0, 1, 1, 0), 0, 2, 1),
        ((0, 1, 1, 0), 1, 2, 1),
        ((0, 1, 1, 0), 1, 2, 0),
    ]


def test_alone_cannot_receive_what_it_did_not_send():
    with pytest.raises(UsageError, match="wait for ever"):
        AloneControl().irecv(np.zeros(1), 0)
    with pytest.raises(SystemExit) as ended:
        AloneControl().abort(3)
    assert ended.value.code == 3
