"""Ranks that have joined contribute what changes nothing, until all have."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ringplug.backend import ops
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import MismatchError, RingplugError
from ringplug.backend.fusion import TensorSpec
from ringplug.backend.reduction import Reduction
from tests.ranks import Together

SUM = ReduceOp.SUM


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_uneven_steps(ranks, size):
    def rank(r):
        for step in range(2 * r + 1):
            active = sum(2 * q + 1 > step for q in range(size))
            total, mean = ops.grouped_allreduce([np.ones(3), np.ones(2, np.float32)], op=SUM)
            assert total.tolist() == [active] * 3
            mean = ops.allreduce(np.ones(2), name=f"step {step}")
            assert mean == pytest.approx(active / size)
        last = ops.join()
        # Unnamed operations match again, though the ranks made different numbers of them.
        assert ops.allreduce(1, op=SUM) == size
        return last

    assert ranks(rank, size) == [size - 1] * size


def test_neutral_values(ranks):
    def rank(r):
        if r == 0:
            return ops.join()
        for dtype in (np.float32, np.int8, np.uint16, bool):
            array = np.array([0, 1], dtype)
            for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, SUM):
                assert (ops.allreduce(array, op=op) == array).all(), (dtype, op)
        ops.barrier()
        return ops.join()

    assert ranks(rank, 2) == [1, 1]


def test_what_has_no_neutral_value_is_an_error(ranks):
    keep = Reduction("left", lambda into, other: None)

    def rank(r):
        if r:
            for call in (
                lambda: ops.allgather(np.ones(2)),
                lambda: ops.broadcast(np.ones(2), 1),
                lambda: ops.alltoall(np.ones(3)),
                lambda: ops.reducescatter(np.ones(3)),
                lambda: ops.allreduce(np.ones(3), op=keep),
            ):
                with pytest.raises(MismatchError, match="not possible while rank 0 has joined"):
                    call()
            assert ops.allreduce(1, op=SUM) == 2
        return ops.join()

    ranks(rank, 3)


def test_plans_go_on(ranks):
    specs = [
        TensorSpec("a", (5,), np.dtype(np.float32)),
        TensorSpec("b", (2, 2), np.dtype(np.int64)),
    ]

    def rank(r):
        rt = ranks.current()
        plan = rt.plan(specs, name="gradients")
        for step in range(3 * r + 1):
            active = sum(3 * q + 1 > step for q in range(3))
            a, b = np.full(5, 3, np.float32), np.full((2, 2), 3)
            plan.run([a, b], [a, b])
            assert (a == active).all()
            assert (b == active).all()
            assert ops.allreduce(1.0, op=SUM) == active
        assert ops.join() == 2
        a, b = np.full(5, 3, np.float32), np.full((2, 2), 3)
        plan.run([a, b], [a, b])
        assert (a == 3).all()

    ranks(rank, 3)


def test_a_plan_that_the_joined_rank_does_not_have(ranks, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def rank(r):
        rt = ranks.current()
        common = rt.plan([TensorSpec("a", (1,), np.dtype(np.float32))], name="common")
        x = np.ones(1, np.float32)
        common.run([x], [x])
        if r == 0:
            with pytest.raises(RingplugError, match="no optimizer with the same parameters"):
                ops.join()
            return
        other = rt.plan([TensorSpec("b", (2,), np.dtype(np.float32))], name="other")
        y = np.ones(2, np.float32)
        with pytest.raises(RingplugError):
            other.run([y], [y])

    ranks(rank, 2)


def test_operations_of_before_the_join(ranks):
    both = Together(2)

    def rank(r):
        early = ops.allreduce_async(np.ones(2), op=SUM, name="early")
        if r == 0:
            both()
            last = ops.join()
        else:
            both()
            assert ops.allreduce(1, op=SUM, name="late") == 1
            last = ops.join()
        assert early.wait().tolist() == [2, 2]
        return last

    assert ranks(rank, 2) == [1, 1]


def test_a_second_join(ranks):
    def rank(r):
        for turn in range(5):
            first = turn % 2
            if r == first:
                assert ops.allreduce(1, op=SUM, name="x") == 1
            assert ops.join() == first

    ranks(rank, 2)
