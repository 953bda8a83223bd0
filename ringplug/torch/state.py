"""One rank's weights and optimizer state for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ringplug.backend import ops, runtime
from ringplug.backend.errors import MismatchError, UsageError
from ringplug.backend.process_set import ProcessSet
from ringplug.torch.tensors import Flat, check_devices, describe, raw_bytes

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

_PACKED = 1 << 20
"""Tensors of fewer bytes travel together, in packets of about 32 times as much."""


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet | None = None,
) -> None:
    """Overwrite the tensors of `params` on all ranks with those of `root_rank`.

    Small tensors travel together, so that many of them cost little more than one.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``;
            with the same names, shapes and dtypes on every rank. A mapping's order does not
            matter. Entries that are no tensors, such as a module's extra state, must be equal
            already.
        root_rank: Whose values; a rank of the world.
        process_set: The ranks that take part; None for all.

    Raises:
        UsageError: `params` is none of these.
        MismatchError: On every rank, when names, shapes or dtypes differ; says which.
    """
    tensors = _tensors(params)
    check_devices("broadcast_parameters", list(tensors.values()))
    _compare(
        "broadcast_parameters",
        {name: describe(tensor) for name, tensor in tensors.items()},
        process_set,
    )
    if runtime.current().size_of(process_set) > 1:
        _broadcast(list(tensors.values()), root_rank, "parameters", process_set)


def _tensors(params: Any) -> dict[str, Tensor]:
    """The tensors by name, in an order that is the same on every rank."""
    if isinstance(params, Mapping):
        pairs = sorted((str(name), value) for name, value in params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | bytes | Tensor | set):
        pairs = []
        for place, entry in enumerate(params):
            if isinstance(entry, tuple) and len(entry) == 2:
                pairs.append((str(place if entry[0] is None else entry[0]), entry[1]))
            elif isinstance(entry, Tensor):
                pairs.append((str(place), entry))
            else:
                raise UsageError(
                    f"invalid params of type: {type(params)} with a {type(entry)}: expected "
                    "tensors or tuples (name, tensor)"
                )
    else:
        raise UsageError(
            f"invalid params of type: {type(params)}: expected a state dict, tensors or tuples "
            "(name, tensor)"
        )
    tensors: dict[str, Tensor] = {}
    for name, value in pairs:
        if not isinstance(value, Tensor):
            continue
        if value.layout is not torch.strided:
            raise UsageError(f"params: {name} is sparse; only dense tensors can be broadcast")
        unique = name if name not in tensors else f"{name} ({len(tensors)})"
        tensors[unique] = value
    return tensors


def _compare(op: str, own: dict[str, str], process_set: ProcessSet | None = None) -> None:
    shown = ops.allgather_object(own, name=f"{op} of", process_set=process_set)
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
            f"{op} got different tensors: "
            + ("; ".join(lines[:20]) or f"rank {rank} has them in another order than rank 0")
        )


def _broadcast(
    tensors: list[Tensor], root: int, what: str, process_set: ProcessSet | None = None
) -> None:
    """Overwrite tensors with those of `root`: all are sent before any is waited for."""
    flats = [Flat(tensor) for tensor in tensors if tensor.numel()]
    packets: list[list[Flat]] = []
    filled = 0
    for flat in flats:
        nbytes = flat.tensor.numel() * flat.tensor.element_size()
        if nbytes >= _PACKED or not packets or filled + nbytes > 32 * _PACKED:
            packets.append([])
            filled = 0
        packets[-1].append(flat)
        # What follows a large tensor begins a packet of its own.
        filled = 33 * _PACKED if nbytes >= _PACKED else filled + nbytes
    sent = []
    for number, packet in enumerate(packets):
        pieces = [raw_bytes(flat.tensor) for flat in packet]
        memory = (
            torch.from_numpy(pieces[0])
            if len(pieces) == 1
            else torch.cat([torch.from_numpy(piece) for piece in pieces])
        )
        name = f"{what} {number}"
        handle = ops.broadcast_async_(memory, root, name=name, process_set=process_set)
        sent.append((handle, memory, packet, pieces))
    with torch.no_grad():
        for handle, memory, packet, pieces in sent:
            handle.wait()
            if len(packet) > 1:
                at = 0
                for piece in pieces:
                    piece[:] = memory[at : at + piece.size].numpy()
                    at += piece.size
            for flat in packet:
                flat.store()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: nn.Module | None = None
) -> None:
    """Give all ranks the state of `root_rank`'s optimizer: slots, step counts, learning rates.

    Values keep the types that they have on root: numbers, tuples, None, numpy scalars, tensors.
    Tensors that are there with the same shape and dtype are overwritten in place.

    An optimizer that has made no step has no slots; that is what the others then get, too. (No
    step is made to fill them: it would count, and let weight decay move the parameters.)
    Gradients that are None become zeros on a rank whose optimizer has no slots, as scripts
    written for Horovod may expect.

    Args:
        optimizer: With the same parameters on every rank, wrapped or not.
        root_rank: Whose state.
        model: Without effect; nothing has to be computed here.

    Raises:
        UsageError: The state of LBFGS, which is each rank's own; or no optimizer.
        MismatchError: On every rank, when the optimizers' parameters differ.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("cannot broadcast the state of torch.optim.LBFGS")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected an optimizer, got a {type(optimizer).__name__}")
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    check_devices("broadcast_optimizer_state", parameters)
    _compare(
        "broadcast_optimizer_state",
        {
            f"parameter {number}.{index}": describe(parameter)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        },
    )
    if not optimizer.state:
        _fill_gradients(optimizer)
    mine = runtime.current().world.rank == root_rank
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    state = {places.get(id(key), key): value for key, value in optimizer.state.items()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    packing = _Packing()
    packed = packing.pack((state, groups)) if mine else None
    skeleton = ops.broadcast_object(packed, root_rank, name="optimizer state")
    if mine:
        _broadcast(packing.tensors, root_rank, "optimizer state tensors")
        return
    unpacking = _Unpacking()
    new_state, new_groups = unpacking.unpack(skeleton, (state, groups))
    _broadcast(unpacking.tensors, root_rank, "optimizer state tensors")
    for group, options in zip(optimizer.param_groups, new_groups, strict=True):
        group.update(options)
    optimizer.state.clear()
    for key, value in new_state.items():
        known = isinstance(key, int) and key < len(parameters)
        optimizer.state[parameters[key] if known else key] = value


def _fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class _Slot:
    """Where a tensor belongs in a packed tree, and what it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def fits(self, other: Any) -> bool:
        """Whether a tensor can be overwritten."""
        return (
            isinstance(other, Tensor)
            and tuple(other.shape) == self.shape
            and other.dtype == self.dtype
            and other.layout is torch.strided
            and not other.requires_grad
        )


class _Packing:
    """Takes the tensors out of a tree of dicts, lists and tuples.

    Attributes:
        tensors: In the order of the tree.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, tree: Any) -> Any:
        """The tree with slots for its dense tensors on the CPU."""
        if isinstance(tree, Tensor) and tree.layout is torch.strided:
            check_devices("broadcast_optimizer_state", [tree])
            self.tensors.append(tree)
            return _Slot(tree)
        if type(tree) is dict:
            return {key: self.pack(value) for key, value in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(self.pack(value) for value in tree)
        return tree


class _Unpacking:
    """Puts tensors into the slots of a tree.

    Attributes:
        tensors: Those to be overwritten with what root has, in the order of the tree.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def unpack(self, skeleton: Any, old: Any) -> Any:
        """The tree, with tensors of `old`, a tree of about the same form, where they fit."""
        if isinstance(skeleton, _Slot):
            reused = skeleton.fits(old)
            tensor = old if reused else torch.empty(skeleton.shape, dtype=skeleton.dtype)
            self.tensors.append(tensor)
            return tensor
        if type(skeleton) is dict:
            inside = old if isinstance(old, dict) else {}
            return {key: self.unpack(value, inside.get(key)) for key, value in skeleton.items()}
        if type(skeleton) in (list, tuple):
            others = old if isinstance(old, list | tuple) and len(old) == len(skeleton) else ()
            padded = [*others] or [None] * len(skeleton)
            return type(skeleton)(map(self.unpack, skeleton, padded))
        return skeleton
