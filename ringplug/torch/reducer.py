"""Averages an optimizer's gradients over the ranks while the backward pass goes on."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringplug.backend import runtime
from ringplug.backend.adapters import view
from ringplug.backend.buffers import Array, ReduceOp
from ringplug.backend.errors import MismatchError, UsageError
from ringplug.backend.fusion import TensorSpec, digest
from ringplug.backend.transport import Transport
from ringplug.torch.tensors import check_devices

__all__ = ["GradientReducer"]


class GradientReducer:
    """Reduces ``parameter.grad`` of fixed parameters, once per backward pass that completes a step.

    A round covers all parameters on every rank. Those without a gradient here contribute zeros;
    those without one anywhere keep ``grad=None``, so that weight decay and momentum do not move
    them. Gradients are reduced when ``backward()`` returns, so that clipping, scalers and logs
    see the averages.

    Averages of averages change nothing, so several backward passes in one step, each reduced,
    add up to the right gradient. Sums do not have this property: there a second pass is an error.

    Args:
        named: Names, for errors, and parameters that require gradients; the same on every rank.
        op: AVERAGE or SUM.
        compression: What the wire carries; None is the setting.
        passes: Backward passes that make up one step; their gradients are added.
        sparse_as_dense: Whether sparse gradients are made dense.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        op: ReduceOp,
        compression: str | None,
        passes: int,
        sparse_as_dense: bool,
    ) -> None:
        # Gradients come roughly from the last layer to the first.
        self._names = [name for name, _ in reversed(named)]
        self._parameters = [parameter for _, parameter in reversed(named)]
        check_devices("DistributedOptimizer", self._parameters)
        self.passes = passes
        self._op = op
        self._sparse_as_dense = sparse_as_dense
        specs = [
            TensorSpec(name, tuple(parameter.shape), view(parameter).dtype)
            for name, parameter in zip(self._names, self._parameters, strict=True)
        ]
        # Last comes who has a gradient, and the number of the round.
        flags = TensorSpec("flags", (len(specs) + 1,), np.dtype(np.int64))
        self._size = runtime.current().world.size
        self._plan = runtime.current().plan(
            [*specs, flags], name="gradients", op=op, compression=compression
        )
        self._differing: str | None = None
        self._round = 0
        self._passed = 0
        self._task = -1
        self._reduced = False
        self._own: list[Tensor | None] = [None] * len(specs)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]

    def remove(self) -> None:
        """Reduce nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """Gradients begin anew: after zero_grad or a loaded state.

        Raises:
            UsageError: A backward pass was interrupted by an error after the other ranks had
                received a part of its gradients, which cannot be taken back.
        """
        if any(gradient is not None for gradient in self._own):
            if not self._plan.discard():
                error = "backward() was interrupted when a part of its gradients had been sent"
                self._plan.lane.abandon(error)
                raise UsageError(f"{error}; the ranks cannot go on together")
            self._own = [None] * len(self._parameters)
        self._passed = 0
        self._reduced = False

    def synchronize(self) -> None:
        """Reduce what has not been reduced since the last step. A collective, if so.

        Raises:
            MismatchError: The ranks are at different rounds.
            RecoverableError: A rank is gone or late.
        """
        if not self._reduced:
            self._finish()

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        self.reset()

    def warn_of_replicas(self) -> None:
        """Once, on rank 0: warn if the parameters of the first round were not the same."""
        name, self._differing = self._differing, None
        if name is not None and runtime.current().world.rank == 0:
            warnings.warn(
                f"the ranks train different models: the values of {name} are not the same on all "
                "ranks; call ringplug.torch.broadcast_parameters(model.state_dict(), root_rank=0) "
                "before the first step",
                UserWarning,
                stacklevel=4,
            )

    def _compare_values(self) -> None:
        """A collective, after the first round, when all ranks have come and none has stepped."""
        own = np.array([_checksum(parameter) for parameter in self._parameters], np.int64)
        both = np.concatenate([own, -own])

        what = f"comparison of {own.size} parameters"

        def job(transport: Transport) -> None:
            transport.agree(digest(what), what)
            transport.allreduce(both, ReduceOp.MAX)

        self._plan.lane.run(job, what)
        largest, smallest = both[: own.size], -both[own.size :]
        different = np.flatnonzero(largest != smallest)
        if different.size:
            # The names are in reverse: the last is the model's first.
            self._differing = self._names[int(different[-1])]

    def _hook(self, index: int) -> Any:
        def ready(parameter: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._end_of_backward)
            if self._passed + 1 >= self.passes:
                if self._own[index] is not None:
                    # The same parameter again, in a backward pass inside another one.
                    self._finish()
                self._refuse_second_sum()
                self._ready(index, parameter)

        return ready

    def _end_of_backward(self) -> None:
        self._task = -1
        self._passed += 1
        if self._passed >= self.passes:
            self._finish()

    def _refuse_second_sum(self) -> None:
        if self._reduced and self._op is not ReduceOp.AVERAGE:
            raise UsageError(
                "gradients were summed over the ranks already in this step: call step() or "
                "zero_grad() before another backward(), or set backward_passes_per_step"
            )

    def _ready(self, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            if not self._sparse_as_dense:
                raise UsageError(
                    f"the gradient of {self._names[index]} is sparse; pass "
                    "sparse_as_dense=True to DistributedOptimizer"
                )
            gradient = parameter.grad = gradient.to_dense()
        dense = gradient.detach().contiguous()
        self._own[index] = dense
        self._plan.ready(index, view(dense))

    def _finish(self) -> None:
        """Complete a round: whatever is not under way goes now."""
        size = len(self._parameters)
        # An average of integers is truncated: this way it counts the ranks all the same.
        share = self._size if self._op is ReduceOp.AVERAGE else 1
        flags = np.zeros(size + 1, np.int64)
        borrowed: dict[int, tuple[Tensor, Array]] = {}
        for index, parameter in enumerate(self._parameters):
            if self._own[index] is None and parameter.grad is not None:
                self._ready(index, parameter)
            if self._own[index] is None:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                borrowed[index] = (zeros, view(zeros))
                self._plan.ready(index, borrowed[index][1])
            else:
                flags[index] = share
        flags[size] = self._round * share
        own, self._own = self._own, [None] * size
        self._plan.ready(size, flags)
        self._plan.finish()
        self._check_round(int(flags[size]))
        if self._round == 0:
            self._compare_values()
        self._round += 1
        for index, (zeros, _) in borrowed.items():
            if flags[index] > 0:
                self._parameters[index].grad = zeros
        for parameter, dense in zip(self._parameters, own, strict=True):
            gradient = parameter.grad
            # A gradient that was not contiguous travelled as a copy.
            if (
                dense is not None
                and gradient is not None
                and dense.data_ptr() != gradient.data_ptr()
            ):
                gradient.detach().copy_(dense)
        self._passed = 0
        self._reduced = True

    def _check_round(self, total: int) -> None:
        if total != self._round * self._size:
            raise MismatchError(
                f"this rank is at round {self._round} of its gradients, others are not: the "
                "ranks made a different number of backward passes between their steps"
            )


def _checksum(parameter: Tensor) -> int:
    values = np.ascontiguousarray(view(parameter.detach()))
    return zlib.crc32(values.reshape(-1).view(np.uint8).data)
