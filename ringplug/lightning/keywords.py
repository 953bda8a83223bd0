"""Keyword arguments of RingStrategy, checked where they are written.

Lightning keeps unknown ones for DistributedDataParallel, which sees them when training starts.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable

from torch.nn.parallel import DistributedDataParallel

__all__ = ["check_keywords"]

# Lightning gives DistributedDataParallel these itself.
_GIVEN = {"self", "module", "device_ids"}


def check_keywords(given: Iterable[str], *classes: type) -> None:
    """Refuse names that no constructor takes.

    Args:
        given: Names of keyword arguments.
        classes: Whose constructors may take them, next to DistributedDataParallel.

    Raises:
        TypeError: A name that is in none of their signatures; says the nearest that is.
    """
    valid: set[str] = set()
    for owner in (*classes, DistributedDataParallel):
        for name, parameter in inspect.signature(owner).parameters.items():
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                valid.add(name)
    valid -= _GIVEN
    for name in given:
        if name not in valid:
            near = difflib.get_close_matches(name, sorted(valid), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {_listed(valid)}"
            raise TypeError(f"RingStrategy got an unexpected keyword argument {name!r}{hint}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
