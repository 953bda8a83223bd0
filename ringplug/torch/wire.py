"""What gradients travel as: the engine's codecs with a divisor before the sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringplug.backend import runtime
from ringplug.backend.buffers import Buffer, is_floating, scale_into
from ringplug.backend.compression import Compressor, get_compressor
from ringplug.torch.compression import CompressionChoice, wire_codec

__all__ = ["Predivided", "gradient_codec"]


def gradient_codec(compression: CompressionChoice, predivide: float) -> str | Compressor | None:
    """What a plan's `compression` argument is for an optimizer's.

    Args:
        compression: See `CompressionChoice`.
        predivide: What gradients are divided by before the sum, and multiplied by after it.
    """
    codec = wire_codec(compression)
    if predivide == 1.0:
        return codec
    if codec is None:
        codec = runtime.current().config.compression
    return Predivided(get_compressor(codec), predivide)


class Predivided:
    """A codec for values that are divided before they are added, and multiplied after.

    Both happen while values are packed and unpacked. Integers are left as they are.

    Args:
        codec: What the wire carries.
        divisor: Above 0.
    """

    def __init__(self, codec: Compressor, divisor: float) -> None:
        self._codec = codec
        self._divisor = divisor
        self.name = f"{codec.name}, predivided by {divisor}"

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """As without the division."""
        return self._codec.wire_dtype(dtype)

    def encode(self, source: Buffer, payload: Buffer) -> None:
        """Fill `payload` with the divided values."""
        if not is_floating(source.dtype):
            self._codec.encode(source, payload)
            return
        divided = np.empty(source.shape, source.dtype)
        scale_into(source, 1 / self._divisor, divided)
        self._codec.encode(divided, payload)

    def decode(self, payload: Buffer, target: Buffer, factor: float) -> None:
        """Fill `target`, multiplied again."""
        scale = self._divisor if is_floating(target.dtype) else 1.0
        self._codec.decode(payload, target, factor * scale)
