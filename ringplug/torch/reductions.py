"""torch.distributed's reductions in terms of the backend's, and the sum of sparse tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from ringplug.backend.buffers import Buffer, ReduceOp, check_reducible
from ringplug.backend.errors import UsageError
from ringplug.backend.transport import Transport
from ringplug.torch.tensors import Flat

__all__ = ["Reduction", "allreduce_sparse", "reduction"]

dist: Any = torch.distributed
_OPS = {
    int(dist.ReduceOp.SUM): ReduceOp.SUM,
    int(dist.ReduceOp.AVG): ReduceOp.AVERAGE,
    int(dist.ReduceOp.PRODUCT): ReduceOp.PRODUCT,
    int(dist.ReduceOp.MIN): ReduceOp.MIN,
    int(dist.ReduceOp.MAX): ReduceOp.MAX,
    int(dist.ReduceOp.BAND): ReduceOp.BAND,
    int(dist.ReduceOp.BOR): ReduceOp.BOR,
    int(dist.ReduceOp.BXOR): ReduceOp.BXOR,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """What to do with the ranks' values.

    Attributes:
        op: The backend's reduction; SUM where torch's is AVG, see `average`.
        name: For signatures and errors.
        average: Whether the sum is divided by the number of ranks.
        factor: A number or tensor that this rank's values are multiplied with first.
    """

    op: ReduceOp
    name: str
    average: bool = False
    factor: Any = None

    def scale(self, size: int) -> float:
        """What a transport multiplies its result with."""
        return 1 / size if self.average else 1.0

    def check(self, tensor: Tensor) -> None:
        """Raise UsageError where this reduction has no meaning for the tensor's dtype."""
        if tensor.dtype is torch.bool and (self.average or self.factor is not None):
            raise UsageError(f"{self.name} of bool values: a truth value has no mean")
        probe = Flat(torch.empty(0, dtype=tensor.dtype)).numbers
        check_reducible(probe.dtype, self.op)

    def load(self, flat: Flat) -> Buffer:
        """This rank's values, premultiplied if so asked; a copy in that case."""
        if self.factor is None:
            return flat.numbers
        return Flat(flat.tensor * self.factor).numbers.astype(flat.numbers.dtype, copy=False)


def reduction(op: Any) -> Reduction:
    """The reduction behind a ``torch.distributed.ReduceOp``.

    Raises:
        UsageError: It is none that is known here.
    """
    if isinstance(op, dist.ReduceOp.RedOpType):
        op = dist.ReduceOp(op)
    kind, factor = op.__getstate__()
    number = int(kind)
    if number == int(dist.ReduceOp.PREMUL_SUM):
        return Reduction(ReduceOp.SUM, "PREMUL_SUM", factor=factor)
    if number not in _OPS:
        raise UsageError(f"reduction {kind} is not known to ringplug")
    known = _OPS[number]
    if known is ReduceOp.AVERAGE:
        return Reduction(ReduceOp.SUM, "AVG", average=True)
    return Reduction(known, known.name)


def allreduce_sparse(transport: Transport, tensor: Tensor, how: Reduction) -> None:
    """Sum of sparse COO tensors, in place: all ranks' indices and values are gathered.

    The ranks may hold different numbers of elements. Each index appears once in the result.
    """
    own = tensor.detach().coalesce()
    indices, values = own.indices().t().contiguous(), own.values().contiguous()
    counts = np.zeros(transport.size, np.int64)
    mine = np.array([values.shape[0]], np.int64)
    transport.allgather(mine, counts, [1] * transport.size)
    total = int(counts.sum())
    all_indices = torch.empty((total, indices.shape[1]), dtype=indices.dtype)
    all_values = torch.empty((total, *values.shape[1:]), dtype=values.dtype)
    for part, whole in ((indices, all_indices), (values, all_values)):
        width = part.shape[1:].numel() * part.element_size()
        widths = [int(count) * width for count in counts]
        transport.allgather(Flat(part).bytes, Flat(whole).bytes, widths)
    if how.average:
        all_values = torch.div(
            all_values,
            transport.size,
            rounding_mode=None if all_values.is_floating_point() else "trunc",
        )
    merged = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape)
    # A detached sparse tensor has indices of its own: this must be the tensor itself.
    tensor.copy_(merged.coalesce())
