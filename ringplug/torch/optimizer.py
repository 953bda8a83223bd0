"""``DistributedOptimizer``: a torch optimizer whose gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.compression import get_compressor
from ringplug.backend.errors import UsageError
from ringplug.torch.reducer import GradientReducer

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: str | None = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    sparse_as_dense: bool = False,
) -> Any:
    """Let an optimizer use gradients that are reduced over all ranks.

    The same object is returned, so schedulers and scalers made before keep working; its state
    dict and pickle are those of the plain optimizer. Gradients are reduced by the time
    ``backward()`` returns; ``step()`` reduces what was not, for ranks on which no gradient was
    computed. If the ranks' parameters differ in their first round, rank 0 warns.

    Args:
        optimizer: Any torch optimizer, with the same parameters on every rank.
        named_parameters: ``model.named_parameters()``, for errors.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``; None takes the setting, from
            ``init(compression=...)`` or RINGPLUG_COMPRESSION.
        backward_passes_per_step: Backward passes whose gradients are added before one
            reduction; they are not divided by it.
        op: Average or Sum.
        sparse_as_dense: Make sparse gradients dense; they are an error otherwise.

    Returns:
        `optimizer`, with the further methods ``synchronize()``, ``skip_synchronize()`` and
        ``set_backward_passes_per_step()``.

    Raises:
        UsageError: Wrong names, a wrong number of passes, or an optimizer that is wrapped
            already.
        ConfigError: No such compression.
        NotInitializedError: Before ``init()``.
        UnavailableError: Parameters that are not on the CPU.
    """
    rt = runtime.current()
    if isinstance(optimizer, _Distributed):
        raise UsageError("this optimizer is distributed already")
    if backward_passes_per_step <= 0:
        raise UsageError(f"backward_passes_per_step={backward_passes_per_step} must be above 0")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UsageError(f"op={op!r}: Average and Sum are possible")
    if compression is not None:
        get_compressor(compression)
    names = _check_names(optimizer, named_parameters)
    plain = type(optimizer)
    any_optimizer: Any = optimizer
    any_optimizer.__class__ = type(plain.__name__, (_Distributed, plain), {"_plain": plain})

    def make() -> GradientReducer | None:
        if rt.world.size == 1:
            return None
        return GradientReducer(
            _named(optimizer, names),
            op,
            compression,
            any_optimizer._ringplug_passes,
            sparse_as_dense,
        )

    any_optimizer._ringplug_passes = backward_passes_per_step
    any_optimizer._ringplug_skip = False
    any_optimizer._ringplug_make = make
    any_optimizer._ringplug_reducer = make()
    tracked = vars(optimizer).get("step")
    if tracked is not None:
        # A scheduler that was made before has put its own step, of the plain class, before ours.
        any_optimizer.step = _through(any_optimizer, tracked)
    return optimizer


def _check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[int, str]:
    """Names by the parameter's id; empty if none were given."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError("named_parameters must be pairs (name, parameter), as model gives them")
    seen: set[str] = set()
    twice = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise UsageError(f"named_parameters has names more than once: {', '.join(twice)}")
    names = {id(parameter): name for name, parameter in pairs}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    unnamed = sum(id(parameter) not in names for parameter in parameters)
    if unnamed:
        raise UsageError(f"named_parameters lacks {unnamed} parameters of the optimizer")
    return names


def _named(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[tuple[str, Tensor]]:
    return [
        (names.get(id(parameter), f"parameter {number}.{index}"), parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter.requires_grad
    ]


def _through(optimizer: Any, tracked: Any) -> Callable[..., Any]:
    def step(closure: Callable[[], Any] | None = None) -> Any:
        return optimizer._ringplug_step(tracked, closure)

    vars(step).update(vars(tracked))
    return step


class _Distributed(torch.optim.Optimizer):
    """What is put before the class of an optimizer."""

    _plain: type[torch.optim.Optimizer]
    _ringplug_reducer: GradientReducer | None
    _ringplug_make: Callable[[], GradientReducer | None]
    _ringplug_passes: int
    _ringplug_skip: bool

    def synchronize(self) -> None:
        """Make sure that the gradients are reduced; a collective where they are not yet."""
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.synchronize()

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
        if passes <= 0:
            raise UsageError(f"backward_passes_per_step={passes} must be above 0")
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
        reduced = closure
        if closure is None:
            if not skip:
                self.synchronize()
        else:
            original = closure

            def closure_and_reduce() -> Any:
                with torch.enable_grad():
                    loss = original()
                if not skip:
                    self.synchronize()
                return loss

            reduced = closure_and_reduce
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.warn_of_replicas()
        result = plain_step() if reduced is None else plain_step(reduced)
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.stepped()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.reset()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._ringplug_reducer is not None:
            self._ringplug_reducer.remove()
        self._ringplug_reducer = self._ringplug_make()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled and copied as what it was, so that files load without ringplug.
        return object.__new__, (self._plain,), self.__getstate__()
