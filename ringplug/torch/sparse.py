"""Sparse gradients: the ranks' rows are gathered, and rows of the same place added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ringplug.backend.buffers import Array, ReduceOp
from ringplug.backend.fusion import digest
from ringplug.backend.lane import Lane
from ringplug.backend.transport import Transport
from ringplug.torch.tensors import describe, raw_bytes

__all__ = ["SparseExchange"]


class SparseExchange:
    """Adds up sparse gradients of the ranks of a lane.

    Unlike a dense sum it moves only rows that some rank has; like one it gives every rank the
    same bits. Rows are added in float32 or wider.

    Args:
        lane: Whose ranks take part; this registers what a rank that has joined does.
        named: Names and parameters, in an order that is the same on every rank.
    """

    def __init__(self, lane: Lane, named: Sequence[tuple[str, Tensor]]) -> None:
        self._lane = lane
        self._parameters = [parameter for _, parameter in named]
        lines = [f"{name}: {describe(parameter)}" for name, parameter in named]
        self._text = "\n".join([f"sparse gradients among {len(named)} parameters", *lines])
        self._signature = digest(self._text)
        lane.partner(self._signature, self._follow)

    def run(
        self, gradients: Mapping[int, Tensor], dims: Mapping[int, int], divisor: int
    ) -> dict[int, Tensor]:
        """Add up gradients. A collective of all ranks, with the same `dims`.

        Args:
            gradients: This rank's, coalesced, by the parameter's index; the others count as
                empty.
            dims: The sparse dimensions of each parameter to exchange; the same on every rank.
            divisor: What the sums are divided by.

        Returns:
            The sums, coalesced, for all of `dims`.
        """
        wanted = np.zeros(len(self._parameters), np.int64)
        for index, sparse_dim in dims.items():
            wanted[index] = sparse_dim

        def job(transport: Transport) -> dict[int, Tensor]:
            transport.agree(self._signature, self._text)
            transport.allreduce(wanted, ReduceOp.MAX)
            return self._exchange(transport, wanted, gradients, divisor)

        return self._lane.run(job, "sparse gradients")

    def _follow(self, transport: Transport) -> None:
        wanted = np.zeros(len(self._parameters), np.int64)
        transport.allreduce(wanted, ReduceOp.MAX)
        self._exchange(transport, wanted, {}, 1)

    def _exchange(
        self, transport: Transport, wanted: Array, gradients: Mapping[int, Tensor], divisor: int
    ) -> dict[int, Tensor]:
        indices: list[int] = np.flatnonzero(wanted).tolist()
        rows = np.zeros(len(indices), np.int64)
        for at, index in enumerate(indices):
            if (gradient := gradients.get(index)) is not None:
                rows[at] = gradient.indices().shape[1]
        table = np.empty(len(indices) * transport.size, np.int64)
        transport.allgather(rows, table, [len(indices)] * transport.size)
        counts = table.reshape(transport.size, len(indices))
        sums = {}
        for at, index in enumerate(indices):
            sparse_dim = int(wanted[index])
            sums[index] = self._add(
                transport, index, sparse_dim, gradients.get(index), counts[:, at].tolist(), divisor
            )
        return sums

    def _add(
        self,
        transport: Transport,
        index: int,
        sparse_dim: int,
        gradient: Tensor | None,
        counts: Sequence[int],
        divisor: int,
    ) -> Tensor:
        parameter = self._parameters[index]
        inner = parameter.shape[sparse_dim:]
        if gradient is None:
            places = torch.zeros((0, sparse_dim), dtype=torch.int64)
            values = torch.zeros((0, *inner), dtype=parameter.dtype)
        else:
            places = gradient.indices().t().contiguous()
            values = gradient.values().contiguous()
        all_places = _gather(transport, places, counts)
        all_values = _gather(transport, values, counts)
        if all_values.is_floating_point() and all_values.dtype.itemsize < 4:
            all_values = all_values.float()
        stacked = torch.sparse_coo_tensor(
            all_places.t(), all_values, parameter.shape, check_invariants=False
        )
        total = stacked.coalesce()
        if divisor != 1:
            total = total / divisor
        return total.to(parameter.dtype).coalesce()


def _gather(transport: Transport, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """All ranks' rows, in rank order."""
    out = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
    width = out[:1].numel() if sum(counts) else 0
    nbytes = width * rows.element_size()
    transport.allgather(raw_bytes(rows), raw_bytes(out), [count * nbytes for count in counts])
    return out
