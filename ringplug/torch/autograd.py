"""Collectives that gradients flow through, with Horovod's rules for the way back.

Each rank's backward pass runs a collective too, so the ranks of the process set have to run
backward as they ran forward. A gradient is that of the ranks' average loss where the reduction
is an average, and of their sum where it is a sum:

========================  ==================================================================
forward                   gradient of the input
========================  ==================================================================
allreduce                 allreduce with the same reduction, scales and compression; also for
                          Min, Max, Product and Adasum, where that is not the derivative
allgather                 this rank's rows of the average
broadcast                 the average on the root, zeros elsewhere
alltoall                  alltoall of the rows back to where they came from
reducescatter             allgather, times the scales, and for a Sum times the set's size
========================  ==================================================================

Groups of tensors go back as groups. Everything can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringplug.backend import ops, place, runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.process_set import ProcessSet

__all__ = ["Call", "allgather", "allreduce", "alltoall", "as_tensors", "broadcast", "reducescatter"]


@dataclass(frozen=True)
class Call:
    """The arguments of one collective beside its tensors.

    Attributes:
        name: What the ranks match by.
        process_set: Its members; None for all ranks.
        op: The reduction.
        prescale: Factor before the reduction.
        postscale: Factor after it.
        average: Given beside `op` by mistake, for the operation to refuse.
        codec: What it travels as.
        root: The sending rank, for a broadcast.
    """

    name: str | None
    process_set: ProcessSet | None
    op: Any = None
    prescale: float = 1.0
    postscale: float = 1.0
    average: Any = None
    codec: Any = "none"
    root: int = 0

    def with_codec(self, codec: Any) -> Call:
        """The same, travelling as something else."""
        return replace(self, codec=codec)

    def back(self, **changes: Any) -> Call:
        """For the way back: under a name of its own, if this one has a name."""
        name = None if self.name is None else f"{self.name}.grad"
        return replace(self, name=name, **changes)


def allreduce(call: Call, tensors: Sequence[Any], grouped: bool) -> list[Any]:
    """The reduced tensors; as one group, or, of a single tensor, by itself."""
    run = _Allreduce.apply if _differentiable(tensors) else _allreduce
    return list(run(call, grouped, *tensors))


def reducescatter(call: Call, tensors: Sequence[Any], grouped: bool) -> list[Any]:
    """This rank's rows of the reduced tensors."""
    run = _Reducescatter.apply if _differentiable(tensors) else _reducescatter
    return list(run(call, grouped, *tensors))


def allgather(call: Call, tensors: Sequence[Any], grouped: bool) -> list[Any]:
    """All ranks' rows of every tensor."""
    run = _Allgather.apply if _differentiable(tensors) else _allgather
    return list(run(call, grouped, *tensors))


def broadcast(call: Call, tensor: Any) -> Any:
    """The root's tensor."""
    run = _Broadcast.apply if _differentiable([tensor]) else _broadcast
    return run(call, tensor)


def alltoall(call: Call, tensor: Any, splits: Any) -> tuple[Any, Any]:
    """Rows from every rank, and how many from each."""
    run = _Alltoall.apply if _differentiable([tensor]) else _alltoall
    result, received = run(call, splits, tensor)
    return result, received


def _differentiable(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )


def _allreduce(call: Call, grouped: bool, *tensors: Any) -> tuple[Any, ...]:
    arguments = (call.average, call.name, call.codec, call.op, call.prescale, call.postscale)
    if grouped:
        return tuple(ops.grouped_allreduce(tensors, *arguments, call.process_set))
    return (ops.allreduce(tensors[0], *arguments, call.process_set),)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, grouped: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.grouped = call, grouped
        return _allreduce(call, grouped, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call = ctx.call.back()
        return (None, None, *_some(allreduce, call, gradients, ctx.grouped))


def _reducescatter(call: Call, grouped: bool, *tensors: Any) -> tuple[Any, ...]:
    arguments = (call.name, call.codec, call.op, call.process_set, call.prescale)
    if grouped:
        return tuple(ops.grouped_reducescatter(tensors, *arguments, call.postscale))
    return (ops.reducescatter(tensors[0], *arguments, call.postscale),)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, grouped: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.grouped = call, grouped
        return _reducescatter(call, grouped, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call = ctx.call
        factor = call.prescale * call.postscale
        if call.op == ReduceOp.SUM:
            factor *= runtime.current().size_of(call.process_set)
        scaled = [grad if grad is None or factor == 1 else grad * factor for grad in gradients]
        back = Call(call.back().name, call.process_set)
        return (None, None, *_some(allgather, back, scaled, ctx.grouped))


def _allgather(call: Call, grouped: bool, *tensors: Any) -> tuple[Any, ...]:
    if grouped:
        return tuple(ops.grouped_allgather(tensors, call.name, call.process_set))
    return (ops.allgather(tensors[0], call.name, call.process_set),)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, grouped: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.grouped = call, grouped
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return _allgather(call, grouped, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call = ctx.call.back(op=ReduceOp.AVERAGE)
        averages = _some(allreduce, call, gradients, ctx.grouped)
        name = None if call.name is None else f"{call.name}.rows"
        rows = ops.allgather(torch.tensor([ctx.rows]), name, call.process_set)
        starts = rows[: _rank(call.process_set)].sum(0).tolist()
        return (
            None,
            None,
            *(
                None if average is None else average.narrow(0, start, count)
                for average, start, count in zip(averages, starts, ctx.rows, strict=True)
            ),
        )


def _broadcast(call: Call, tensor: Any) -> Any:
    return ops.broadcast(tensor, call.root, call.name, call.process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, tensor: Tensor) -> Any:
        ctx.call = call
        return _broadcast(call, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        call = ctx.call.back(op=ReduceOp.AVERAGE)
        average = allreduce(call, [gradient], False)[0]
        return None, average if place.rank() == call.root else torch.zeros_like(average)


def as_tensors(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """The result of an alltoall; the numbers of received rows as a tensor of torch, as it is."""
    result, received = pair
    return result, torch.as_tensor(received) if isinstance(result, Tensor) else received


def _alltoall(call: Call, splits: Any, tensor: Any) -> tuple[Any, Any]:
    return as_tensors(ops.alltoall(tensor, splits, call.name, call.process_set))


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, splits: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call = call
        result, received = _alltoall(call, splits, tensor)
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        return None, None, alltoall(ctx.call.back(), gradient, ctx.received)[0]


def _some(
    collective: Any, call: Call, gradients: Sequence[Tensor | None], grouped: bool
) -> list[Tensor | None]:
    """A collective on the gradients that there are: integer tensors of a group have none."""
    given = [grad for grad in gradients if grad is not None]
    results = iter(collective(call, given, grouped) if given else ())
    return [None if grad is None else next(results) for grad in gradients]


def _rank(process_set: ProcessSet | None) -> int:
    return place.rank() if process_set is None else process_set.rank()
