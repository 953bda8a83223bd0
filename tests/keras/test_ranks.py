"""Starts the checks in ``ranks/``: many in one launch, since frameworks load slowly."""

from pathlib import Path

import pytest

from tests.launching import run_ranks

RANKS = Path(__file__).parent / "ranks"
BACKENDS = ("tensorflow", "jax", "torch")
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}

pytestmark = pytest.mark.slow


def run(np, backend, *modules, **env):
    done = run_ranks(
        RANKS / "checks.py",
        np,
        np,
        *modules,
        timeout=400,
        env={"KERAS_BACKEND": backend, **env},
        launcher="python" if np == 1 else "ringrun",
    )
    assert "all checks passed" in done.stdout, done.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_n_ranks_train_as_one_process(backend):
    run(2, backend, "equivalence")


@pytest.mark.parametrize(("backend", "path"), [("jax", "callback"), ("tensorflow", "ffi")])
def test_the_other_way_into_a_compiled_step(backend, path):
    run(2, backend, "one_path", RINGPLUG_KERAS_PATH=path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_optimizers_gradients_and_files(backend, tmp_path):
    run(2, backend, "optimizers", "gradients", "saving", TESTS_FOLDER=str(tmp_path))


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_and_errors(backend):
    # The second device is for keras.distribution, which must be refused.
    run(2, backend, "callbacks", "failures", **(TWO_DEVICES if backend == "jax" else {}))


@pytest.mark.parametrize(
    ("np", "backend"), [(1, "torch"), (2, "torch"), (4, "torch"), (3, "tensorflow"), (3, "jax")]
)
def test_the_contract_of_horovod(np, backend):
    run(np, backend, "contract")


@pytest.mark.parametrize(("np", "backend"), [(3, "torch"), (2, "tensorflow"), (2, "jax")])
def test_batches_of_all_ranks_and_elastic_states(np, backend):
    run(np, backend, "batch_norm", "elastic_states")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_world_of_one(backend):
    run(1, backend, "alone", *(["custom_calls"] if backend != "torch" else []))


@pytest.mark.parametrize(
    ("backend", "how", "callbacks"),
    [
        ("jax", "exchange", "none"),
        ("jax", "exchange", "callbacks"),
        ("tensorflow", "exchange", "none"),
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
    assert error in done.output, done.output
