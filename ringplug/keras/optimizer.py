"""The seam: a live Keras optimizer whose gradients are combined before it uses them.

Keras gives gradients to ``Optimizer.apply``, whatever the backend and whatever the loop: `fit`,
a custom `train_step`, or a raw tape. `DistributedOptimizer` changes the class of the optimizer
that it is given to a subclass with another `apply`, so slots, iterations and everything that
refers to the optimizer stay. The average is taken at the entry of the outermost optimizer's
`apply`: before clipping, weight decay, moving averages and the test for overflow, which
therefore see the same numbers on every rank.

Two complements: a `LossScaleOptimizer` on JAX has a `stateless_apply` that never calls `apply`;
and with gradient accumulation the first hook that runs once per update is `_clip_gradients`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import keras

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.keras import learning_rate, quiet, step
from ringplug.keras.exchange import step_lane
from ringplug.keras.naming import masquerade
from ringplug.keras.progress import check_reduced, forget_progress, raise_latched, restore
from ringplug.keras.reduce import Options, Reduction

__all__ = [
    "Distributed",
    "DistributedOptimizer",
    "reduction_of",
    "reseat",
    "swap",
]

_inside = threading.local()
_classes: dict[tuple[type, Options], type] = {}


class Distributed:
    """What a distributed optimizer's class has in front of the optimizer's own class."""

    _ringplug_options: ClassVar[Options]
    _ringplug_base: ClassVar[type]
    _ringplug_state: Reduction

    @property
    def ringplug(self) -> Reduction:
        """This optimizer's reductions."""
        state = self.__dict__.get("_ringplug_state")
        if state is None:
            # Made by from_config, a copy or an unpickled file rather than by the swap.
            state = Reduction(self._ringplug_options, self._ringplug_base.__name__)
            object.__setattr__(self, "_ringplug_state", state)
        return state

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        raise_latched(self)
        if _nested() or not self.ringplug.active:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        _refuse_inner(self)
        with _outermost(self):
            variables = trainable_variables
            if variables is not None:
                trainable_variables = variables = list(variables)
            elif self.built:  # type: ignore[attr-defined]
                variables = self._trainable_variables  # type: ignore[attr-defined]
            grads = list(grads)
            if variables is not None and len(grads) == len(variables) and grads:
                grads = self._ringplug_reduce(grads, variables)
            return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _ringplug_reduce(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        if not self._ringplug_accumulates():
            return self.ringplug.reduce(grads, variables)
        if step.is_eager([gradient for gradient in grads if gradient is not None]):
            # Which gradients exist may differ between ranks and micro-batches, but what is
            # accumulated must be the same list everywhere: a missing one counts as zero.
            grads = [
                keras.ops.zeros(variable.shape, variable.dtype) if gradient is None else gradient
                for gradient, variable in zip(grads, variables, strict=True)
            ]
        return self.ringplug.overwrite(grads, variables)

    def _ringplug_accumulates(self) -> bool:
        return bool(self.gradient_accumulation_steps)  # type: ignore[attr-defined]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        if _owner() is self and self._ringplug_accumulates():
            grads = self._ringplug_per_update(list(grads))
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _ringplug_per_update(self, grads: list[Any]) -> list[Any]:
        def reduce(given: list[Any]) -> list[Any]:
            return self.ringplug.reduce(given, None)

        if keras.backend.backend() != "jax":
            # TensorFlow and torch call this in the branch that updates.
            return reduce(grads)
        import jax

        done = self._iterations.value + 1  # type: ignore[attr-defined]
        updates = done % self.gradient_accumulation_steps == 0  # type: ignore[attr-defined]
        if step.is_eager([updates, *grads]):
            return reduce(grads) if bool(updates) else grads
        reduced: list[Any] = jax.lax.cond(updates, reduce, lambda given: given, grads)
        return reduced

    def build(self, var_list: Any) -> None:
        super().build(var_list)  # type: ignore[misc]
        if self.ringplug.pending:
            restore(self, self.ringplug.pending)

    @property
    def variables(self) -> Any:
        # JAX's fit asks for these after every epoch, and no exception of a step reaches it.
        raise_latched(self)
        return super().variables  # type: ignore[misc]

    def variables_quietly(self) -> Any:
        """`variables`, without raising what waits."""
        return super().variables  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Any) -> None:
        # fit calls this last, on every backend, with or without callbacks.
        check_reduced(self)
        super().finalize_variable_values(var_list)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(store)  # type: ignore[misc]
        forget_progress(self)

    def set_weights(self, weights: Any) -> None:
        super().set_weights(weights)  # type: ignore[misc]
        forget_progress(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from ringplug.keras.loading import pickled

        return pickled(self)


class DistributedLossScale(Distributed):
    """`Distributed` for LossScaleOptimizer, whose inner optimizer may accumulate."""

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        raise_latched(self)
        if _nested() or not self.ringplug.active:
            return super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, grads, trainable_variables
            )
        with _outermost(self):
            grads = self.ringplug.reduce(
                list(grads),
                self._trainable_variables,  # type: ignore[attr-defined]
            )
            return super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, grads, trainable_variables
            )

    def _ringplug_accumulates(self) -> bool:
        # Overflow is tested in every micro-step, with numbers that all ranks must share.
        return False


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    scale_lr: str | None = "linear",
    backward_passes_per_step: int = 1,
) -> Any:
    """Make an optimizer combine its gradients over all ranks before it uses them.

    Call it on every rank with equal arguments, before `compile`. The optimizer itself is
    changed and returned, with its state; only under the global dtype policy
    ``mixed_float16`` the result is a new `LossScaleOptimizer` around it, the same that
    `compile` would have made. Applied twice, it does nothing the second time. With one rank
    the optimizer computes what it computes without ringplug.

    Args:
        optimizer: Any Keras optimizer, built or not; an identifier such as ``"adam"`` too.
        name: What errors call its gradients; the optimizer's class by default.
        compression: What gradients travel as: ``"fp16"``, ``"bf16"``, ``"none"``; None is the
            setting ``compression``. Sums are accumulated in float32 all the same. Sparse
            gradients always travel as they are.
        op: ``Average`` or ``Sum`` of the ranks' gradients.
        gradient_predivide_factor: With Average, gradients are divided by this before the
            exchange and multiplied by it after the division by the number of ranks.
        sparse_as_dense: Gradients of embeddings (``IndexedSlices``) are made dense before the
            exchange. By default their rows are gathered, which gives what one process would
            get for all the data.
        scale_lr: The learning rate is multiplied by the number of ranks (``"linear"``), by its
            square root (``"sqrt"``), or left alone (None). Rank 0 prints the change. A script
            that scales by itself passes None; one that also passes its scaled rate to a
            callback as `initial_lr` may leave this as it is: the callback takes precedence.
        backward_passes_per_step: Micro-batches per update: sets the optimizer's
            ``gradient_accumulation_steps``. One exchange per update.

    Raises:
        NotInitializedError: `init` was not called.
        UsageError: An argument cannot be used, or TensorFlow, Keras or torch distribute too.
    """
    options = Options(name, compression, ReduceOp(op), gradient_predivide_factor, sparse_as_dense)
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(f"{optimizer!r} is not a Keras optimizer")
    world = runtime.current().world
    factor = learning_rate.factor(scale_lr, world.size)
    if world.size > 1:
        step.refuse()
        step_lane()
        quiet.rank_zero_only()
    _accumulate(optimizer, backward_passes_per_step)
    if isinstance(optimizer, Distributed):
        return optimizer
    already = max([1.0, *(inner.ringplug.scaled for inner in _distributed_inside(optimizer))])
    loss_scale = keras.optimizers.LossScaleOptimizer
    policy = keras.config.dtype_policy().name
    if policy == "mixed_float16" and not isinstance(optimizer, loss_scale):
        # compile would put its LossScaleOptimizer around ours, where one rank's overflow
        # keeps it alone from the exchange.
        optimizer = loss_scale(optimizer, name="loss_scale_optimizer")
    swap(optimizer, options)
    optimizer.ringplug.scaled = already
    if factor != 1.0 and already == 1.0:
        learning_rate.scale(optimizer, factor)
        optimizer.ringplug.scaled = factor
    return optimizer


