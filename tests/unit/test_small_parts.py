"""World, handles, waiting, requests, compression, logging, and the error tree."""

from __future__ import annotations

import io
import json
import logging
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringplug.backend import errors, log, stall
from ringplug.backend.buffers import BFLOAT16
from ringplug.backend.compression import get_compressor
from ringplug.backend.errors import (
    ConfigError,
    NotInitializedError,
    PeerLostError,
    RecoverableError,
    RingplugError,
    StalledError,
    TransportError,
    UsageError,
)
from ringplug.backend.handle import Handle
from ringplug.backend.request import Request, disagreement, fusable
from ringplug.backend.stall import Wait, name_ranks
from ringplug.backend.world import World

# -- world


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_worlds(names):
    worlds = [World.from_hosts(rank, names) for rank in range(len(names))]
    for rank, world in enumerate(worlds):
        assert (world.rank, world.size) == (rank, len(names))
        same = [r for r in range(len(names)) if names[r] == names[rank]]
        assert world.local_ranks == tuple(same)
        assert (world.local_rank, world.local_size) == (same.index(rank), len(same))
        across = [w for w in worlds if w.local_rank == world.local_rank]
        assert world.cross_size == len(across)
        assert sorted(w.cross_rank for w in across) == list(range(len(across)))
        assert world.is_homogeneous == (len({names.count(n) for n in names}) == 1)
        assert world.origin == tuple(range(len(names)))
    assert worlds[0].hosts[0] == 0


def test_a_world_does_not_change():
    with pytest.raises(AttributeError):
        World.from_hosts(0, ["a"]).rank = 1


# -- handles


def test_handle():
    handle = Handle("x")
    called = []
    handle.then(lambda: called.append("before"))
    assert not handle.done()
    with pytest.raises(StalledError, match=r"x has not ended after 0.01 s") as caught:
        handle.wait(0.01)
    assert caught.value.what == "x"
    handle.finish(5)
    assert handle.done()
    assert handle.wait() == 5
    assert handle.exception() is None
    handle.then(lambda: called.append("after"))
    assert called == ["before", "after"]


def test_failed_handle():
    handle = Handle("x")
    error = UsageError("bad")
    handle.fail(error)
    assert handle.done()
    assert handle.exception() is error
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            handle.wait()
        assert caught.value is error


