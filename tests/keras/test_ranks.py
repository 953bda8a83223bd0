"""Starts the scripts in ``ranks/``: many checks in one launch, since frameworks load slowly."""

from pathlib import Path

import pytest

from tests.launching import run_ranks

RANKS = Path(__file__).parent / "ranks"
BACKENDS = ("tensorflow", "jax", "torch")

pytestmark = pytest.mark.slow


def run(script, backend, *args, np=2, env=None, **kw):
    environ = {"KERAS_BACKEND": backend, **(env or {})}
    done = run_ranks(RANKS / f"{script}.py", np, *args, timeout=240, env=environ, **kw)
    assert "all checks passed" in done.stdout, done.output
    return done


@pytest.mark.parametrize("backend", BACKENDS)
def test_n_ranks_train_as_one_process(backend):
    run("equivalence", backend, "auto")


@pytest.mark.parametrize(("backend", "path"), [("jax", "callback"), ("tensorflow", "ffi")])
def test_the_other_way_into_a_compiled_step(backend, path):
    run("equivalence", backend, path, "short")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_optimizer(backend):
    run("optimizers", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unusual_gradients_and_loops(backend):
    run("gradients", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks(backend):
    run("callbacks", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_saving(backend, tmp_path):
    run("saving", backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_world_of_one(backend):
    run("alone", backend, np=1, launcher="python")


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_in_steps_reach_every_rank(backend):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}  # for keras.distribution
    run("failures", backend, env=flags)


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_custom_calls(backend):
    run("custom_calls", backend, np=1, launcher="python")


@pytest.mark.parametrize(
    ("backend", "how", "callbacks"),
    [
        ("jax", "exchange", "none"),
        ("jax", "exchange", "callbacks"),
        ("tensorflow", "exchange", "none"),
        ("torch", "exchange", "callbacks"),
        ("torch", "python", "callbacks"),
        ("torch", "uneven", "none"),
    ],
)
def test_a_failing_rank_ends_all(backend, how, callbacks):
    done = run_ranks(
        RANKS / "breaks.py",
        2,
        how,
        callbacks,
        timeout=60,
        env={"KERAS_BACKEND": backend},
        expect=None,
    )
    assert "fit returned" not in done.stdout, done.output
    error = "PeerLostError" if how == "uneven" else "ValueError: broken on rank 1"
    assert error in done.stderr, done.output
