"""Named operations on any framework's tensors. Layer 9.

Ranks match operations by name, in any order; unnamed ones are matched in the order in which
each rank submits them. What does not fit together is an error on every rank, with both sides,
and the process can go on.

A tensor is a numpy, torch, TensorFlow or JAX tensor on the CPU, a number or a list. Operations
are not differentiable here; the plugins' are. Every one takes a `process_set`, all ranks by
default, and is called by all its ranks.

* ``submission.py``  from tensors to an operation, and back; what this rank refuses by itself
* ``reducing.py``    allreduce, reducescatter
* ``moving.py``      allgather, broadcast, alltoall, barrier, join, poll, synchronize
* ``objects.py``     Python objects
"""

from __future__ import annotations

from ringplug.backend.ops.moving import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    join,
    poll,
    synchronize,
)
from ringplug.backend.ops.objects import allgather_object, broadcast_object
from ringplug.backend.ops.reducing import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ringplug.backend.ops.submission import Pending, resolve_op, start

__all__ = [
    "Pending",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "resolve_op",
    "start",
    "synchronize",
]
