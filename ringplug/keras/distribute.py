"""`DistributedOptimizer` and `PartialDistributedOptimizer`: what a training script calls."""

from __future__ import annotations

from typing import Any

import keras

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.keras import learning_rate, quiet, step
from ringplug.keras.compression import user_compressor, wire_codec
from ringplug.keras.exchange import step_lane
from ringplug.keras.optimizer import Distributed, distributed_inside, swap
from ringplug.keras.options import Options, check_groups, layers_of, ranks_of

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


def DistributedOptimizer(  # noqa: PLR0913, PLR0917 - Horovod's signature
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    scale_lr: str | None = learning_rate.BY_CALLBACKS,
) -> Any:
    """Make an optimizer combine its gradients over all ranks before it uses them.

    Call it on every rank with equal arguments, before `compile`. The optimizer itself is
    changed and returned, with its state; only under the global dtype policy
    ``mixed_float16`` the result is a new `LossScaleOptimizer` around it, the same that
    `compile` would have made. Applied twice, it does nothing the second time. With one rank
    the optimizer computes what it computes without ringplug.

    The result has Horovod's ``register_local_var(variable)`` as well: the gradients of that
    variable stay on each rank.

    Args:
        optimizer: Any Keras optimizer, built or not; an identifier such as ``"adam"`` too.
        name: What errors call its gradients; the optimizer's class by default.
        device_dense: Accepted for Horovod's sake; without effect.
        device_sparse: The same.
        compression: What gradients travel as: `Compression` has ``none``, ``fp16`` and
            ``bf16``; their names as strings; a `Compressor` of one's own; None is the setting
            ``compression``. Sums are accumulated in float32 all the same. Sparse gradients
            always travel as they are.
        sparse_as_dense: Gradients of embeddings (``IndexedSlices``) are made dense before the
            exchange. By default their rows are gathered, which gives what one process would
            get for all the data.
        gradient_predivide_factor: With Average, gradients are divided by this before the
            exchange and multiplied by it after the division by the number of ranks.
        op: ``Average`` or ``Sum`` of the ranks' gradients.
        backward_passes_per_step: Micro-batches per update: sets the optimizer's
            ``gradient_accumulation_steps``. One exchange per update.
        average_aggregated_gradients: An update uses the mean over its micro-batches, as Keras'
            accumulation does; False: their sum, as in Horovod.
        num_groups: Deprecated: `groups`.
        groups: Horovod's groups, a number or lists of variables, are checked and have no
            further effect: all gradients of an update travel as one operation.
        process_set: Combine gradients among these ranks only; the others train by themselves.
            None: all ranks.
        scale_local_gradients: Gradients of local variables are divided by the number of ranks.
        scale_lr: The learning rate is multiplied by the number of ranks (``"linear"``), by its
            square root (``"sqrt"``), or left alone (None). Rank 0 prints the change. By default
            this is left to ringplug's own callbacks: ``callbacks.default()``,
            ``ScaleLearningRateCallback`` and a ``LearningRateWarmupCallback`` without
            `initial_lr` multiply it, once; with Horovod's callbacks only, it stays as it is,
            since Horovod's scripts multiply it themselves.

    Raises:
        NotInitializedError: `init` was not called.
        UsageError: An argument cannot be used, or TensorFlow, Keras or torch distribute too.
    """
    del device_dense, device_sparse
    check_groups(num_groups, groups)
    options = Options(
        name=name,
        compression=compression if user_compressor(compression) else wire_codec(compression),
        op=_op(op),
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=bool(sparse_as_dense),
        passes=backward_passes_per_step,
        average_passes=bool(average_aggregated_gradients),
        ranks=ranks_of(process_set),
        scale_local_gradients=bool(scale_local_gradients),
    )
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(f"{optimizer!r} is not a Keras optimizer")
    world = runtime.current().world
    factor = learning_rate.factor(scale_lr, world.size)
    if world.size > 1:
        step.refuse()
        step_lane()
        if options.ranks is not None and world.rank in options.ranks:
            step_lane(options.ranks)
        quiet.rank_zero_only()
    if isinstance(optimizer, Distributed):
        _check_same(optimizer.ringplug.options, options)
        return optimizer
    _accumulate(optimizer, backward_passes_per_step)
    inside = distributed_inside(optimizer)
    loss_scale = keras.optimizers.LossScaleOptimizer
    policy = keras.config.dtype_policy().name
    if policy == "mixed_float16" and not isinstance(optimizer, loss_scale):
        # compile would put its LossScaleOptimizer around ours, where one rank's overflow
        # keeps it alone from the exchange.
        optimizer = loss_scale(optimizer, name="loss_scale_optimizer")
    before = [one.ringplug for one in inside]
    swap(optimizer, options)
    optimizer.ringplug.may_scale = scale_lr == learning_rate.BY_CALLBACKS
    for earlier in before:
        optimizer.ringplug.take_over(earlier)
    if factor != 1.0 and optimizer.ringplug.scaled == 1.0:
        learning_rate.scale(optimizer, factor)
        optimizer.ringplug.scaled = factor
    return optimizer


def PartialDistributedOptimizer(  # noqa: PLR0913, PLR0917 - Horovod's signature
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    scale_lr: str | None = learning_rate.BY_CALLBACKS,
) -> Any:
    """`DistributedOptimizer`, except for some layers, which every rank has for itself.

    Gradients of the trainable weights of `local_layers` are not combined; they are divided by
    the number of ranks, which makes them what they are in the mean of all ranks' losses. Pass
    the variables of these layers to ``BroadcastGlobalVariablesCallback(local_variables=...)``
    where ranks should start from different ones.

    Args:
        optimizer: As for `DistributedOptimizer`, as are all arguments but these:
        name: See there.
        device_dense: See there.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        gradient_predivide_factor: See there.
        op: See there.
        backward_passes_per_step: See there.
        average_aggregated_gradients: See there.
        num_groups: See there.
        groups: See there.
        process_set: See there.
        local_layers: A layer or several, the same on every rank, built or not.
        scale_local_gradients: False: local gradients are used as they are.
        scale_lr: See there.

    Raises:
        UsageError: Something among `local_layers` is not a Keras layer; or as there.
    """
    layers = layers_of(local_layers)
    made = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        scale_lr=scale_lr,
    )
    made.ringplug.local.add_layers(layers)
    return made


def _op(op: Any) -> ReduceOp:
    try:
        return ReduceOp(op)
    except ValueError:
        raise UsageError(f"op={op!r}: gradients can be combined by Average or Sum") from None


def _check_same(before: Options, now: Options) -> None:
    """Nothing asked for is dropped: an optimizer is distributed once, in one way.

    Raises:
        UsageError: The second time it is asked for something else.
    """
    if now not in (before, Options()):
        raise UsageError(
            f"the optimizer is distributed already, with {before}; asked for now: {now}"
        )


def _accumulate(optimizer: Any, passes: int) -> None:
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
