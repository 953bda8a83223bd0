"""Horovod's ``horovod.torch.functions``: one rank's values for all, and everybody's objects."""

from __future__ import annotations

from ringplug.backend.ops import allgather_object, broadcast_object
from ringplug.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
