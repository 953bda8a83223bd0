"""Adasum and users' own reductions, against what one process computes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ringplug.backend import ops
from ringplug.backend.adasum import coefficients
from ringplug.backend.errors import MismatchError, NotSupportedError, UsageError
from ringplug.backend.reduction import Reduction
from tests.ranks import run_transports

ADASUM = 2


def pair(a, b):
    dot = a @ b
    return (1 - dot / (2 * (a @ a))) * a + (1 - dot / (2 * (b @ b))) * b


def adasum(vectors):
    while len(vectors) > 1:
        vectors = [pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_adasum(ranks, size, dtype):
    vectors = [np.random.default_rng(r).normal(size=1003).astype(dtype) for r in range(size)]
    wide = [vector.astype(np.float64) for vector in vectors]
    tolerance = {8: 1e-12, 4: 1e-5}.get(np.dtype(dtype).itemsize, 2e-2)

    def rank(r):
        # Tensors of one group are combined each by itself.
        whole, part = ops.grouped_allreduce([vectors[r], vectors[r][:10]], op=ADASUM)
        assert whole.dtype == dtype
        np.testing.assert_allclose(whole.astype(float), adasum(wide), tolerance, tolerance)
        few = adasum([vector[:10] for vector in wide])
        np.testing.assert_allclose(part.astype(float), few, tolerance, tolerance)

    ranks(rank, size)


def test_adasum_of_zeros_equals_and_orthogonals(ranks):
    def rank(r):
        assert ops.allreduce(np.zeros(3), op=ADASUM).tolist() == [0, 0, 0]
        equal = np.array([1.0, 2.0])
        np.testing.assert_allclose(ops.allreduce(equal, op=ADASUM), equal)
        apart = np.eye(2)[r]
        np.testing.assert_allclose(ops.allreduce(apart, op=ADASUM), [1, 1])

    ranks(rank, 2)
    assert coefficients(np.zeros((4, 4))).tolist() == [1, 1, 1, 1]


def test_adasum_refusals(ranks):
    def rank(r):
        with pytest.raises(NotSupportedError, match="1, 2, 4, 8, ... ranks; these are 3"):
            ops.allreduce(np.ones(3), op=ADASUM)
        with pytest.raises(NotImplementedError):
            ops.allreduce(np.ones(3), op=ADASUM)
        assert ops.allreduce(1, op=1) == 3

    ranks(rank, 3)

    def whole(r):
        with pytest.raises(UsageError, match="real floats"):
            ops.allreduce(np.ones(3, int), op=ADASUM)

    ranks(whole, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_own_elementwise_reduction(ranks, size, count):
    def combine(into, other):
        np.copyto(into, other, where=abs(other) > abs(into))

    largest = Reduction("largest magnitude", combine)
    everything = np.random.default_rng(0).normal(size=(size, count))
    expected = everything[abs(everything).argmax(0), np.arange(count)] if count else []

    def rank(r):
        mine = everything[r].copy()
        result = ops.allreduce(mine, op=largest, name="x")
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(mine, everything[r])
        both = ops.grouped_allreduce([mine, mine.astype(np.float32)], op=largest)
        np.testing.assert_array_equal(both[0], expected)
        assert both[1].dtype == np.float32

    ranks(rank, size)


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_own_reduction_that_does_not_commute(ranks, size, elementwise):
    """Digits written one after the other show the order."""

    def combine(into, other):
        np.copyto(into, 10 * into + other)

    digits = Reduction("digits", combine, elementwise=elementwise)

    def rank(r):
        result = ops.allreduce(np.full(7, r + 1), op=digits)
        assert result.tolist() == [int("".join(str(q + 1) for q in range(size)))] * 7

    ranks(rank, size)


def test_own_reduction_of_whole_tensors(ranks):
    """Each rank's tensor wins as a whole: the one with the largest sum."""

    def combine(into, other):
        if other.sum() > into.sum():
            np.copyto(into, other)

    best = Reduction("best", combine, elementwise=False)

    def rank(r):
        a, b = ops.grouped_allreduce([np.array([r, 0]), np.array([5 - r, 9])], op=best)
        assert a.tolist() == [2, 0]
        assert b.tolist() == [5, 9]

    ranks(rank, 3)


def test_reductions_of_different_names(ranks):
    def rank(r):
        mine = Reduction(f"of rank {r}", lambda into, other: None)
        with pytest.raises(MismatchError, match="custom of rank 0.*custom of rank 1"):
            ops.allreduce(np.ones(2), op=mine, name="x")
        with pytest.raises(UsageError, match="Average and Sum"):
            ops.reducescatter(np.ones(2), op=mine)

    ranks(rank, 2)


@pytest.mark.parametrize("kind", ["threads", "ring", "hierarchical"])
def test_on_other_transports(kind):
    from ringplug.backend.adasum import allreduce_adasum
    from ringplug.backend.reduction import allreduce_custom

    vectors = [np.random.default_rng(r).normal(size=50000) for r in range(4)]
    hosts = ["a", "a", "b", "b"] if kind == "hierarchical" else None
    digits = Reduction("digits", lambda into, other: np.copyto(into, 10 * into + other))

    def rank(transport):
        x = vectors[transport.rank].copy()
        allreduce_adasum(transport, x, [slice(0, x.size)])
        np.testing.assert_allclose(x, adasum(vectors), 1e-9, 1e-12)
        y = np.full(40000, transport.rank + 1)
        allreduce_custom(transport, y, digits, [slice(0, y.size)])
        assert (y == 1234).all()

    run_transports(rank, 4, kind, hosts)
