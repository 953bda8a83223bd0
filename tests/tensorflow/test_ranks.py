"""Starts the checks in ``ranks/``: many in one launch, since TensorFlow loads slowly."""

from pathlib import Path

import pytest

from tests.checks import passed
from tests.launching import run_ranks

RANKS = Path(__file__).parent / "ranks"
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "KERAS_BACKEND": "tensorflow"}

pytestmark = pytest.mark.slow


def run(np, *modules, **env):
    launcher = "python" if np == 1 else "ringrun"
    done = run_ranks(
        RANKS / "checks.py", np, np, *modules, timeout=300, env=DYNAMIC | env, launcher=launcher
    )
    passed(done, np)


@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_operations(np):
    run(np, "operations")


@pytest.mark.parametrize("np", [2, 4])
def test_gradients_and_errors(np):
    run(np, "gradients", "errors")