def test_many_threads_wait_for_one_handle():
    for _ in range(100):
        handle = Handle("x")
        got = []
        threads = [
            threading.Thread(target=lambda h=handle, g=got: g.append(h.wait(10))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        handle.finish(7)
        for thread in threads:
            thread.join(10)
        assert got == [7, 7, 7]


# -- waiting


def test_name_ranks():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks({3, 1}) == "ranks 1, 3"
    assert name_ranks(range(20)).endswith("14, 15 and 4 more")


def endless(wait):
    while True:
        wait.pause()


def test_a_wait_ends_at_its_deadline():
    with pytest.raises(StalledError, match=r"waited 0\.\d s for ranks 1, 2") as caught:
        endless(Wait(lambda: [2, 1], 0.1, 60, frozenset))
    assert caught.value.absent == (1, 2)
    assert caught.value.seconds > 0.1


def test_a_wait_for_one_who_left(monkeypatch):
    monkeypatch.setattr(stall, "_GRACE", 0.05)
    with pytest.raises(PeerLostError, match="rank 2 left") as caught:
        endless(Wait(lambda: [1, 2], 20, 60, lambda: {2, 5}))
    assert caught.value.ranks == (2,)


def test_others_may_leave(monkeypatch):
    monkeypatch.setattr(stall, "_GRACE", 0.0)
    with pytest.raises(StalledError):
        endless(Wait(lambda: [1], 0.2, 60, lambda: {0, 2}))


def test_subgroups_are_named_as_the_world_counts(monkeypatch):
    monkeypatch.setattr(stall, "_GRACE", 0.0)
    with pytest.raises(StalledError, match="rank 7;") as stalled:
        endless(Wait(lambda: [1], 0.1, 60, frozenset, origin=(4, 7)))
    assert stalled.value.absent == (7,)
    with pytest.raises(PeerLostError, match="rank 7 left") as lost:
        endless(Wait(lambda: [1], 9, 60, lambda: {1}, origin=(4, 7)))
    assert lost.value.ranks == (7,)


def test_a_long_wait_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING, logger="ringplug"), pytest.raises(StalledError):
        endless(Wait(lambda: [1], 0.4, 0.1, frozenset))
    assert [r.getMessage() for r in caplog.records] == ["waiting since 0 s for rank 1"]


def test_a_wait_is_awake_at_first_and_sleeps_later():
    slept = []
    wait = Wait(lambda: [1], 60, 60, frozenset, spins=10)
    for _ in range(10):
        wait.pause(slept.append)
    assert slept == []
    for _ in range(200):
        wait.pause(slept.append)
    assert slept == sorted(slept)
    assert slept[-1] == 1e-3


# -- requests


def request(name="x", kind="allreduce", dtype="float32", shape=(3,), op="SUM", **more):
    return Request(name, kind, (dtype,), (shape,), op, **more)


allreduce = request()


@given(
    st.text(),
    st.lists(st.lists(st.integers(0, 2**40))),
    st.floats(allow_nan=False),
    st.lists(st.integers(0, 2**31)),
    st.text(),
)
def test_requests_travel(name, shapes, scale, numbers, refused):
    sent = Request(
        name,
        "allreduce",
        ("f", "g"),
        tuple(map(tuple, shapes)),
        "SUM",
        1,
        scale,
        2.0,
        "fp16",
        tuple(numbers),
        refused,
    )
    assert Request.decode(json.loads(json.dumps(sent.encode()))) == sent


def test_equal_requests_agree():
    assert disagreement({0: allreduce, 1: allreduce}) == ""
    rows = request(kind="allgather", shape=(3, 2))
    other = request(kind="allgather", shape=(0, 2))
    assert disagreement({0: rows, 1: other}) == ""


def test_a_disagreement_groups_the_ranks():
    other = request(dtype="float64")
    text = disagreement({0: allreduce, 1: other, 2: allreduce})
    assert text == "Mismatched data types: ranks 0, 2: float32; rank 1: float64"


def test_what_may_share_a_buffer():
    # What differs in dtype goes together, and is put into buffers by dtype.
    assert fusable(allreduce, request("y", shape=(7, 2)))
    assert fusable(allreduce, request("y", dtype="float64"))
    one = request("a", "broadcast", op="", root=1)
    assert fusable(one, request("b", "broadcast", op="", root=1))
    assert not fusable(one, request("b", "broadcast", op="", root=0))
    for different in (
        request("y", op="MAX"),
        request("y", prescale=2.0),
        request("y", postscale=2.0),
        request("y", codec="fp16"),
        request("y", "broadcast", op=""),
        request("y", "allgather", op=""),
    ):
        assert not fusable(allreduce, different)
    assert not fusable(different, different)


# -- compression


@pytest.mark.parametrize(
    ("codec", "wire"), [("none", None), ("fp16", np.dtype("f2")), ("bf16", BFLOAT16)]
)
def test_codecs(codec, wire):
    codec = get_compressor(codec)
    for dtype in map(np.dtype, ("f4", "f8", "f2", BFLOAT16, "i4", "?", "c8")):
        on_wire = codec.wire_dtype(dtype)
        narrowed = wire is not None and dtype in (np.dtype("f4"), np.dtype("f8"))
        assert on_wire == (wire if narrowed else dtype)
        source = np.array([0, 1, 1, 0], dtype)
        payload, target = np.empty(4, on_wire), np.empty(4, dtype)
        codec.encode(source, payload)
        codec.decode(payload, target, 1.0)
        np.testing.assert_array_equal(target, source)
        if dtype.kind == "f":
            codec.decode(payload, target, 0.5)
            np.testing.assert_array_equal(target, source * dtype.type(0.5))


def test_codecs_are_found_by_name_or_given():
    codec = get_compressor("bf16")
    assert get_compressor(codec) is codec
    with pytest.raises(ConfigError, match="expected one of none, fp16, bf16"):
        get_compressor("int3")


# -- logging


def test_log_records_carry_the_rank():
    root = logging.getLogger("ringplug")
    before = (root.level, root.propagate, list(root.handlers))
    root.handlers = []
    try:
        log.set_level("info")
        log.set_level("info")
        assert len(root.handlers) == 1
        stream = io.StringIO()
        root.handlers[0].setStream(stream)
        log.set_rank(3)
        log.get_logger("ringplug.backend.test").info("hello")
        log.get_logger("ringplug.backend.test").debug("hidden")
        log.set_rank(None)
        log.get_logger("ringplug.backend.test").warning("alone")
        assert stream.getvalue().splitlines() == [
            "[ringplug rank 3] INFO hello",
            "[ringplug rank -] WARNING alone",
        ]
    finally:
        root.level, root.propagate, root.handlers = before
        log.set_rank(None)


# -- errors


def test_the_tree():
    for name in errors.__all__:
        kind = getattr(errors, name)
        # Horovod has this one outside of its errors: it is no failure.
        assert issubclass(kind, RingplugError) or kind is errors.HostsUpdatedInterrupt
        assert kind.__doc__
    assert issubclass(RingplugError, RuntimeError)
    for kind in (PeerLostError, StalledError, TransportError):
        assert issubclass(kind, RecoverableError)
    for kind in (ConfigError, NotInitializedError, UsageError):
        assert issubclass(kind, ValueError)
        assert not issubclass(kind, RecoverableError)


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(StalledError("late", "x", [1, 2], 3.0)))
    assert (str(error), error.what, error.absent, error.seconds) == ("late", "x", (1, 2), 3.0)
    lost = pickle.loads(pickle.dumps(PeerLostError("gone", [1])))
    assert (str(lost), lost.ranks) == ("gone", (1,))
