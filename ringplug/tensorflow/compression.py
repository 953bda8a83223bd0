"""What is sent in place of a tensor: `Compression`, and a base class for one's own.

`Compression.none`, ``.fp16`` and ``.bf16`` name codecs of the engine, which casts while it packs
and adds in float32. A class of the user's own is called around the collective instead: what its
``compress`` returns is what the ranks reduce.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import tensorflow as tf

from ringplug.backend.compression import Compressor as WireCompressor
from ringplug.backend.compression import get_compressor
from ringplug.backend.errors import ConfigError

__all__ = [
    "BF16Compressor",
    "Compression",
    "CompressionChoice",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "split_compression",
]


class Compressor:
    """Base class of what makes tensors smaller before ranks reduce them.

    A subclass overrides both methods. The ranks add (or average, ...) what `compress` returns,
    so it must be a dense tensor whose values mean the same on every rank, of the same shape and
    dtype everywhere.

    Attributes:
        wire: The engine's codec that does the same as this class; not inherited, since a
            subclass may do something else.
    """

    wire: ClassVar[str | None] = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What to send in place of `tensor`, and what `decompress` needs to know of it."""
        raise NotImplementedError("a Compressor needs a static method compress")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The result in the form of the original; `tensor` is the reduced payload."""
        raise NotImplementedError("a Compressor needs a static method decompress")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    wire: ClassVar[str | None] = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        del ctx
        return tensor


class _CastCompressor(Compressor):
    dtype: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor cast, if it is floating (of any width); and its own dtype."""
        kind = tf.as_dtype(tensor.dtype)
        return (tf.cast(tensor, cls.dtype) if kind.is_floating else tensor), kind

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The tensor in the dtype that it had."""
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class FP16Compressor(_CastCompressor):
    """Floating tensors as IEEE half precision: 11 bits of precision, largest value 65504."""

    wire: ClassVar[str | None] = "fp16"
    dtype: ClassVar[Any] = tf.float16


class BF16Compressor(_CastCompressor):
    """Floating tensors as bfloat16: 8 bits of precision, the range of float32."""

    wire: ClassVar[str | None] = "bf16"
    dtype: ClassVar[Any] = tf.bfloat16


class Compression:
    """What gradients and reductions travel as."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


CompressionChoice: TypeAlias = "str | type[Compressor] | Compressor | WireCompressor | None"
"""``"none"``, ``"fp16"``, ``"bf16"``; a member of `Compression`; a `Compressor` of the user's own
(class or object); a codec object of the engine; None for the setting."""


def split_compression(
    compression: CompressionChoice,
) -> tuple[str | WireCompressor | None, Any]:
    """What the engine is to do, and what is to be called around it.

    Args:
        compression: See `CompressionChoice`.

    Returns:
        The engine's `compression` argument, and something with ``compress(tensor) -> (payload,
        ctx)`` and ``decompress(payload, ctx)``, or None.

    Raises:
        ConfigError: It is none of these.
    """
    if compression is None:
        return None, None
    if isinstance(compression, str):
        get_compressor(compression)
        return compression, None
    kind = compression if isinstance(compression, type) else type(compression)
    wire = vars(kind).get("wire")
    if isinstance(wire, str):
        return wire, None
    given: Any = compression
    if all(callable(getattr(given, name, None)) for name in ("compress", "decompress")):
        return "none", given
    if isinstance(compression, type) or not all(
        callable(getattr(given, name, None)) for name in ("wire_dtype", "encode", "decode")
    ):
        raise ConfigError(
            f"compression={compression!r}: expected none, fp16 or bf16, a member of Compression, "
            "a class with compress and decompress, or a codec with wire_dtype, encode and decode"
        )
    return given, None
