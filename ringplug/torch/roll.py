"""The roll of a round: which gradients the ranks have, and at which round they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringplug.backend.buffers import Array
from ringplug.backend.fusion import TensorSpec

__all__ = ["Roll", "Summary"]

_TURN = 1 << 16
"""Rounds are counted up to here and then anew: their squares stay exact in double precision."""


@dataclass(frozen=True)
class Summary:
    """What all ranks together have; the same on every rank.

    Attributes:
        ranks: How many took part; those that have joined do not count.
        dense: For each parameter, how many ranks have a dense gradient.
        sparse: How many have a sparse one.
        sparse_dims: The number of sparse dimensions of those.
        in_step: Whether all are at the same round, and this rank, too.
    """

    ranks: int
    dense: Array
    sparse: Array
    sparse_dims: Array
    in_step: bool


class Roll:
    """One rank's entries, sent as integers along with the gradients.

    Args:
        count: Number of parameters.
        share: What an entry is multiplied by; twice the number of ranks where the roll is
            averaged, so that truncation cannot lose one, and 1 where it is summed.
    """

    def __init__(self, count: int, share: int) -> None:
        self._count = count
        self._share = share
        self.spec = TensorSpec("roll", (3 * count + 3,), np.dtype(np.int64))

    def write(self, sparse_dims: Array, present: Array, number: int) -> Array:
        """This rank's entries.

        Args:
            sparse_dims: For each parameter, the sparse dimensions of its gradient; 0 for a
                dense one.
            present: Whether there is a gradient.
            number: Of the round.
        """
        count = self._count
        roll = np.zeros(self.spec.shape, np.int64)
        roll[:count] = present & (sparse_dims == 0)
        roll[count : 2 * count] = present & (sparse_dims > 0)
        roll[2 * count : 3 * count] = sparse_dims
        # Ranks that have joined contribute zeros, here as everywhere.
        number %= _TURN
        roll[3 * count :] = 1, number, number * number
        roll *= self._share
        return roll

    def read(self, roll: Array, number: int) -> Summary:
        """What `write` of all ranks has become.

        Args:
            roll: Summed, or averaged and truncated, over the ranks.
            number: Of this rank's round.
        """
        if self._share != 1:
            roll = (roll + 1) // 2
        count = self._count
        dense, sparse, dims = roll[:count], roll[count : 2 * count], roll[2 * count : 3 * count]
        number %= _TURN
        ranks, numbers, squares = (int(value) for value in roll[3 * count :])
        # A sum and a sum of squares that fit one number are of that number only.
        in_step = numbers == ranks * number and squares == ranks * number * number
        return Summary(ranks, dense, sparse, dims // np.maximum(sparse, 1), in_step)
