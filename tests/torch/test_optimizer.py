"""DistributedOptimizer, SyncBatchNorm, broadcasts and elastic states on 1 to 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import passed
from tests.launching import run_ranks

HERE = Path(__file__).parent


@pytest.mark.parametrize("script", ["ranks_optimizer.py", "ranks_sync_batch_norm.py"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_script(script, ranks):
    passed(run_ranks(HERE / script, ranks, timeout=150), ranks)


def test_other_transport():
    env = {"RINGPLUG_TRANSPORT": "ring"}
    passed(run_ranks(HERE / "ranks_optimizer.py", 3, timeout=150, env=env), 3)
