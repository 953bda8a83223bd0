"""What a rank asks for in a named operation, and whether all ranks ask for the same. Layer 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ringplug.backend.stall import name_ranks

__all__ = ["Request", "disagreement", "fusable"]


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's part in one named operation on one tensor, or on a group of them.

    Attributes:
        name: What the ranks match by.
        kind: ``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``,
            ``barrier`` or ``join``.
        dtypes: Names of the numpy dtypes, one per tensor.
        shapes: Of this rank's tensors.
        op: Name of the reduction.
        root: The sending rank, for a broadcast.
        prescale: Factor before the reduction.
        postscale: Factor after it.
        codec: Name of the compressor, for an allreduce.
        numbers: Rows for each rank, for an alltoall; how many unnamed operations there were
            on this rank, for a join.
        refused: Why this rank cannot take part after all; empty when it can.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    codec: str = "none"
    numbers: tuple[int, ...] = ()
    refused: str = ""

    def encode(self) -> tuple[Any, ...]:
        """As what JSON can carry."""
        return astuple(self)

    @classmethod
    def decode(cls, fields: Sequence[Any]) -> Request:
        """From what `encode` gave, after JSON made lists of its tuples."""
        name, kind, dtypes, shapes, op, root, prescale, postscale, codec, numbers, refused = fields
        return cls(
            name,
            kind,
            tuple(dtypes),
            tuple(map(tuple, shapes)),
            op,
            root,
            prescale,
            postscale,
            codec,
            tuple(numbers),
            refused,
        )


_ROWS = ("allgather", "alltoall", "reducescatter")
"""Kinds that cut or join tensors along their first dimension."""
_REDUCING = ("allreduce", "reducescatter")
_NOT_WITH_JOIN = ("allgather", "alltoall", "broadcast", "reducescatter")

Check = tuple[str, Callable[[Request], Any]]


def disagreement(requests: Mapping[int, Request], joined: Sequence[int] = ()) -> str:
    """Why the ranks' requests of one name do not fit together; empty when they do.

    Checked in Horovod's order: dtype, kind, shape, scales, reduction, joined ranks, tensors
    without dimensions, dimensions, root; first hit wins.

    Args:
        requests: By rank.
        joined: Ranks that have joined, and take part with neutral values where possible.
    """
    refused = {rank: r.refused for rank, r in requests.items() if r.refused}
    if refused:
        rank, reason = next(iter(refused.items()))
        return f"rank {rank} cannot take part: {reason}"
    first = next(iter(requests.values()))
    kind = first.kind
    if all(request == first for request in requests.values()):
        return _impossible(first, joined)
    title = kind.upper()
    checks: list[Check] = [
        ("Mismatched data types", lambda r: ", ".join(r.dtypes)),
        ("Mismatched operations", lambda r: r.kind.upper()),
    ]
    if kind in ("allreduce", "broadcast", "reducescatter"):
        checks.append((f"Mismatched {title} tensor shapes", lambda r: _show(r.shapes)))
    if kind in _REDUCING:
        checks += [
            ("Mismatched prescale and/or postscale factors", lambda r: (r.prescale, r.postscale)),
            ("Mismatched reduction operations", lambda r: r.op),
            ("Mismatched compression", lambda r: r.codec),
        ]
    problem = _differing(requests, checks) or _impossible(first, joined)
    if problem:
        return problem
    checks = []
    if kind in ("allgather", "alltoall"):
        checks += [
            (
                f"Mismatched {title} numbers of dimensions",
                lambda r: [len(shape) for shape in r.shapes],
            ),
            (
                f"Mismatched {title} dimensions after the first",
                lambda r: [list(shape[1:]) for shape in r.shapes],
            ),
        ]
    if kind in ("allgather", "broadcast"):
        checks.append((f"Mismatched {title} root ranks", lambda r: r.root))
    return _differing(requests, checks)


def _differing(requests: Mapping[int, Request], checks: Sequence[Check]) -> str:
    for title, key in checks:
        groups: dict[str, list[int]] = {}
        for rank in sorted(requests):
            groups.setdefault(str(key(requests[rank])), []).append(rank)
        if len(groups) > 1:
            sides = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in groups.items())
            return f"{title}: {sides}"
    return ""


def _impossible(request: Request, joined: Sequence[int]) -> str:
    title = request.kind.upper()
    if joined and request.kind in _NOT_WITH_JOIN:
        return f"{title} is not possible while {name_ranks(joined)} has joined"
    if joined and request.op.startswith("custom "):
        return f"a custom reduction is not possible while {name_ranks(joined)} has joined"
    if request.kind in _ROWS and any(not shape for shape in request.shapes):
        return f"{title} of a tensor without dimensions; reshape it to (1,)"
    return ""


def _show(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def fusable(one: Request, other: Request) -> bool:
    """Whether two agreed operations can share a buffer."""
    return one.kind == other.kind in ("allreduce", "broadcast") and _key(one) == _key(other)


def _key(request: Request) -> Sequence[object]:
    return (request.op, request.prescale, request.postscale, request.codec, request.root)
