"""Ranks that train together run the same versions."""

from __future__ import annotations

from importlib import metadata

import torch

from ringplug.backend import ops, runtime
from ringplug.backend.errors import MismatchError

__all__ = ["check_same_software"]


def check_same_software(package: str, process_set: int) -> None:
    """Compare the versions of PyTorch and Lightning. Collective over the set.

    Args:
        package: The distribution that the user's Lightning comes from.
        process_set: The number of the set that trains.

    Raises:
        MismatchError: They differ; says which rank has which.
    """
    own = f"torch {torch.__version__}, {package} {metadata.version(package)}"
    shown = ops.allgather_object(own, "versions under RingStrategy", process_set=process_set)
    if len(set(shown)) > 1:
        ranks = runtime.current().groups.find(process_set).ranks
        table = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, shown, strict=True))
        raise MismatchError(f"the ranks run different software: {table}")
