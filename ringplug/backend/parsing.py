"""What people write in settings, as values. Layer 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "name_or",
    "one_of",
    "optional_int",
    "parse_bool",
    "parse_bytes",
    "parse_seconds",
    "positive_bytes",
    "positive_seconds",
    "shown",
]

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_bool(text: str | bool) -> bool:
    """``1/true/yes/on`` or ``0/false/no/off``."""
    word = str(text).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected one of 1/true/yes/on or 0/false/no/off")


def parse_bytes(text: str | int) -> int:
    """Bytes, from an integer or from text such as ``64MiB`` or ``1GB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size such as 65536, 64MiB or 1GB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_seconds(text: str | float) -> float:
    """Seconds, from a number or from text such as ``30s``, ``500ms`` or ``10m``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    if match is None or match[2] not in _TIMES:
        raise ValueError("expected a time such as 30, 30s, 500ms or 10m")
    return float(match[1]) * _TIMES[match[2]]


def positive_seconds(text: str | float) -> float:
    """Seconds, more than none; see `parse_seconds`."""
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise ValueError("expected more than 0 seconds")
    return seconds


def positive_bytes(text: str | int) -> int:
    """Bytes, more than none; see `parse_bytes`."""
    size = parse_bytes(text)
    if size <= 0:
        raise ValueError("expected more than 0 bytes")
    return size


def one_of(*words: str) -> Callable[[str], str]:
    """A parser for one of the words."""

    def parse(text: str) -> str:
        word = str(text).strip().lower()
        if word not in words:
            raise ValueError("expected one of " + ", ".join(words))
        return word

    return parse


def name_or(words: Sequence[str], *methods: str) -> Callable[[Any], Any]:
    """One of the words, or an object with these methods."""
    named = one_of(*words)

    def parse(value: Any) -> Any:
        if isinstance(value, str):
            return named(value)
        lacking = [method for method in methods if not callable(getattr(value, method, None))]
        if lacking:
            raise ValueError(
                f"expected one of {', '.join(words)} or an object with {', '.join(methods)}; "
                f"this one lacks {', '.join(lacking)}"
            )
        return value

    return parse


def optional_int(text: str) -> int | None:
    """An integer, or None for nothing."""
    return int(text) if str(text).strip() else None


def shown(value: Any) -> Any:
    """A setting's value as the ranks compare it: objects by their name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(getattr(value, "name", None) or getattr(value, "__qualname__", type(value).__name__))
