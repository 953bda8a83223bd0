"""Flat buffers: dtypes, reductions, scaling, and conversion to and from 16-bit floats. Layer 1.

A buffer is a one-dimensional contiguous numpy array. Half-precision floats are always added
in float32, so a sum is rounded once and cannot overflow on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from ringplug.backend.errors import UsageError

__all__ = [
    "BFLOAT16",
    "CHUNK_BYTES",
    "Array",
    "Buffer",
    "ReduceOp",
    "accumulator",
    "as_bytes",
    "check_reducible",
    "convert",
    "fold",
    "is_floating",
    "neutral_array",
    "scale_into",
    "split_evenly",
]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Buffer: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT16 = np.dtype(np.float16)
_FLOAT32 = np.dtype(np.float32)
CHUNK_BYTES = 512 * 1024
"""What is reduced at a time: small enough for the cache, large enough to hide numpy's calls."""


class ReduceOp(IntEnum):
    """How values of several ranks become one. The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BAND = 6
    BOR = 7
    BXOR = 8


_UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is a real or complex floating type, bfloat16 and float8 included."""
    return dtype.kind in "fc" or "float" in dtype.name


def check_reducible(dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Raise UsageError where `op` has no meaning for `dtype`."""
    if dtype.kind == "b" and op is ReduceOp.AVERAGE:
        raise UsageError(
            "AVERAGE of bool values has no bool result: use SUM (any), MIN (all), or convert"
        )
    if op is ReduceOp.ADASUM and not (is_floating(dtype) and dtype.kind != "c"):
        raise UsageError(f"ADASUM works on real floats, not on {dtype}")
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UsageError(f"{op.name} of {dtype} values: complex numbers have no order")
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and is_floating(dtype):
        raise UsageError(f"{op.name} works on integers and bool, not on {dtype}")
    if dtype.kind not in "biufcV" or dtype.type is np.void:
        raise UsageError(f"{op.name} of {dtype} values is not possible")


def accumulator(dtype: np.dtype[Any], factor: float = 1.0) -> np.dtype[Any]:
    """The type in which values of `dtype` are added before they are scaled by `factor`.

    float32 for all narrower floats; 64 bits for integers that are scaled, whose sum need not
    fit although their average does.
    """
    if is_floating(dtype):
        return _FLOAT32 if dtype.itemsize < 4 else dtype
    if factor != 1.0 and dtype.kind in "iu":
        return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)
    return dtype


def neutral_array(shape: Sequence[int], dtype: np.dtype[Any], op: ReduceOp) -> Array:
    """Values that leave unchanged what they are reduced with."""
    value: Any = 0
    if op is ReduceOp.PRODUCT:
        value = 1
    elif op in (ReduceOp.MIN, ReduceOp.MAX):
        lowest = op is ReduceOp.MAX
        if dtype.kind == "b":
            value = not lowest
        elif dtype.kind in "iu":
            limits = np.iinfo(dtype)
            value = limits.min if lowest else limits.max
        else:
            value = -np.inf if lowest else np.inf
    elif op is ReduceOp.BAND:
        value = True if dtype.kind == "b" else ~dtype.type(0)
    return np.full(shape, value, dtype)


def as_bytes(buffer: Buffer) -> Buffer:
    """The same memory as uint8."""
    return buffer.view(np.uint8) if buffer.size else np.empty(0, np.uint8)


def split_evenly(count: int, parts: int) -> list[slice]:
    """`parts` neighbouring slices of ``range(count)``, sizes differing by at most one."""
    small, extra = divmod(count, parts)
    starts = [i * small + min(i, extra) for i in range(parts + 1)]
    return [slice(starts[i], starts[i + 1]) for i in range(parts)]


def convert(source: Buffer, target: Buffer) -> None:
    """Copy `source` into `target`, converting the dtype; ties round to even.

    bfloat16 is the upper half of a float32, which integer arithmetic converts several times
    faster than a cast per element.
    """
    if target.dtype == BFLOAT16 and source.dtype == _FLOAT32:
        bits = source.view(np.uint32)
        rounded = (bits >> 16) & 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        np.copyto(target.view(np.uint16), rounded, casting="unsafe")
        nan = np.isnan(source)
        if nan.any():
            target[nan] = np.nan
    elif source.dtype == BFLOAT16 and target.dtype == _FLOAT32:
        wide = target.view(np.uint32)
        np.copyto(wide, source.view(np.uint16))
        np.left_shift(wide, 16, out=wide)
    elif target.dtype == _FLOAT16:
        with np.errstate(over="ignore"):
            np.copyto(target, source, casting="unsafe")
    else:
        np.copyto(target, source, casting="unsafe")


def scale_into(source: Buffer, factor: float, target: Buffer) -> None:
    """``target = source * factor``; `source` may be `target`.

    Integers are scaled in double precision and truncated toward zero, as Horovod does.
    """
    if factor == 1.0:
        if source is not target:
            convert(source, target)
    elif not is_floating(source.dtype):
        exact = source.astype(np.float64) * factor
        np.copyto(target, np.trunc(exact), casting="unsafe")
    elif target.dtype == source.dtype and source.dtype.itemsize >= 4:
        np.multiply(source, source.dtype.type(factor), out=target)
    else:
        wide = np.empty(source.shape, accumulator(source.dtype))
        convert(source, wide)
        np.multiply(wide, wide.dtype.type(factor), out=wide)
        convert(wide, target)


def fold(op: ReduceOp, parts: Sequence[Buffer], factor: float, out: Buffer) -> None:
    """``out = factor * (parts[0] op parts[1] op ...)``, in cache-sized chunks.

    Args:
        op: The reduction; AVERAGE is SUM, its division is `factor`.
        parts: One buffer per rank, same size and dtype. `out` may be ``parts[0]``, and no
            other.
        factor: Applied to the result before it is rounded to `out`'s dtype.
        out: Same size; its dtype may differ from that of the parts.
    """
    count = out.size
    dtype = parts[0].dtype
    ufunc = _UFUNCS[op]
    wide = accumulator(dtype, factor)
    step = max(1, CHUNK_BYTES // max(dtype.itemsize, 1))
    plain = wide == dtype and out.dtype == dtype and (factor == 1.0 or is_floating(dtype))
    if plain:
        scale = dtype.type(factor) if factor != 1.0 else None
        for lo in range(0, count, step):
            piece = slice(lo, min(lo + step, count))
            total = out[piece]
            if len(parts) == 1:
                if parts[0] is not out:
                    np.copyto(total, parts[0][piece])
            else:
                ufunc(parts[0][piece], parts[1][piece], out=total)
                for part in parts[2:]:
                    ufunc(total, part[piece], out=total)
            if scale is not None:
                np.multiply(total, scale, out=total)
        return
    total_scratch = np.empty(min(step, count), wide)
    part_scratch = np.empty(min(step, count), wide)
    for lo in range(0, count, step):
        piece = slice(lo, min(lo + step, count))
        total = total_scratch[: piece.stop - lo]
        convert(parts[0][piece], total)
        for part in parts[1:]:
            if wide == dtype:
                ufunc(total, part[piece], out=total)
            else:
                addend = part_scratch[: piece.stop - lo]
                convert(part[piece], addend)
                ufunc(total, addend, out=total)
        scale_into(total, factor, out[piece])
