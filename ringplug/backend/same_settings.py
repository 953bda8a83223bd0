"""All ranks need the same settings. Layer 1."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from ringplug.backend.config import Config
from ringplug.backend.errors import MismatchError
from ringplug.backend.parsing import shown

__all__ = ["check_same_settings"]

_OWN = (
    "log_level",
    "host_id",
    "expected_size",
    "start_timeout",
    "stall_warning",
    "timeline",
    "timeline_mark_cycles",
)
"""Settings in which ranks may differ."""


def check_same_settings(config: Config, exchange: Callable[[bytes], list[bytes]]) -> None:
    """Raise, on every rank, where settings differ that must not.

    Args:
        config: This rank's.
        exchange: All-gather of bytes over all ranks.

    Raises:
        MismatchError: Names each such setting with every rank's value.
    """
    mine = {
        field.name: shown(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _OWN
    }
    ranks = [json.loads(part) for part in exchange(json.dumps(mine).encode())]
    different = [
        f"{name} is {', '.join(str(rank[name]) for rank in ranks)} on ranks 0 to {len(ranks) - 1}"
        for name in mine
        if len({rank[name] for rank in ranks}) > 1
    ]
    if different:
        raise MismatchError("all ranks need the same settings: " + "; ".join(different))
