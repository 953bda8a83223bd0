"""The process between the caller of `ringplug.run` and the ranks: ringrun's supervisor.

A process of its own, because a supervisor forks and handles signals, which a notebook with its
threads must not. It is ``python -m ringplug.launch.job_process PARENT REPORT OPTIONS...``; the
function comes by standard input, and the report goes to the descriptor REPORT: one line of JSON,
then the results' bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from ringplug.backend.errors import RingplugError
from ringplug.launch import failure
from ringplug.launch.arguments import Options, parse
from ringplug.launch.called import FUNCTION, result_of
from ringplug.launch.job import die_with_parent
from ringplug.launch.mpirun import root_reason
from ringplug.launch.start import supervised

__all__ = ["main"]


def main() -> None:
    """Run one job and report how it ended."""
    parent, descriptor, *words = sys.argv[1:]
    die_with_parent(int(parent))
    with os.fdopen(int(descriptor), "wb") as report:
        os.set_inheritable(report.fileno(), False)
        try:
            header, results = _run(parse([*words, "--", "function"]))
        except RingplugError as error:
            header, results = {"refused": [type(error).__name__, str(error)]}, {}
        header["sizes"] = {rank: len(data) for rank, data in results.items()}
        report.write(json.dumps(header).encode() + b"\n")
        for data in results.values():
            report.write(data)


def _run(options: Options) -> tuple[dict[str, Any], dict[int, bytes]]:
    root_reason(options.allow_run_as_root)
    results: dict[int, bytes] = {}
    stand_in = ["--as-horovod"] if options.as_horovod else []
    rank_line = [sys.executable, "-m", "ringplug.launch.worker", *stand_in, "--call"]
    with supervised(options, rank_line) as (supervisor, line, environ):
        directory = supervisor.job.directory
        _store(sys.stdin.buffer, directory / FUNCTION)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

        def collect() -> None:
            for rank in range(options.np):
                path = directory / result_of(rank)
                if path.exists():
                    results[rank] = path.read_bytes()

        ended = supervisor.watch(line, environ, collect)
        cause = failure.first(ended.failures)
        header: dict[str, Any] = {
            "np": options.np,
            "code": ended.code,
            "said": ended.said,
            "failure": None,
        }
        if cause is not None:
            others = [one for one in ended.failures if one is not cause]
            header["failure"] = asdict(cause)
            header["report"] = failure.report(cause, others, supervisor.console.tail(cause.rank))
        return header, results


def _store(source: BinaryIO, path: Path) -> None:
    """Keep the call where ranks find it. It is not unpickled here."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        shutil.copyfileobj(source, file)


if __name__ == "__main__":
    main()
