"""How long an allreduce takes, beside other ways to do the same on the same processes.

    python -m benchmarks.allreduce -np 2
    python -m benchmarks.allreduce -np 4 --sizes 4 64KiB 64MiB --json results.json

For each size, in turns within one job so that all meet the same machine:

* ``direct``  ringplug, in memory from ``transport.allocate``
* ``staged``  ringplug, in ordinary memory
* ``named``   ringplug's named lane: what ``ringplug.allreduce`` does, agreement included
* ``mpi``     MPI_Allreduce of the MPI library, in place
* ``gloo``    torch.distributed with gloo
* ``memcpy``  every rank copies its buffer at the same time, between two barriers: the floor

Values are float32 and summed. A time is the slowest rank's, from a common barrier on; the table
shows the median over the rounds, and how many times slower the others are than ``direct``.
Without ``-np`` this is one rank of a job that a launcher has started.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.launching import launch

DEFAULT_SIZES = ["4", "256", "4KiB", "64KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB"]
METHODS = ["direct", "staged", "named", "mpi", "gloo", "memcpy"]
_NAMED_AT_MOST = 16 * 2**20
"""The named lane returns a new array each time: beyond this its allocation is what is measured."""

Method = tuple[np.ndarray, Callable[[], Any]]


def main() -> int:
    arguments = parse(sys.argv[1:])
    if arguments.np is not None:
        return launch("benchmarks.allreduce", arguments.np, sys.argv[1:])
    results = measure(arguments.sizes, arguments.seconds, arguments.rounds)
    if results is not None:
        print(table(results))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    from ringplug.backend.parsing import parse_bytes

    parser = argparse.ArgumentParser("benchmarks.allreduce", description=__doc__.split("\n")[0])
    parser.add_argument("-np", type=int, help="start this many ranks with ringrun")
    parser.add_argument("--sizes", nargs="+", default=DEFAULT_SIZES, help="such as 4 64KiB 64MiB")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size and method")
    parser.add_argument("--rounds", type=int, default=200, help="most rounds of each")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    arguments = parser.parse_args(words)
    arguments.sizes = [max(4, parse_bytes(size) // 4 * 4) for size in arguments.sizes]
    return arguments


class Contestants:
    """Everything that is compared, set up once on this rank."""

    def __init__(self, largest: int) -> None:
        import torch
        import torch.distributed

        import ringplug
        from ringplug.backend import ops

        self.runtime = ringplug.init()
        self.rank, self.size = self.runtime.world.rank, self.runtime.world.size
        from mpi4py import MPI  # ringplug.init() has started it

        self._mpi = MPI
        self.world = MPI.COMM_WORLD.Dup()
        self._ops, self._torch = ops, torch
        store = self._store()
        torch.distributed.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size
        )
        self.lane = self.runtime.lane("benchmark")
        self.transport = self.lane.transport
        self._allocated = self.transport.allocate(largest).view(np.float32)
        self._staged = np.empty(largest // 4, np.float32)
        self._copy = np.empty(largest // 4, np.float32)
        self._copy[:] = 0

    def _store(self) -> Any:
        """The rendezvous of torch: rank 0 serves a port of its choice and tells the others."""
        from datetime import timedelta

        store = None
        port = None
        if self.rank == 0:
            store = self._torch.distributed.TCPStore(
                "127.0.0.1", 0, self.size, True, timedelta(seconds=60), wait_for_workers=False
            )
            port = store.port
        port = self._ops.broadcast_object(port, 0, name="gloo port")
        return store or self._torch.distributed.TCPStore(
            "127.0.0.1", port, self.size, False, timedelta(seconds=60)
        )

    def methods(self, nbytes: int) -> dict[str, Method]:
        """For one size: the buffer that each method reduces, and the call."""
        from ringplug.backend.buffers import ReduceOp

        count = nbytes // 4
        direct, staged, copy = (a[:count] for a in (self._allocated, self._staged, self._copy))
        tensor = self._torch.from_numpy(staged)
        mpi_sum, in_place = self._mpi.SUM, self._mpi.IN_PLACE
        found: dict[str, Method] = {
            "direct": (direct, lambda: self.transport.allreduce(direct, ReduceOp.SUM)),
            "staged": (staged, lambda: self.transport.allreduce(staged, ReduceOp.SUM)),
            "mpi": (staged, lambda: self.world.Allreduce(in_place, staged, mpi_sum)),
            "gloo": (staged, lambda: self._torch.distributed.all_reduce(tensor)),
            "memcpy": (staged, lambda: self._memcpy(staged, copy)),
        }
        if nbytes <= _NAMED_AT_MOST:
            name = f"named {nbytes}"
            found["named"] = (
                staged,
                lambda: self._ops.allreduce(staged, ReduceOp.SUM, name=name),
            )
        return found

    def _memcpy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.transport.barrier()
        np.copyto(target, source)
        self.transport.barrier()

    def slowest(self, seconds: list[float]) -> list[float]:
        """For each round, the time of the rank that took longest."""
        times = np.array(seconds)
        self.world.Allreduce(self._mpi.IN_PLACE, times, self._mpi.MAX)
        return times.tolist()

    def agree(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return int(self.world.allreduce(number, self._mpi.MIN))


def measure(sizes: list[int], seconds: float, rounds: int) -> dict[str, Any] | None:
    """Run everything; the results on rank 0, None elsewhere."""
    them = Contestants(max(sizes))
    rows = []
    for nbytes in sizes:
        methods = them.methods(nbytes)
        for name, (buffer, call) in methods.items():
            verify(them, name, buffer, call)
        first = {name: once(them, *method) for name, method in methods.items()}
        turns = them.agree(max(5, min(rounds, int(seconds / max(max(first.values()), 1e-6)))))
        times: dict[str, list[float]] = {name: [] for name in methods}
        # A few calls in a row for what takes microseconds: the first one finds a cold cache.
        burst = 20 if nbytes <= 64 * 2**10 else 1
        for _ in range(turns):
            for name, method in methods.items():
                times[name] += [once(them, *method) for _ in range(burst)][burst // 4 :]
        row: dict[str, Any] = {"bytes": nbytes}
        for name in METHODS:
            if name in times:
                slowest = them.slowest(times[name])
                row[name] = {"median": statistics.median(slowest), "minimum": min(slowest)}
        rows.append(row)
    if them.rank != 0:
        return None
    return {
        "ranks": them.size,
        "transport": them.transport.name,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "mpi": " ".join(map(str, them._mpi.get_vendor()[:1])),
        "torch": them._torch.__version__,
        "unit": "seconds",
        "rows": rows,
    }


def verify(them: Contestants, name: str, buffer: np.ndarray, call: Callable[[], Any]) -> None:
    """A time only counts when the sum is right."""
    buffer[:] = them.rank + 1
    result = call()
    if name == "memcpy":
        return
    total = result if name == "named" else buffer
    wanted = them.size * (them.size + 1) / 2
    if not (total == wanted).all():
        raise AssertionError(f"{name}: {total[:3]} is not {wanted}")


def once(them: Contestants, buffer: np.ndarray, call: Callable[[], Any]) -> float:
    """Seconds of one call on this rank."""
    buffer[:1] = 1.0
    if not np.isfinite(buffer[-1]) or abs(buffer[-1]) > 1e30:
        buffer[:] = 1.0
    them.transport.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(results: dict[str, Any]) -> str:
    """The medians, and each method's as a multiple of ``direct``."""
    present = [m for m in METHODS if any(m in row for row in results["rows"])]
    lines = [
        f"allreduce of float32, {results['ranks']} ranks on {results['cores']} cores, transport "
        f"{results['transport']}; median time, and as a multiple of direct",
        "",
        f"{'size':>8} " + " ".join(f"{name:>17}" for name in present),
    ]
    for row in results["rows"]:
        cells = []
        for name in present:
            if name in row:
                median = row[name]["median"]
                ratio = median / row["direct"]["median"]
                cells.append(f"{duration(median):>10} {ratio:>5.2f}x")
            else:
                cells.append(f"{'-':>10} {'':>6}")
        lines.append(f"{size(row['bytes']):>8} " + " ".join(cells))
    return "\n".join(lines)


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def size(nbytes: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


if __name__ == "__main__":
    sys.exit(main())
