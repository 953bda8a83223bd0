"""Broadcasting of a model's and an optimizer's state, and the check that ranks agree on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from ringplug.backend import ops, runtime
from ringplug.backend.buffers import Array
from ringplug.backend.errors import MismatchError, UsageError
from ringplug.keras.local import LocalVariables

__all__ = ["broadcast_global_variables", "broadcast_model", "broadcast_variables"]

_PIECE_BYTES = 64 * 2**20
_SEED = "seed_generator_state"


def broadcast_global_variables(root_rank: int, *owners: Any, process_set: Any = None) -> None:
    """Give every rank the variables of `root_rank`.

    Keras 3 keeps no list of all variables, so what to broadcast is named.

    Args:
        root_rank: Whose values everybody gets.
        *owners: Models (their optimizer's variables included), layers, optimizers, or
            variables, the same on every rank.
        process_set: Who takes part; None: all ranks. `root_rank` counts among all ranks.

    Raises:
        UsageError: Nothing was named.
        MismatchError: On every rank, when the ranks' variables differ in shape or dtype.
    """
    if not owners:
        raise UsageError(
            "Keras 3 has no global variables: broadcast_global_variables(root_rank, model)"
        )
    variables: list[Any] = []
    for owner in owners:
        if isinstance(owner, keras.Variable):
            variables.append(owner)
        elif isinstance(owner, keras.Model):
            variables += model_variables(owner)
        else:
            variables += owner.variables
    broadcast_variables(variables, root_rank, process_set)


def broadcast_model(
    model: Any,
    root_rank: int,
    seeds_differ: bool = True,
    local: LocalVariables | None = None,
    process_set: Any = None,
) -> None:
    """Give every rank the weights, optimizer state and random seeds of `root_rank`'s model.

    Args:
        model: Built; its optimizer is built here if need be.
        root_rank: Whose state everybody gets.
        seeds_differ: Random layers (dropout) draw other numbers on each rank: root's seed plus
            the distance from root. False makes them draw the same.
        local: Variables that stay as they are on each rank, and so do an optimizer's slots for
            them.
        process_set: Who takes part; None: all ranks.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    variables = model_variables(model)
    if local is not None:
        variables = _without(local, variables, model)
    broadcast_variables(variables, root_rank, process_set)
    world = runtime.current().world
    distance = (world.rank - root_rank) % world.size
    if seeds_differ and distance:
        for variable in variables:
            if variable.name == _SEED:
                state = np.array(keras.ops.convert_to_numpy(variable))
                state[0] += state.dtype.type(distance)
                variable.assign(state)


def model_variables(model: Any) -> list[Any]:
    """A model's variables and its optimizer's, in an order that all ranks share."""
    optimizer = getattr(model, "optimizer", None)
    return list(model.variables) + (list(optimizer.variables) if optimizer is not None else [])


def _without(local: LocalVariables, variables: Sequence[Any], model: Any) -> list[Any]:
    trained = list(model.trainable_variables)
    stay = {id(variables[index]) for index in local.among(variables)}
    slots = () if getattr(model, "optimizer", None) is None else model.optimizer.variables
    for slot in slots:
        owners = [v for v in trained if slot.name.startswith(_slot_prefix(v))]
        if owners and id(max(owners, key=lambda v: len(v.path))) in stay:
            stay.add(id(slot))
    return [variable for variable in variables if id(variable) not in stay]


def _slot_prefix(variable: Any) -> str:
    """How Keras begins the names of what an optimizer keeps for a variable."""
    return f"{variable.path.replace('/', '_')}_"


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: Any = None) -> None:
    """Assign root's values to the variables, after a check that all ranks have the same list."""
    if runtime.current().size_of(process_set) == 1:
        return
    _agree(variables, process_set)
    for group in _groups(variables):
        # Copies, since the arrays are written to and Keras may hand out its own memory.
        values = [np.array(keras.ops.convert_to_numpy(variable)) for variable in group]
        packed = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
        received = ops.broadcast(
            np.concatenate(packed), root_rank, "keras.variables", process_set=process_set
        )
        at = 0
        for variable, value in zip(group, values, strict=True):
            part = received[at : at + value.nbytes]
            at += value.nbytes
            variable.assign(part.view(value.dtype).reshape(value.shape))


def _agree(variables: Sequence[Any], process_set: Any) -> None:
    table = [
        (
            f"{keras.backend.standardize_dtype(v.dtype)}{list(v.shape)}"
            f"{'' if v.trainable else ' not trainable'}",
            getattr(v, "path", v.name),
        )
        for v in variables
    ]
    # Names carry counters of what else a rank has built, so they are shown but not compared.
    digest = hashlib.sha256("\n".join(kind for kind, _ in table).encode()).hexdigest()
    digests = ops.allgather_object(digest, "keras.variables.digest", process_set)
    if len(set(digests)) == 1:
        return
    tables = ops.allgather_object(table, "keras.variables.table", process_set)
    raise MismatchError(f"the ranks' models differ:\n{_difference(tables)}")


def _difference(tables: Sequence[Sequence[tuple[str, str]]]) -> str:
    lines = []
    for index in range(max(len(table) for table in tables)):
        row = [table[index] if index < len(table) else ("nothing", "-") for table in tables]
        if len({kind for kind, _ in row}) > 1:
            sides = "; ".join(f"rank {r}: {kind} {name}" for r, (kind, name) in enumerate(row))
            lines.append(f"variable {index}: {sides}")
    shown = lines[:20]
    return "\n".join(shown + ([f"and {len(lines) - 20} more"] if len(lines) > 20 else []))


def _groups(variables: Iterable[Any]) -> list[list[Any]]:
    groups: list[list[Any]] = [[]]
    size = 0
    for variable in variables:
        nbytes = int(np.prod(variable.shape, dtype=np.int64)) * 8
        if groups[-1] and size + nbytes > _PIECE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(variable)
        size += nbytes
    return groups if groups[0] else []


def averaged(arrays: Sequence[Array], name: str, process_set: Any = None) -> list[Array]:
    """The mean over ranks of each array."""
    flat = np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in arrays])
    mean = ops.allreduce(flat, name=name, process_set=process_set)
    results, at = [], 0
    for array in arrays:
        results.append(mean[at : at + array.size].reshape(array.shape).astype(array.dtype))
        at += array.size
    return results
