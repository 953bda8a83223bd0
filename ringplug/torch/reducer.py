"""Reduces an optimizer's gradients over the ranks while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringplug.backend import runtime
from ringplug.backend.errors import UsageError
from ringplug.torch.exchange import GradientExchange, ReducerOptions
from ringplug.torch.parameters import in_plan_order
from ringplug.torch.tensors import check_devices

__all__ = ["GradientReducer", "StepOrderError"]


class StepOrderError(UsageError, AssertionError):
    """A backward pass, or `zero_grad`, came where Horovod's contract does not allow it."""


class GradientReducer:
    """Reduces ``parameter.grad`` of fixed parameters, once per backward pass that completes a step.

    Parameters without a gradient anywhere keep ``grad=None``, so that weight decay and momentum
    do not move them. Gradients are reduced when ``backward()`` returns, so that clipping, scalers
    and logs see the results.

    Averages of averages change nothing, so several backward passes in one step, each reduced,
    add up to the right gradient. Other reductions do not have this property: there a gradient
    that was reduced must not be computed again before the step.

    Args:
        named: Names, for errors, and parameters that require gradients; the same on every rank.
        passes: Backward passes that make up one step; their gradients are added.
        options: How to reduce.
    """

    def __init__(
        self, named: Sequence[tuple[str, Tensor]], passes: int, options: ReducerOptions
    ) -> None:
        self._named = in_plan_order(named, options.groups)
        self._parameters = [parameter for _, parameter in self._named]
        check_devices("DistributedOptimizer", self._parameters)
        self.passes = passes
        self._options = options
        self._exchange = GradientExchange(self._named, options)
        self._passed = 0
        self._task = -1
        self._reduced = False
        self._replaced = False
        self._settled: set[int] = set()
        self._counts = [0] * len(self._named)
        self._hooks = []
        for index, parameter in enumerate(self._parameters):
            _take_over(parameter)
            hook = parameter.register_post_accumulate_grad_hook(_Hook(self, index))
            self._hooks.append(hook)

    # -- what the optimizer calls

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def replaced(self) -> None:
        """Another optimizer's reducer has taken over some of the parameters."""
        self._replaced = True

    def covers(self, parameters: Sequence[Tensor]) -> bool:
        """Whether all of `parameters` are reduced here."""
        known = {id(parameter) for parameter in self._parameters}
        return all(id(parameter) in known for parameter in parameters)

    def check_zero_grad(self) -> None:
        """Raise StepOrderError if Horovod's contract holds and gradients were not used yet."""
        if self._options.strict and any(self._counts):
            raise StepOrderError(
                "zero_grad() after backward() and before step() or synchronize(): under Horovod's "
                "contract gradients may still be under way then"
            )

    def reset(self, loading: bool = False) -> None:
        """Gradients begin anew: after zero_grad or a loaded state.

        Args:
            loading: Whether a state is loaded, which must succeed: the next round then fails.

        Raises:
            UsageError: A backward pass was interrupted by an error after the other ranks had
                received a part of its gradients, which cannot be taken back.
        """
        self._passed = 0
        self._reduced = False
        self._settled.clear()
        self._counts = [0] * len(self._named)
        error = self._exchange.discard()
        if error and not loading:
            raise UsageError(f"{error}; the ranks cannot go on together")

    def synchronize(self) -> None:
        """Reduce what has not been reduced since the last step. A collective, if so.

        Raises:
            MismatchError: The ranks are at different rounds.
            RecoverableError: A rank is gone or late.
        """
        if self._replaced and not self._options.averages:
            raise UsageError(
                "another DistributedOptimizer, made later, reduces parameters of this one; with "
                f"op={self._options.op.name.title()} they would be reduced twice"
            )
        if not self._reduced:
            self._finish()
        self._counts = [0] * len(self._named)

    def warn_of_replicas(self) -> None:
        """Once, on one rank: warn if the parameters of the first round were not the same."""
        self._exchange.warn_of_replicas()

    # -- one round

    def ready(self, index: int) -> None:
        """A gradient has been computed; called while a backward pass goes on."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_of_backward)
        self._connect()
        # Also if the gradient is refused: averages are then made anew by step().
        self._reduced = False
        self._count(index)
        if self._passed + 1 >= self.passes:
            if self._exchange.has(index):
                # The same parameter again, in a backward pass inside another one.
                self._finish()
            self._exchange.take(index)

    def _connect(self) -> None:
        """After another `init`, go on with the ranks of now."""
        if self._exchange.runtime is not runtime.current():
            self._exchange = GradientExchange(self._named, self._options)

    def _count(self, index: int) -> None:
        """One more gradient of a parameter in this step."""
        self._counts[index] += 1
        name = self._named[index][0]
        if index in self._settled and not self._options.averages:
            raise StepOrderError(
                f"the gradient of {name} was reduced already in this step: with "
                f"op={self._options.op.name.title()} call step() or zero_grad() before another "
                "backward(), or set backward_passes_per_step"
            )
        if self._options.strict and self._counts[index] > self.passes:
            raise StepOrderError(
                f"the gradient of {name} was computed more than "
                f"backward_passes_per_step={self.passes} times before step(); raise it to add up "
                "gradients over several passes"
            )

    def _end_of_backward(self) -> None:
        self._task = -1
        self._passed += 1
        if self._passed >= self.passes:
            self._finish()

    def _finish(self) -> None:
        """Complete a round: whatever is not under way goes now."""
        self._connect()
        for index, parameter in enumerate(self._parameters):
            # What was summed in an earlier round of this step is not to be summed again.
            done = index in self._settled and not self._options.averages
            if parameter.grad is not None and not done and not self._exchange.has(index):
                self._exchange.take(index)
        results = self._exchange.finish()
        for index, result in results.items():
            _assign(self._parameters[index], result)
        self._settled.update(results)
        self._passed = 0
        self._reduced = True


class _Hook:
    """Tells a reducer that one of its parameters has a gradient."""

    def __init__(self, reducer: GradientReducer, index: int) -> None:
        self.reducer = reducer
        self._index = index

    def __call__(self, parameter: Tensor) -> None:
        self.reducer.ready(self._index)


def _take_over(parameter: Tensor) -> None:
    """Let the newest of several optimizers with a parameter reduce it while gradients come."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for key, hook in list((hooks or {}).items()):
        if isinstance(hook, _Hook):
            hook.reducer.replaced()
            del hooks[key]  # type: ignore[union-attr]


def _assign(parameter: Tensor, result: Tensor) -> None:
    """Make `result` the gradient; in place where the old one allows it."""
    gradient = parameter.grad
    if (
        gradient is None
        or gradient.layout is not torch.strided
        or result.layout is not torch.strided
    ):
        parameter.grad = result
    elif gradient.data_ptr() != result.data_ptr():
        # A gradient that was not contiguous travelled as a copy.
        gradient.detach().copy_(result)
