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
import torch.distributed as dist
from torch import Tensor

from ringplug.backend.config import Config
from ringplug.backend.errors import MismatchError, RingplugError, UsageError
from ringplug.backend.fusion import digest
from ringplug.backend.handle import Handle
from ringplug.backend.lane import Lane
from ringplug.backend.transport import Transport
from ringplug.torch import collectives
from ringplug.torch.collectives import Task
from ringplug.torch.mailbox import Mailbox
from ringplug.torch.reductions import reduction
from ringplug.torch.tensors import check_devices
from ringplug.torch.work import RingWork

__all__ = ["RingProcessGroup"]


class RingProcessGroup(dist.ProcessGroup):
    """One group of ranks; made by ``torch.distributed``, not by hand.

    Every collective is agreed before it moves data: ranks that pass different operations,
    dtypes, shapes, roots or reductions all get a `MismatchError` that shows both sides, and
    the group stays usable. A rank whose own arguments are wrong gets a `UsageError`, the
    others a `MismatchError` with its text.

    Args:
        lane: Carries the collectives; the group owns it.
        messages: Carries sends and receives; the group owns it.
        config: The deadline of messages.
        name: torch's name of the group.

    Attributes:
        overlap: False runs also asynchronous operations at once, on the calling thread, which
            is faster where the cores are all busy.
    """

    def __init__(self, lane: Lane, messages: Lane, config: Config, name: str) -> None:
        super().__init__(lane.transport.rank, lane.transport.size)
        self._lane = lane
        self._messages = messages
        self._mailbox = Mailbox(messages, config)
        self._name = name
        self._description = "undefined"
        self._sequence = 0
        self._closed = False
        self.overlap = True

    # -- what torch asks about a group

    def rank(self) -> int:
        """This process within the group."""
        return self._lane.transport.rank

    def size(self) -> int:
        """Number of processes in the group."""
        return self._lane.transport.size

    getRank = rank
    getSize = size

    def name(self) -> str:
        """The backend's name."""
        return "ring"

    getBackendName = name
    _get_backend_name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._description = description

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: all ranks count from zero."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._lane.run(lambda _: None, "wait for pending works")

    @property
    def lane(self) -> Lane:
        """The backend's lane, for what goes around torch's collectives."""
        return self._lane

    # -- life

    def shutdown(self) -> None:
        """Leave the group. Waits for nobody."""
        if not self._closed:
            self._closed = True
            self._lane.close()
            self._messages.close()

    abort = shutdown

    # -- running

    def _run(
        self,
        op: str,
        build: Callable[[], Task],
        tensors: Iterable[Tensor],
        result: list[Any],
        opts: Any,
    ) -> RingWork:
        """Run one collective: at once if the caller waits for it anyway, else on the lane's thread.

        Args:
            op: Its name.
            build: Checks the arguments and says what to do.
            tensors: All that take part.
            result: What the work's future holds.
            opts: torch's options; `asyncOp` says whether the caller goes on meanwhile.
        """

        def checked() -> Task:
            check_devices(op, list(tensors))
            return build()

        return RingWork(self.start(op, checked, getattr(opts, "asyncOp", True)), result)

    def start(self, op: str, build: Callable[[], Task], later: bool = False) -> Handle:
        """Agree with the other ranks on a task and run it, in order with the collectives.

        Args:
            op: Its name.
            build: Checks the arguments and says what to do; what it raises, the operation
                raises on this rank, and the others get a MismatchError.
            later: Let the lane's thread do it.

        Returns:
            A handle; ended unless `later`.

        Raises:
            RingplugError: Unless `later`: what went wrong.
        """
        try:
            task = build()
        except RingplugError as error:
            task = _refused(error)
        inference = torch.is_inference_mode_enabled()

        def job(transport: Transport) -> None:
            # Counted here, in the order of execution, which is the same on all ranks even when
            # callbacks of earlier operations start further ones.
            self._sequence += 1
            what = f"{op} {task.what} (operation {self._sequence} of group {self._name})"
            with torch.inference_mode(inference), torch.no_grad():
                _agree(transport, what, task)
                task.job(transport)

        name = f"{op} {task.what[:160]}"
        if later and self.overlap:
            return self._lane.submit(job, name)
        handle = Handle(name)
        try:
            self._lane.run(job, name)
        except RingplugError as error:
            if not later:
                raise
            handle.fail(error)
        else:
            handle.finish()
        return handle

    # -- collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> RingWork:
        """Reduce in place; dense or sparse COO."""
        opts = dist.AllreduceOptions() if opts is None else opts
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._run(
            "allreduce",
            lambda: collectives.allreduce(tensors, reduction(opts.reduceOp), self.size()),
            tensors,
            tensors,
            opts,
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> RingWork:
        """Copy from the root's tensor, in place."""
        opts = dist.BroadcastOptions() if opts is None else opts
        tensor = _only(tensors, "broadcast")
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
        return self._alltoall(
            outputs, inputs, lambda: ([t.numel() for t in inputs], [t.numel() for t in outputs]), opts
        )

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


class _Refusal(Task):
    """A collective that this rank cannot take part in."""

    __slots__ = ()


def _refused(error: RingplugError) -> Task:
    def job(_: Transport) -> None:
        raise error

    return _Refusal(f"refused by this rank: {error}", job)


def _agree(transport: Transport, what: str, task: Task) -> None:
    """Agree with the others on what comes; a rank that cannot says so there.

    Its own, more exact error then follows from the job.
    """
    try:
        transport.agree(digest(what), what)
    except MismatchError:
        if not isinstance(task, _Refusal):
            raise
