"""A small task, cut so that rank r's batch k is its part of one process's batch k."""

import time

import keras
import numpy as np
import pytest

import ringplug.keras as ring

BATCH = 8
EPOCHS = 3
SAMPLES = 96


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 8)).astype("float32")
    y = rng.normal(size=(SAMPLES, 3)).astype("float32")
    return x, y


def mine(array, batch=BATCH):
    """This rank's part of every global batch."""
    whole = batch * ring.size()
    at = ring.rank() * batch
    return np.concatenate(
        [array[k : k + whole][at : at + batch] for k in range(0, len(array), whole)]
    )


def make_model(seed=3, policy=None):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu", dtype=policy),
            keras.layers.Dense(3, dtype=policy),
        ]
    )


def fit(model, optimizer, x, y, batch, epochs=EPOCHS, callbacks=None, loss="mse", **compile_with):
    model.compile(optimizer, loss, **compile_with)
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


def distributed_and_alone(make_optimizer, options=None, model=make_model, **compile_with):
    """Weights after training on all ranks, after training alone on all data, and the optimizer."""
    x, y = data()
    optimizer = ring.DistributedOptimizer(make_optimizer(), **{"scale_lr": None, **(options or {})})
    together = fit(model(), optimizer, mine(x), mine(y), BATCH, **compile_with)
    alone = fit(model(), make_optimizer(), x, y, BATCH * ring.size(), **compile_with)
    return together, alone, optimizer


def difference(a, b):
    return max(
        float(np.abs(np.asarray(p) - np.asarray(q)).max()) for p, q in zip(a, b, strict=True)
    )


def assert_ranks_equal(arrays):
    flat = np.concatenate([np.asarray(a).ravel() for a in arrays])
    every = ring.allgather(flat[None])
    for other in every[1:]:
        assert np.array_equal(every[0], other, equal_nan=True), np.abs(every[0] - other).max()


def assert_raises_everywhere(kind, text, function):
    """`function` raises `kind` with `text` on this rank, as it does on the others."""
    with pytest.raises(kind) as caught:
        function()
    assert text in str(caught.value), f"{text!r} is not in {caught.value}"
    return caught.value


def run(checks):
    """Call the checks in order on all ranks; say how long each took."""
    for check in checks:
        start = time.monotonic()
        check()
        if ring.rank() == 0:
            print(f"ok {check.__name__} {time.monotonic() - start:.1f} s", flush=True)
