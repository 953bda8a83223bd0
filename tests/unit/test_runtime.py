"""init, shutdown and the public names, in a world of one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import ringplug
from ringplug.backend import runtime
from ringplug.backend.errors import (
    ConfigError,
    MismatchError,
    NotInitializedError,
    UsageError,
)
from tests.ranks import run_threads


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    ringplug.shutdown()


def test_a_world_of_one():
    assert not ringplug.is_initialized()
    rt = ringplug.init()
    assert ringplug.is_initialized()
    assert runtime.current() is rt
    places = (ringplug.rank, ringplug.size, ringplug.local_rank, ringplug.local_size)
    assert [place() for place in (*places, ringplug.cross_rank, ringplug.cross_size)] == [
        *(0, 1, 0, 1),
        *(0, 1),
    ]
    assert ringplug.is_homogeneous()
    x = np.arange(3.0)
    assert ringplug.allreduce(x, op=ringplug.Sum).tolist() == [0, 1, 2]
    assert ringplug.allreduce(x, prescale_factor=2.0, postscale_factor=3.0).tolist() == [0, 6, 12]
    assert ringplug.allgather(x).tolist() == [0, 1, 2]
    assert ringplug.broadcast(x, 0).tolist() == [0, 1, 2]
    assert ringplug.broadcast_object({"a": 1}) == {"a": 1}
    assert ringplug.allgather_object("a") == ["a"]
    ringplug.barrier()
    handle = ringplug.allreduce_async(x)
    assert ringplug.synchronize(handle).tolist() == [0, 1, 2]
    assert ringplug.poll(handle)
    assert rt.exchange(b"me") == [b"me"]
    assert rt.departed() == frozenset()


def test_init_is_idempotent_without_settings():
    rt = ringplug.init(timeout=5)
    assert rt.config.timeout == 5
    assert ringplug.init() is rt
    with pytest.raises(UsageError, match="initialised already"):
        ringplug.init(timeout=6)


def test_shutdown_and_again():
    first = ringplug.init()
    ringplug.shutdown()
    ringplug.shutdown()
    assert not ringplug.is_initialized()
    with pytest.raises(NotInitializedError, match="shut down"):
        first.lane("x")
    second = ringplug.init()
    assert second is not first
    assert ringplug.allreduce(1, op=ringplug.Sum) == 1


@pytest.mark.parametrize(
    "call",
    [
        ringplug.rank,
        ringplug.size,
        ringplug.local_rank,
        lambda: ringplug.allreduce(1),
        lambda: ringplug.broadcast(1, 0),
        ringplug.barrier,
        lambda: ringplug.broadcast_object(1),
        runtime.current,
    ],
)
def test_nothing_works_before_init(call):
    with pytest.raises(NotInitializedError, match="init"):
        call()


def test_wrong_settings():
    with pytest.raises(TypeError, match="unknown settings: colour"):
        ringplug.init(colour="red")
    with pytest.raises(ConfigError, match="argument timeout='soon'"):
        ringplug.init(timeout="soon")
    with pytest.raises(UsageError, match="communicator or a list of ranks"):
        ringplug.init(comm=object())
    with pytest.raises(ConfigError, match="init"):
        ringplug.init(comm=[0], control="alone")
    assert not ringplug.is_initialized()


def test_the_environment(monkeypatch):
    monkeypatch.setenv("RINGPLUG_TIMEOUT", "7m")
    assert ringplug.init().config.timeout == 420
    ringplug.shutdown()
    assert ringplug.init(timeout=3).config.timeout == 3


def test_a_lane_of_wrong_ranks():
    rt = ringplug.init()
    with pytest.raises(UsageError, match=r"ranks \[0, 3\] are not all in 0..0"):
        rt.lane("x", [0, 3])
    with pytest.raises(UsageError, match="name a rank twice"):
        rt.lane("x", [0, 0])


def test_unnamed_operations_are_numbered_from_init_on():
    ringplug.init()
    with pytest.raises(UsageError, match=r"unnamed.1: "):
        ringplug.allreduce(["text"])
    ringplug.shutdown()
    ringplug.init()
    with pytest.raises(UsageError, match=r"unnamed.1: "):
        ringplug.allreduce(["text"])


def test_import_loads_nothing():
    code = (
        "import sys, ringplug; dir(ringplug); "
        "print([m for m in ('numpy', 'mpi4py', 'torch', 'tensorflow', 'jax', 'keras') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_world_of_one_needs_no_mpi():
    code = (
        "import sys, ringplug; ringplug.init(); assert ringplug.allreduce(1) == 1; "
        "print('mpi4py.MPI' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_public_names():
    for name in ringplug.__all__:
        assert getattr(ringplug, name) is not None
        assert name in dir(ringplug)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ringplug.nothing


def test_settings_must_agree():
    def rank(control, settings):
        mine = dataclasses.replace(
            settings, fusion_bytes=1000 * (control.world.rank + 1), log_level=""
        )
        with pytest.raises(MismatchError, match=r"same settings: fusion_bytes is 1000, 2000 on"):
            runtime.Runtime(mine, control)

    run_threads(rank, 2)
