"""Floats as 16-bit floats on the wire; everything else as it is. Layer 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringplug.backend.buffers import BFLOAT16, Buffer, convert, is_floating, scale_into

__all__ = ["Bf16", "Fp16"]


class _Cast:
    name: str
    _wire: np.dtype[Any]

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        narrows = is_floating(dtype) and dtype.kind != "c" and dtype.itemsize > 2
        return self._wire if narrows else dtype

    def encode(self, source: Buffer, payload: Buffer) -> None:
        if source.dtype.itemsize == 8 and payload.dtype == BFLOAT16:
            source = source.astype(np.float32)
        convert(source, payload)

    def decode(self, payload: Buffer, target: Buffer, factor: float) -> None:
        if payload.dtype == target.dtype:
            scale_into(payload, factor, target)
            return
        if payload.dtype == BFLOAT16 and target.dtype.itemsize == 8:
            payload = payload.astype(np.float32)
        convert(payload, target)
        scale_into(target, factor, target)


class Fp16(_Cast):
    """IEEE half precision: 11 bits of precision, largest value 65504."""

    name = "fp16"
    _wire = np.dtype(np.float16)


class Bf16(_Cast):
    """bfloat16: 8 bits of precision, the range of float32."""

    name = "bf16"
    _wire = BFLOAT16
