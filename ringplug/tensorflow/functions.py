"""Variables and Python objects between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ringplug.backend import ops
from ringplug.backend.buffers import Array
from ringplug.backend.errors import UsageError
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.tensorflow.bridge import Result, name_in_graph, ordered, run
from ringplug.tensorflow.failures import entry

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]

_PIECE_BYTES = 64 * 2**20


@entry
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give every rank the values that variables have on `root_rank`.

    They travel together, in messages of 64 MiB or of one larger variable: many small ones cost
    no more than their bytes.

    Args:
        variables: ``tf.Variable`` or Keras variables of any dtypes; as many of the same shapes
            and dtypes in the same order on every rank.
        root_rank: A rank among all ranks, the same on every rank.
        process_set: Who takes part.
        inplace: Without effect; memory beside the variables is never more than such a message.

    Returns:
        None; in a graph of ``tf.compat.v1``, the operation that does it.

    Raises:
        MismatchError: On every rank, when they pass different variables or roots.
    """
    del inplace
    assigned = _assign(list(variables), root_rank, None, process_set)
    if ordered():
        return None
    return tf.group(*assigned)


@entry
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give every rank the values that variables have on `root_rank`, and return them.

    Args:
        variables: As for `broadcast_variables`.
        root_rank: See there.
        name: What the ranks match by.
        process_set: Who takes part.

    Returns:
        The values of the variables after it.
    """
    assigned = _assign(list(variables), root_rank, name, process_set)
    with tf.control_dependencies([] if tf.executing_eagerly() else assigned):
        return [tf.identity(_variable(variable)) for variable in variables]


@entry
def broadcast_global_variables(root_rank: int) -> Any:
    """Give every rank root's global variables, in a graph of ``tf.compat.v1``.

    Args:
        root_rank: A rank among all ranks.

    Returns:
        The operation that does it, for ``session.run``.

    Raises:
        RuntimeError: In eager code, where there are no global variables.
    """
    if tf.executing_eagerly():
        raise UsageError(
            "eager code has no global variables: use broadcast_variables(model.variables, "
            "root_rank), and the same for the optimizer's"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives every rank root's global variables when a ``tf.compat.v1`` session begins.

    Args:
        root_rank: A rank among all ranks.
        device: Without effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        del coord
        session.run(self.bcast_op)


@entry
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank a copy of root's object.

    Args:
        obj: Any object that cloudpickle takes; ignored on the other ranks.
        root_rank: Whose object it is; a rank among all ranks.
        session: Without effect: none is needed.
        name: What the ranks match by.
        process_set: Who takes part.

    Returns:
        `obj` itself on root, a copy elsewhere.
    """
    del session
    return ops.broadcast_object(obj, root_rank, name=name, process_set=process_set)


@entry
def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """`broadcast_object` with all but the object given; see there.

    Args:
        root_rank: Whose object it is.
        session: Without effect.
        name: What the ranks match by.
        process_set: Who takes part.

    Returns:
        A function of the object that returns root's.
    """

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@entry
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank's object, in rank order.

    Args:
        obj: Any object that cloudpickle takes.
        session: Without effect: none is needed.
        name: What the ranks match by.
        process_set: Who takes part.
    """
    del session
    return ops.allgather_object(obj, name=name, process_set=process_set)


def _assign(
    variables: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[Any]:
    """The assignments of root's values."""
    assigned: list[Any] = []
    for number, piece in enumerate(_pieces([_variable(variable) for variable in variables])):
        values = [tf.convert_to_tensor(variable) for variable in piece]
        wanted = name if name is None or number == 0 else f"{name}.{number}"
        key = name_in_graph("broadcast", wanted, values[0])

        def job(arrays: Sequence[Array], key: str | None = key) -> Sequence[Array]:
            pending = ops.start(
                "broadcast",
                arrays,
                name=key,
                process_set=process_set,
                single=False,
                root=root_rank,
                wait=True,
            )
            return pending.arrays()

        received = run(job, values, [Result(v.dtype, v.shape) for v in values], "broadcast")
        for variable, value in zip(piece, received, strict=True):
            assigned.append(variable.assign(value))
    return assigned


def _variable(variable: Any) -> Any:
    """TensorFlow's variable in a Keras variable; anything else as it is."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def _pieces(variables: Sequence[Any]) -> list[list[Any]]:
    """Runs of variables that are sent together."""
    pieces: list[list[Any]] = []
    room = 0
    for variable in variables:
        nbytes = (variable.shape.num_elements() or 0) * tf.as_dtype(variable.dtype).size
        if not pieces or nbytes > room:
            pieces.append([])
            room = _PIECE_BYTES
        pieces[-1].append(variable)
        room -= nbytes
    return pieces
