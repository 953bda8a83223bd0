"""Buckets: every element of every tensor in exactly one place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringplug.backend.buffers import BFLOAT16
from ringplug.backend.compression import get_compressor
from ringplug.backend.fusion import Bucket, TensorSpec, digest, make_buckets

DTYPES = [np.dtype(d) for d in ("f4", "f2", "f8", "i1", "c16")] + [BFLOAT16]


def plain(dtype):
    return dtype


specs_strategy = st.lists(
    st.builds(
        lambda shape, dtype: TensorSpec("t", tuple(shape), dtype),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from(DTYPES),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(
    specs_strategy,
    st.integers(1, 600),
    st.integers(1, 600),
    st.sampled_from(["none", "fp16", "bf16"]),
)
def test_buckets(specs, fusion_bytes, first_bytes, codec):
    wire = get_compressor(codec).wire_dtype
    buckets = make_buckets(specs, fusion_bytes, first_bytes, wire)
    covered: dict[int, list[tuple[int, int]]] = {}
    for number, bucket in enumerate(buckets):
        assert bucket.count > 0
        limit = first_bytes if number == 0 else fusion_bytes
        itemsize = wire(bucket.dtype).itemsize
        # A bucket that was begun when the first one was not closed yet may have either size.
        assert bucket.count * itemsize <= max(limit, first_bytes, itemsize)
        at = 0
        for slot in bucket.slots:
            assert specs[slot.index].dtype == bucket.dtype
            assert slot.at == at
            assert slot.start < slot.stop
            at += slot.stop - slot.start
            covered.setdefault(slot.index, []).append((slot.start, slot.stop))
        assert at == bucket.count
        assert [s.index for s in bucket.slots] == sorted(s.index for s in bucket.slots)
    for index, spec in enumerate(specs):
        ranges = covered.get(index, [])
        assert ranges == sorted(ranges), "parts of a tensor leave in order"
        assert sum(stop - start for start, stop in ranges) == spec.size
        edges = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == edges[:-1]
    # Within one dtype, tensors leave in the order given.
    for dtype in DTYPES:
        order = [s.index for b in buckets if b.dtype == dtype for s in b.slots]
        assert order == sorted(order)
    # A tensor is cut only where it is larger than a bucket.
    for index, ranges in covered.items():
        size = specs[index].size * wire(specs[index].dtype).itemsize
        if size <= min(fusion_bytes, first_bytes):
            assert len(ranges) == 1


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.integers(1, 60),
    st.data(),
)
def test_parts(sizes, limit, data):
    """Any cut of a bucket, piece by piece, meets each element once and at its place."""
    specs = [TensorSpec("t", (size,), np.dtype("i8")) for size in sizes]
    starts = np.cumsum([0, *sizes])
    for bucket in make_buckets(specs, limit * 8, limit * 8, plain):
        memory = np.empty(bucket.count, np.int64)
        for slot in bucket.slots:
            numbers = starts[slot.index] + np.arange(slot.start, slot.stop)
            memory[slot.at : slot.at + numbers.size] = numbers
        cuts = data.draw(st.lists(st.integers(0, bucket.count), max_size=6))
        edges = sorted({0, *cuts, bucket.count})
        got = []
        for low, high in itertools.pairwise(edges):
            piece = memory[low:high]
            for index, elements, where in bucket.parts(slice(low, high)):
                numbers = starts[index] + np.arange(sizes[index])[elements]
                np.testing.assert_array_equal(piece[where], numbers)
                got += numbers.tolist()
        assert got == memory.tolist()
        assert list(bucket.parts(slice(0, 0))) == []


def test_a_huge_tensor_is_cut():
    specs = [TensorSpec("huge", (2**31 + 7,), np.dtype("u1"))]
    buckets = make_buckets(specs, 2**30, 2**20, plain)
    assert [b.count for b in buckets] == [2**20, 2**30, 2**30 - 2**20 + 7]
    assert buckets[-1].slots[0].stop == 2**31 + 7


def test_empty_tensors_are_nowhere():
    specs = [TensorSpec("a", (0, 5), DTYPES[0]), TensorSpec("b", (), DTYPES[0])]
    (bucket,) = make_buckets(specs, 100, 100, plain)
    assert [slot.index for slot in bucket.slots] == [1]
    assert make_buckets(specs[:1], 100, 100, plain) == []
    assert make_buckets([], 100, 100, plain) == []


def test_the_first_bucket_is_small():
    specs = [TensorSpec(f"t{i}", (10,), np.dtype("f4")) for i in range(12)]
    counts = [b.count for b in make_buckets(specs, 200, 40, plain)]
    assert counts == [10, 50, 50, 10]


def test_a_tensor_that_fits_the_next_bucket_is_not_cut():
    specs = [TensorSpec(n, (s,), np.dtype("i1")) for n, s in (("a", 6), ("b", 7), ("c", 3))]
    buckets = make_buckets(specs, 10, 10, plain)
    assert [[s.index for s in b.slots] for b in buckets] == [[0], [1, 2]]


def test_the_wire_decides_the_size():
    specs = [TensorSpec("t", (100,), np.dtype("f4"))]
    narrow = get_compressor("bf16").wire_dtype
    assert len(make_buckets(specs, 200, 200, plain)) == 2
    assert len(make_buckets(specs, 200, 200, narrow)) == 1


def test_sizes():
    assert TensorSpec("x", (), np.dtype("f4")).size == 1
    assert TensorSpec("x", (3, 0), np.dtype("f4")).size == 0
    assert TensorSpec("x", (3, 4), np.dtype("f4")).size == 12


@given(st.text(), st.text())
def test_digest(one, other):
    assert 0 <= digest(one) < 2**63
    assert (digest(one) == digest(other)) == (one == other)


def test_digest_is_the_same_in_every_process():
    assert digest("ringplug") == 3_553_056_450_116_444_640


@pytest.mark.parametrize("place", [slice(0, 4), slice(4, 4), slice(2, 3)])
def test_parts_of_a_bucket_without_slots(place):
    assert list(Bucket(np.dtype("f4"), (), 0).parts(place)) == []
