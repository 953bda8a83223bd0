"""Starts the scripts in ``ranks/``: many checks in one launch, since frameworks load slowly."""

from pathlib import Path

import pytest

from tests.launching import run_ranks

RANKS = Path(__file__).parent / "ranks"
BACKENDS = ("tensorflow", "jax", "torch")

pytestmark = pytest.mark.slow


def run(script, backend, *args, np=2, **kw):
    done = run_ranks(
        RANKS / f"{script}.py", np, *args, timeout=240, env={"KERAS_BACKEND": backend}, **kw
    )
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
