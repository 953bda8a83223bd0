"""The process group ``ring`` of torch.distributed, on a lane of the backend.

torch calls the methods here from Python and, through virtual methods, from C++ (DDP's reducer,
functional collectives). torch renames such methods now and then, so each has all the names
that versions 2.6 and later call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ringplug.backend.errors import UsageError
from ringplug.backend.transport import Transport
from ringplug.torch import collectives
from ringplug.torch.collectives import Task
from ringplug.torch.compilation import untraced_methods
from ringplug.torch.group import LaneGroup
from ringplug.torch.reductions import reduction
from ringplug.torch.tensors import check_devices
from ringplug.torch.work import RingWork

__all__ = ["RingProcessGroup"]

# torch's stubs describe overloads that are pybind11's, not a protocol to be implemented.
dist: Any = torch.distributed


@untraced_methods
class RingProcessGroup(LaneGroup):
    """One group of ranks; made by ``torch.distributed``, not by hand.

    Every collective is agreed before it moves data: ranks that pass different operations,
    dtypes, shapes, roots or reductions all get a `MismatchError` that shows both sides, and
    the group stays usable. A rank whose own arguments are wrong gets a `UsageError`, the
    others a `MismatchError` with its text.
    """

    # -- collectives

    def allreduce(self, tensors: Sequence[Tensor] | Any, opts: Any = None) -> RingWork:
        """Reduce in place; dense or sparse COO. `opts` may be just the reduction."""
        if opts is None or not hasattr(opts, "reduceOp"):
            how, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = dist.ReduceOp.SUM if how is None else how
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._run(
            "allreduce",
            lambda: collectives.allreduce(tensors, reduction(opts.reduceOp), self.size()),
            tensors,
            tensors,
            opts,
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor] | Any, opts: Any = None) -> RingWork:
        """Copy from the root's tensor, in place. `opts` may be just the root."""
        if opts is None or isinstance(opts, int):
            root, opts = opts or 0, dist.BroadcastOptions()
            opts.rootRank = root
        tensor = _only([tensors] if isinstance(tensors, Tensor) else tensors, "broadcast")
        root = int(opts.rootRank)
        return self._run(
            "broadcast", lambda: collectives.broadcast(tensor, root), [tensor], [tensor], opts
        )

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> RingWork:
        """One output per rank; they may differ in size."""
        own, into = _only(inputs, "allgather"), list(_only(outputs, "allgather"))
        return self._allgather(into, own, opts, [into])

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> RingWork:
        """One output, the ranks' inputs one after the other."""
        return self._allgather([output], own, opts, [output])

    _allgather_base = all_gather_single
    allgather_into_tensor = all_gather_single

    def _allgather(
        self, outputs: list[Tensor], own: Tensor, opts: Any, result: list[Any]
    ) -> RingWork:
        return self._run(
            "allgather",
            lambda: collectives.allgather(outputs, own, self.rank(), self.size()),
            [*outputs, own],
            result,
            opts,
        )

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> RingWork:
        """`all_gather_single` of several tensors."""
        return self._several(
            "allgather",
            [
                lambda o=output, i=own: collectives.allgather([o], i, self.rank(), self.size())  # type: ignore[misc]
                for output, own in zip(outputs, inputs, strict=True)
            ],
            [*outputs, *inputs],
            list(outputs),
            opts,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> RingWork:
        """Several tensors; ``outputs[r][i]`` becomes rank r's ``inputs[i]``."""
        columns = [[row[i] for row in outputs] for i in range(len(inputs))]
        return self._several(
            "allgather",
            [
                lambda o=column, i=own: collectives.allgather(o, i, self.rank(), self.size())  # type: ignore[misc]
                for column, own in zip(columns, inputs, strict=True)
            ],
            [*chain.from_iterable(outputs), *inputs],
            [list(row) for row in outputs],
            opts,
        )

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> RingWork:
        """One input per rank; they may differ in size."""
        output, parts = _only(outputs, "reduce_scatter"), list(_only(inputs, "reduce_scatter"))
        return self._reduce_scatter(output, parts, opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> RingWork:
        """One input, cut into equal parts."""
        return self._reduce_scatter(output, [source], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor = reduce_scatter_single

    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], opts: Any) -> RingWork:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._run(
            "reduce_scatter",
            lambda: collectives.reduce_scatter(
                output, inputs, reduction(opts.reduceOp), self.rank(), self.size()
            ),
            [output, *inputs],
            [output],
            opts,
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> RingWork:
        """`reduce_scatter_single` of several tensors."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._several(
            "reduce_scatter",
            [
                lambda o=output, i=source: collectives.reduce_scatter(  # type: ignore[misc]
                    o, [i], reduction(opts.reduceOp), self.rank(), self.size()
                )
                for output, source in zip(outputs, inputs, strict=True)
            ],
            [*outputs, *inputs],
            list(outputs),
            opts,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> RingWork:
        """Reduce to the root's tensor; the others' are unchanged."""
        opts = dist.ReduceOptions() if opts is None else opts
        tensor, root = _only(tensors, "reduce"), int(opts.rootRank)
        return self._run(
            "reduce",
            lambda: collectives.reduce(tensor, root, reduction(opts.reduceOp)),
            [tensor],
            [tensor],
            opts,
        )

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> RingWork:
        """The root's outputs become the ranks' inputs."""
        opts = dist.GatherOptions() if opts is None else opts
        own, root = _only(inputs, "gather"), int(opts.rootRank)
        into = list(outputs[0]) if outputs else []
        return self._run(
            "gather",
            lambda: collectives.gather(into, own, root, self.rank(), self.size()),
            [*into, own],
            [into],
            opts,
        )

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> RingWork:
        """The root's inputs go to the ranks' outputs."""
        opts = dist.ScatterOptions() if opts is None else opts
        output, root = _only(outputs, "scatter"), int(opts.rootRank)
        parts = list(inputs[0]) if inputs else []
        return self._run(
            "scatter",
            lambda: collectives.scatter(output, parts, root, self.rank(), self.size()),
            [output, *parts],
            [output],
            opts,
        )

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> RingWork:
        """``inputs[r]`` goes to rank r, ``outputs[r]`` came from rank r; sizes may differ."""
        outputs, inputs = list(outputs), list(inputs)

        def lengths() -> tuple[list[int], list[int]]:
            return [one.numel() for one in inputs], [one.numel() for one in outputs]

        return self._alltoall(outputs, inputs, lengths, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> RingWork:
        """Rows of one tensor, in equal parts or as the splits say."""
        return self._alltoall(
            [output],
            [source],
            lambda: (
                _blocks(source, input_splits, self.size()),
                _blocks(output, output_splits, self.size()),
            ),
            opts,
        )

    alltoall_base = all_to_all_single

    def _alltoall(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        lengths: Callable[[], tuple[list[int], list[int]]],
        opts: Any,
    ) -> RingWork:
        return self._run(
            "alltoall",
            lambda: collectives.alltoall(outputs, inputs, *lengths()),
            [*outputs, *inputs],
            outputs,
            opts,
        )

    def barrier(self, opts: Any = None) -> RingWork:
        """Wait for all ranks of the group."""
        return self._run("barrier", lambda: Task("", lambda _: None), [], [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names the ranks that did not come, as all errors here do."""
        self.barrier().wait(timeout)

    def _several(
        self,
        op: str,
        builds: Sequence[Callable[[], Task]],
        tensors: Iterable[Tensor],
        result: list[Any],
        opts: Any,
    ) -> RingWork:
        """Several tensors in one operation."""

        def build() -> Task:
            tasks = [one() for one in builds]

            def job(transport: Transport) -> None:
                for task in tasks:
                    task.job(transport)

            return Task("; ".join(task.what for task in tasks), job)

        return self._run(op, build, tensors, result, opts)

    # -- coalescing: operations are queued in order anyway

    def _start_coalescing(self, device: Any = None) -> None:
        """Operations until `_end_coalescing` run as they come."""

    def _end_coalescing(self, device: Any = None) -> RingWork:
        """A work that ends when all operations before it have."""
        return RingWork(self._lane.submit(lambda _: None, "end of coalescing"), [])

    # -- messages

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int = 0) -> RingWork:
        """Send one tensor to a rank of this group."""
        tensor = _only(tensors, "send")
        check_devices("send", [tensor])
        return RingWork(self._mailbox.send(tensor, int(destination), int(tag)), [tensor])

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> RingWork:
        """Receive one tensor of the same dtype and shape from a rank of this group."""
        tensor = _only(tensors, "recv")
        check_devices("recv", [tensor])
        return RingWork(self._mailbox.receive(tensor, int(source), int(tag)), [tensor])

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> RingWork:
        """Receive from whichever rank sends first; `source_rank` of the work says which."""
        tensor = _only(tensors, "recv")
        check_devices("recv", [tensor])
        return RingWork(self._mailbox.receive(tensor, None, int(tag)), [tensor])


def _only(items: Sequence[Any], op: str) -> Any:
    if len(items) != 1:
        raise UsageError(f"{op}: one tensor (or list) per process, got {len(items)}")
    return items[0]


def _blocks(tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Elements of each block of rows."""
    rows = tensor.shape[0] if tensor.ndim else 1
    width = tensor.numel() // rows if rows else 0
    if not splits:
        if rows % size:
            raise UsageError(f"{rows} rows cannot be cut into {size} equal parts; pass splits")
        return [rows // size * width] * size
    if len(splits) != size or sum(splits) != rows:
        raise UsageError(f"splits {list(splits)} do not cut {rows} rows into {size} parts")
    return [int(count) * width for count in splits]
