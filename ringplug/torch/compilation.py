"""Keeps torch.compile away from communication.

A compiled model's forward pass calls into process groups (DDP broadcasts buffers there), and
the compiler would try to trace the Python behind them.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch  # noqa: F401 - makes the module that is imported by name below

__all__ = ["untraced", "untraced_methods"]

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """`function`, run as it is even where the compiler watches; costs nothing where it does not.

    The compiler itself takes seconds to import, so its own decorator is used only once somebody
    else has imported it.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            dynamo = sys.modules.get("torch._dynamo")
            if dynamo is None or not hasattr(dynamo, "disable"):
                return function(*args, **kwargs)
            disabled.append(dynamo.disable(function))
        return disabled[0](*args, **kwargs)

    _skip(run)
    return run  # type: ignore[return-value]


def _skip(function: Any) -> None:
    """Let the compiler not look into the wrapper itself either."""
    frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    else:
        # Before torch 2.7.
        frames.skip_code(function.__code__)


def untraced_methods(kind: type) -> type:
    """Class decorator: all methods that the class itself defines are `untraced`."""
    wrapped: dict[Any, Any] = {}
    for name, member in list(vars(kind).items()):
        if callable(member) and not name.startswith("__") and not isinstance(member, type):
            # Two names of one method stay one method.
            setattr(kind, name, wrapped.setdefault(member, untraced(member)))
    return kind
