"""What the wire carries in place of the gradients. Layer 2.

* ``none.py``  the values as they are
* ``cast.py``  floats as 16-bit floats

Sums are always accumulated in float32 or wider (see buffers.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ringplug.backend.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from ringplug.backend.buffers import Buffer

__all__ = ["Compressor", "get_compressor"]


class Compressor(Protocol):
    """A codec whose payloads can be added: the transport reduces them as they are."""

    name: str

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype on the wire of a tensor of `dtype`."""
        ...

    def encode(self, source: Buffer, payload: Buffer) -> None:
        """Fill `payload`, of the wire dtype and as many elements, from `source`."""
        ...

    def decode(self, payload: Buffer, target: Buffer, factor: float) -> None:
        """Fill `target` from a reduced `payload`, times `factor`."""
        ...


def get_compressor(choice: str | Compressor) -> Compressor:
    """The codec of that name: ``none``, ``fp16`` or ``bf16``; an object is returned as it is.

    Raises:
        ConfigError: There is no such codec.
    """
    if not isinstance(choice, str):
        return choice
    from ringplug.backend.compression.cast import Bf16, Fp16
    from ringplug.backend.compression.none import NoCompression

    codecs: dict[str, type[Compressor]] = {"none": NoCompression, "fp16": Fp16, "bf16": Bf16}
    if choice not in codecs:
        raise ConfigError(f"compression={choice!r}: expected one of {', '.join(codecs)}")
    return codecs[choice]()
