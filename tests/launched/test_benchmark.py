"""The benchmark runs and measures every contender."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("ranks", [1, 2])
def test_allreduce_benchmark(tmp_path, ranks):
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.allreduce", "-np", str(ranks)),
            *("--seconds", "0.02", "--sizes", "4", "1MiB", "--json", str(result)),
        ],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert report["ranks"] == ranks
    assert [row["bytes"] for row in report["rows"]] == [4, 2**20]
    for row in report["rows"]:
        assert {"direct", "staged", "named", "mpi", "gloo", "memcpy"} < row.keys()
        assert all(value > 0 for value in row.values())
    assert "of memcpy" in done.stdout
