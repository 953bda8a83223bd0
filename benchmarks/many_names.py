"""What it gains to have many small named operations in flight.

    python -m benchmarks.many_names -np 4
    python -m benchmarks.many_names -np 4 --count 1000 --rounds 9 --json results.json

One round does the same `count` allreduces of 4 float64 numbers twice, each with a name of its own:

* ``one by one``  ``allreduce``, in the same order on all ranks
* ``in flight``   ``allreduce_async`` of all of them, in another order on each rank, then
  ``synchronize``

Every result is checked, outside of the times. A time is the slowest rank's, from a common barrier
on; the medians over the rounds are shown, and their ratio. Without ``-np`` this is one rank of a
job that a launcher has started.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ringplug
from benchmarks.launching import launch


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.many_names", description=__doc__.split("\n")[0])
    parser.add_argument("-np", type=int, help="start this many ranks with ringrun")
    parser.add_argument("--count", type=int, default=1000, help="operations in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()
    if arguments.np is not None:
        return launch("benchmarks.many_names", arguments.np, sys.argv[1:])
    results = measure(arguments.count, arguments.rounds)
    if ringplug.rank() == 0:
        print(table(results))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Both ways in turns, after one round that is not counted."""
    ringplug.init()
    times: dict[str, list[float]] = {"one by one": [], "in flight": []}
    for turn in range(rounds + 1):
        for name, call in (("one by one", one_by_one), ("in flight", in_flight)):
            seconds = timed(call, count, turn)
            if turn > 0:
                times[name].append(seconds)
    return {
        "ranks": ringplug.size(),
        "cores": len(os.sched_getaffinity(0)),
        "operations": count,
        "unit": "seconds",
        **{name: {"median": statistics.median(t), "all": t} for name, t in times.items()},
    }


def timed(call: Callable[[int, int], list[np.ndarray]], count: int, turn: int) -> float:
    """Seconds of the slowest rank."""
    ringplug.barrier()
    start = time.perf_counter()
    sums = call(count, turn)
    seconds = time.perf_counter() - start
    ranks = ringplug.size()
    for number, total in enumerate(sums):
        np.testing.assert_array_equal(total, ranks * number + ranks * (ranks - 1) / 2)
    return float(ringplug.allreduce(seconds, op=ringplug.Max, name="slowest"))


def value(number: int) -> np.ndarray:
    return np.full(4, float(number + ringplug.rank()))


def one_by_one(count: int, turn: int) -> list[np.ndarray]:
    return [
        ringplug.allreduce(value(number), op=ringplug.Sum, name=f"number {number}")
        for number in range(count)
    ]


def in_flight(count: int, turn: int) -> list[np.ndarray]:
    order = list(range(count))
    random.Random(f"{turn} {ringplug.rank()}").shuffle(order)
    handles = {
        number: ringplug.allreduce_async(value(number), op=ringplug.Sum, name=f"number {number}")
        for number in order
    }
    return [ringplug.synchronize(handles[number]) for number in range(count)]


def table(results: dict[str, Any]) -> str:
    one, flight = (results[name]["median"] for name in ("one by one", "in flight"))
    return "\n".join(
        [
            f"{results['operations']} named allreduces of 32 B, {results['ranks']} ranks on "
            f"{results['cores']} cores; median time",
            f"  one by one {one * 1e3:9.1f} ms",
            f"  in flight  {flight * 1e3:9.1f} ms   1/{one / flight:.1f} of it",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
