"""Process sets: ranks that do collectives among themselves. Layer 5."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from ringplug.backend.errors import NotInitializedError, UsageError

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """Some of the ranks; pass it as `process_set` to any operation or optimizer.

    It becomes usable when it is given to ``init(process_sets=...)`` or `add_process_set`, on
    all ranks, members or not.

    Args:
        members: The ranks, or an ``mpi4py.MPI.Comm`` of the member processes.

    Attributes:
        ranks: The members' ranks in the world, ascending; None for a communicator that `init`
            has not seen yet.
        process_set_id: A number, the same on all ranks; 0 for all ranks; None while the set is
            not usable.
        mpi_comm: The communicator it was made from, or None.
    """

    def __init__(self, members: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        self._own_rank: int | None = None
        if isinstance(members, Iterable):
            ranks = list(members)
            if any(isinstance(r, bool) or not hasattr(r, "__index__") for r in ranks):
                raise UsageError(f"a process set is made of ranks, which are integers: {ranks}")
            self.ranks = sorted(index(rank) for rank in ranks)
            if len(set(self.ranks)) != len(self.ranks):
                raise UsageError(f"process set with ranks {self.ranks}: a rank occurs twice")
        elif hasattr(members, "Get_group"):
            self.mpi_comm = members
        else:
            raise UsageError(f"a process set is made of ranks or an MPI communicator: {members!r}")

    def size(self) -> int:
        """Number of members."""
        return len(self._members())

    def rank(self) -> int:
        """This process among the members.

        Raises:
            UsageError: It is none of them.
        """
        members = self._members()
        if self._own_rank not in members:
            raise UsageError(f"rank {self._own_rank} is not in this process set: {members}")
        return members.index(self._own_rank)

    def included(self) -> bool:
        """Whether this process is a member."""
        return self._own_rank in self._members()

    def bind(self, number: int, ranks: Sequence[int], own_rank: int) -> None:
        """The runtime has set it up."""
        self.process_set_id, self.ranks, self._own_rank = number, list(ranks), own_rank

    def unbind(self) -> None:
        """The runtime has ended; the set can be set up again in the next."""
        self.process_set_id = None

    def invalidate(self) -> None:
        """It was removed, and stands for nothing any more."""
        self.process_set_id = self.ranks = self.mpi_comm = None

    def _members(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            raise NotInitializedError(
                f"{self!r} is not set up: call init(process_sets=[...]) or add_process_set on all "
                "ranks"
            )
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Global(ProcessSet):
    def __init__(self) -> None:
        super().__init__([])

    def unbind(self) -> None:
        super().unbind()
        self.ranks = []

    def _members(self) -> list[int]:
        if self.process_set_id is None:
            raise NotInitializedError("ringplug has not been initialized; call init() first")
        return super()._members()


global_process_set = _Global()
"""All ranks; what every `process_set` argument is by default."""
