"""Process sets on thread ranks: who may use them, and what the ranks must agree on."""

from __future__ import annotations

import numpy as np
import pytest

from ringplug.backend import ops, place
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import CollectiveError, MismatchError, UsageError
from ringplug.backend.process_set import ProcessSet

SUM = ReduceOp.SUM


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_in_a_set(ranks, size):
    members = [0, size - 1] if size > 2 else [1]

    def rank(r):
        some = place.add_process_set(members)
        assert some.ranks == members
        assert some.size() == len(members)
        assert some.included() == (r in members)
        assert place.process_set_included(some.process_set_id) == (r in members)
        if r not in members:
            with pytest.raises(UsageError, match=f"rank {r} is not in this process set"):
                some.rank()
            with pytest.raises(UsageError, match=f"rank {r} is not in process set 1"):
                ops.allreduce(1, process_set=some)
            return
        n, at = len(members), members.index(r)
        assert some.rank() == at
        assert ops.allreduce(r, op=SUM, process_set=some) == sum(members)
        assert ops.allreduce(2.0 * r, process_set=some) == 2 * sum(members) / n
        gathered = ops.allgather(np.full(at + 1, r), process_set=some).tolist()
        assert gathered == [m for i, m in enumerate(members) for _ in range(i + 1)]
        assert ops.broadcast(np.array([r]), members[-1], process_set=some)[0] == members[-1]
        sent = ops.alltoall(np.arange(n) + 10 * r, process_set=some).tolist()
        assert sent == [10 * m + at for m in members]
        part = ops.reducescatter(np.ones((n, 2)), op=SUM, process_set=some)
        assert part.tolist() == [[n, n]]
        assert ops.allgather_object(r, process_set=some) == members
        assert ops.broadcast_object(r, members[0], process_set=some) == members[0]
        ops.barrier(process_set=some)

    ranks(rank, size, dynamic_process_sets=True)


def test_root_must_be_in_the_set(ranks):
    def rank(r):
        some = place.add_process_set([0, 2])
        if r != 1:
            with pytest.raises(UsageError, match=r"root_rank 1 is not in \[0, 2\]"):
                ops.broadcast(1, 1, process_set=some)

    ranks(rank, 3, dynamic_process_sets=True)


def test_mismatch_in_a_set_names_ranks_of_the_world(ranks):
    def rank(r):
        some = place.add_process_set([1, 2])
        if r:
            with pytest.raises(MismatchError, match=r"rank 1: \[1\]; rank 2: \[2\]"):
                ops.allreduce(np.ones(r), name="x", process_set=some)
            assert ops.allreduce(1, op=SUM, process_set=some) == 2
        assert ops.allreduce(1, op=SUM) == 3

    ranks(rank, 3, dynamic_process_sets=True)


def test_sets_come_and_go(ranks):
    def rank(r):
        one, two = place.add_process_set([0]), place.add_process_set(ProcessSet([1, 0]))
        assert place.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0], 2: [0, 1]}
        with pytest.raises(UsageError, match=r"with ranks \[0, 1\] already"):
            place.add_process_set([0, 1])
        with pytest.raises(UsageError, match="set up already"):
            place.add_process_set(two)
        assert place.remove_process_set(one)
        assert one.process_set_id is None
        assert one.ranks is None
        with pytest.raises(UsageError):
            place.remove_process_set(one)
        three = place.add_process_set([2])
        assert three.process_set_id == 3
        assert place.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 2: [0, 1], 3: [2]}
        if r < 2:
            assert ops.allreduce(1, op=SUM, process_set=two) == 2

    ranks(rank, 3, dynamic_process_sets=True)


def test_what_is_pending_in_a_removed_set_fails(ranks):
    def rank(r):
        some = place.add_process_set([0, 1])
        pending = ops.allreduce_async(1, process_set=some, name="x") if r == 0 else None
        place.remove_process_set(some)
        if pending is not None:
            with pytest.raises(CollectiveError, match="x: "):
                pending.wait()
        assert ops.allreduce(1, op=SUM) == 3

    ranks(rank, 3, dynamic_process_sets=True)


def test_what_cannot_be_a_set(ranks):
    def rank(r):
        with pytest.raises(UsageError, match="rank 7 of a process set"):
            place.add_process_set([0, 7])
        with pytest.raises(MismatchError, match=r"rank 0: .*\[0\].*rank 1: .*\[1\]"):
            place.add_process_set([r])
        with pytest.raises(MismatchError if r else UsageError, match="twice"):
            place.add_process_set([0, 1] if r else [0, 0, 1])
        for wrong in (["a"], [0.5], 3):
            with pytest.raises(UsageError):
                place.add_process_set(wrong)
        assert ops.allreduce(1, op=SUM) == 2

    ranks(rank, 2, dynamic_process_sets=True)


def test_sets_are_fixed_unless_the_setting_says_otherwise(ranks):
    def rank(r):
        with pytest.raises(UsageError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
            place.add_process_set([0])

    ranks(rank, 2)


def test_a_plan_in_a_set(ranks):
    from ringplug.backend.fusion import TensorSpec

    def rank(r):
        some = place.add_process_set([0, 2])
        rt = ranks.current()
        assert rt.size_of(some) == 2
        spec = TensorSpec("x", (3,), np.dtype(np.float32))
        if r == 1:
            with pytest.raises(UsageError, match="rank 1 is not in process set 1"):
                rt.plan([spec], name="p", process_set=some)
            return
        x = np.full(3, r, np.float32)
        rt.plan([spec], name="p", process_set=some).run([x], [x])
        assert x.tolist() == [1, 1, 1]

    ranks(rank, 3, dynamic_process_sets=True)
