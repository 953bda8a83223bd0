"""The operations of ringplug.torch, in the module that Horovod has them in.

* ``reduce_ops.py``  allreduce, reducescatter
* ``move_ops.py``    allgather, broadcast, alltoall, barrier, join
* ``sparse_ops.py``  allreduce of sparse tensors
* ``handles.py``     poll, synchronize
* ``autograd.py``    how gradients flow through them

The rest is the backend's: where this process is, process sets, what is built in, timelines.
"""

from __future__ import annotations

from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import HorovodInternalError
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
from ringplug.torch.handles import poll, synchronize
from ringplug.torch.move_ops import (
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
)
from ringplug.torch.reduce_ops import (
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
from ringplug.torch.sparse_ops import sparse_allreduce_async

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
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
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
