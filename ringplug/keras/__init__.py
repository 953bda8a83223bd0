"""Data-parallel training of Keras 3 models, on its TensorFlow, JAX and PyTorch backends.

::

    import ringplug.keras as ring

    ring.init()
    optimizer = ring.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer=optimizer, loss=..., metrics=...)
    model.fit(..., callbacks=ring.callbacks.default())

Every rank runs the whole script on its own part of the data, with the same number of batches.
Gradients are averaged in every step; started without a launcher, the script trains as it would
without ringplug.
"""

from __future__ import annotations

from typing import Any

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.ops import allgather_object, broadcast_object
from ringplug.keras import callbacks, schedules
from ringplug.keras.compression import Compression
from ringplug.keras.exchange import step_lane
from ringplug.keras.loading import load_model
from ringplug.keras.optimizer import DistributedOptimizer
from ringplug.keras.state import broadcast_global_variables
from ringplug.keras.values import allgather, allreduce, broadcast

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "schedules",
    "shutdown",
    "size",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def init(comm: Any = None, **settings: Any) -> None:
    """Join the ranks that the launcher started; without one this process is a world of one.

    Args:
        comm: An ``mpi4py.MPI.Comm`` whose processes form the world.
        **settings: See the table of settings; they override the environment.
    """
    current = runtime.init(comm, **settings)
    if current.world.size > 1:
        # All ranks are here now; later they may come to their first step at different times.
        step_lane()


def shutdown() -> None:
    """Leave the ranks. Never waits."""
    runtime.shutdown()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return runtime.is_initialized()


def rank() -> int:
    """This process's number among all ranks."""
    return runtime.current().world.rank


def size() -> int:
    """The number of ranks."""
    return runtime.current().world.size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return runtime.current().world.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return runtime.current().world.local_size


def cross_rank() -> int:
    """The number of this host among those that have a rank of this local rank."""
    return runtime.current().world.cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank of this local rank."""
    return runtime.current().world.cross_size
