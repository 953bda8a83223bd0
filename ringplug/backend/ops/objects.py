"""Python objects between ranks, pickled. Layer 8.

Only ranks of the same job can send them: they are trusted as the script itself is. Functions
and classes of the main script or of a notebook can be sent too, by cloudpickle.
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np

from ringplug.backend import runtime
from ringplug.backend.ops.submission import Set, start

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Set = None
) -> Any:
    """Give every rank a copy of root's object.

    Args:
        obj: Any object that pickles (else UsageError here, MismatchError on the others);
            ignored on the other ranks.
        root_rank: Whose object it is; a rank in the world.
        name: What the ranks match by.
        process_set: Whose ranks.

    Returns:
        `obj` itself on root, a copy elsewhere.
    """
    mine = runtime.current().world.rank == root_rank
    payload, problem = _pickle(obj) if mine else (b"", "")
    gathered = start(
        "allgather",
        [np.frombuffer(payload, np.uint8)],
        name=name,
        process_set=process_set,
        root=root_rank,
        problem=problem,
        wait=True,
    ).wait()
    return obj if mine else pickle.loads(gathered)


def allgather_object(obj: Any, name: str | None = None, process_set: Set = None) -> list[Any]:
    """Every rank's object, in rank order; see `broadcast_object`."""
    payload, problem = _pickle(obj)
    framed = np.frombuffer(len(payload).to_bytes(8, "little") + payload, np.uint8)
    gathered = (
        start(
            "allgather",
            [framed],
            name=name,
            process_set=process_set,
            problem=problem,
            wait=True,
        )
        .wait()
        .tobytes()
    )
    objects, at = [], 0
    while at < len(gathered):
        length = int.from_bytes(gathered[at : at + 8], "little")
        objects.append(pickle.loads(gathered[at + 8 : at + 8 + length]))
        at += 8 + length
    return objects


def _pickle(obj: Any) -> tuple[bytes, str]:
    """The object as bytes, or why it cannot be: the other ranks must hear of that."""
    try:
        return cloudpickle.dumps(obj), ""
    except Exception as error:  # noqa: BLE001 - the object's own code runs here
        return b"", f"cannot pickle {type(obj).__name__}: {error}"
