"""``horovod.common.basics``."""

from __future__ import annotations

from typing import Any

import ringplug

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The operations that need no framework, as methods; ringplug's own functions.

    Args:
        pkg_path: Where Horovod's compiled library would be; without effect.
        *args: Its name; without effect.
    """

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        del pkg_path, args

    def __getattr__(self, name: str) -> Any:
        if name in ringplug.__all__:
            return getattr(ringplug, name)
        raise AttributeError(f"HorovodBasics has no attribute {name!r}")
