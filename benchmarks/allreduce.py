"""Allreduce of CPU tensors against its peers and the machine's limit, in one run.

    python -m benchmarks.allreduce -np 2
    python -m benchmarks.allreduce -np 4 --sizes 4 64KiB 64MiB --json result.json

Every size is measured for all contenders in turn, several rounds, on the same ranks:

* ``direct``: ringplug's transport, the buffer from ``transport.allocate``
* ``staged``: ringplug's transport, ordinary memory
* ``named``: `ringplug.allreduce` of a numpy array by name
* ``mpi``: MPI_Allreduce in place, the same MPI library
* ``gloo``: torch.distributed's gloo
* ``memcpy``: a copy of the buffer between two barriers on all ranks at once, the floor for
  anything that writes every byte once

Reported are medians in microseconds, and ratios: how many times faster than MPI and gloo, and
how many times the floor's time. Machines are noisy: only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ringplug.backend.transport import Transport

SIZES = ["4", "4KiB", "64KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB"]
ROUNDS = 5
_RANK = "BENCHMARK_RANK"


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-np", "--num-proc", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="bytes, such as 4 or 64MiB")
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender and size")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    if _RANK in os.environ:
        measure(arguments)
        return
    command = [sys.executable, "-m", "ringplug.launch", "-np", str(arguments.num_proc)]
    environ = {**os.environ, _RANK: "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, sys.executable, *_again()], env=environ, check=False)
    sys.exit(done.returncode)


def _again() -> list[str]:
    return ["-m", "benchmarks.allreduce", *sys.argv[1:]]


def measure(arguments: argparse.Namespace) -> None:
    """One rank: all sizes, all contenders."""
    import ringplug
    from ringplug.backend.config import parse_bytes
    from ringplug.backend.runtime import current

    ringplug.init()
    lane = current().lane("benchmark")
    gloo = _gloo()
    rows = []
    for text in arguments.sizes:
        nbytes = max(4, parse_bytes(text))
        row = lane.run(lambda t, n=nbytes: _one_size(t, gloo, n, arguments.seconds), "benchmark")
        rows.append({"bytes": nbytes, **row})
        if ringplug.rank() == 0:
            _show(rows[-1], header=len(rows) == 1)
    if ringplug.rank() == 0 and arguments.json:
        result = {"ranks": ringplug.size(), "unit": "seconds", "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1))


def _gloo() -> Callable[[np.ndarray], None]:
    """Torch's gloo over the same ranks, on the loopback interface."""
    import torch
    import torch.distributed as dist

    import ringplug

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    port = ringplug.broadcast_object(port)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=ringplug.rank(),
        world_size=ringplug.size(),
    )
    return lambda array: dist.all_reduce(torch.from_numpy(array))


def _one_size(
    transport: Transport, gloo: Callable[[np.ndarray], None], nbytes: int, seconds: float
) -> dict[str, float]:
    from mpi4py import MPI

    import ringplug
    from ringplug.backend.buffers import ReduceOp

    direct = transport.allocate(nbytes).view(np.float32)
    plain = np.zeros(nbytes // 4, np.float32)
    copy = np.ones_like(plain)

    def memcpy() -> None:
        transport.barrier()
        np.copyto(copy, plain)
        transport.barrier()

    contenders: dict[str, Callable[[], object]] = {
        "direct": lambda: transport.allreduce(direct, ReduceOp.SUM),
        "staged": lambda: transport.allreduce(plain, ReduceOp.SUM),
        "named": lambda: ringplug.allreduce(plain, op=ringplug.Sum, name=f"bench.{nbytes}"),
        "mpi": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, plain),
        "gloo": lambda: gloo(plain),
        "memcpy": memcpy,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            times[name] += _repeat(transport, contender, seconds / ROUNDS)
    return {name: statistics.median(values) for name, values in times.items()}


def _repeat(transport: Transport, contender: Callable[[], object], seconds: float) -> list[float]:
    """The slowest rank's time of each call, for about `seconds`."""
    from ringplug.backend.buffers import ReduceOp

    contender()
    start = time.perf_counter()
    contender()
    once = np.array([time.perf_counter() - start])
    transport.allreduce(once, ReduceOp.MAX)
    count = int(min(2000, max(1, seconds / once[0])))
    times = np.empty(count)
    for index in range(count):
        transport.barrier()
        start = time.perf_counter()
        contender()
        times[index] = time.perf_counter() - start
    transport.allreduce(times, ReduceOp.MAX)
    return times.tolist()


def _show(row: dict[str, float], header: bool) -> None:
    names = ["direct", "staged", "named", "mpi", "gloo", "memcpy"]
    if header:
        print(f"{'bytes':>11} " + "".join(f"{name:>10}" for name in names) + "   microseconds")
    times = "".join(f"{row[name] * 1e6:>10.1f}" for name in names)
    faster = [
        f"{ours} {row['gloo'] / row[ours]:.1f}x gloo, {row['mpi'] / row[ours]:.1f}x MPI, "
        f"{row[ours] / row['memcpy']:.2f} of memcpy"
        for ours in ("direct", "staged")
    ]
    print(f"{row['bytes']:>11} {times}   " + "; ".join(faster), flush=True)


if __name__ == "__main__":
    main()
