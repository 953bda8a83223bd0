"""Whether the ranks train the same model: compared once, before the first step."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ringplug.backend.adapters import view
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.fusion import digest
from ringplug.backend.lane import Lane
from ringplug.backend.transport import Transport

__all__ = ["ReplicaCheck"]


class ReplicaCheck:
    """Compares checksums of parameters over the ranks of a lane.

    Args:
        lane: Whose ranks take part; this registers what a rank that has joined does.
        named: Names and parameters, the same on every rank, the model's first last.
    """

    def __init__(self, lane: Lane, named: Sequence[tuple[str, Tensor]]) -> None:
        self._lane = lane
        self._named = named
        self._text = f"comparison of {len(named)} parameters"
        self._signature = digest(self._text)
        self._differing: str | None = None
        lane.partner(self._signature, self._follow)

    def compare(self) -> None:
        """A collective, after the first round, when all ranks have come and none has stepped."""
        own = np.array([_checksum(parameter) for _, parameter in self._named], np.int64)
        both = np.concatenate([own, -own])

        def job(transport: Transport) -> None:
            transport.agree(self._signature, self._text)
            transport.allreduce(both, ReduceOp.MAX)

        self._lane.run(job, self._text)
        largest, smallest = both[: own.size], -both[own.size :]
        different = np.flatnonzero(largest != smallest)
        if different.size:
            self._differing = self._named[int(different[-1])][0]

    def _follow(self, transport: Transport) -> None:
        # Less than any checksum and its negative: only ranks that train are compared.
        least = np.full(2 * len(self._named), np.iinfo(np.int64).min)
        transport.allreduce(least, ReduceOp.MAX)

    def warn(self) -> None:
        """Once, on one rank: warn if the parameters were not the same."""
        name, self._differing = self._differing, None
        if name is not None and self._lane.transport.rank == 0:
            warnings.warn(
                f"the ranks train different models: the values of {name} are not the same on all "
                "ranks; call ringplug.torch.broadcast_parameters(model.state_dict(), root_rank=0) "
                "before the first step",
                UserWarning,
                stacklevel=6,
            )


def _checksum(parameter: Tensor) -> int:
    values = np.ascontiguousarray(view(parameter.detach()))
    return zlib.crc32(values.reshape(-1).view(np.uint8).data)
