"""Reduces an optimizer's gradients over the ranks while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringplug.backend import runtime
from ringplug.backend.adapters import view
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import MismatchError, UsageError
from ringplug.backend.fusion import TensorSpec
from ringplug.backend.plan import Plan
from ringplug.backend.process_set import ProcessSet
from ringplug.torch.compression import CompressionChoice, user_compressor
from ringplug.torch.parameters import in_plan_order
from ringplug.torch.payloads import PayloadReducer
from ringplug.torch.replicas import ReplicaCheck
from ringplug.torch.roll import Roll, Summary
from ringplug.torch.sparse import SparseExchange
from ringplug.torch.tensors import check_devices
from ringplug.torch.wire import gradient_codec

__all__ = ["GradientReducer", "ReducerOptions", "StepOrderError"]


class StepOrderError(UsageError, AssertionError):
    """A backward pass, or `zero_grad`, came where Horovod's contract does not allow it."""


@dataclass(frozen=True)
class ReducerOptions:
    """How gradients are reduced; the arguments of `DistributedOptimizer`.

    Attributes:
        op: AVERAGE, SUM, MIN, MAX or PRODUCT.
        compression: What the wire carries; None is the setting.
        predivide: What gradients are divided by before the sum, and multiplied by after it.
        groups: Parameters to send together.
        sparse_as_dense: Whether sparse gradients travel as dense ones.
        process_set: The ranks; None for all.
        strict: Whether Horovod's limits on passes and `zero_grad` hold.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    compression: CompressionChoice = None
    predivide: float = 1.0
    groups: int | list[list[Tensor]] | None = None
    sparse_as_dense: bool = False
    process_set: ProcessSet | None = None
    strict: bool = False


class GradientReducer:
    """Reduces ``parameter.grad`` of fixed parameters, once per backward pass that completes a step.

    A round covers all parameters on every rank. Those without a gradient here contribute zeros;
    those without one anywhere keep ``grad=None``, so that weight decay and momentum do not move
    them. Gradients are reduced when ``backward()`` returns, so that clipping, scalers and logs
    see the results.

    Averages of averages change nothing, so several backward passes in one step, each reduced,
    add up to the right gradient. Other reductions do not have this property: there a gradient
    that was reduced must not be computed again before the step.

    A parameter whose gradient was once sparse, on any rank, leaves the plan: from then on its
    rows are gathered after the plan's round.

    Args:
        named: Names, for errors, and parameters that require gradients; the same on every rank.
        passes: Backward passes that make up one step; their gradients are added.
        options: How to reduce.
    """

    def __init__(
        self, named: Sequence[tuple[str, Tensor]], passes: int, options: ReducerOptions
    ) -> None:
        ordered = in_plan_order(named, options.groups)
        self._names = [name for name, _ in ordered]
        self._parameters = [parameter for _, parameter in ordered]
        check_devices("DistributedOptimizer", self._parameters)
        self.passes = passes
        self._options = options
        self._averages = options.op is ReduceOp.AVERAGE
        self._sparse: dict[int, int] = {}
        self._replaced = False
        self._connect()
        self._passed = 0
        self._task = -1
        self._reduced = False
        self._settled: set[int] = set()
        self._counts = [0] * len(ordered)
        self._forget()
        self._hooks = []
        for index, parameter in enumerate(self._parameters):
            _take_over(parameter)
            hook = parameter.register_post_accumulate_grad_hook(_Hook(self, index))
            self._hooks.append(hook)

    # -- the plan

    def _connect(self) -> None:
        """Make what belongs to the runtime: at first, and after another `init`."""
        self._runtime = runtime.current()
        self._size = self._runtime.size_of(self._options.process_set)
        self._make_plan()
        named = list(zip(self._names, self._parameters, strict=True))
        self._exchange = SparseExchange(self._plan.lane, named)
        self._replicas = ReplicaCheck(self._plan.lane, named)
        self._round = 0

    def _make_plan(self) -> None:
        """Cut the gradients into buckets; those that were found to be sparse are left out."""
        options, count = self._options, len(self._parameters)
        own = user_compressor(options.compression)
        codec = gradient_codec(options.compression, options.predivide)
        sums = options.op in (ReduceOp.AVERAGE, ReduceOp.SUM)
        inside = [] if own is not None else [n for n in range(count) if n not in self._sparse]
        self._slots = {index: slot for slot, index in enumerate(inside)}
        specs = [self._spec(index) for index in inside]
        # The roll goes with the gradients where their reduction can count.
        alone = own is not None or not sums
        self._roll = Roll(count, 2 * self._size if self._averages and not alone else 1)

        def plan(specs: list[TensorSpec], op: ReduceOp, codec: Any) -> Plan:
            return runtime.current().plan(
                specs,
                name="gradients",
                op=op,
                compression=codec,
                process_set=options.process_set,
            )

        self._plan = plan(specs if alone else [*specs, self._roll.spec], options.op, codec)
        self._roll_plan = plan([self._roll.spec], ReduceOp.SUM, "none") if alone else None
        self._payloads = None
        if own is not None:
            dense = {n: p for n, p in enumerate(self._parameters) if n not in self._sparse}
            self._payloads = PayloadReducer(
                own, dense, lambda specs: plan(specs, options.op, codec)
            )

    def _spec(self, index: int) -> TensorSpec:
        parameter = self._parameters[index]
        return TensorSpec(self._names[index], tuple(parameter.shape), view(parameter).dtype)

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
        self._counts = [0] * len(self._parameters)
        if any(gradient is not None for gradient in self._own):
            self._forget()
            if not self._plan.discard():
                error = "backward() was interrupted when a part of its gradients had been sent"
                self._plan.lane.abandon(error)
                self._make_plan()
                if not loading:
                    raise UsageError(f"{error}; the ranks cannot go on together")

    def synchronize(self) -> None:
        """Reduce what has not been reduced since the last step. A collective, if so.

        Raises:
            MismatchError: The ranks are at different rounds.
            RecoverableError: A rank is gone or late.
        """
        if self._replaced and not self._averages:
            raise UsageError(
                "another DistributedOptimizer, made later, reduces parameters of this one; with "
                f"op={self._options.op.name.title()} they would be reduced twice"
            )
        if not self._reduced:
            self._finish()
        self._counts = [0] * len(self._parameters)

    def warn_of_replicas(self) -> None:
        """Once, on one rank: warn if the parameters of the first round were not the same."""
        self._replicas.warn()

    # -- one round

    def ready(self, index: int) -> None:
        """A gradient has been computed; called while a backward pass goes on."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_of_backward)
        self._count(index)
        self._reduced = False
        if self._passed + 1 >= self.passes:
            if self._own[index] is not None:
                # The same parameter again, in a backward pass inside another one.
                self._finish()
            self._take(index)

    def _count(self, index: int) -> None:
        """One more gradient of a parameter in this step."""
        self._counts[index] += 1
        if index in self._settled and not self._averages:
            raise StepOrderError(
                f"the gradient of {self._names[index]} was reduced already in this step: with "
                f"op={self._options.op.name.title()} call step() or zero_grad() before another "
                "backward(), or set backward_passes_per_step"
            )
        if self._options.strict and self._counts[index] > self.passes:
            raise StepOrderError(
                f"the gradient of {self._names[index]} was computed more than "
                f"backward_passes_per_step={self.passes} times before step(); raise it to add up "
                "gradients over several passes"
            )

    def _end_of_backward(self) -> None:
        self._task = -1
        self._passed += 1
        if self._passed >= self.passes:
            self._finish()

    def _take(self, index: int) -> None:
        """Hand a gradient over to the round."""
        if self._runtime is not runtime.current():
            self._connect()
        gradient = self._parameters[index].grad
        assert gradient is not None
        gradient = gradient.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce()
            self._dims[index] = gradient.sparse_dim()
            self._check_sparse(index)
            if not self._options.sparse_as_dense:
                self._own[index] = gradient
                return
            gradient = gradient.to_dense()
        if index in self._sparse:
            # Sparse before or on another rank: it goes the way of the sparse ones.
            self._own[index] = gradient.to_sparse(self._sparse[index])
            return
        dense = self._own[index] = gradient.contiguous()
        if index in self._slots:
            self._plan.ready(self._slots[index], view(dense))

    def _check_sparse(self, index: int) -> None:
        op = self._options.op
        if not self._options.sparse_as_dense and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UsageError(
                f"the gradient of {self._names[index]} is sparse, and op={op.name.title()}: sparse "
                "gradients can be averaged or summed; pass sparse_as_dense=True"
            )

    def _finish(self) -> None:
        """Complete a round: whatever is not under way goes now."""
        if self._runtime is not runtime.current():
            self._connect()
        for index, parameter in enumerate(self._parameters):
            settled = index in self._settled and not self._averages
            if self._own[index] is None and parameter.grad is not None and not settled:
                self._take(index)
        own, dims = self._own, self._dims
        lent = {}
        for index, slot in self._slots.items():
            gradient = own[index]
            if gradient is None or gradient.layout is not torch.strided:
                parameter = self._parameters[index]
                lent[index] = torch.zeros(parameter.shape, dtype=parameter.dtype)
                self._plan.ready(slot, view(lent[index]))
        present = np.array([gradient is not None for gradient in own], bool)
        summary = self._call_roll(np.array(dims, np.int64), present)
        self._forget()
        if self._round == 0:
            self._replicas.compare()
        self._round += 1
        self._store(own, lent, summary)
        self._settled.update(np.flatnonzero(summary.dense + summary.sparse).tolist())
        self._passed = 0
        self._reduced = True

    def _call_roll(self, dims: Any, present: Any) -> Summary:
        """Wait for the plan's buckets, and learn what the ranks have."""
        roll = self._roll.write(dims, present, self._round)
        if self._roll_plan is None:
            self._plan.ready(len(self._slots), roll)
            self._plan.finish()
        else:
            self._plan.finish()
            self._roll_plan.run([roll], [roll])
        summary = self._roll.read(roll, self._round)
        if not summary.in_step:
            raise MismatchError(
                f"this rank is at round {self._round} of its gradients, others are not: the "
                "ranks made a different number of backward passes between their steps"
            )
        return summary

    def _store(self, own: list[Tensor | None], lent: dict[int, Tensor], summary: Summary) -> None:
        """Put what the round gave into the parameters' gradients."""
        dense = {
            index: gradient
            for index, gradient in enumerate(own)
            if gradient is not None and gradient.layout is torch.strided
        }
        if self._payloads is not None:
            dense.update(self._payloads.run(dense))
        gathered = self._gather_rows(own, summary)
        for index, parameter in enumerate(self._parameters):
            if not summary.dense[index] and not summary.sparse[index]:
                continue
            if not self._averages and index in self._settled:
                # Reduced in an earlier round of this step, and in this one by nobody.
                continue
            result = dense.get(index, lent.get(index))
            rows = gathered.get(index)
            if rows is not None and summary.dense[index]:
                result = rows.to_dense() if result is None else rows.to_dense() + result
            elif rows is not None:
                result = rows
            assert result is not None
            if summary.sparse[index] and not summary.dense[index] and rows is None:
                result = result.to_sparse(int(summary.sparse_dims[index]))
            _assign(parameter, result)

    def _gather_rows(self, own: list[Tensor | None], summary: Summary) -> dict[int, Tensor]:
        """The sums of sparse gradients; a collective if some rank has one."""
        if self._options.sparse_as_dense:
            return {}
        found = {
            index: int(summary.sparse_dims[index])
            for index in np.flatnonzero(summary.sparse).tolist()
        }
        wanted = {
            index: sparse_dim
            for index, sparse_dim in {**self._sparse, **found}.items()
            if summary.sparse[index] or summary.dense[index]
        }
        if not wanted:
            return {}
        mine = {
            index: gradient
            for index in wanted
            if (gradient := own[index]) is not None and gradient.layout is not torch.strided
        }
        rows = self._exchange.run(mine, wanted, self._size if self._averages else 1)
        if found.keys() - self._sparse.keys():
            self._sparse.update(found)
            self._make_plan()
        return rows

    def _forget(self) -> None:
        count = len(self._parameters)
        self._own: list[Tensor | None] = [None] * count
        self._dims = [0] * count


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
