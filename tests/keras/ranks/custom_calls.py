"""XLA custom calls with a Python body, without any training; one process."""

import threading

import keras
import numpy as np
import pytest

BACKEND = keras.backend.backend()

if BACKEND == "jax":
    import jax

    from ringplug.keras import ffi_jax as ffi

    def compiled(function):
        return jax.jit(function)

    Failure = jax.errors.JaxRuntimeError
else:
    import tensorflow as tf

    from ringplug.tensorflow import ffi

    def compiled(function):
        call = tf.function(function, jit_compile=True)
        return lambda *arrays: call(*map(tf.constant, arrays))

    Failure = tf.errors.InternalError


def call(target, *arrays):
    return ffi.call(target, arrays, [(tuple(a.shape), a.dtype) for a in arrays], alias=True)


def probe_passes():
    assert ffi.probe() == ""


def every_dtype_and_shape():
    import ml_dtypes

    kinds = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"]
    arrays = [np.array([[0, 1, 3]]).astype(kind) for kind in kinds]
    arrays += [np.array([1.5, -2], ml_dtypes.bfloat16), np.float32(7), np.zeros((0, 4), "float32")]
    if BACKEND == "tensorflow":
        arrays += [np.array([1.5], "float64"), np.array([2**40], "int64")]
    arrays = [np.asarray(a) for a in arrays]

    def reverse(sources, targets):
        for source, target in zip(sources, targets, strict=True):
            assert source.dtype == target.dtype
            target[...] = source[::-1] if source.ndim else source

    target = ffi.register(reverse)
    results = compiled(lambda *given: call(target, *given))(*arrays)
    for result, array in zip(results, arrays, strict=True):
        result = np.asarray(result)
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array[::-1] if array.ndim else array)


def several_calls_keep_their_order():
    """Independent of each other as far as XLA can see; also in a loop and a branch."""
    seen = []

    def body(number):
        def run(sources, targets):
            seen.append(number)
            targets[0][...] = sources[0]

        return ffi.register(run)

    targets = [body(number) for number in range(8)]
    function = compiled(lambda x: [call(target, x + 1)[0] for target in targets])
    for _ in range(25):
        seen.clear()
        for result in function(np.ones(1000, "float32")):
            np.asarray(result)
        assert seen == list(range(8)), seen


def gradients_are_not_copied():
    """The result lies in the operand's memory, and both are XLA's own."""
    same = []

    def run(sources, targets):
        same.append(sources[0].ctypes.data == targets[0].ctypes.data)
        targets[0] *= 2

    target = ffi.register(run)
    result = compiled(lambda x: call(target, x + 1)[0])(np.ones(100_000, "float32"))
    assert (np.asarray(result) == 4).all()
    assert same == [True]


def errors_come_out():
    threads = []

    def run(sources, targets):
        threads.append(threading.current_thread())
        raise ValueError("from the body")

    target = ffi.register(run)
    failing = compiled(lambda x: call(target, x)[0])
    with pytest.raises(Failure, match="ValueError: from the body"):
        np.asarray(failing(np.ones(10, "float32")))
    assert len(threads) == 1
    if BACKEND == "jax":
        from ringplug.keras import step_jax

        step_jax._forget_failures()
    ffi.probe.cache_clear()
    assert ffi.probe() == "", "usable after an error"


CHECKS = [
    probe_passes,
    every_dtype_and_shape,
    several_calls_keep_their_order,
    gradients_are_not_copied,
    errors_come_out,
]
