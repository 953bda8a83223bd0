"""Starts the checks in ``ranks/``: many in one launch, since TensorFlow loads slowly."""

from pathlib import Path

import pytest

from tests.checks import passed
from tests.launching import run_ranks

RANKS = Path(__file__).parent / "ranks"
ENV = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "KERAS_BACKEND": "tensorflow"}

pytestmark = pytest.mark.slow


def run(np, *modules):
    done = run_ranks(
        RANKS / "checks.py",
        np,
        np,
        *modules,
        timeout=300,
        env=ENV,
        launcher="python" if np == 1 else "ringrun",
    )
    passed(done, np)


def test_one_rank():
    run(1, "operations", "gradients", "errors", "tapes", "optimizers", "variables", "graphs_of_v1")


def test_two_ranks():
    run(2, "operations", "gradients", "errors", "graphs_of_v1")


def test_training_on_two_ranks():
    run(2, "tapes", "optimizers", "variables")


def test_three_ranks():
    run(3, "operations", "gradients", "tapes")


def test_four_ranks():
    run(4, "errors", "optimizers", "variables", "graphs_of_v1")
