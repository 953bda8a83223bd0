"""Rank 0's side of the named lane: who asked for what, and what follows from it. Layer 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ringplug.backend.errors import MismatchError, PeerLostError, RingplugError, StalledError
from ringplug.backend.log import get_logger
from ringplug.backend.request import Request, disagreement
from ringplug.backend.stall import name_ranks
from ringplug.backend.trace.operations import Operations

__all__ = ["MOST_KNOWN", "Answer", "Coordinator", "error_of", "memorable"]

_log = get_logger(__name__)

MOST_KNOWN = 4096
"""How many of a rank's requests go by number; both sides stop counting there."""

Answer: TypeAlias = tuple[str, str, str, list[int], Any]
"""Name; kind and text of the error, or both empty; numbers: the rows of every rank, tensor by
tensor, for an allgather, every sender's rows for every receiver for an alltoall, the last rank
and the highest count for a join, or the ranks that an error is about; the request, encoded, for
ranks that have joined and did not make it."""


class Coordinator:
    """The table of requests that not every rank has made yet.

    Args:
        origin: For each rank of this group its number in the world, which messages use.
        shown: What the timeline hears.

    Attributes:
        answers: What is decided about names that all ranks asked for, for all, in order.
        addressed: Rank and answer: what only this rank must hear, because the others have not
            asked, or will only later. A rank gets one answer to each of its requests.
    """

    def __init__(self, origin: Sequence[int], shown: Operations) -> None:
        self._origin = tuple(origin)
        self._shown = shown
        self._size = len(self._origin)
        self._table: dict[str, dict[int, Request]] = {}
        self._known: list[list[Request]] = [[] for _ in self._origin]
        self._given_up: dict[str, tuple[Answer, set[int]]] = {}
        self._warned: set[str] = set()
        # In the order in which they joined.
        self._joined: dict[int, Request] = {}
        self.answers: list[Answer] = []
        self.addressed: list[tuple[int, Answer]] = []

    def request(self, rank: int, entry: Any) -> Request:
        """What a rank announced: a request, or the number of one that it announced before."""
        known = self._known[rank]
        if isinstance(entry, int):
            return known[entry]
        request = Request.decode(entry)
        if memorable(request) and len(known) < MOST_KNOWN:
            known.append(request)
        return request

    def enter(self, rank: int, request: Request) -> None:
        """A rank asks; when it is the last one, the outcome joins the answers."""
        name = request.name
        if request.kind == "join":
            self._shown.asked(self._origin[rank], name, request.kind)
            self._join(rank, request)
            return
        if name in self._given_up:
            answer, late = self._given_up[name]
            if rank in late:
                # Its part in what the others gave up; the name is free for the next round.
                late.discard(rank)
                if not late:
                    del self._given_up[name]
                self.addressed.append((rank, answer))
                return
        self._shown.asked(self._origin[rank], name, request.kind)
        self._table.setdefault(name, {})[rank] = request
        self._complete(name)

    def _complete(self, name: str) -> None:
        requests = self._table[name]
        joined = [rank for rank in self._joined if rank not in requests]
        if len(requests) + len(joined) < self._size:
            return
        del self._table[name]
        self._warned.discard(name)
        named = {self._origin[rank]: requests[rank] for rank in requests}
        problem = disagreement(named, [self._origin[rank] for rank in joined])
        request = next(iter(requests.values()))
        numbers: list[int] = []
        if not problem and request.kind == "allgather":
            for at in range(len(request.shapes)):
                numbers += [requests[rank].shapes[at][0] for rank in range(self._size)]
        elif not problem and request.kind == "alltoall":
            for rank in range(self._size):
                numbers += requests[rank].numbers
        shown = request.encode() if joined else None
        self.answers.append((name, problem and "mismatch", problem, numbers, shown))

    def _join(self, rank: int, request: Request) -> None:
        self._joined[rank] = request
        for name in list(self._table):
            self._complete(name)
        if len(self._joined) == self._size:
            last = list(self._joined)[-1]
            count = max(joined.numbers[0] for joined in self._joined.values())
            self._joined = {}
            self.answers.append((request.name, "", "", [self._origin[last], count], None))

    def take(self) -> tuple[list[Answer], list[tuple[int, Answer]]]:
        """All `answers`, and all that is `addressed`; from now on there are none."""
        if self.answers:
            self._shown.round()
        answers, self.answers = self.answers, []
        addressed, self.addressed = self.addressed, []
        return answers, addressed

    def absent(self, name: str) -> list[int]:
        """Ranks that have not asked for it."""
        requests = self._table.get(name, self._joined)
        return [r for r in range(self._size) if r not in requests and r not in self._joined]

    def waits(self, name: str) -> bool:
        """Whether it has not been asked for by all."""
        return name in self._table

    def give_up(self, name: str, kind: str, text: str, ranks: Sequence[int]) -> None:
        """Fail a name on all ranks: now where they wait, else when they ask for it."""
        self._fail(name, (name, kind, text, list(ranks), None))

    def withdraw(self, rank: int, name: str) -> None:
        """A rank does not wait for it any longer; it ignores answers until it hears this one."""
        if rank in self._joined and self._joined[rank].name == name:
            del self._joined[rank]
        elif rank in self._table.get(name, {}):
            text = f"rank {self._origin[rank]} gave up waiting for it"
            self._fail(name, (name, "stalled", text, self._called(self.absent(name)), None))
        self.addressed.append((rank, (name, "withdrawn", "", [], None)))

    def _fail(self, name: str, answer: Answer) -> None:
        self._shown.dropped(name)
        late = set(self.absent(name))
        waiting = self._table.pop(name, None)
        if waiting is None:
            # A join: nobody has joined any more.
            waiting, self._joined = self._joined, {}
        self.addressed += [(rank, answer) for rank in waiting]
        if late:
            self._given_up[name] = (answer, late)

    def warn(self, name: str, absent: Sequence[int], seconds: float) -> None:
        """Log, once, who is waited for."""
        if name not in self._warned:
            self._warned.add(name)
            ranks = name_ranks(self._called(absent))
            _log.warning("%s: waiting since %.0f s for %s", name, seconds, ranks)

    def _called(self, ranks: Sequence[int]) -> list[int]:
        return [self._origin[rank] for rank in ranks]


def error_of(name: str, kind: str, reason: str, ranks: Sequence[int]) -> RingplugError:
    """What an answer that is an error raises."""
    text = f"{name}: {reason}"
    if kind == "mismatch":
        return MismatchError(text)
    return PeerLostError(text, ranks) if kind == "lost" else StalledError(text, absent=ranks)


def memorable(request: Request) -> bool:
    """Whether a rank may ask for the same again, so that a number can stand for it."""
    return request.kind != "join" and not request.name.startswith("unnamed.")
