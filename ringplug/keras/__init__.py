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

The names are those of ``horovod.keras`` and ``horovod.tensorflow.keras``: a script written for
either runs with ``import ringplug.keras as hvd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import HorovodInternalError, HostsUpdatedInterrupt
from ringplug.backend.ops import allgather_object, broadcast_object
from ringplug.backend.place import (
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    is_homogeneous,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    size,
)
from ringplug.backend.probes import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.backend.timeline import start_timeline, stop_timeline
from ringplug.keras import callbacks, elastic, schedules
from ringplug.keras.batch_norm import SyncBatchNormalization
from ringplug.keras.compression import Compression, Compressor
from ringplug.keras.distribute import DistributedOptimizer, PartialDistributedOptimizer
from ringplug.keras.exchange import step_lane
from ringplug.keras.loading import load_model
from ringplug.keras.state import broadcast_global_variables
from ringplug.keras.values import allgather, allreduce, broadcast, reducescatter

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "schedules",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None, **settings: Any
) -> None:
    """Join the ranks that the launcher started; without one this process is a world of one.

    Args:
        comm: Who forms the world: an ``mpi4py.MPI.Comm``, a list of ranks, or a list of
            communicators. All processes that were launched by default.
        process_sets: `ProcessSet` objects to set up; or ``"dynamic"``, which lets them come and
            go by `add_process_set` and `remove_process_set`.
        **settings: See the table of settings; they override the environment.
    """
    current = runtime.init(comm, process_sets, **settings)
    if current.world.size > 1:
        # All ranks are here now; later they may come to their first step at different times.
        step_lane()


def shutdown() -> None:
    """Leave the ranks. Never waits."""
    runtime.shutdown()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return runtime.is_initialized()
