"""Sums and averages of sparse tensors: every rank gets every rank's entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringplug.backend import ops, runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import MismatchError
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.torch.compilation import untraced
from ringplug.torch.handles import Waitable

__all__ = ["SparseHandle", "sparse_allreduce_async"]


class SparseHandle:
    """A sparse allreduce under way: call it to get the result, or give it to `synchronize`."""

    def __init__(self, pending: Waitable, name: str | None, divisor: int) -> None:
        self._pending = pending
        self._name = name
        self._divisor = divisor

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._pending.done()

    def wait(self) -> Tensor:
        """The reduced tensor; raises what the operation raised."""
        indices, values, sizes = self._pending.wait()
        if bool((sizes != sizes[0]).any()):
            sides = "; ".join(f"rank {at}: {row.tolist()}" for at, row in enumerate(sizes))
            raise MismatchError(f"{self._name}: Mismatched sparse tensor shapes: {sides}")
        if self._divisor != 1:
            exact = values.dtype.is_floating_point or values.dtype.is_complex
            values = torch.div(values, self._divisor, rounding_mode=None if exact else "trunc")
        # What valid tensors of this size are made of.
        return torch.sparse_coo_tensor(
            indices.t(), values, sizes[0].tolist(), check_invariants=False
        )

    def __call__(self) -> Tensor:
        """The reduced tensor; raises what the operation raised."""
        return self.wait()


@untraced
def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: Any,
    process_set: ProcessSet | None = global_process_set,
) -> SparseHandle:
    """Start the reduction of sparse tensors: their entries, gathered from all ranks.

    Args:
        tensor: A sparse COO tensor, coalesced or not, of the same size, sparse dimensions and
            dtype on every rank; the number of entries may differ. It must not change until the
            operation is done.
        name: What the ranks match by.
        op: Average or Sum. An average of integers is truncated toward zero, entry by entry.
        process_set: The ranks that take part; an average is divided by their number.

    Returns:
        A handle: call it, without arguments, to wait for the result, a new sparse tensor on
        every rank, not coalesced. No gradients flow through it.

    Raises:
        UsageError: A ValueError: the tensor is not sparse, or the reduction another one. The
            other ranks get an error too.
        MismatchError: From the handle: the ranks' tensors do not fit together.
    """
    problem = ""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        problem = f"op={op!r} of sparse tensors: Average and Sum are possible"
    elif tensor.layout is not torch.sparse_coo:
        problem = f"sparse_allreduce_async of a tensor of layout {tensor.layout}"
    if problem:
        ops.start("allgather", [], name=name, process_set=process_set, problem=problem)
    plain = tensor.detach()
    parts = [plain._indices().t(), plain._values(), torch.tensor([list(plain.shape)])]
    divisor = runtime.current().size_of(process_set) if op == ReduceOp.AVERAGE else 1
    return SparseHandle(ops.grouped_allgather_async(parts, name, process_set), name, divisor)
