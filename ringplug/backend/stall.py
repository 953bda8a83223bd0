"""Waiting for other ranks: briefly awake, then asleep, and never for ever. Layer 1."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from ringplug.backend.errors import PeerLostError, StalledError
from ringplug.backend.log import get_logger

__all__ = ["Wait", "name_ranks"]

_log = get_logger(__name__)

_SPINS = 100
_FIRST_SLEEP = 20e-6
_LAST_SLEEP = 1e-3
_CHECK_EVERY = 0.05
_GRACE = 1.0
"""Seconds between hearing that a rank left and giving up on what it may have sent before."""


def name_ranks(ranks: Collection[int]) -> str:
    """``rank 3`` or ``ranks 1, 3``; the first 16 of many."""
    shown = [str(rank) for rank in sorted(ranks)[:16]]
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + more


class Wait:
    """One wait for other ranks; call `pause` each time the awaited thing is not there yet.

    Args:
        absent: The ranks that are being waited for, now.
        timeout: Seconds until StalledError.
        warning: Seconds until the wait is logged, with the absent ranks.
        departed: The ranks that have left the group, now.
        spins: How often `pause` returns at once before it starts to sleep.
        origin: What errors call each rank; its own number by default.
    """

    __slots__ = (
        "_absent",
        "_count",
        "_departed",
        "_lost_since",
        "_next_check",
        "_origin",
        "_spins",
        "_start",
        "_timeout",
        "_warning",
    )

    def __init__(
        self,
        absent: Callable[[], Sequence[int]],
        timeout: float,
        warning: float,
        departed: Callable[[], Collection[int]],
        spins: int = _SPINS,
        origin: Sequence[int] | None = None,
    ) -> None:
        self._absent = absent
        self._timeout = timeout
        self._warning = warning
        self._departed = departed
        self._spins = spins
        self._origin = origin
        self._count = 0
        self._start = time.monotonic()
        self._next_check = self._start + _CHECK_EVERY
        self._lost_since: float | None = None

    def pause(self, sleep: Callable[[float], object] = time.sleep) -> None:
        """Let a little time pass; longer the longer this wait lasts.

        Args:
            sleep: Called with seconds; may return early when the awaited thing arrives.

        Raises:
            PeerLostError: A rank that is waited for has left.
            StalledError: The deadline has passed.
        """
        self._count += 1
        if self._count <= self._spins:
            return
        if time.monotonic() >= self._next_check:
            self._check()
        doublings = min((self._count - self._spins) // 8, 6)
        sleep(min(_FIRST_SLEEP * 2**doublings, _LAST_SLEEP))

    def _check(self) -> None:
        now = time.monotonic()
        self._next_check = now + _CHECK_EVERY
        waited = now - self._start
        absent = self._absent()
        lost = self._called(set(absent) & set(self._departed()))
        absent = self._called(absent)
        if lost:
            self._lost_since = self._lost_since or now
            if now - self._lost_since > _GRACE:
                raise PeerLostError(
                    f"{name_ranks(lost)} left (its process ended, it failed, or it called "
                    "shutdown) while this rank waited for it; its own output says why",
                    lost,
                )
        if waited > self._timeout:
            raise StalledError(
                f"waited {waited:.1f} s for {name_ranks(absent)}; see what it does instead, or "
                "raise the timeout setting if it is only slow",
                absent=absent,
                seconds=waited,
            )
        if waited > self._warning:
            self._warning = float("inf")
            _log.warning("waiting since %.0f s for %s", waited, name_ranks(absent))

    def _called(self, ranks: Collection[int]) -> list[int]:
        origin = self._origin
        return sorted(ranks if origin is None else (origin[rank] for rank in ranks))
