"""Which tensors share a bucket. Pure data, no communication. Layer 2."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Bucket", "Slot", "TensorSpec", "digest", "make_buckets"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a plan.

    Attributes:
        name: For errors.
        shape: Its shape.
        dtype: Its numpy dtype; bfloat16 is ml_dtypes'.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements `start` to `stop` of tensor `index` lie at `at` in a bucket."""

    index: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors, or parts of large ones, of one dtype that travel together."""

    dtype: np.dtype[Any]
    slots: tuple[Slot, ...]
    count: int

    def parts(self, place: slice) -> Iterator[tuple[int, slice, slice]]:
        """What lies in the elements `place` of this bucket.

        Yields:
            Tensor index, its elements, and where they lie relative to ``place.start``.
        """
        low, high = 0, len(self.slots)
        while low < high:
            middle = (low + high) // 2
            slot = self.slots[middle]
            if slot.at + slot.stop - slot.start <= place.start:
                low = middle + 1
            else:
                high = middle
        for slot in self.slots[low:]:
            if slot.at >= place.stop:
                return
            first = max(place.start, slot.at)
            last = min(place.stop, slot.at + slot.stop - slot.start)
            shift = slot.start - slot.at
            yield (
                slot.index,
                slice(first + shift, last + shift),
                slice(first - place.start, last - place.start),
            )


def make_buckets(
    specs: Sequence[TensorSpec],
    fusion_bytes: int,
    first_bytes: int,
    wire_dtype: Callable[[np.dtype[Any]], np.dtype[Any]],
) -> list[Bucket]:
    """Cut tensors into buckets, in the order given.

    Args:
        specs: The tensors, in the order in which they are expected to become ready.
        fusion_bytes: Size of a bucket on the wire; larger tensors are cut.
        first_bytes: Size of the first bucket.
        wire_dtype: The dtype on the wire for a tensor's dtype.

    Returns:
        Buckets in launch order: a bucket comes when its last element is there. Each holds one
        dtype. Tensors without elements are in none.
    """
    buckets: list[Bucket] = []
    filling: dict[np.dtype[Any], list[Slot]] = {}
    counts: dict[np.dtype[Any], int] = {}

    def close(dtype: np.dtype[Any]) -> None:
        buckets.append(Bucket(dtype, tuple(filling.pop(dtype)), counts.pop(dtype)))

    for index, spec in enumerate(specs):
        wire = wire_dtype(spec.dtype)
        start, size = 0, spec.size
        while start < size:
            limit = max(1, (fusion_bytes if buckets else first_bytes) // wire.itemsize)
            at = counts.get(spec.dtype, 0)
            stop = min(size, start + max(1, limit - at))
            # A tensor that fits a whole bucket but not this one's rest begins the next.
            if at and stop < size and size - start <= limit:
                close(spec.dtype)
                continue
            filling.setdefault(spec.dtype, []).append(Slot(index, start, stop, at))
            counts[spec.dtype] = at + stop - start
            if counts[spec.dtype] >= limit:
                close(spec.dtype)
            start = stop
    for dtype in list(filling):
        close(dtype)
    return buckets


def digest(text: str) -> int:
    """A number below 2**63 that differs, with near certainty, when the text does."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
