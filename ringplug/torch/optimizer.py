"""``DistributedOptimizer``: a torch optimizer whose gradients are reduced over the ranks."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.torch.adasum import DeltaOptimizer, check_adasum
from ringplug.torch.compression import CompressionChoice, wire_codec
from ringplug.torch.exchange import ReducerOptions
from ringplug.torch.parameters import check_groups, check_names, trainable
from ringplug.torch.reducer import GradientReducer

__all__ = ["DistributedOptimizer"]

_OPS = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


def DistributedOptimizer(  # noqa: PLR0913, PLR0917 - Horovod's signature
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: CompressionChoice = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Let an optimizer use gradients that are reduced over the ranks.

    The same object is returned, so schedulers and scalers made before keep working; its state
    dict, its pickle and its copies are those of the plain optimizer. Gradients are reduced by
    the time ``backward()`` returns; ``step()`` reduces what was not, for ranks on which no
    gradient was computed. If the ranks' parameters differ in their first round, one rank warns.

    Gradients that no rank has stay None. A rank that lacks one which others have contributes
    zeros. After `join` a rank contributes zeros until all ranks have joined, and averages are
    still divided by the number of all.

    With ``op=Adasum`` the optimizer steps with this rank's own gradients, and what the steps of
    the ranks changed is combined; see `ringplug.torch.adasum`. A step that a `GradScaler` skips
    on one rank only then makes the others wait.

    Args:
        optimizer: Any torch optimizer, with the same parameters on every rank. Of several that
            share a parameter the one made last reduces its gradient in the backward pass.
        named_parameters: ``model.named_parameters()``, for errors.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of one's own with
            ``compress`` and ``decompress``, which is called for each dense gradient once the
            backward pass is over; None takes the setting, from ``init(compression=...)`` or
            RINGPLUG_COMPRESSION.
        backward_passes_per_step: Backward passes whose gradients are added before one
            reduction; they are not divided by it.
        op: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: Gradients are divided by it before the sum, and the sum is
            multiplied by it again, for an average only. Sums of 16-bit floats do not need it:
            they are made in float32.
        num_groups: Deprecated, use `groups`.
        groups: Gradients to send together once all of them are there: a number of groups of
            neighbours, or lists of parameters. Results are the same; parameters that are not
            in this optimizer are passed over. Buckets are filled in the order of the groups, and
            cut by size all the same.
        sparse_as_dense: Reduce sparse gradients as dense ones; they are sparse again
            afterwards. By default the ranks' rows are gathered and added, uncompressed.
        process_set: The ranks that reduce gradients; on others the optimizer works by itself.

    Returns:
        `optimizer`, with the further methods ``synchronize()``, ``skip_synchronize()`` and
        ``set_backward_passes_per_step()``.

    Raises:
        UsageError: Wrong names, groups, factor or number of passes, or an optimizer that is
            wrapped already.
        NotSupportedError: Adasum with a process set or a number of ranks that is no power of
            two.
        ConfigError: No such compression.
        NotInitializedError: Before ``init()``.
        UnavailableError: Parameters that are not on the CPU.
    """
    if isinstance(optimizer, _Distributed | DeltaOptimizer):
        raise UsageError("this optimizer is distributed already")
    op = _check_op(op, gradient_predivide_factor)
    _check_passes(backward_passes_per_step)
    if num_groups != 0:
        warnings.warn("num_groups is deprecated, use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    together = check_groups(groups)
    wire_codec(compression)
    names = check_names(optimizer, named_parameters)
    rt = runtime.current()
    wrapped: Any = optimizer
    if op is ReduceOp.ADASUM and rt.world.size > 1:
        check_adasum(process_set)
        _put_before(DeltaOptimizer, wrapped)
        wrapped._ringplug_names = names
        wrapped._ringplug_compression = compression
        wrapped.backward_passes_per_step = backward_passes_per_step
    else:
        _put_before(_Distributed, wrapped)
        wrapped._ringplug_names = names
        wrapped._ringplug_options = ReducerOptions(
            op=ReduceOp.AVERAGE if op is ReduceOp.ADASUM else op,
            compression=compression,
            predivide=float(gradient_predivide_factor),
            groups=together,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            strict=_as_horovod(),
        )
        wrapped._ringplug_passes = backward_passes_per_step
        wrapped._ringplug_skip = wrapped._ringplug_synchronized = False
        wrapped._ringplug_reducer = None
        wrapped._ringplug_renew()
    for name, value in (
        ("op", op),
        ("gradient_predivide_factor", gradient_predivide_factor),
        ("sparse_as_dense", sparse_as_dense),
        ("process_set", process_set),
    ):
        setattr(wrapped, name, value)
    tracked = vars(optimizer).get("step")
    if tracked is not None:
        # A scheduler that was made before has put its own step, of the plain class, before ours.
        wrapped.step = _through(wrapped, tracked)
    return optimizer


def _put_before(first: type[torch.optim.Optimizer], optimizer: Any) -> None:
    plain = type(optimizer)
    optimizer.__class__ = type(plain.__name__, (first, plain), {"_plain": plain})


def _check_op(op: Any, predivide: float) -> ReduceOp:
    try:
        known = ReduceOp(op)
    except ValueError:
        known = None
    if known is None or (known not in _OPS and known is not ReduceOp.ADASUM):
        raise UsageError(f"op={op!r}: Average, Sum, Min, Max, Product and Adasum are possible")
    if predivide != 1.0:
        if known is not ReduceOp.AVERAGE:
            raise UsageError("gradient_predivide_factor is for op=Average")
        if not (predivide > 0 and math.isfinite(predivide)):
            raise UsageError(f"gradient_predivide_factor={predivide} must be above 0")
    return known


def _check_passes(passes: int) -> None:
    if passes <= 0:
        raise UsageError(f"backward_passes_per_step={passes} must be above 0")


def _as_horovod() -> bool:
    """Whether this process imported ringplug under Horovod's name."""
    return "horovod.torch" in sys.modules and "ringplug.as_horovod" in sys.modules


def _through(optimizer: Any, tracked: Any) -> Callable[..., Any]:
    def step(closure: Callable[[], Any] | None = None) -> Any:
        return optimizer._ringplug_step(tracked, closure)

    vars(step).update(vars(tracked))
    return step


class _Distributed(torch.optim.Optimizer):
    """What is put before the class of an optimizer."""

    _plain: type[torch.optim.Optimizer]
    _ringplug_names: dict[int, str]
    _ringplug_options: ReducerOptions
    _ringplug_reducer: GradientReducer | None
    _ringplug_passes: int
    _ringplug_skip: bool
    _ringplug_synchronized: bool

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added before one reduction."""
        return self._ringplug_passes

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        # Horovod's own tests look here.
        return {parameter: name for name, parameter in trainable(self, self._ringplug_names)}

    def synchronize(self) -> None:
        """Make sure that the gradients are reduced; a collective where they are not yet.

        Put the following ``step()`` into ``with optimizer.skip_synchronize()``: it warns
        otherwise.
        """
        self._ringplug_synchronize()
        self._ringplug_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context, ``step()`` uses the gradients as they are."""
        self._ringplug_skip = True
        try:
            yield
        finally:
            self._ringplug_skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes make up a step, between steps."""
        _check_passes(passes)
        self._ringplug_passes = passes
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.passes = passes
            self._ringplug_reducer.reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The plain optimizer's step, on reduced gradients; also after each call of `closure`."""
        return self._ringplug_step(super().step, closure)

    def _ringplug_step(
        self, plain_step: Callable[..., Any], closure: Callable[[], Any] | None
    ) -> Any:
        skip = self._ringplug_skip
        if not skip and self._ringplug_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): gradients that were changed in between on one rank "
                "only are not reduced again",
                UserWarning,
                stacklevel=3,
            )
        self._ringplug_synchronized = False
        reduced = closure
        if closure is None:
            if not skip:
                self._ringplug_synchronize()
        else:
            original = closure

            def closure_and_reduce() -> Any:
                with torch.enable_grad():
                    loss = original()
                if not skip:
                    self._ringplug_synchronize()
                return loss

            reduced = closure_and_reduce
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.warn_of_replicas()
        result = plain_step() if reduced is None else plain_step(reduced)
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.reset()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the plain optimizer; what was computed since the last step is given up.

        Args:
            set_to_none: Whether gradients become None; zeros otherwise.

        Raises:
            AssertionError: Under Horovod's name only, between ``backward()`` and ``step()`` or
                ``synchronize()``.
        """
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.check_zero_grad()
        super().zero_grad(set_to_none)
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.reset()
        self._ringplug_renew()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the plain optimizer; gradients begin anew."""
        super().load_state_dict(state_dict)
        self._ringplug_synchronized = self._ringplug_skip = False
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.reset(loading=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the plain optimizer; the new parameters' gradients are reduced, too. A collective."""
        super().add_param_group(param_group)
        self._ringplug_renew()

    def _ringplug_synchronize(self) -> None:
        self._ringplug_renew()
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.synchronize()

    def _ringplug_renew(self) -> None:
        """Reduce also parameters that came, or began to require gradients, since last time."""
        process_set = self._ringplug_options.process_set
        if not runtime.is_initialized() or not _included(process_set):
            return
        if runtime.current().size_of(process_set) == 1:
            return
        named = trainable(self, self._ringplug_names)
        reducer = self._ringplug_reducer
        if reducer is not None:
            if reducer.covers([parameter for _, parameter in named]):
                return
            reducer.remove()
        self._ringplug_reducer = GradientReducer(
            named, self._ringplug_passes, self._ringplug_options
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled and copied as what it was, so that files load without ringplug.
        return object.__new__, (self._plain,), self.__getstate__()


def _included(process_set: ProcessSet | None) -> bool:
    return process_set is None or process_set.included()
