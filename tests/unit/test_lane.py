"""A lane runs operations one at a time, in the order in which they were submitted."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ringplug.backend.control.alone import AloneControl
from ringplug.backend.errors import (
    MismatchError,
    NotInitializedError,
    PeerLostError,
    StalledError,
    TransportError,
    UsageError,
)
from ringplug.backend.lane import Lane
from ringplug.backend.transport.alone import AloneTransport


class TwoRanks(AloneTransport):
    """Not alone, so that the lane has a worker thread; the jobs here don't communicate."""

    size = 2


@pytest.fixture(params=[True, False], ids=["threaded", "inline"])
def lane(request):
    made = Lane(TwoRanks(AloneControl()), "test", threaded=request.param)
    yield made
    made.close()


@pytest.fixture
def threaded():
    made = Lane(TwoRanks(AloneControl()), "test")
    yield made
    made.close()


def raiser(error):
    def job(transport):
        raise error

    return job


def test_run_and_submit_keep_their_order(lane):
    order = []
    handles = []
    for number in range(300):
        if number % 7 == 3:
            lane.run(lambda t, n=number: order.append(n), "run")
        else:
            handles.append(lane.submit(lambda t, n=number: order.append(n), "submit"))
    for handle in handles:
        handle.wait(10)
    assert order == list(range(300))


def test_results_and_transport(lane):
    assert lane.run(lambda t: t, "run") is lane.transport
    assert lane.submit(lambda t: t, "submit").wait(10) is lane.transport


def test_submit_does_not_wait_for_a_running_job(threaded):
    gate, begun = threading.Event(), threading.Event()

    def slow(transport):
        begun.set()
        gate.wait(10)
        return "slow"

    first = threaded.submit(slow, "slow")
    begun.wait(10)
    second = threaded.submit(lambda t: "second", "second")
    assert not first.done()
    assert not second.done()
    gate.set()
    assert second.wait(10) == "second"
    assert first.done()


def test_submit_and_close_do_not_wait_for_a_job_on_a_callers_thread(threaded):
    gate, begun = threading.Event(), threading.Event()

    def slow(transport):
        begun.set()
        gate.wait(10)

    runner = threading.Thread(target=threaded.run, args=(slow, "slow"), daemon=True)
    runner.start()
    assert begun.wait(10)
    handles = [threaded.submit(lambda t, n=n: n, "later") for n in range(3)]
    done = threading.Event()

    def more():
        handles.append(threaded.submit(lambda t: 3, "more"))
        threaded.close()
        done.set()

    threading.Thread(target=more, daemon=True).start()
    assert done.wait(5), "submit or close waits for the running job"
    gate.set()
    runner.join(10)
    for handle in handles:
        with pytest.raises(NotInitializedError):
            handle.wait(10)


def test_a_job_may_use_its_own_lane(lane):
    def inner(transport):
        return lane.run(lambda t: "run", "inner run"), lane.submit(lambda t: "sub", "inner").wait(5)

    def waiting(transport):
        # Something is queued behind this job: the inner operations must not wait for it.
        after.append(lane.submit(lambda t: "after", "after"))
        return inner(transport)

    after = []
    assert lane.submit(inner, "outer").wait(10) == ("run", "sub")
    done: list = []
    runner = threading.Thread(target=lambda: done.append(lane.run(inner, "outer run")), daemon=True)
    runner.start()
    runner.join(10)
    assert done == [("run", "sub")]
    runner = threading.Thread(target=lambda: done.append(lane.run(waiting, "w")), daemon=True)
    runner.start()
    runner.join(10)
    assert done[1:] == [("run", "sub")]
    assert after[0].wait(10) == "after"


def test_run_from_many_threads_is_one_at_a_time(threaded):
    inside, most = [], []

    def job(transport):
        inside.append(1)
        most.append(len(inside))
        np.ones(1000).sum()
        inside.pop()

    def many():
        for _ in range(100):
            threaded.run(job, "job")
            threaded.submit(job, "job").wait(10)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(most) == 800
    assert max(most) == 1


@pytest.mark.parametrize("error", [UsageError("bad"), MismatchError("differ")])
def test_other_errors_leave_the_lane_usable(lane, error):
    with pytest.raises(type(error), match=str(error)):
        lane.run(raiser(error), "gradients")
    with pytest.raises(type(error), match=str(error)):
        lane.submit(raiser(error), "gradients").wait(10)
    assert lane.broken is None
    assert lane.run(lambda t: 1, "next") == 1


def test_an_unexpected_error_breaks_the_lane(lane):
    """It may have come in the middle of a collective: the others must hear that this rank left."""
    left = []
    lane.transport.control.leave = lambda: left.append(1)
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        lane.submit(raiser(error), "step").wait(10)
    assert caught.value is error
    assert left
    with pytest.raises(TransportError, match=r"step failed on this rank: ValueError\('mine'\)"):
        lane.run(lambda t: 1, "next")


def test_a_mismatch_names_the_operation(lane):
    with pytest.raises(MismatchError, match="^gradients: differ"):
        lane.run(raiser(MismatchError("differ")), "gradients")


def test_a_broken_group_breaks_the_lane(lane):
    with pytest.raises(StalledError) as caught:
        lane.run(raiser(StalledError("late", "", [1], 2.0)), "gradients")
    assert str(caught.value) == "gradients: late"
    assert (caught.value.what, caught.value.absent, caught.value.seconds) == ("gradients", (1,), 2)
    ran = []
    with pytest.raises(StalledError, match="gradients: late"):
        lane.run(lambda t: ran.append(1), "next")
    with pytest.raises(StalledError, match="gradients: late"):
        lane.submit(lambda t: ran.append(1), "next").wait(10)
    assert not ran
    assert lane.broken is caught.value


@pytest.mark.parametrize("error", [PeerLostError("gone", [1]), TransportError("cable")])
def test_recoverable_errors_keep_their_kind(lane, error):
    with pytest.raises(type(error), match=f"^step: {error}") as caught:
        lane.submit(raiser(error), "step").wait(10)
    assert caught.value.__cause__ is error
    assert getattr(caught.value, "ranks", ()) == getattr(error, "ranks", ())


def test_closed(lane):
    lane.close()
    lane.close()
    with pytest.raises(NotInitializedError, match="next: ringplug was shut down"):
        lane.run(lambda t: 1, "next")
    with pytest.raises(NotInitializedError):
        lane.submit(lambda t: 1, "next").wait(10)


def test_close_ends_the_worker(threaded):
    threaded.submit(lambda t: None, "x").wait(10)
    worker = next(t for t in threading.enumerate() if t.name == "ringplug-test")
    assert worker.daemon
    threaded.close()
    worker.join(10)
    assert not worker.is_alive()


def test_no_worker_before_it_is_needed(threaded):
    threaded.run(lambda t: None, "x")
    assert not [t for t in threading.enumerate() if t.name == "ringplug-test"]


def test_what_is_asked_of_a_closed_lane_fails_at_once(lane):
    assert lane.submit(lambda t: 1, "first").wait(10) == 1
    lane.close()
    assert lane.ended(10)
    for _ in range(2):
        with pytest.raises(NotInitializedError, match="second: ringplug was shut down"):
            lane.submit(lambda t: 2, "second").wait(10)
        with pytest.raises(NotInitializedError, match="third: ringplug was shut down"):
            lane.run(lambda t: 3, "third")
