"""Horovod's contract at the top level, on 1 to 4 real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import passed
from tests.launching import run_ranks

CONTRACT = Path(__file__).with_name("ranks_contract.py")


@pytest.mark.parametrize(
    ("size", "hosts"), [(1, ""), (2, ""), (3, ""), (4, ""), (4, "aabb"), (3, "abc")]
)
def test_named_operations(size, hosts):
    passed(run_ranks(CONTRACT, size, *filter(None, [hosts]), timeout=90), size)


WORLDS = """
import numpy as np
from mpi4py import MPI
import ringplug as r

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
halves = world.Split(rank % 2, rank)

# Communicators and lists of ranks; sets with the same members are one.
sets = [r.ProcessSet(halves), r.ProcessSet(range(0, size, 2)), r.ProcessSet(world.Dup()),
        r.ProcessSet([0])]
r.init(comm=world, process_sets=sets)
known = {0: list(range(size)), 1: list(range(0, size, 2)), 2: list(range(1, size, 2))}
if size > 2:
    known[3] = [0]
assert r.get_process_set_ids_and_ranks() == known
assert r.comm_process_set_id(world) == 0
assert r.comm_process_set_id(halves) == sets[0].process_set_id == 1 + rank % 2
assert sets[2].process_set_id == 0
assert r.allreduce(1, op=r.Sum, process_set=sets[0]) == halves.size
assert r.global_process_set.size() == size and r.global_process_set.rank() == rank
r.init(process_sets=sets)
r.shutdown()

# Several communicators: the first is the world.
r.init(comm=[world, halves])
assert r.size() == size and len(r.get_process_set_ids_and_ranks()) == 3
r.shutdown()

# A part of the world.
mine = list(range(rank % 2, size, 2))
r.init(comm=mine)
assert (r.size(), r.rank()) == (len(mine), mine.index(rank))
assert r.allgather_object(rank) == mine
r.shutdown()
world.barrier()

# Many times, with work in between.
evens = r.ProcessSet(range(0, size, 2))
for turn in range(100):
    r.init(process_sets=[evens], dynamic_process_sets=turn % 2 == 0)
    assert r.allreduce(np.full(1000, rank), op=r.Sum)[0] == size * (size - 1) // 2
    if evens.included():
        assert r.allreduce(1, op=r.Sum, process_set=evens) == evens.size()
    if turn % 2 == 0:
        one = r.add_process_set([size - 1])
        if one.included():
            assert r.broadcast(turn, size - 1, process_set=one) == turn
    r.barrier()
    r.shutdown()
    assert not r.is_initialized()
    try:
        r.size()
    except ValueError:
        pass
    else:
        raise AssertionError("size() after shutdown()")

# What the ranks do not agree on is an error on all.
for ranks, kind in (([rank], r.MismatchError), ([size], ValueError)):
    try:
        r.init(process_sets=[r.ProcessSet(ranks)])
    except kind:
        pass
    else:
        raise AssertionError(ranks)
r.init()
assert r.allreduce(1, op=r.Sum) == size
print("fine")
"""


@pytest.mark.parametrize("size", [2, 4])
def test_worlds_and_process_sets(size):
    assert run_ranks(WORLDS, size, timeout=120).stdout.count("fine") == size
