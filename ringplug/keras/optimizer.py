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

from ringplug.backend.errors import UsageError
from ringplug.keras import learning_rate, step
from ringplug.keras.naming import masquerade
from ringplug.keras.options import Options
from ringplug.keras.progress import check_reduced, forget_progress, raise_latched, restore
from ringplug.keras.reduce import Reduction

__all__ = [
    "Distributed",
    "distributed_inside",
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

    def register_local_var(self, var: Any) -> None:
        """Keep a variable's gradients on this rank: they are not combined with the others'.

        They are divided by the number of ranks, unless ``scale_local_gradients=False``.

        Args:
            var: A Keras variable, or one of the backend, that this optimizer trains. Register
                the same variables on every rank, before the first step.

        Raises:
            UsageError: It is no variable.
        """
        self.ringplug.local.add(var)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        raise_latched(self)
        if _nested():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        if self.ringplug.active:
            _refuse_inner(self)
        with _outermost(self):
            variables = trainable_variables
            if variables is not None:
                trainable_variables = variables = list(variables)
            elif self.built:  # type: ignore[attr-defined]
                variables = self._trainable_variables  # type: ignore[attr-defined]
            grads = list(grads)
            if variables is not None and len(grads) == len(variables) and grads:
                grads = self._ringplug_combine(grads, variables)
            return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _ringplug_combine(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.ringplug.active:
            return self.ringplug.alone(grads, variables)
        if not self._ringplug_accumulates():
            return self.ringplug.reduce(grads, variables)
        if step.is_eager([gradient for gradient in grads if gradient is not None]):
            # Which gradients exist may differ between ranks and micro-batches, but what is
            # accumulated must be the same list everywhere: a missing one counts as zero.
            local = self.ringplug.local.among(variables)
            grads = [
                keras.ops.zeros(variable.shape, variable.dtype)
                if gradient is None and index not in local
                else gradient
                for index, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
            ]
        # What Keras passes on from here: the owners of what `_clip_gradients` gets.
        _inside.owners = [
            variable
            for gradient, variable in zip(grads, variables, strict=True)
            if gradient is not None and not getattr(variable, "overwrite_with_gradient", False)
        ]
        return self.ringplug.overwrite(grads, variables)

    def _ringplug_accumulates(self) -> bool:
        return bool(self.gradient_accumulation_steps)  # type: ignore[attr-defined]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        if _owner() is self and self.ringplug.active and self._ringplug_accumulates():
            grads = self._ringplug_per_update(list(grads))
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _ringplug_per_update(self, grads: list[Any]) -> list[Any]:
        owners = _inside.owners

        def reduce(given: list[Any]) -> list[Any]:
            return self.ringplug.reduce(given, None, owners)

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
        if _nested():
            return super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, grads, trainable_variables
            )
        with _outermost(self):
            variables = self._trainable_variables  # type: ignore[attr-defined]
            grads = self._ringplug_combine(list(grads), variables)
            return super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, grads, trainable_variables
            )

    def _ringplug_accumulates(self) -> bool:
        # Overflow is tested in every micro-step, with numbers that all ranks must share.
        return False


def swap(optimizer: Any, options: Options) -> None:
    """Make `optimizer` distributed in place, and the optimizers inside it plain."""
    for inner in distributed_inside(optimizer):
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
    inside = distributed_inside(outer)
    if not inside or not isinstance(outer, keras.optimizers.LossScaleOptimizer):
        return False
    first = inside[0]
    before = first.ringplug
    swap(outer, before.options)
    outer.ringplug.take_over(before)
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


def distributed_inside(optimizer: Any) -> list[Any]:
    """The distributed ones among the optimizers that `optimizer` hands gradients to."""
    inner = learning_rate.inner_optimizers(optimizer)
    found = [one for one in inner if isinstance(one, Distributed)]
    return found + [deeper for one in inner for deeper in distributed_inside(one)]


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
        _inside.owner = _inside.owners = None


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
