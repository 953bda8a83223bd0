"""Which ranks a strategy trains over: those of a process set that is set up, this one among them.

A strategy sets up none itself. That is collective over all ranks, while strategies are made,
with different sets, by some of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringplug.backend import config, runtime
from ringplug.backend.errors import NotInitializedError, UsageError
from ringplug.backend.process_set import ProcessSet, global_process_set

__all__ = ["members_of"]

_HOW = (
    "call ringplug.init(process_sets=[...]) with all sets, on all ranks, before RingStrategy("
    "process_set=...)"
)


def members_of(process_set: ProcessSet | Sequence[int] | None) -> tuple[int, ...] | None:
    """The ranks of a process set, ascending; None for all ranks. Waits for nobody.

    Args:
        process_set: A set that is set up, or the ranks of one.

    Raises:
        NotInitializedError: It is not set up.
        UsageError: No set has these ranks, or this rank is not in it.
    """
    if process_set is None or process_set is global_process_set:
        return None
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not runtime.is_initialized():
        first = ""
        if config.launched() is None:
            first = (
                "no launcher started this process, and a process set is a part of processes that "
                "one did (devices=N starts none then). Start them with ringrun -np N python "
                "script.py; in the script "
            )
        raise NotInitializedError(f"RingStrategy(process_set={_shown(wanted)}): {first}{_HOW}")
    rt = runtime.current()
    known = rt.groups.ranks
    number = wanted.process_set_id
    if wanted is not process_set:
        number = next((at for at, ranks in known.items() if ranks == wanted.ranks), None)
    if number is None or number not in known:
        kind = NotInitializedError if wanted is process_set else UsageError
        raise kind(
            f"RingStrategy(process_set={_shown(wanted)}): that set is not set up; {_HOW}. Those "
            f"that are, by their number: {known}"
        )
    ranks = known[number]
    if rt.world.rank not in ranks:
        raise UsageError(
            f"RingStrategy(process_set={ranks}) on rank {rt.world.rank}, which is not in the set: "
            "make the strategy with a set that the rank is in, or only where "
            "process_set.included()"
        )
    return None if number == 0 else tuple(ranks)


def _shown(wanted: ProcessSet) -> str:
    return repr(wanted) if wanted.ranks is None else str(wanted.ranks)
