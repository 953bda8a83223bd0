"""ringplug: train a Keras 3, Lightning or PyTorch script on many processes.

The names here work on any framework's tensors; ``ringplug.keras``, ``ringplug.lightning``,
``ringplug.torch`` and ``ringplug.tensorflow`` are the plugins. Importing ringplug imports no
framework, no MPI and no numpy: everything is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ringplug.backend.buffers import ReduceOp as ReduceOp
    from ringplug.backend.errors import CollectiveError as CollectiveError
    from ringplug.backend.errors import ConfigError as ConfigError
    from ringplug.backend.errors import HorovodInternalError as HorovodInternalError
    from ringplug.backend.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from ringplug.backend.errors import MismatchError as MismatchError
    from ringplug.backend.errors import NotInitializedError as NotInitializedError
    from ringplug.backend.errors import NotReducedError as NotReducedError
    from ringplug.backend.errors import NotSupportedError as NotSupportedError
    from ringplug.backend.errors import PeerLostError as PeerLostError
    from ringplug.backend.errors import RankFailedError as RankFailedError
    from ringplug.backend.errors import RecoverableError as RecoverableError
    from ringplug.backend.errors import RingplugError as RingplugError
    from ringplug.backend.errors import ShutDownError as ShutDownError
    from ringplug.backend.errors import StalledError as StalledError
    from ringplug.backend.errors import TransportError as TransportError
    from ringplug.backend.errors import UnavailableError as UnavailableError
    from ringplug.backend.errors import UsageError as UsageError
    from ringplug.backend.ops import allgather as allgather
    from ringplug.backend.ops import allgather_async as allgather_async
    from ringplug.backend.ops import allgather_object as allgather_object
    from ringplug.backend.ops import allreduce as allreduce
    from ringplug.backend.ops import allreduce_ as allreduce_
    from ringplug.backend.ops import allreduce_async as allreduce_async
    from ringplug.backend.ops import allreduce_async_ as allreduce_async_
    from ringplug.backend.ops import alltoall as alltoall
    from ringplug.backend.ops import alltoall_async as alltoall_async
    from ringplug.backend.ops import barrier as barrier
    from ringplug.backend.ops import broadcast as broadcast
    from ringplug.backend.ops import broadcast_ as broadcast_
    from ringplug.backend.ops import broadcast_async as broadcast_async
    from ringplug.backend.ops import broadcast_async_ as broadcast_async_
    from ringplug.backend.ops import broadcast_object as broadcast_object
    from ringplug.backend.ops import grouped_allgather as grouped_allgather
    from ringplug.backend.ops import grouped_allgather_async as grouped_allgather_async
    from ringplug.backend.ops import grouped_allreduce as grouped_allreduce
    from ringplug.backend.ops import grouped_allreduce_ as grouped_allreduce_
    from ringplug.backend.ops import grouped_allreduce_async as grouped_allreduce_async
    from ringplug.backend.ops import grouped_allreduce_async_ as grouped_allreduce_async_
    from ringplug.backend.ops import grouped_reducescatter as grouped_reducescatter
    from ringplug.backend.ops import grouped_reducescatter_async as grouped_reducescatter_async
    from ringplug.backend.ops import join as join
    from ringplug.backend.ops import poll as poll
    from ringplug.backend.ops import reducescatter as reducescatter
    from ringplug.backend.ops import reducescatter_async as reducescatter_async
    from ringplug.backend.ops import synchronize as synchronize
    from ringplug.backend.place import add_process_set as add_process_set
    from ringplug.backend.place import comm_process_set_id as comm_process_set_id
    from ringplug.backend.place import cross_rank as cross_rank
    from ringplug.backend.place import cross_size as cross_size
    from ringplug.backend.place import (
        get_process_set_ids_and_ranks as get_process_set_ids_and_ranks,
    )
    from ringplug.backend.place import is_homogeneous as is_homogeneous
    from ringplug.backend.place import local_rank as local_rank
    from ringplug.backend.place import local_size as local_size
    from ringplug.backend.place import process_set_included as process_set_included
    from ringplug.backend.place import rank as rank
    from ringplug.backend.place import remove_process_set as remove_process_set
    from ringplug.backend.place import size as size
    from ringplug.backend.probes import ccl_built as ccl_built
    from ringplug.backend.probes import cuda_built as cuda_built
    from ringplug.backend.probes import ddl_built as ddl_built
    from ringplug.backend.probes import gloo_built as gloo_built
    from ringplug.backend.probes import gloo_enabled as gloo_enabled
    from ringplug.backend.probes import mpi_built as mpi_built
    from ringplug.backend.probes import mpi_enabled as mpi_enabled
    from ringplug.backend.probes import mpi_threads_supported as mpi_threads_supported
    from ringplug.backend.probes import nccl_built as nccl_built
    from ringplug.backend.probes import rocm_built as rocm_built
    from ringplug.backend.process_set import ProcessSet as ProcessSet
    from ringplug.backend.process_set import global_process_set as global_process_set
    from ringplug.backend.reduction import Reduction as Reduction
    from ringplug.backend.runtime import init as init
    from ringplug.backend.runtime import is_initialized as is_initialized
    from ringplug.backend.runtime import shutdown as shutdown
    from ringplug.backend.timeline import start_timeline as start_timeline
    from ringplug.backend.timeline import stop_timeline as stop_timeline
    from ringplug.launch.run import run as run

    Average = ReduceOp.AVERAGE
    Sum = ReduceOp.SUM
    Adasum = ReduceOp.ADASUM
    Min = ReduceOp.MIN
    Max = ReduceOp.MAX
    Product = ReduceOp.PRODUCT

_HOMES = {
    "backend.buffers": ("ReduceOp",),
    "backend.errors": (
        "CollectiveError",
        "ConfigError",
        "HorovodInternalError",
        "HostsUpdatedInterrupt",
        "MismatchError",
        "NotInitializedError",
        "NotReducedError",
        "NotSupportedError",
        "PeerLostError",
        "RankFailedError",
        "RecoverableError",
        "RingplugError",
        "ShutDownError",
        "StalledError",
        "TransportError",
        "UnavailableError",
        "UsageError",
    ),
    "backend.ops": (
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
        "synchronize",
    ),
    "backend.place": (
        "add_process_set",
        "comm_process_set_id",
        "cross_rank",
        "cross_size",
        "get_process_set_ids_and_ranks",
        "is_homogeneous",
        "local_rank",
        "local_size",
        "process_set_included",
        "rank",
        "remove_process_set",
        "size",
    ),
    "backend.probes": (
        "ccl_built",
        "cuda_built",
        "ddl_built",
        "gloo_built",
        "gloo_enabled",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "rocm_built",
    ),
    "backend.process_set": (
        "ProcessSet",
        "global_process_set",
    ),
    "backend.reduction": ("Reduction",),
    "backend.runtime": (
        "init",
        "is_initialized",
        "shutdown",
    ),
    "backend.timeline": (
        "start_timeline",
        "stop_timeline",
    ),
    "launch.run": ("run",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
_REDUCTIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

__all__ = sorted([*_MODULE_OF, *_REDUCTIONS])


def __getattr__(name: str) -> Any:
    if name in _REDUCTIONS:
        found = import_module("ringplug.backend.buffers").ReduceOp[name.upper()]
    elif name in _MODULE_OF:
        found = getattr(import_module(f"ringplug.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'ringplug' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
