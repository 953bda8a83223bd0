"""Arithmetic on flat buffers, against numpy, ml_dtypes and exact values."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from ringplug.backend import buffers
from ringplug.backend.buffers import (
    BFLOAT16,
    ReduceOp,
    accumulator,
    as_bytes,
    check_reducible,
    convert,
    fold,
    scale_into,
)
from ringplug.backend.errors import UsageError

F2, F4, F8 = (np.dtype(d) for d in ("f2", "f4", "f8"))
# Signed zeros, infinities, the largest and the smallest numbers, denormals of each dtype.
SPECIAL = np.array(
    [
        *(0.0, -0.0, np.inf, -np.inf, 1, -1, 65504, 65520, -70000, 3.4e38, 1e-8, -6e-8, 5.96e-8),
        *(1e-40, -1e-45, 1.17e-38, 9.2e-41, 2.0**-133, 2.0**-134, 3 * 2.0**-135),
    ],
    np.float32,
)


def bits(array):
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("narrow", [F2, BFLOAT16], ids=str)
def test_float32_to_16_bits_rounds_to_nearest_even(narrow):
    random = np.random.default_rng(0)
    patterns = random.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    patterns = patterns[~np.isnan(patterns)]
    # All the ties, and their neighbours on both sides.
    upper = np.arange(2**16, dtype=np.uint32) << 16
    near = (upper[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    near = near.view(np.float32)
    near = near[~np.isnan(near)]
    for source in (patterns, near, SPECIAL, -SPECIAL, np.empty(0, F4)):
        target = np.empty(source.shape, narrow)
        before = source.copy()
        convert(source, target)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(bits(target), bits(source.astype(narrow)))
        np.testing.assert_array_equal(bits(source), bits(before))


@pytest.mark.parametrize("narrow", [F2, BFLOAT16], ids=str)
def test_nan_stays_nan(narrow):
    patterns = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    target = np.zeros(7, narrow)
    convert(np.concatenate([patterns.view(np.float32), np.ones(2, F4)]), target)
    assert np.isnan(target[:5].astype(F4)).all()
    assert (target[5:] == 1).all()


@pytest.mark.parametrize("narrow", [F2, BFLOAT16], ids=str)
def test_16_bits_to_float32_is_exact(narrow):
    every = np.arange(2**16, dtype=np.uint16).view(narrow)
    wide = np.empty(2**16, F4)
    convert(every, wide)
    wanted = every.astype(F4)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(wanted))
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(bits(wide[number]), bits(wanted[number]))
    back = np.empty(2**16, narrow)
    convert(wide, back)
    np.testing.assert_array_equal(bits(back)[number], bits(every)[number])


@pytest.mark.parametrize(
    ("frm", "to"), list(itertools.product([F2, BFLOAT16, F4, F8, np.dtype("i4")], repeat=2))
)
def test_every_pair(frm, to):
    source = np.array([0, 1, 2, -3, 100], frm)
    target = np.empty(5, to)
    convert(source, target)
    np.testing.assert_array_equal(target, source.astype(to))


def test_strided_views_convert():
    source = np.arange(20, dtype=F4)
    target = np.zeros(20, BFLOAT16)
    convert(source[::2], target[1::2])
    assert (target[1::2] == source[::2]).all()
    assert not target[::2].any()


@pytest.mark.parametrize(
    ("value", "factor", "wanted"),
    [
        (7, 0.5, 3),
        (-7, 0.5, -3),
        (5, 1 / 3, 1),
        (-5, 1 / 3, -1),
        (3, 1 / 3, 1),
        (-1, 0.5, 0),
        (9, 2.0, 18),
    ],
)
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8"])
def test_integers_are_truncated_toward_zero(value, factor, wanted, dtype):
    source = np.full(3, value, dtype)
    target = np.empty_like(source)
    scale_into(source, factor, target)
    assert (target == wanted).all()
    assert (source == value).all()
    fold(ReduceOp.AVERAGE, [source, np.zeros_like(source)], factor, target)
    assert (target == wanted).all()


@pytest.mark.parametrize("dtype", [F2, BFLOAT16, F4, F8, np.dtype("c8"), np.dtype("c16")], ids=str)
def test_scaling_floats(dtype):
    source = np.array([1, -2, 3, 0], dtype)
    target = np.empty_like(source)
    scale_into(source, 0.5, target)
    np.testing.assert_array_equal(target, np.array([0.5, -1, 1.5, 0], dtype))
    scale_into(source, 1.0, target)
    np.testing.assert_array_equal(target, source)
    scale_into(source, 0.5, source)
    np.testing.assert_array_equal(source, np.array([0.5, -1, 1.5, 0], dtype))


def test_scaling_halves_goes_through_float32():
    source = np.full(4, 3e-5, F2)
    target = np.empty_like(source)
    # The factor itself does not fit float16.
    scale_into(source, 1e6, target)
    np.testing.assert_allclose(target, 30, rtol=1e-2)


def test_scaling_into_another_dtype():
    target = np.empty(3, F4)
    scale_into(np.array([1, 2, 3], BFLOAT16), 0.1, target)
    np.testing.assert_allclose(target, [0.1, 0.2, 0.3], rtol=1e-6)


OPS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u4", "i8", "f2", "f4", "f8", "c8", BFLOAT16], ids=str
)
def test_fold(op, parts, dtype, monkeypatch):
    dtype = np.dtype(dtype)
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        return
    monkeypatch.setattr(buffers, "CHUNK_BYTES", 64)
    random = np.random.default_rng(1)
    arrays = [random.integers(0, 3, 100).astype(dtype) for _ in range(parts)]
    wanted = arrays[0].copy()
    for other in arrays[1:]:
        wanted = OPS[op](wanted, other).astype(dtype)
    copies = [array.copy() for array in arrays]
    out = np.empty(100, dtype)
    fold(op, arrays, 1.0, out)
    np.testing.assert_array_equal(out, wanted)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    # In place on the first part, and for no elements.
    fold(op, arrays, 1.0, arrays[0])
    np.testing.assert_array_equal(arrays[0], wanted)
    fold(op, [array[:0] for array in arrays], 1.0, out[:0])


@pytest.mark.parametrize("dtype", [F2, BFLOAT16], ids=str)
def test_sums_of_16_bits_are_rounded_once(dtype):
    random = np.random.default_rng(2)
    parts = [random.standard_normal(10_000).astype(dtype) for _ in range(7)]
    out = np.empty(10_000, dtype)
    fold(ReduceOp.SUM, parts, 1.0, out)
    exact = np.sum([p.astype(F4) for p in parts], axis=0, dtype=F8)
    np.testing.assert_array_equal(out, exact.astype(F4).astype(dtype))


def test_sums_of_16_bits_do_not_overflow_before_the_factor():
    parts = [np.full(10, 65504, F2)] * 16
    out = np.empty(10, F2)
    fold(ReduceOp.AVERAGE, parts, 1 / 16, out)
    assert (out == 65504).all()


def test_fold_into_a_wider_result():
    parts = [np.full(10, 1 + 2.0**-7, BFLOAT16)] * 3
    out = np.empty(10, F4)
    fold(ReduceOp.SUM, parts, 0.5, out)
    assert (out == 3 * (1 + 2.0**-7) / 2).all()


def test_fold_is_one_pass_of_chunks(monkeypatch):
    """The factor is applied to what is in the cache, not in a second pass over everything."""
    monkeypatch.setattr(buffers, "CHUNK_BYTES", 80)
    seen = []

    def watch(one, other, out):
        seen.append(out.size)
        np.add(one, other, out=out)

    monkeypatch.setitem(buffers._UFUNCS, ReduceOp.SUM, watch)
    out = np.empty(50, F4)
    fold(ReduceOp.SUM, [np.ones(50, F4)] * 3, 0.5, out)
    assert seen == [20, 20, 20, 20, 10, 10]
    assert (out == 1.5).all()


def test_what_has_no_meaning_is_refused():
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        with pytest.raises(UsageError, match=f"{op.name} of complex64.*no order"):
            check_reducible(np.dtype("c8"), op)
    for dtype in (F4, BFLOAT16, np.dtype("c8")):
        with pytest.raises(UsageError, match=f"BOR works on integers and bool, not on {dtype}"):
            check_reducible(dtype, ReduceOp.BOR)
    for dtype in ("O", "U3", "M8[s]", [("a", "f4")], "V8"):
        with pytest.raises(UsageError, match="SUM of .* is not possible"):
            check_reducible(np.dtype(dtype), ReduceOp.SUM)
    for dtype in ("?", "i8", "f2", BFLOAT16, ml_dtypes.float8_e4m3fn, "c16"):
        check_reducible(np.dtype(dtype), ReduceOp.SUM)


def test_accumulators():
    for dtype in (F2, BFLOAT16, np.dtype(ml_dtypes.float8_e4m3fn)):
        assert accumulator(dtype) == F4
    for dtype in ("i1", "?", "f4", "f8", "c8"):
        assert accumulator(np.dtype(dtype)) == np.dtype(dtype)


def test_as_bytes_is_the_same_memory():
    for dtype in (F4, BFLOAT16, np.dtype("?")):
        array = np.zeros(3, dtype)
        as_bytes(array)[:] = 1
        assert array.astype(bool).all()
        assert as_bytes(array).nbytes == array.nbytes
        assert as_bytes(array[:0]).size == 0
