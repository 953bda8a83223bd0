"""A rank that dies or leaves while another is inside of a ``tf.function``."""

import pytest

from tests.launching import run_ranks

pytestmark = pytest.mark.slow

TRAIN = """
    import sys
    import tensorflow as tf
    import ringplug.tensorflow as ring

    ring.init()
    variable = tf.Variable([1.0, 2.0])

    @tf.function(jit_compile="xla" in sys.argv)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        gradient = ring.DistributedGradientTape(tape).gradient(loss, variable)
        variable.assign_sub(0.1 * gradient)

    step()
    step()
    if ring.rank() == 1:
        if "raise" in sys.argv:
            raise ValueError("broken on rank 1")
        sys.exit(0)
    try:
        step()
    except tf.errors.UnknownError as error:
        assert "PeerLostError" in str(error) or "TransportError" in str(error), error
        assert "rank 1" in str(error), error
        print("told", flush=True)
        raise
    print("went on")
"""


@pytest.mark.parametrize("how", ["graph", "xla"])
def test_a_rank_that_leaves_is_an_error_in_a_function(how):
    done = run_ranks(TRAIN, 2, how, "leave", timeout=60, expect=None)
    assert "told" in done.stdout, done.output
    assert "went on" not in done.stdout, done.output


def test_a_rank_that_raises_ends_all():
    done = run_ranks(TRAIN, 2, "graph", "raise", timeout=60, expect=None)
    assert "ValueError: broken on rank 1" in done.output
    assert "went on" not in done.stdout, done.output
