"""Messages between two ranks of a group: send, receive, receive from anyone.

A sender announces each message (tag, dtype, shape, number); small ones travel in the
announcement. The receiver matches announcements with its requests by source and tag, and only
then receives the body, so that a receive into the wrong tensor is an error that shows both
sides. One job on a lane of its own carries on everything that is under way and ends when
nothing is, so that messages progress while their owners do something else, and nothing polls
when there are none.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ringplug.backend.buffers import Buffer
from ringplug.backend.config import Config
from ringplug.backend.control import Control, Pending
from ringplug.backend.errors import MismatchError, NotInitializedError
from ringplug.backend.handle import Handle
from ringplug.backend.lane import Lane
from ringplug.backend.stall import Wait
from ringplug.backend.transport import Transport
from ringplug.torch.tensors import Flat, describe

__all__ = ["Mailbox"]

_HEAD = struct.Struct("<qqqB")
_EAGER_BYTES = 4096
_BODY_TAGS = 1 << 14
"""Tags for bodies, used in turn; far more than there are bodies under way."""


@dataclass(eq=False)
class _Letter:
    """A send or a receive that was asked for.

    Attributes:
        peer: The other rank; None receives from anyone.
    """

    handle: Handle
    tensor: Flat
    shown: str
    peer: int | None
    tag: int
    sending: bool
    wait: Wait
    inference: bool
    body: Pending | None = None
    memory: Buffer | None = None


@dataclass(eq=False)
class _Announcement:
    source: int
    tag: int
    number: int
    nbytes: int
    shown: str
    body: Buffer | None = field(repr=False)


class Mailbox:
    """The point-to-point side of one group.

    Args:
        lane: Used by nothing else, so that its control channel is free for messages.
        config: The deadline of every message.
    """

    def __init__(self, lane: Lane, config: Config) -> None:
        self._lane = lane
        self._config = config
        self._lock = threading.Lock()
        self._new: deque[_Letter] = deque()
        self._working = False
        self._announced: list[_Announcement] = []
        self._sent = 0

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """Start sending; the tensor may be changed once the handle is done."""
        return self._submit(tensor, to, tag, sending=True)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Handle:
        """Start receiving into `tensor`; the handle's result is the sender's rank.

        Args:
            tensor: Same dtype and shape as the sender's.
            source: Rank in this group; None for anyone.
            tag: As the sender's.
        """
        return self._submit(tensor, source, tag, sending=False)

    def _submit(self, tensor: Tensor, peer: int | None, tag: int, sending: bool) -> Handle:
        verb = "send to" if sending else "receive from"
        name = f"{verb} {'anyone' if peer is None else f'rank {peer}'} (tag {tag})"
        control = self._lane.transport.control
        others = {r for r in range(control.world.size) if r != control.world.rank}
        absent = others if peer is None else {peer}

        def departed() -> frozenset[int]:
            # A message from anyone is lost only when everyone is.
            gone = control.departed()
            return gone if absent <= gone else frozenset()

        wait = Wait(
            lambda: sorted(absent),
            self._config.timeout,
            self._config.stall_warning,
            departed,
            spins=0,
        )
        letter = _Letter(
            handle=Handle(name),
            tensor=Flat(tensor),
            shown=describe(tensor),
            peer=peer,
            tag=tag,
            sending=sending,
            wait=wait,
            inference=torch.is_inference_mode_enabled(),
        )
        with self._lock:
            self._new.append(letter)
            start = not self._working
            self._working = True
        if start:
            job = self._lane.submit(self._work, "messages")
            job.then(lambda: self._ended(job.exception()))
        return letter.handle

    def _ended(self, error: BaseException | None) -> None:
        """Where the lane is closed or broken, fail what came since."""
        if error is None:
            return
        with self._lock:
            left = list(self._new)
            self._new.clear()
            self._working = False
        for letter in left:
            letter.handle.fail(error)

    def _work(self, transport: Transport) -> None:
        """Carry on all letters until none is left; on the lane's worker thread."""
        control = transport.control
        active: list[_Letter] = []
        try:
            while True:
                if self._lane.closed:
                    raise NotInitializedError("the process group was destroyed")
                with self._lock:
                    fresh = list(self._new)
                    self._new.clear()
                    if not fresh and not active:
                        self._working = False
                        return
                active += fresh
                for letter in fresh:
                    if letter.sending:
                        self._begin_send(control, letter)
                self._listen(control)
                before = len(active)
                active = [letter for letter in active if not self._step(control, letter)]
                if len(active) == before and not fresh:
                    if transport.size == 1:
                        # Only this process can send what is awaited: come back when it does.
                        with self._lock:
                            self._new.extendleft(reversed(active))
                            self._working = False
                        return
                    self._pause(active)
        except BaseException as error:
            # Whatever it is, nobody may be left waiting for a letter.
            for letter in active:
                if not letter.handle.done():
                    letter.handle.fail(error)
            raise

    def _begin_send(self, control: Control, letter: _Letter) -> None:
        assert letter.peer is not None
        memory = letter.tensor.bytes
        self._sent += 1
        if letter.peer == control.world.rank:
            self._announced.append(
                _Announcement(
                    letter.peer, letter.tag, self._sent, memory.size, letter.shown, memory.copy()
                )
            )
            return
        eager = memory.size <= _EAGER_BYTES
        shown = letter.shown.encode()
        head = _HEAD.pack(letter.tag, self._sent, memory.size, eager) + shown + b"\0"
        control.post(letter.peer, head + (memory.tobytes() if eager else b""))
        if not eager:
            letter.memory = memory
            letter.body = control.isend(memory, letter.peer, 1 + self._sent % _BODY_TAGS)

    def _listen(self, control: Control) -> None:
        while (message := control.poll()) is not None:
            source, payload = message
            tag, number, nbytes, eager = _HEAD.unpack_from(payload)
            shown, _, body = payload[_HEAD.size :].partition(b"\0")
            content = np.frombuffer(body, np.uint8) if eager else None
            self._announced.append(
                _Announcement(source, tag, number, nbytes, shown.decode(), content)
            )

    def _step(self, control: Control, letter: _Letter) -> bool:
        """Carry one letter on; whether it has ended."""
        if letter.sending:
            if letter.body is not None and not letter.body.done():
                return False
            letter.handle.finish(letter.peer)
            return True
        if letter.body is None and letter.memory is None:
            announcement = self._match(letter)
            if announcement is None:
                return False
            self._begin_receive(control, letter, announcement)
        if letter.body is not None and not letter.body.done():
            return False
        self._end_receive(letter)
        return True

    def _match(self, letter: _Letter) -> _Announcement | None:
        for index, one in enumerate(self._announced):
            if one.tag == letter.tag and letter.peer in (None, one.source):
                return self._announced.pop(index)
        return None

    def _begin_receive(self, control: Control, letter: _Letter, one: _Announcement) -> None:
        letter.peer = one.source
        fits = one.shown == letter.shown
        letter.memory = letter.tensor.bytes if fits else np.empty(one.nbytes, np.uint8)
        letter.shown = f"{letter.shown} for {one.shown}" if not fits else ""
        if one.body is None:
            # Received even where it does not fit, so that the sender is not left waiting.
            letter.body = control.irecv(letter.memory, one.source, 1 + one.number % _BODY_TAGS)
        elif fits:
            np.copyto(letter.memory, one.body)

    def _end_receive(self, letter: _Letter) -> None:
        if letter.shown:
            got, _, sent = letter.shown.partition(" for ")
            letter.handle.fail(
                MismatchError(f"{letter.handle.name}: rank {letter.peer} sent {sent}, got {got}")
            )
            return
        with torch.inference_mode(letter.inference), torch.no_grad():
            letter.tensor.store()
        letter.handle.finish(letter.peer)

    def _pause(self, active: list[_Letter]) -> None:
        """Sleep a little; raise when a letter's peer is gone or its deadline has passed."""
        nap: Callable[[float], object] = time.sleep
        for letter in active:
            letter.wait.pause(nap)
            nap = _do_not_sleep


def _do_not_sleep(_: float) -> None:
    """One nap per round is enough."""