def _accumulate(optimizer: Any, passes: int) -> None:
    if passes < 1:
        raise UsageError(f"backward_passes_per_step={passes}: expected 1 or more")
    if passes == 1:
        return
    inner = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer):
        inner = inner.inner_optimizer
    if inner.gradient_accumulation_steps == passes:
        return
    if inner.built:
        raise UsageError(
            "backward_passes_per_step needs an optimizer that is not built yet: "
            "its accumulators are made then"
        )
    if inner.gradient_accumulation_steps:
        raise UsageError(
            f"backward_passes_per_step={passes}, but the optimizer has "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}"
        )
    inner.gradient_accumulation_steps = passes


def swap(optimizer: Any, options: Options) -> None:
    """Make `optimizer` distributed in place, and the optimizers inside it plain."""
    for inner in _distributed_inside(optimizer):
        inner.__class__ = type(inner)._ringplug_base
    if isinstance(optimizer, Distributed):
        return
    label = type(optimizer).__name__
    optimizer.__class__ = distributed_class(type(optimizer), options)
    object.__setattr__(optimizer, "_ringplug_state", Reduction(options, label))
    forget_progress(optimizer)


def reseat(model: Any) -> bool:
    """Distribute the optimizer that `compile` put around a distributed one.

    Returns:
        Whether the model's optimizer is distributed now.
    """
    outer = model.optimizer
    if isinstance(outer, Distributed):
        return True
    inside = _distributed_inside(outer)
    if not inside or not isinstance(outer, keras.optimizers.LossScaleOptimizer):
        return False
    first = inside[0]
    options, scaled = type(first)._ringplug_options, first.ringplug.scaled
    swap(outer, options)
    outer.ringplug.scaled = scaled
    # Whatever was traced contains the old arrangement; fit makes the function anew.
    model.train_function = None
    return True


