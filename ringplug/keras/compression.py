"""What gradients and values travel as: `Compression`, and a base class for one's own.

`Compression.none`, ``.fp16`` and ``.bf16`` name codecs of the engine, which casts while it packs
and adds in float32. A class of the user's own is called around the exchange instead, on tensors
of the Keras backend: what its ``compress`` returns is what the ranks reduce.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import keras

from ringplug.backend.compression import Compressor as WireCompressor
from ringplug.backend.errors import UsageError

__all__ = [
    "BF16Compressor",
    "Compression",
    "CompressionChoice",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "user_compressor",
    "wire_codec",
]

_WIRES = ("none", "fp16", "bf16")


class Compressor:
    """Base class of what makes tensors smaller before ranks reduce them.

    A subclass overrides both methods, with operations that work in a compiled step where the
    model is compiled. The ranks add (or average) what `compress` returns: a dense tensor whose
    values mean the same on every rank, of the same shape and dtype everywhere.

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
        return tensor


class _CastCompressor(Compressor):
    dtype: ClassVar[str]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor cast, if it is floating (of any width); and its own dtype."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        floating = keras.backend.is_float_dtype(dtype)
        return (keras.ops.cast(tensor, cls.dtype) if floating else tensor), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The tensor in the dtype that it had."""
        return keras.ops.cast(tensor, ctx) if keras.backend.is_float_dtype(ctx) else tensor


class FP16Compressor(_CastCompressor):
    """Floating tensors as IEEE half precision: 11 bits of precision, largest value 65504."""

    wire: ClassVar[str | None] = "fp16"
    dtype: ClassVar[str] = "float16"


class BF16Compressor(_CastCompressor):
    """Floating tensors as bfloat16: 8 bits of precision, the range of float32."""

    wire: ClassVar[str | None] = "bf16"
    dtype: ClassVar[str] = "bfloat16"


class Compression:
    """What gradients and values travel as."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


CompressionChoice: TypeAlias = "str | type[Compressor] | Compressor | WireCompressor | None"
"""``"none"``, ``"fp16"``, ``"bf16"``; a member of `Compression`; a `Compressor` of the user's own
(class or object); a codec object of the engine; None for the setting."""


def wire_codec(compression: Any) -> str | WireCompressor | None:
    """What the engine's `compression` argument is for a choice.

    Returns:
        A codec's name or object; None for the setting; ``"none"`` for a user's own class, which
        is called around the exchange: see `user_compressor`.

    Raises:
        UsageError: It is none of the choices.
    """
    if compression is None or (isinstance(compression, str) and compression in _WIRES):
        return compression
    # No assignment expression: TensorFlow's AutoGraph does not know them.
    wire = _own_wire(compression)
    if wire is not None:
        return wire
    if user_compressor(compression) is not None:
        return "none"
    methods = ("wire_dtype", "encode", "decode")
    is_codec = all(callable(getattr(compression, name, None)) for name in methods)
    if isinstance(compression, (str, type)) or not is_codec:
        raise UsageError(
            f"compression={compression!r}: expected none, fp16 or bf16, a member of Compression, "
            "a class with compress and decompress, or a codec with wire_dtype, encode and decode"
        )
    codec: WireCompressor = compression
    return codec


def user_compressor(compression: Any) -> Any:
    """The user's own compressor, to be called around the exchange; None for all other choices.

    Returns:
        Something with ``compress(tensor) -> (payload, ctx)`` and ``decompress(payload, ctx)``.
    """
    if compression is None or isinstance(compression, str) or _own_wire(compression) is not None:
        return None
    if all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        return compression
    return None


def _own_wire(compression: Any) -> str | None:
    """The codec named by the class itself: a subclass may override what its base does.

    The classes of ringplug's other plugins have that name too.
    """
    kind = compression if isinstance(compression, type) else type(compression)
    wire = vars(kind).get("wire")
    return wire if isinstance(wire, str) else None
