"""Rank 0's side of the named lane: who asked for what, and what follows from it. Layer 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ringplug.backend.log import get_logger
from ringplug.backend.request import Request, disagreement
from ringplug.backend.stall import name_ranks

__all__ = ["MOST_KNOWN", "Answer", "Coordinator"]

_log = get_logger(__name__)

MOST_KNOWN = 4096
"""How many of a rank's requests go by number; both sides stop counting there."""

Answer: TypeAlias = tuple[str, str, str, list[int]]
"""Name; kind and text of the error, or both empty; every rank's rows of an allgather, or the
ranks that the error is about."""


class Coordinator:
    """The table of requests that not every rank has made yet.

    Attributes:
        answers: What is decided about names that all ranks asked for, for all, in order.
        addressed: Rank and answer: what only this rank must hear, because the others have not
            asked, or will only later. A rank gets one answer to each of its requests.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._table: dict[str, dict[int, Request]] = {}
        self._known: list[list[Request]] = [[] for _ in range(size)]
        self._given_up: dict[str, tuple[Answer, set[int]]] = {}
        self._warned: set[str] = set()
        self.answers: list[Answer] = []
        self.addressed: list[tuple[int, Answer]] = []

    def request(self, source: int, entry: str | int) -> Request:
        """What a rank announced: in full, or by its number among that rank's named requests."""
        known = self._known[source]
        if isinstance(entry, int):
            return known[entry]
        request = Request.decode(entry)
        if not request.name.startswith("unnamed.") and len(known) < MOST_KNOWN:
            known.append(request)
        return request

    def enter(self, rank: int, request: Request) -> None:
        """A rank asks; when it is the last one, the answer is decided."""
        name = request.name
        if name in self._given_up:
            answer, late = self._given_up[name]
            if rank in late:
                # Its part in what the others gave up; the name is free for the next round.
                late.discard(rank)
                if not late:
                    del self._given_up[name]
                self.addressed.append((rank, answer))
                return
        requests = self._table.setdefault(name, {})
        requests[rank] = request
        if len(requests) == self._size:
            del self._table[name]
            self._warned.discard(name)
            problem = disagreement(requests)
            sizes = []
            if request.kind == "allgather" and not problem:
                sizes = [requests[r].shape[0] for r in range(self._size)]
            self.answers.append((name, problem and "mismatch", problem, sizes))

    def absent(self, name: str) -> list[int]:
        """Ranks that have not asked for it."""
        return [r for r in range(self._size) if r not in self._table.get(name, {})]

    def give_up(self, name: str, kind: str, text: str, ranks: Sequence[int]) -> None:
        """Fail a name on all ranks: now where they wait, else when they ask for it."""
        self._fail(name, (name, kind, text, list(ranks)))

    def withdraw(self, rank: int, name: str) -> None:
        """A rank does not wait for it any longer; it ignores answers until it hears this one."""
        if rank in self._table.get(name, {}):
            text = f"rank {rank} gave up waiting for it"
            self._fail(name, (name, "stalled", text, self.absent(name)))
        self.addressed.append((rank, (name, "withdrawn", "", [])))

    def _fail(self, name: str, answer: Answer) -> None:
        late = set(self.absent(name))
        self.addressed += [(rank, answer) for rank in self._table.pop(name, {})]
        if late:
            self._given_up[name] = (answer, late)

    def warn(self, name: str, absent: Sequence[int], seconds: float) -> None:
        """Log, once, who is waited for."""
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("%s: waiting since %.0f s for %s", name, seconds, name_ranks(absent))
