"""ringplug for PyTorch: a process group for torch.distributed, and Horovod's names.

With torch.distributed, and whatever is built on it::

    import ringplug.torch
    torch.distributed.init_process_group("ring")     # under ringrun, mpirun, srun, or alone

In a plain training loop::

    import ringplug.torch as ring
    ring.init()
    optimizer = ring.DistributedOptimizer(optimizer, model.named_parameters())
    ring.broadcast_parameters(model.state_dict(), root_rank=0)
    ring.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from __future__ import annotations

from ringplug.backend.buffers import ReduceOp
from ringplug.backend.ops import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_async,
    barrier,
    broadcast,
    broadcast_async,
    broadcast_object,
    poll,
    synchronize,
)
from ringplug.backend.place import (
    cross_rank,
    cross_size,
    is_homogeneous,
    local_rank,
    local_size,
    rank,
    size,
)
from ringplug.backend.runtime import init, is_initialized, shutdown
from ringplug.torch.compression import Compression
from ringplug.torch.optimizer import DistributedOptimizer
from ringplug.torch.rendezvous import register
from ringplug.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

register()
