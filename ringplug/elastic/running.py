"""Runs a training function on a state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ringplug.backend.errors import CollectiveError, HostsUpdatedInterrupt, RingplugError
from ringplug.backend.log import get_logger
from ringplug.elastic.state import State

__all__ = ["run", "run_fn"]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)

_log = get_logger(__name__)

_NOTE = (
    "the state was set back to its last commit; a job cannot go on without a rank that it has "
    "lost (elastic jobs are not offered yet): save the state if you can, and start the job again"
)


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator of a training function whose first argument is a `State`; see `run_fn`."""
    return run_fn(func)


def run_fn(
    func: Callable[Concatenate[S, P], T], reset: Callable[[], Any] | None = None
) -> Callable[Concatenate[S, P], T]:
    """A function that brings the state of rank 0 to all ranks and then calls `func`.

    * When a collective fails, the state goes back to its last commit and the error goes on to
      the caller, with a note: a group of ranks that has lost one is not rebuilt here. The
      restored state can be written to a file there.
    * When `func` raises HostsUpdatedInterrupt, which ringplug itself never does, training starts
      over on the same ranks: `reset`, the state's reset callbacks, its `sync` unless the
      interrupt says otherwise, and `func` again.

    Args:
        func: Called with the state and further arguments, on all ranks.
        reset: Called before training starts over.

    Returns:
        The wrapped function; it returns what `func` returns.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except CollectiveError as error:
                _restore(state, error)
                raise
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            if reset is not None:
                reset()
            state.on_reset()

    return wrapper  # type: ignore[return-value]


def _restore(state: State, error: CollectiveError) -> None:
    note = _NOTE
    try:
        state.restore()
    except RingplugError as other:
        note = f"the state could not be set back to its last commit: {other}"
    _log.error("%s: %s", error, note)
    # From Python 3.11 on the error itself says so, wherever it is shown.
    if hasattr(error, "add_note"):
        error.add_note(note)