def distributed_class(base: type, options: Options) -> type:
    """The subclass of `base` that combines gradients as `options` say."""
    known = _classes.get((base, options))
    if known is not None:
        return known
    is_loss_scale = issubclass(base, keras.optimizers.LossScaleOptimizer)
    front = DistributedLossScale if is_loss_scale else Distributed
    members = {
        "_ringplug_options": options,
        "_ringplug_base": base,
        "__doc__": base.__doc__,
    }
    made = type(base.__name__, (front, base), members)
    masquerade(made, base)
    _classes[base, options] = made
    return made


def reduction_of(optimizer: Any) -> Reduction | None:
    """The reductions of a distributed optimizer; None for any other."""
    return optimizer.ringplug if isinstance(optimizer, Distributed) else None


def _distributed_inside(optimizer: Any) -> list[Any]:
    inner = learning_rate.inner_optimizers(optimizer)
    found = [one for one in inner if isinstance(one, Distributed)]
    return found + [deeper for one in inner for deeper in _distributed_inside(one)]


def _owner() -> Any:
    return getattr(_inside, "owner", None)


def _nested() -> bool:
    return _owner() is not None


@contextmanager
def _outermost(optimizer: Any) -> Iterator[None]:
    _inside.owner = optimizer
    try:
        yield
    except BaseException:
        # An eager exchange has failed, or tracing: either way it is being raised now.
        optimizer.ringplug.meter.latch.take()
        raise
    finally:
        _inside.owner = None


@step.uncompiled
def _refuse_inner(optimizer: Any) -> None:
    """Raise when a LossScaleOptimizer called this: its ranks may take different branches."""
    kind = keras.optimizers.LossScaleOptimizer
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("loss_scale_optimizer.py"):
            caller = frame.f_locals.get("self")
            if caller is None or (isinstance(caller, kind) and caller is not optimizer):
                raise UsageError(
                    "LossScaleOptimizer is around DistributedOptimizer: a rank whose gradients "
                    "overflow would stay away from the exchange. Use DistributedOptimizer("
                    "LossScaleOptimizer(optimizer)), or compile(..., auto_scale_loss=False), or "
                    "one of ringplug's callbacks, which put it right"
                )
        frame = frame.f_back  # type: ignore[assignment]
