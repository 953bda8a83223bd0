"""The named operations of ringplug.torch on several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import passed
from tests.launching import run_ranks

SCRIPT = Path(__file__).parent / "ranks_operations.py"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations(ranks):
    passed(run_ranks(SCRIPT, ranks, timeout=150), ranks)
