"""What is sent in place of a tensor: `Compression`, and a base class for one's own.

`Compression.none`, ``.fp16`` and ``.bf16`` name codecs of the engine, which casts while it packs
and adds in float32. A class of the user's own is called around the collective instead: what its
``compress`` returns is what the ranks reduce.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

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
    "user_compressor",
    "wire_codec",
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
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What to send in place of `tensor`, and what `decompress` needs to know of it."""
        raise NotImplementedError("a Compressor needs a static method compress")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The result in the form of the original; `tensor` is the reduced payload."""
        raise NotImplementedError("a Compressor needs a static method decompress")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    wire: ClassVar[str | None] = "none"

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor cast, if it is floating (of any width); and its own dtype."""
        if not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in the dtype that it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_CastCompressor):
    """Floating tensors as IEEE half precision: 11 bits of precision, largest value 65504."""

    wire: ClassVar[str | None] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


class BF16Compressor(_CastCompressor):
    """Floating tensors as bfloat16: 8 bits of precision, the range of float32."""

    wire: ClassVar[str | None] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


class Compression:
    """What gradients and reductions travel as."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


CompressionChoice: TypeAlias = "str | type[Compressor] | Compressor | WireCompressor | None"
"""``"none"``, ``"fp16"``, ``"bf16"``; a member of `Compression`; a `Compressor` of the user's own
(class or object); a codec object of the engine; None for the setting."""


def wire_codec(compression: CompressionChoice) -> str | WireCompressor | None:
    """What the engine's `compression` argument is for a choice.

    Args:
        compression: See `CompressionChoice`.

    Returns:
        A codec's name or object; None for the setting. ``"none"`` for a user's own class, which
        is called around the collective: see `user_compressor`.

    Raises:
        ConfigError: It is none of these.
    """
    if compression is None:
        return None
    if isinstance(compression, str):
        get_compressor(compression)
        return compression
    if (wire := _own_wire(compression)) is not None:
        return wire
    if user_compressor(compression) is not None:
        return "none"
    if isinstance(compression, type) or not all(
        callable(getattr(compression, name, None)) for name in ("wire_dtype", "encode", "decode")
    ):
        raise ConfigError(
            f"compression={compression!r}: expected none, fp16 or bf16, a member of Compression, "
            "a class with compress and decompress, or a codec with wire_dtype, encode and decode"
        )
    return compression  # type: ignore[return-value]


def user_compressor(compression: CompressionChoice) -> Any:
    """The user's own compressor, to be called around the collective; None for all other choices.

    Returns:
        Something with ``compress(tensor) -> (payload, ctx)`` and ``decompress(payload, ctx)``.
    """
    if compression is None or isinstance(compression, str) or _own_wire(compression) is not None:
        return None
    if all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        return compression
    return None


def _own_wire(compression: Any) -> str | None:
    """The codec named by the class itself: a subclass may override what its base does."""
    kind = compression if isinstance(compression, type) else type(compression)
    wire = vars(kind).get("wire")
    return wire if isinstance(wire, str) else None
