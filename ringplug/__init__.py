"""ringplug: train a Keras 3, Lightning or PyTorch script on many processes.

The names here work on any framework's tensors; ``ringplug.keras``, ``ringplug.lightning`` and
``ringplug.torch`` are the plugins. Importing ringplug imports no framework, no MPI and no
numpy: everything is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ringplug.backend.buffers import ReduceOp as ReduceOp
    from ringplug.backend.errors import ConfigError as ConfigError
    from ringplug.backend.errors import MismatchError as MismatchError
    from ringplug.backend.errors import NotInitializedError as NotInitializedError
    from ringplug.backend.errors import NotReducedError as NotReducedError
    from ringplug.backend.errors import PeerLostError as PeerLostError
    from ringplug.backend.errors import RecoverableError as RecoverableError
    from ringplug.backend.errors import RingplugError as RingplugError
    from ringplug.backend.errors import StalledError as StalledError
    from ringplug.backend.errors import TransportError as TransportError
    from ringplug.backend.errors import UnavailableError as UnavailableError
    from ringplug.backend.errors import UsageError as UsageError
    from ringplug.backend.ops import allgather as allgather
    from ringplug.backend.ops import allgather_async as allgather_async
    from ringplug.backend.ops import allgather_object as allgather_object
    from ringplug.backend.ops import allreduce as allreduce
    from ringplug.backend.ops import allreduce_async as allreduce_async
    from ringplug.backend.ops import barrier as barrier
    from ringplug.backend.ops import broadcast as broadcast
    from ringplug.backend.ops import broadcast_async as broadcast_async
    from ringplug.backend.ops import broadcast_object as broadcast_object
    from ringplug.backend.ops import poll as poll
    from ringplug.backend.ops import synchronize as synchronize
    from ringplug.backend.place import cross_rank as cross_rank
    from ringplug.backend.place import cross_size as cross_size
    from ringplug.backend.place import is_homogeneous as is_homogeneous
    from ringplug.backend.place import local_rank as local_rank
    from ringplug.backend.place import local_size as local_size
    from ringplug.backend.place import rank as rank
    from ringplug.backend.place import size as size
    from ringplug.backend.runtime import init as init
    from ringplug.backend.runtime import is_initialized as is_initialized
    from ringplug.backend.runtime import shutdown as shutdown

    Average = ReduceOp.AVERAGE
    Sum = ReduceOp.SUM
    Min = ReduceOp.MIN
    Max = ReduceOp.MAX
    Product = ReduceOp.PRODUCT

_HOMES = {
    "buffers": ("ReduceOp",),
    "errors": (
        "ConfigError",
        "MismatchError",
        "NotInitializedError",
        "NotReducedError",
        "PeerLostError",
        "RecoverableError",
        "RingplugError",
        "StalledError",
        "TransportError",
        "UnavailableError",
        "UsageError",
    ),
    "ops": (
        "allgather",
        "allgather_async",
        "allgather_object",
        "allreduce",
        "allreduce_async",
        "barrier",
        "broadcast",
        "broadcast_async",
        "broadcast_object",
        "poll",
        "synchronize",
    ),
    "place": (
        "cross_rank",
        "cross_size",
        "is_homogeneous",
        "local_rank",
        "local_size",
        "rank",
        "size",
    ),
    "runtime": ("init", "is_initialized", "shutdown"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
_REDUCTIONS = {
    "Average": "AVERAGE",
    "Sum": "SUM",
    "Min": "MIN",
    "Max": "MAX",
    "Product": "PRODUCT",
}

__all__ = sorted([*_MODULE_OF, *_REDUCTIONS])


def __getattr__(name: str) -> Any:
    if name in _REDUCTIONS:
        return import_module("ringplug.backend.buffers").ReduceOp[_REDUCTIONS[name]]
    if name in _MODULE_OF:
        return getattr(import_module(f"ringplug.backend.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'ringplug' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
