"""What a rank asks for in a named operation, and whether all ranks ask for the same. Layer 2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringplug.backend.stall import name_ranks

__all__ = ["Request", "disagreement"]


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's part in one named operation.

    Attributes:
        name: What the ranks match by.
        kind: ``allreduce``, ``allgather``, ``broadcast`` or ``barrier``.
        dtype: Name of the numpy dtype.
        shape: Of this rank's tensor.
        op: Name of the reduction, for an allreduce.
        root: The sending rank, for a broadcast.
        prescale: Factor before the reduction.
        postscale: Factor after it.
        refused: Why this rank cannot take part after all; empty when it can.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    refused: str = ""

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Request:
        """From JSON."""
        fields = json.loads(text)
        fields["shape"] = tuple(fields["shape"])
        return cls(**fields)


def disagreement(requests: Mapping[int, Request]) -> str:
    """Why the ranks' requests of one name do not fit together; empty when they do.

    Checked in Horovod's order: dtype, kind, shape, scales, reduction, dimensions, root.
    """
    refused = {rank: r.refused for rank, r in requests.items() if r.refused}
    if refused:
        rank, reason = next(iter(refused.items()))
        return f"rank {rank} cannot take part: {reason}"
    first = next(iter(requests.values()))
    if all(request == first for request in requests.values()) and first.kind != "allgather":
        return ""
    kind = first.kind.upper()
    checks: list[tuple[str, Any]] = [
        ("Mismatched data types", lambda r: r.dtype),
        ("Mismatched operations", lambda r: r.kind),
    ]
    if first.kind == "allgather":
        checks += [
            (f"Mismatched {kind} numbers of dimensions", lambda r: len(r.shape)),
            (f"Mismatched {kind} dimensions after the first", lambda r: list(r.shape[1:])),
            (f"Mismatched {kind} root ranks", lambda r: r.root),
        ]
    else:
        checks += [
            (f"Mismatched {kind} tensor shapes", lambda r: list(r.shape)),
            ("Mismatched prescale and/or postscale factors", lambda r: (r.prescale, r.postscale)),
            ("Mismatched reduction operations", lambda r: r.op),
            (f"Mismatched {kind} root ranks", lambda r: r.root),
        ]
    for title, key in checks:
        groups: dict[str, list[int]] = {}
        for rank in sorted(requests):
            groups.setdefault(str(key(requests[rank])), []).append(rank)
        if len(groups) > 1:
            sides = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in groups.items())
            return f"{title}: {sides}"
    if first.kind == "allgather" and not first.shape:
        return "ALLGATHER of a tensor without dimensions; reshape it to (1,)"
    return ""


def fusable(one: Request, other: Request) -> bool:
    """Whether two agreed operations can share a buffer."""
    return one.kind == other.kind == "allreduce" and _key(one) == _key(other)


def _key(request: Request) -> Sequence[object]:
    return (request.dtype, request.op, request.prescale, request.postscale)
