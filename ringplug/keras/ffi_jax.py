"""JAX: an *ordered* primitive around an XLA custom call with a Python body.

A plain ``jax.ffi.ffi_call`` may be moved past another one by XLA, even with a side effect;
ranks would then enter their collectives in different orders. An ordered effect makes JAX
thread a token through all calls of a program and across programs, which fixes the order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

from ringplug.backend.xla_ffi import Handler, Targets

__all__ = ["call", "probe", "register", "target_of"]


def _announce(name: str, handler: Handler) -> None:
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(handler.address))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu", api_version=1)


_targets = Targets(_announce)
register = _targets.register
target_of = _targets.target_of


@functools.lru_cache(maxsize=1)
def _primitive() -> Primitive:
    """The primitive; built on first use, since it leans on parts of JAX that are not public."""
    from jax._src import core, dispatch, effects
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo

    class Ordered(effects.Effect):
        def __str__(self) -> str:
            return "ringplug"

    effect = Ordered()
    effects.lowerable_effects.add_type(Ordered)
    effects.ordered_effects.add_type(Ordered)
    effects.control_flow_allowed_effects.add_type(Ordered)
    effects.custom_derivatives_allowed_effects.add_type(Ordered)
    effects.remat_allowed_effects.add_type(Ordered)

    primitive = core.Primitive("ringplug_call")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))

    @primitive.def_effectful_abstract_eval
    def _abstract(*_: Any, shapes: Any, **__: Any) -> Any:
        return [core.ShapedArray(shape, dtype) for shape, dtype in shapes], {effect}

    def _lower(ctx: Any, *operands: Any, target: str, shapes: Any, alias: bool) -> Any:
        del shapes
        token = ctx.tokens_in.get(effect)
        results = [
            ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
            for aval in ctx.avals_out
        ]
        layouts = [tuple(reversed(range(len(aval.shape)))) for aval in ctx.avals_in]
        out_layouts = [tuple(reversed(range(len(aval.shape)))) for aval in ctx.avals_out]
        # The token comes last, so that operand i can share its memory with result i.
        made = mlir.custom_call(
            target,
            result_types=[*results, hlo.TokenType.get()],
            operands=[*operands, token],
            backend_config={},
            has_side_effect=True,
            api_version=4,
            operand_output_aliases={i: i for i in range(len(operands))} if alias else None,
            operand_layouts=[*layouts, ()],
            result_layouts=[*out_layouts, ()],
        )
        *outputs, after = made.results
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: after})))
        return outputs

    mlir.register_lowering(primitive, _lower, platform="cpu")
    return primitive


def call(
    target: str,
    operands: Sequence[Any],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    alias: bool,
) -> list[Any]:
    """Emit the custom call into the program that is being traced.

    Args:
        target: A name from `register`.
        operands: Traced arrays.
        shapes: Shape and dtype of each result.
        alias: Result i may use operand i's memory; they must then match in shape and dtype.
    """
    results: list[Any] = _primitive().bind(
        *operands,
        target=target,
        shapes=tuple((tuple(shape), np.dtype(dtype)) for shape, dtype in shapes),
        alias=alias,
    )
    return list(results)


@functools.lru_cache(maxsize=1)
def probe() -> str:
    """Whether this JAX runs our custom calls, in order: "" if so, else why not."""
    if jax.default_backend() != "cpu":
        return f"JAX's backend is {jax.default_backend()}; custom calls serve the CPU"
    seen: list[int] = []

    def body(mark: int, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        seen.append(mark)
        np.multiply(sources[0], 2, out=targets[0])

    try:
        targets = [register(functools.partial(body, mark)) for mark in range(4)]

        def program(x: Any) -> list[Any]:
            def one(target: str, x: Any) -> Any:
                return call(target, [x], [(x.shape, x.dtype)], True)[0]

            branch = jax.lax.cond(x[0] > 0, lambda x: one(targets[3], x), lambda x: x, x)
            return [one(target, x + 1) for target in targets[:3]] + [branch]

        given = np.arange(1, 5, dtype=np.float32)
        with jax.ensure_compile_time_eval():
            results = [np.asarray(r) for r in jax.jit(program)(given)]
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        return f"the custom call fails on this JAX: {type(error).__name__}: {error}"
    if seen != [3, 0, 1, 2]:
        return f"custom calls ran in the order {seen}"
    if not all(np.array_equal(r, (given + 1) * 2) for r in results[:3]):
        return "custom calls returned wrong values"
    return "" if np.array_equal(results[3], given * 2) else "a custom call in cond went wrong"
