"""Who is here, as tensors whose values are found when a graph runs, not when it is traced.

So a function that was traced before an elastic job changed its size sees the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ringplug.backend import place, runtime
from ringplug.backend.errors import NotInitializedError
from ringplug.tensorflow.bridge import Result, run
from ringplug.tensorflow.failures import entry

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]

_NOT_INITIALIZED = -1
_UNKNOWN_SET = -3


@entry
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks in a process set.

    Args:
        process_set_id: Which; 0 is that of all ranks.
        name: Without effect.

    Returns:
        An int32 tensor without dimensions.
    """
    del name
    return _number(lambda: runtime.current().size_of(process_set_id))


@entry
def rank_op(name: str | None = None) -> Any:
    """This rank, an int32 tensor without dimensions; `name` has no effect."""
    del name
    return _number(place.rank)


@entry
def local_size_op(name: str | None = None) -> Any:
    """The number of ranks on this host, an int32 tensor; `name` has no effect."""
    del name
    return _number(place.local_size)


@entry
def local_rank_op(name: str | None = None) -> Any:
    """This rank among those on this host, an int32 tensor; `name` has no effect."""
    del name
    return _number(place.local_rank)


@entry
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Whether this rank is in a process set.

    Args:
        process_set_id: Which; 0 is that of all ranks.
        name: Without effect.

    Returns:
        An int32 tensor without dimensions: 1 or 0; -1 before ``init()``, -3 when there is no
        such set.
    """
    del name

    def included() -> int:
        try:
            ranks = runtime.current().groups.ranks
        except NotInitializedError:
            return _NOT_INITIALIZED
        if process_set_id not in ranks:
            return _UNKNOWN_SET
        return int(place.rank() in ranks[process_set_id])

    return _number(included)


def _number(find: Callable[[], int]) -> Any:
    (number,) = run(lambda _: [np.array(find(), np.int32)], [], [Result(tf.int32, ())], "a query")
    return number
