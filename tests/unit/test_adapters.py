"""Framework tensors as arrays: the same memory, whatever the dtype and layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch

from ringplug.backend.adapters import adapter_for, like, view
from ringplug.backend.buffers import BFLOAT16
from ringplug.backend.errors import UsageError

SHAPES = [(3, 4), (), (0, 5), (7,)]
TORCH = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]
TENSORFLOW = [
    *(tf.bool, tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.int8, tf.int16, tf.int32, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
]
JAX = ["bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32", "complex64"]


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_is_viewed_in_place(dtype, shape):
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    array = view(tensor)
    assert isinstance(array, np.ndarray)
    assert array.shape == shape
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    if array.size:
        assert array.ctypes.data == tensor.data_ptr()
        array[...] = 1
        assert (tensor == 1).all()
    back = like(array.copy(), tensor)
    assert (back.dtype, tuple(back.shape)) == (dtype, shape)
    assert torch.equal(back, tensor)


def test_torch_layouts():
    base = torch.arange(24.0).reshape(4, 6)
    for tensor in (base.T, base[::2, 1::3], base.expand(2, 4, 6), base[1]):
        array = view(tensor)
        assert array.ctypes.data == tensor.data_ptr()
        np.testing.assert_array_equal(array, tensor.numpy())
    half = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[:, ::2]
    assert view(half).ctypes.data == half.data_ptr()
    assert view(half).astype(np.float32).tolist() == half.float().tolist()
    parameter = torch.nn.Parameter(torch.ones(3))
    assert view(parameter).ctypes.data == parameter.data_ptr()
    z = torch.tensor([1 + 2j])
    assert view(z.conj())[0] == 1 - 2j
    assert view(z.conj().imag)[0] == -2


def test_torch_refusals():
    for tensor, text in (
        (torch.empty(3, device="meta"), "on meta.*shared_memory"),
        (torch.eye(3).to_sparse(), "no dense memory"),
        (torch.zeros(3).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quint8"),
    ):
        with pytest.raises(UsageError, match=text):
            view(tensor)


@pytest.mark.parametrize("dtype", TENSORFLOW, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensorflow_is_viewed_in_place(dtype, shape):
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    tensor = tf.cast(tf.constant(numbers), dtype)
    array = view(tensor)
    assert array.shape == shape
    assert array.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(array, numbers.astype(array.dtype))
    if array.size:
        assert address(view(tensor)) == address(array), "the tensor's memory, not a copy of it"
    back = like(array.copy(), tensor)
    assert back.dtype == dtype
    assert tuple(back.shape) == shape


def test_tensorflow_variables_and_refusals():
    variable = tf.Variable([1.0, 2.0])
    assert view(variable).tolist() == [1, 2]
    assert isinstance(like(view(variable).copy(), variable), tf.Tensor)
    with pytest.raises(UsageError, match="IndexedSlices"):
        view(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2])))
    with pytest.raises(UsageError, match="string"):
        view(tf.constant(["a"]))
    seen = []

    @tf.function
    def traced(x):
        with pytest.raises(UsageError, match="symbolic"):
            view(x)
        seen.append(1)
        return x

    traced(tf.ones(2))
    assert seen


@pytest.mark.parametrize("dtype", JAX)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jax_is_viewed_in_place(dtype, shape):
    array = jnp.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    seen = view(array)
    assert seen.shape == shape
    assert seen.dtype.name == dtype
    if seen.size:
        assert address(seen) == array.unsafe_buffer_pointer()
        assert not seen.flags.writeable
    back = like(seen.copy(), array)
    assert isinstance(back, jax.Array)
    assert (back.dtype, back.shape) == (array.dtype, shape)


def test_jax_tracers_are_refused():
    def traced(x):
        with pytest.raises(UsageError, match="traced JAX value"):
            view(x)
        return x

    jax.jit(traced)(jnp.ones(2))


def test_numpy_and_numbers():
    array = np.arange(6).reshape(2, 3)
    assert view(array) is array
    assert view(array[:, ::2]).base is not None
    assert like(array, array) is array
    assert view(3).shape == ()
    assert like(np.array(3), 5) == 3
    assert type(like(np.array(3.0), 5.0)) is float
    assert view([[1, 2], [3, 4]]).shape == (2, 2)
    assert view(np.ones(2, BFLOAT16)).dtype == BFLOAT16
    assert view(np.ones(2, ml_dtypes.float8_e5m2)).dtype == ml_dtypes.float8_e5m2


@pytest.mark.parametrize(
    "thing", [None, "text", b"text", [None], object(), [[1], [1, 2]], np.datetime64("2020-01-01")]
)
def test_what_is_no_tensor(thing):
    with pytest.raises(UsageError):
        view(thing)


def test_subclasses_belong_to_their_framework():
    class Mine(torch.Tensor):
        pass

    assert type(adapter_for(Mine())).__name__ == "TorchAdapter"
    assert type(adapter_for(np.ma.zeros(3))).__name__ == "NumpyAdapter"
