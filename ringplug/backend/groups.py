"""The process sets of one rank, and what it has to take part in each. Layer 6."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ringplug.backend.errors import MismatchError, NotInitializedError, UsageError
from ringplug.backend.lane import Lane
from ringplug.backend.named import NamedLane
from ringplug.backend.process_set import ProcessSet
from ringplug.backend.stall import name_ranks

__all__ = ["Group", "Groups", "parse_world"]


class Group:
    """One process set as one of its members has it.

    Attributes:
        number: The id of the process set.
        ranks: Its members, ascending.
        named: Its named operations.
        plans: The lane of plans that have none of their own, once there is one.
    """

    def __init__(self, number: int, ranks: Sequence[int], named: NamedLane) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self.named = named
        self.plans: Lane | None = None

    def index(self, rank: int | None, role: str) -> int:
        """The place of a rank of the world among the members.

        Raises:
            UsageError: It is no member.
        """
        if rank is None or rank not in self.ranks:
            where = f"0..{len(self.ranks) - 1}" if self.number == 0 else f"{list(self.ranks)}"
            raise UsageError(f"{role} {rank} is not in {where}")
        return self.ranks.index(rank)


class Groups:
    """All process sets of one runtime, by their ids; 0 is the whole world.

    Args:
        rank: Of this process.
        size: Of the world.
        exchange: All-gather of bytes over all ranks.
        members_of: The ranks of an MPI communicator's processes.
        make: Makes the named lane of a set with these ranks; collective over them.
        dynamic: Whether sets may come and go after `init`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Callable[[bytes], list[bytes]],
        members_of: Callable[[Any], list[int]],
        make: Callable[[int, Sequence[int]], NamedLane],
        dynamic: bool,
    ) -> None:
        self._rank = rank
        self._size = size
        self._exchange = exchange
        self._members_of = members_of
        self._make = make
        self._dynamic = dynamic
        self._next = 0
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._groups: dict[int, Group] = {}
        self._bound: dict[int, list[ProcessSet]] = {}
        self._register(tuple(range(size)))
        self.everyone = self._groups[0]

    @property
    def ranks(self) -> dict[int, list[int]]:
        """The members of every set, by its id."""
        return {number: list(ranks) for number, ranks in self._ranks.items()}

    @property
    def open(self) -> list[Group]:
        """The sets that this rank is in."""
        return list(self._groups.values())

    def find(self, process_set: ProcessSet | int | None) -> Group:
        """The group of a set that this rank is in.

        Raises:
            UsageError: There is no such set, or this rank is not in it.
        """
        number = process_set.process_set_id if isinstance(process_set, ProcessSet) else process_set
        if process_set is None:
            return self.everyone
        if number is None:
            raise NotInitializedError(
                f"{process_set!r} is not set up: give it to init(process_sets=[...]) or "
                "add_process_set on all ranks"
            )
        if number not in self._ranks:
            raise UsageError(f"there is no process set {number}; known: {self.ranks}")
        if number not in self._groups:
            raise UsageError(
                f"rank {self._rank} is not in process set {number}, whose ranks are "
                f"{list(self._ranks[number])}; only they may use it"
            )
        return self._groups[number]

    def size_of(self, process_set: ProcessSet | int | None) -> int:
        """How many ranks are in a set."""
        if process_set is None:
            return self._size
        number = process_set.process_set_id if isinstance(process_set, ProcessSet) else process_set
        if number not in self._ranks:
            raise UsageError(f"there is no process set {number}; known: {self.ranks}")
        return len(self._ranks[number])

    def bind(self, process_set: ProcessSet, number: int) -> None:
        """Make an object stand for a set."""
        process_set.bind(number, self._ranks[number], self._rank)
        self._bound.setdefault(number, []).append(process_set)

    def establish(self, process_sets: Sequence[ProcessSet]) -> None:
        """Set up sets, in the order given. Collective over all ranks.

        Sets with the same members are one. Communicators may differ between ranks, as those
        of a split do; each rank's object stands for the set that it is in.

        Raises:
            UsageError: Ranks that do not exist.
            MismatchError: On every rank, when they pass different ranks.
        """
        problem, wanted = self._all_wanted(process_sets)
        for at, shown in enumerate(self._show(wanted, problem)):
            for ranks in shown:
                if ranks not in self._ranks.values():
                    self._register(ranks)
            self._bind_own(process_sets[at])

    def add(self, members: Any) -> ProcessSet:
        """Set up one more set. Collective over all ranks; see `establish`.

        Raises:
            UsageError: Sets may not change, or there is one with these members already.
        """
        self._check_dynamic()
        problem, wanted = self._all_wanted([members])
        ((ranks, *others),) = self._show(wanted, problem)
        made = members if isinstance(members, ProcessSet) else ProcessSet(members)
        for one in (ranks, *others):
            if one in self._ranks.values():
                raise UsageError(f"there is a process set with ranks {list(one)} already")
        for one in (ranks, *others):
            self._register(one)
        self._bind_own(made)
        return made

    def remove(self, process_set: ProcessSet) -> bool:
        """Give up a set; what is pending in it fails. Collective over all ranks.

        Returns:
            False for the set of all ranks, which stays.
        """
        self._check_dynamic()
        number = process_set.process_set_id
        if number == 0:
            return False
        if number not in self._ranks:
            raise UsageError(f"{process_set!r} is not set up; known: {self.ranks}")
        self._show([["remove", [number]]])
        for bound in self._bound.pop(number, []):
            bound.invalidate()
        del self._ranks[number]
        group = self._groups.pop(number, None)
        if group is not None:
            group.named.close()
            if group.plans is not None:
                group.plans.close()
        return True

    def close(self) -> None:
        """Give up all sets. Waits for nobody."""
        for bound in self._bound.values():
            for process_set in bound:
                process_set.unbind()
        for group in self._groups.values():
            group.named.close()

    def _bind_own(self, process_set: ProcessSet) -> None:
        comm = process_set.mpi_comm
        own = self._members_of(comm) if comm is not None else process_set.ranks
        assert own is not None
        self.bind(process_set, self.number_of(own))

    def number_of(self, ranks: Sequence[int]) -> int:
        """The id of the set with these members.

        Raises:
            UsageError: There is none.
        """
        for number, known in self._ranks.items():
            if known == tuple(ranks):
                return number
        raise UsageError(f"there is no process set with ranks {list(ranks)}; known: {self.ranks}")

    def _register(self, ranks: tuple[int, ...]) -> None:
        number, self._next = self._next, self._next + 1
        if self._rank in ranks:
            self._groups[number] = Group(number, ranks, self._make(number, ranks))
        self._ranks[number] = ranks

    def _check_dynamic(self) -> None:
        if not self._dynamic:
            raise UsageError(
                "process sets may not change after init(): set HOROVOD_DYNAMIC_PROCESS_SETS=1 (or "
                'RINGPLUG_DYNAMIC_PROCESS_SETS=1), or call init(process_sets="dynamic")'
            )

    def _all_wanted(self, sets: Sequence[Any]) -> tuple[UsageError | None, list[list[Any]]]:
        """For the other ranks; with the error for this one, if it cannot be."""
        try:
            return None, [self._wanted(one) for one in sets]
        except UsageError as error:
            return error, [["problem", str(error)]]

    def _wanted(self, members: Any) -> list[Any]:
        process_set = members if isinstance(members, ProcessSet) else ProcessSet(members)
        if process_set.process_set_id is not None:
            raise UsageError(f"{process_set!r} is set up already")
        if process_set.ranks is None and process_set.mpi_comm is None:
            raise UsageError("this process set was removed; make a new one")
        if process_set.mpi_comm is not None:
            return ["comm", self._members_of(process_set.mpi_comm)]
        return ["ranks", process_set.ranks]

    def _show(
        self, wanted: Sequence[list[Any]], problem: UsageError | None = None
    ) -> list[list[tuple[int, ...]]]:
        """What all ranks want, for each place in the list: one set, or those of a split."""
        shown = [json.loads(part) for part in self._exchange(json.dumps(wanted).encode())]
        if problem is not None:
            raise problem
        for rank, other in enumerate(shown):
            if other and other[0][0] == "problem":
                raise MismatchError(f"rank {rank} cannot set up a process set: {other[0][1]}")
        if len({json.dumps([kind for kind, _ in other]) for other in shown}) > 1 or any(
            kind != "comm" and len({str(other[at][1]) for other in shown}) > 1
            for at, (kind, _) in enumerate(wanted)
        ):
            table = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(shown))
            raise MismatchError(f"ranks set up different process sets: {table}")
        places = [sorted(tuple(other[at][1]) for other in shown) for at in range(len(wanted))]
        unknown = {
            rank
            for at, (kind, _) in enumerate(wanted)
            if kind != "remove"
            for ranks in places[at]
            for rank in ranks
            if not 0 <= rank < self._size
        }
        if unknown:
            alone = "; to start several processes: ringrun -np N python script.py"
            raise UsageError(
                f"{name_ranks(unknown)} of a process set: not in 0..{self._size - 1}"
                f"{alone if self._size == 1 else ''}"
            )
        return [list(dict.fromkeys(place)) for place in places]


def parse_world(
    comm: Any, process_sets: Sequence[ProcessSet] | str | None
) -> tuple[Any, list[ProcessSet]]:
    """The arguments of `init`: who forms the world, and the process sets to set up.

    Raises:
        UsageError: They are neither.
    """
    sets: list[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise UsageError(f'process_sets={process_sets!r}: expected a list or "dynamic"')
    elif process_sets is not None:
        sets = list(process_sets)
    if any(not isinstance(one, ProcessSet) for one in sets):
        raise UsageError("process_sets must be ProcessSet objects")
    if comm is None or hasattr(comm, "Get_group"):
        return comm, sets
    if not isinstance(comm, Iterable):
        raise UsageError(f"comm={comm!r}: expected an MPI communicator or a list of ranks")
    members = list(comm)
    if members and all(hasattr(one, "Get_group") for one in members):
        return members[0], [*map(ProcessSet, members[1:]), *sets]
    if any(not isinstance(one, int) for one in members):
        raise UsageError(f"comm={members}: expected ranks or MPI communicators")
    return members or None, sets
