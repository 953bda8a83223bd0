"""Every example runs, alone and on several ranks, and says what it should."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIGITS = {
    "keras-tensorflow": ("keras_digits.py", {"KERAS_BACKEND": "tensorflow"}),
    "keras-jax": ("keras_digits.py", {"KERAS_BACKEND": "jax"}),
    "keras-torch": ("keras_digits.py", {"KERAS_BACKEND": "torch"}),
    "lightning": ("lightning_digits.py", {}),
    "torch": ("torch_digits.py", {}),
}


def curves(tmp_path, script, environ, ranks, *options):
    result = tmp_path / f"{ranks}.json"
    launcher = "python" if ranks == 1 else "ringrun"
    run_ranks(
        EXAMPLES / script,
        ranks,
        "--json",
        result,
        *options,
        env=environ,
        timeout=240,
        launcher=launcher,
    )
    return json.loads(result.read_text())


@pytest.mark.parametrize("name", DIGITS)
def test_digits_reach_the_same_on_one_and_two_ranks(tmp_path, name):
    script, environ = DIGITS[name]
    one, two = (curves(tmp_path, script, environ, ranks) for ranks in (1, 2))
    assert len(one["loss"]) >= 8
    assert one["loss"][-1] < one["loss"][0] / 2
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert min(one["accuracy"], two["accuracy"]) > 0.95


def test_digits_on_four_ranks_with_a_narrow_wire_and_warm_up(tmp_path):
    options = ("--compression", "bf16", "--warmup", "2")
    four = curves(tmp_path, "keras_digits.py", {"KERAS_BACKEND": "jax"}, 4, *options)
    assert four["accuracy"] > 0.95


def test_gpt_learns_english():
    done = run_ranks(
        EXAMPLES / "lightning_gpt.py", 2, "--steps", 30, "--compression", "bf16", timeout=240
    )
    before, after = map(float, re.findall(r"(\d+\.\d+)", done.output.split("nats")[1])[:2])
    assert after < before - 1


def test_lightning_starts_its_second_process(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, EXAMPLES / "lightning_digits.py", "--devices", "2"]
    done = subprocess.run(
        [*command, "--epochs", "1", "--json", result],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1"}
        | {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lightning on 2" in done.stdout
    assert len(json.loads(result.read_text())["loss"]) == 1


def test_examples_are_short():
    scripts = list(EXAMPLES.glob("*.py"))
    assert len(scripts) >= 5
    assert all(len(script.read_text().splitlines()) < 120 for script in scripts)
