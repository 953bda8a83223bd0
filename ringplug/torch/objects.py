"""Objects, decisions and named barriers over a group's own lane.

Unlike named operations, these stand in one line with the group's collectives, so that a rank
which takes another path is found out at once.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.backend.transport import Transport
from ringplug.torch.collectives import Task
from ringplug.torch.process_group import RingProcessGroup

__all__ = ["barrier", "broadcast_object", "count_votes"]


def barrier(group: RingProcessGroup, name: str = "") -> None:
    """Wait for all ranks of the group; they must give the same name.

    Raises:
        MismatchError: Some rank waits elsewhere; says where.
    """
    group.start("barrier", lambda: Task(name, lambda _: None))


def broadcast_object(group: RingProcessGroup, obj: Any, root: int) -> Any:
    """`obj` of `root`, a copy on the other ranks (pickled; what they pass is not looked at)."""
    received: list[bytes] = []

    def build() -> Task:
        payload = b""
        if group.rank() == root:
            try:
                payload = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise UsageError(f"{type(obj).__name__} cannot be pickled: {error}") from error

        def job(transport: Transport) -> None:
            length = np.array([len(payload)], np.int64)
            transport.broadcast(length, root)
            mine = transport.rank == root
            content = (
                np.frombuffer(payload, np.uint8).copy()
                if mine
                else np.empty(int(length[0]), np.uint8)
            )
            transport.broadcast(content, root)
            if not mine:
                received.append(content.tobytes())

        return Task(f"of an object from rank {root}", job)

    group.start("broadcast", build)
    # Outside the collective: an object that cannot be made here is this rank's own problem.
    return pickle.loads(received[0]) if received else obj


def count_votes(group: RingProcessGroup, vote: bool, op: str, what: str) -> int:
    """How many ranks of the group said yes.

    Args:
        group: Whose ranks.
        vote: This rank's.
        op: What is voted on, a word or two for errors; the same on every rank.
        what: More about it, such as the place in training; the same on every rank.
    """
    votes = np.array([int(vote)], np.int64)

    def job(transport: Transport) -> None:
        transport.allreduce(votes, ReduceOp.SUM)

    group.start(op, lambda: Task(what, job))
    return int(votes[0])
