"""What the ranks do with an optimizer's gradients in one round."""

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
from ringplug.torch.payloads import PayloadReducer
from ringplug.torch.replicas import ReplicaCheck
from ringplug.torch.roll import Roll, Summary
from ringplug.torch.sparse import SparseExchange
from ringplug.torch.wire import gradient_codec

__all__ = ["GradientExchange", "ReducerOptions"]


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

    @property
    def averages(self) -> bool:
        """Whether reducing what was reduced already changes nothing."""
        return self.op is ReduceOp.AVERAGE


class GradientExchange:
    """Reduces gradients of fixed parameters, one round after another.

    Every round covers all parameters on every rank. Dense gradients go into the buckets of a
    plan as they come; those that a rank lacks are zeros there. With the plan goes the roll, which
    tells all ranks what there was. Then follow, where needed, the rows of sparse gradients and
    the payloads of a user's own compressor.

    A parameter whose gradient was once sparse, on any rank, leaves the plan.

    A rank that has joined takes part in each of these with nothing: plans, and what registers
    itself as a partner of the lane, know how.

    Args:
        named: Names, for errors, and parameters, in the order in which gradients come.
        options: How to reduce.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], options: ReducerOptions) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._options = options
        self.runtime = runtime.current()
        self._size = self.runtime.size_of(options.process_set)
        self._sparse: dict[int, int] = {}
        self._round = 0
        self._joins = self.runtime.joins
        self._make_plan()
        self._rows = SparseExchange(self._plan.lane, named)
        self._replicas = ReplicaCheck(self._plan.lane, named)
        self._forget()

    def _make_plan(self) -> None:
        """Cut the gradients into buckets; those that were found to be sparse are left out."""
        options, count = self._options, len(self._parameters)
        own = user_compressor(options.compression)
        codec = gradient_codec(options.compression, options.predivide)
        dense = [index for index in range(count) if index not in self._sparse]
        inside = [] if own is not None else dense
        self._slots = {index: slot for slot, index in enumerate(inside)}
        # The roll goes with the gradients where their reduction can count.
        apart = own is not None or options.op not in (ReduceOp.AVERAGE, ReduceOp.SUM)
        self._roll = Roll(count, 2 * self._size if options.averages and not apart else 1)

        def plan(specs: list[TensorSpec], op: ReduceOp, codec: Any) -> Plan:
            return self.runtime.plan(
                specs, name="gradients", op=op, compression=codec, process_set=options.process_set
            )

        specs = [self._spec(index) for index in inside]
        self._plan = plan(specs if apart else [*specs, self._roll.spec], options.op, codec)
        self._roll_plan = plan([self._roll.spec], ReduceOp.SUM, "none") if apart else None
        self._payloads = None
        if own is not None:
            parameters = {index: self._parameters[index] for index in dense}
            self._payloads = PayloadReducer(
                own, parameters, lambda specs: plan(specs, options.op, codec)
            )

    def _spec(self, index: int) -> TensorSpec:
        parameter = self._parameters[index]
        return TensorSpec(self._names[index], tuple(parameter.shape), view(parameter).dtype)

    # -- before a round is complete

    def has(self, index: int) -> bool:
        """Whether a gradient was taken for this round."""
        return self._own[index] is not None

    def take(self, index: int) -> None:
        """Take a parameter's gradient for this round; it may be sent at once.

        Raises:
            UsageError: It is sparse, which does not go with the reduction.
        """
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

    def discard(self) -> str:
        """Forget the gradients of this round; an error text if the others have some already.

        In that case no further round is possible.
        """
        if all(gradient is None for gradient in self._own):
            return ""
        self._forget()
        if self._plan.discard():
            return ""
        error = "backward() was interrupted when a part of its gradients had been sent"
        self._plan.lane.abandon(error)
        self._make_plan()
        return error

    # -- the round

    def finish(self) -> dict[int, Tensor]:
        """Complete the round. A collective.

        Returns:
            For each parameter of which some rank has taken a gradient: the result, dense or
            sparse.

        Raises:
            MismatchError: The ranks are at different rounds.
            RecoverableError: A rank is gone or late.
        """
        if self._joins != self.runtime.joins:
            # Ranks that joined early missed rounds, and steps: the models are compared again.
            self._joins = self.runtime.joins
            self._round = 0
        lent = {}
        for index, slot in self._slots.items():
            gradient = self._own[index]
            if gradient is None or gradient.layout is not torch.strided:
                parameter = self._parameters[index]
                lent[index] = torch.zeros(parameter.shape, dtype=parameter.dtype)
                self._plan.ready(slot, view(lent[index]))
        summary = self._call_roll()
        own = self._own
        self._forget()
        if self._round == 0:
            self._replicas.compare()
        self._round += 1
        dense = {
            index: gradient
            for index, gradient in enumerate(own)
            if gradient is not None and gradient.layout is torch.strided
        }
        if self._payloads is not None:
            dense.update(self._payloads.run(dense))
        rows = self._gather_rows(own, summary)
        found = np.flatnonzero(summary.dense + summary.sparse).tolist()
        return {
            index: self._result(index, dense.get(index, lent.get(index)), rows.get(index), summary)
            for index in found
        }

    def warn_of_replicas(self) -> None:
        """Once, on one rank: warn if the parameters of the first round were not the same."""
        self._replicas.warn()

    def _call_roll(self) -> Summary:
        """Wait for the plan's buckets, and learn what the ranks have."""
        present = np.array([gradient is not None for gradient in self._own], bool)
        roll = self._roll.write(np.array(self._dims, np.int64), present, self._round)
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
        rows = self._rows.run(mine, wanted, self._size if self._options.averages else 1)
        if found.keys() - self._sparse.keys():
            self._sparse.update(found)
            self._make_plan()
        return rows

    def _result(
        self, index: int, dense: Tensor | None, rows: Tensor | None, summary: Summary
    ) -> Tensor:
        """Dense if some rank's gradient is, as it would be in one process."""
        if rows is not None:
            if not summary.dense[index]:
                return rows
            return rows.to_dense() if dense is None else rows.to_dense() + dense
        assert dense is not None
        if summary.sparse[index] and not summary.dense[index]:
            return dense.to_sparse(int(summary.sparse_dims[index]))
        return dense

    def _forget(self) -> None:
        self._own: list[Tensor | None] = [None] * len(self._parameters)
        self._dims = [0] * len(self._parameters)
