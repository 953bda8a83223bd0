"""The benchmarks run, check their sums, and report every method."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(module, *words):
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_allreduce(tmp_path):
    out = tmp_path / "results.json"
    words = ["-np", "2", "--sizes", "4", "64KiB", "32MiB", "--seconds", "0.1", "--json", str(out)]
    printed = run("benchmarks.allreduce", *words)
    results = json.loads(out.read_text())
    assert (results["ranks"], results["transport"]) == (2, "shared_memory")
    assert [row["bytes"] for row in results["rows"]] == [4, 65536, 2**25]
    for row in results["rows"]:
        named = {"named"} if row["bytes"] <= 2**24 else set()
        assert row.keys() == {"bytes", "direct", "staged", "mpi", "gloo", "memcpy"} | named
        for name in row.keys() - {"bytes"}:
            assert 0 < row[name]["minimum"] <= row[name]["median"]
    for word in ("64 KiB", "32 MiB", "direct", "memcpy", "1.00x"):
        assert word in printed


def test_many_names(tmp_path):
    out = tmp_path / "results.json"
    words = ["-np", "3", "--count", "50", "--rounds", "2", "--json", str(out)]
    printed = run("benchmarks.many_names", *words)
    results = json.loads(out.read_text())
    assert (results["ranks"], results["operations"]) == (3, 50)
    for name in ("one by one", "in flight"):
        assert len(results[name]["all"]) == 2
        assert results[name]["median"] > 0
        assert name in printed
