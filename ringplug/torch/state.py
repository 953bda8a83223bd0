"""One rank's weights and optimizer state for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ringplug.backend import ops, runtime
from ringplug.backend.errors import MismatchError, UsageError
from ringplug.torch.tensors import check_devices, describe

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Overwrite the tensors of `params` on all ranks with those of `root_rank`.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``, with the same names,
            shapes and dtypes on every rank. Entries that are no tensors must be equal already.
        root_rank: Whose values.

    Raises:
        UsageError: `params` is neither.
        MismatchError: On every rank, when names, shapes or dtypes differ; says which.
    """
    pairs = list(params.items()) if isinstance(params, Mapping) else list(params)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError("params must be a state dict or pairs (name, tensor)")
    tensors = {str(name): value for name, value in pairs if isinstance(value, Tensor)}
    check_devices("broadcast_parameters", list(tensors.values()))
    _compare({name: describe(tensor) for name, tensor in tensors.items()})
    if runtime.current().world.size == 1:
        return
    with torch.no_grad():
        for name, tensor in tensors.items():
            received = ops.broadcast(tensor.detach(), root_rank, name=f"parameter {name}")
            if runtime.current().world.rank != root_rank:
                tensor.detach().copy_(received)


def _compare(own: dict[str, str]) -> None:
    shown = ops.allgather_object(own, name="broadcast_parameters")
    first = shown[0]
    for rank, other in enumerate(shown):
        if other == first and list(other) == list(first):
            continue
        lines = [
            f"{name}: rank 0 has {first.get(name, 'nothing')}, rank {rank} has "
            f"{other.get(name, 'nothing')}"
            for name in {**first, **other}
            if first.get(name) != other.get(name)
        ]
        raise MismatchError(
            "broadcast_parameters got different tensors: "
            + ("; ".join(lines[:20]) or f"rank {rank} has them in another order than rank 0")
        )


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Load the state of `root_rank`'s optimizer on all ranks: slots, step counts, learning rates.

    An optimizer that has made no step has no slots; that is what the others then get, too.

    Args:
        optimizer: With the same parameters on every rank.
        root_rank: Whose state.
    """
    own = runtime.current().world.rank == root_rank
    state = ops.broadcast_object(
        optimizer.state_dict() if own else None, root_rank, name="optimizer state"
    )
    if not own:
        optimizer.load_state_dict(state)
