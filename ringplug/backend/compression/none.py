"""No compression. Layer 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringplug.backend.buffers import Buffer, scale_into

__all__ = ["NoCompression"]


class NoCompression:
    """The values as they are."""

    name = "none"

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return dtype

    def encode(self, source: Buffer, payload: Buffer) -> None:
        np.copyto(payload, source)

    def decode(self, payload: Buffer, target: Buffer, factor: float) -> None:
        scale_into(payload, factor, target)
