"""TensorFlow: the same custom call with a Python body, inside graphs and under XLA.

TensorFlow's library exports the function that returns XLA's FFI table, with which a handler is
registered; the op ``XlaCallModule`` then runs a small StableHLO module that calls it. It is a
stateful op, so automatic control dependencies keep several of them in program order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ringplug.backend.buffers import Array
from ringplug.backend.errors import UnavailableError
from ringplug.backend.xla_ffi import Body, Handler, Targets, register_with_api
from ringplug.tensorflow.failures import code_of

__all__ = ["call", "in_xla", "probe", "reachable", "register", "target_of"]

_SYMBOL = "_ZN3xla3ffi12GetXlaFfiApiEv"  # xla::ffi::GetXlaFfiApi()
_VERSION = 9
_LAST = "_ringplug_last"
_TYPES = {
    "bool": "i1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "ui8",
    "uint16": "ui16",
    "uint32": "ui32",
    "uint64": "ui64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
    "float8_e5m2": "f8E5M2",
    "float8_e4m3fn": "f8E4M3FN",
}


@functools.lru_cache(maxsize=1)
def _api() -> int:
    folder = Path(tf.__file__).parent
    for name in ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2"):
        try:
            function = getattr(ctypes.CDLL(str(folder / name)), _SYMBOL)
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        address: int = function()
        return address
    raise UnavailableError("this TensorFlow does not export XLA's FFI table")


def _announce(name: str, handler: Handler) -> None:
    register_with_api(_api(), name, "Host", handler)


_targets = Targets(_announce, code_of)


def register(body: Body) -> str:
    """A new custom-call target that runs `body`; returns its name. It lives for ever."""
    return _targets.register(_without_last(body))


def target_of(owner: Any, body: Body) -> str:
    """The target that runs `body`, made on the first call for this `owner`."""
    return _targets.target_of(owner, _without_last(body))


def _without_last(body: Body) -> Body:
    def run(sources: Sequence[Array], targets: Sequence[Array]) -> None:
        body(sources[:-1], targets[:-1])

    return run


def _tensor_type(shape: Sequence[int], dtype: Any) -> str:
    kind = _TYPES.get(tf.as_dtype(dtype).name)
    if kind is None:
        raise UnavailableError(f"a custom call cannot take values of {dtype}")
    return f"tensor<{''.join(f'{size}x' for size in shape)}{kind}>"


def call(
    target: str, operands: Sequence[Any], shapes: Sequence[tuple[tuple[int, ...], Any]], alias: bool
) -> list[Any]:
    """The op that runs the custom call.

    Args:
        target: A name from `register`.
        operands: Tensors with static shapes.
        shapes: Shape and dtype of each result.
        alias: Result i may use operand i's memory; they must then match in shape and dtype.
    """
    from tensorflow.compiler.tf2xla.python import xla

    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    operands = [*operands, _last_of(graph)]
    shapes = [*shapes, ((), tf.float32)]
    inputs = [_tensor_type(x.shape, x.dtype) for x in operands]
    outputs = [_tensor_type(shape, dtype) for shape, dtype in shapes]
    names = [f"%arg{index}" for index in range(len(inputs))]
    aliases = [
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{index}], "
        f"operand_index = {index}, operand_tuple_indices = []>"
        for index in range(len(inputs) - 1 if alias else 0)
    ]
    arguments = ", ".join(f"{name}: {kind}" for name, kind in zip(names, inputs, strict=True))
    results = ", ".join(f"%0#{index}" for index in range(len(outputs)))
    module = f"""module {{
      func.func public @main({arguments}) -> ({", ".join(outputs)}) {{
        %0:{len(outputs)} = stablehlo.custom_call @{target}({", ".join(names)})
          {{api_version = 4 : i32, has_side_effect = true, backend_config = {{}},
           output_operand_aliases = [{", ".join(aliases)}]}}
          : ({", ".join(inputs)}) -> ({", ".join(outputs)})
        return {results} : {", ".join(outputs)}
      }}
    }}"""
    made = xla.call_module(
        tuple(operands),
        version=_VERSION,
        module=module,
        Tout=[tf.as_dtype(dtype) for _, dtype in shapes],
        Sout=[tuple(shape) for shape, _ in shapes],
        platforms=["CPU"],
    )
    *wanted, last = made
    if graph is not None:
        setattr(graph, _LAST, last)
    return wanted


def _last_of(graph: Any) -> Any:
    """The scalar that the previous custom call of this graph, or one around it, returned.

    XLA ignores control dependencies inside the program that it compiles, so the order of the
    calls is made a dependency of data.
    """
    outer = graph
    while outer is not None:
        if hasattr(outer, _LAST):
            return getattr(outer, _LAST)
        outer = getattr(outer, "outer_graph", None)
    return tf.zeros((), tf.float32)


def in_xla() -> bool:
    """Whether the graph being traced is going to be compiled by XLA."""
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def reachable() -> bool:
    """Whether this TensorFlow has what `register` needs; see `probe` for a thorough answer."""
    try:
        return bool(_api())
    except UnavailableError:
        return False


@functools.lru_cache(maxsize=1)
def probe() -> str:
    """Whether this TensorFlow runs our custom calls: "" if so, else why not."""
    if tf.config.list_logical_devices("GPU"):
        return "TensorFlow computes on a GPU; custom calls serve the CPU"
    seen: list[int] = []

    def body(mark: int, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        seen.append(mark)
        for source, target in zip(sources, targets, strict=True):
            np.multiply(source, 2, out=target)

    given = np.arange(1, 5, dtype=np.float32)
    try:
        targets = [register(functools.partial(body, mark)) for mark in range(2)]

        def program(x: Any) -> Any:
            y, z = call(targets[0], [x + 1, x], [(x.shape, x.dtype)] * 2, True)
            (w,) = call(targets[1], [x], [(x.shape, x.dtype)], True)
            return y, z, w

        with tf.init_scope(), tf.device("CPU:0"):
            results = [
                [np.asarray(r) for r in tf.function(program, jit_compile=jit)(tf.constant(given))]
                for jit in (False, True)
            ]
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        ImportError,
        tf.errors.OpError,
    ) as error:
        return f"the custom call fails on this TensorFlow: {type(error).__name__}: {error}"
    if seen != [0, 1, 0, 1]:
        return f"custom calls ran as {seen}"
    for y, z, w in results:
        if not (np.array_equal(y, given * 2 + 2) and np.array_equal(z, given * 2)):
            return "custom calls returned wrong values"
        if not np.array_equal(w, given * 2):
            return "custom calls returned wrong values"
    return ""
