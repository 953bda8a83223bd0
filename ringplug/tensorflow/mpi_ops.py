"""The operations of ringplug.tensorflow, in the module that Horovod has them in.

* ``reductions.py``  allreduce, reducescatter
* ``movement.py``    allgather, broadcast, alltoall, barrier, join; what all of them share
* ``functions.py``   variables and objects
* ``queries.py``     who is here, as tensors

The rest is the backend's: where this process is, process sets, what is built in, timelines.
"""

from __future__ import annotations

from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import HorovodInternalError, HostsUpdatedInterrupt
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
from ringplug.backend.runtime import init, is_initialized, shutdown
from ringplug.backend.timeline import start_timeline, stop_timeline
from ringplug.tensorflow.functions import broadcast_
from ringplug.tensorflow.movement import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    join,
)
from ringplug.tensorflow.queries import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from ringplug.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
