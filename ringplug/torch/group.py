"""A process group without collectives: what it is called, how long it lives, how it runs things.

`RingProcessGroup` adds the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ringplug.backend.config import Config
from ringplug.backend.errors import MismatchError, RingplugError
from ringplug.backend.fusion import digest
from ringplug.backend.handle import Handle
from ringplug.backend.lane import Lane
from ringplug.backend.transport import Transport
from ringplug.torch.collectives import Task
from ringplug.torch.mailbox import Mailbox
from ringplug.torch.tensors import check_devices
from ringplug.torch.work import RingWork

__all__ = ["LaneGroup"]

dist: Any = torch.distributed


class LaneGroup(dist.ProcessGroup):
    """One group of ranks on a lane of the backend.

    Args:
        lane: Carries the collectives; the group owns it.
        messages: Carries sends and receives; the group owns it.
        config: The deadline of messages.
        name: torch's name of the group.
        members: For each rank of the group, its rank in ringplug's world.

    Attributes:
        members: As given.
        overlap: False runs also asynchronous operations at once, on the calling thread, which
            is faster where the cores are all busy.
        timeout: Deadline of every operation, in seconds.
    """

    def __init__(
        self, lane: Lane, messages: Lane, config: Config, name: str, members: Sequence[int]
    ) -> None:
        super().__init__(lane.transport.rank, lane.transport.size)
        self._lane = lane
        self._messages = messages
        self._mailbox = Mailbox(messages, config)
        self._name = name
        self.members = tuple(members)
        self._description = "undefined"
        self._sequence = 0
        self._closed = False
        self.overlap = True
        self.timeout = config.timeout

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

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
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
        shown = f"{op} {task.what}".rstrip()

        def job(transport: Transport) -> None:
            # Counted here, in the order of execution, which is the same on all ranks even when
            # callbacks of earlier operations start further ones.
            self._sequence += 1
            what = f"{shown} (operation {self._sequence} of group {self._name})"
            with torch.inference_mode(inference), torch.no_grad():
                _agree(transport, what, task)
                task.job(transport)

        name = f"{op} {task.what[:160]}".rstrip()
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
