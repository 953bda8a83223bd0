"""The runtime: everything that one rank holds, from init to shutdown. Layer 6.

`init`, `shutdown` and `current` manage the package's only global, the current runtime. Several
runtimes can live in one process (the tests' ranks are threads), each used explicitly.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ringplug.backend import config as settings_module
from ringplug.backend import log
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.compression import Compressor, get_compressor
from ringplug.backend.config import Config
from ringplug.backend.control import Control, open_control
from ringplug.backend.errors import MismatchError, NotInitializedError, UsageError
from ringplug.backend.fusion import TensorSpec
from ringplug.backend.lane import Lane
from ringplug.backend.named import NamedLane
from ringplug.backend.plan import Plan
from ringplug.backend.stall import name_ranks
from ringplug.backend.transport import open_transport
from ringplug.backend.world import World

__all__ = ["Runtime", "current", "init", "is_initialized", "shutdown"]


class Runtime:
    """One rank's settings, world and lanes.

    Args:
        config: The settings, the same on every rank.
        control: The control plane; the runtime owns it.
    """

    def __init__(self, config: Config, control: Control) -> None:
        self.config = config
        self.world: World = control.world
        self._control = control
        # Setting up is collective and may wait for others; closing must not wait for that.
        self._setup = threading.RLock()
        self._lock = threading.Lock()
        self.unnamed = itertools.count()
        self._lanes: list[Lane] = []
        self._plans: Lane | None = None
        self._closed = False
        self._check_settings()
        # Made here, where all ranks are: a rank may later use it alone for a while.
        self.named = NamedLane(self._subset(None), self.lane("named operations"), config)

    def lane(
        self, name: str, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> Lane:
        """A new lane with a communicator and a transport of its own.

        Collective over `ranks`, which must create their lanes in the same order.

        Args:
            name: What it is for; the same on all its ranks.
            ranks: The ranks that take part, in the order of their rank in the lane; all by
                default.
            timeout: Deadline of waits in its operations, in seconds; that of the settings by
                default.

        Raises:
            MismatchError: The ranks are creating different lanes.
            UsageError: This rank is not among `ranks`.
        """
        config = self.config
        if timeout is not None:
            config = dataclasses.replace(config, timeout=timeout)
        with self._setup:
            if self._closed:
                raise NotInitializedError(f"lane {name}: ringplug was shut down")
            control = self._subset(ranks)
            try:
                shown = control.exchange(name.encode(), self.config.timeout)
                if len(set(shown)) > 1:
                    members = control.world.origin
                    table = "; ".join(
                        f"rank {members[at]}: {text.decode()}" for at, text in enumerate(shown)
                    )
                    raise MismatchError(f"ranks are setting up different things: {table}")
                transport = open_transport(config, control)
            except BaseException:
                control.leave()
                raise
            lane = Lane(transport, name, threaded=control.thread_multiple())
        with self._lock:
            # Closed lanes are let go, with the memory that they map.
            self._lanes = [*(other for other in self._lanes if not other.closed), lane]
        return lane

    def plan(
        self,
        specs: Sequence[TensorSpec],
        *,
        name: str,
        op: ReduceOp = ReduceOp.AVERAGE,
        compression: str | Compressor | None = None,
        lane: Lane | None = None,
    ) -> Plan:
        """A plan over the given tensors; see `Plan`.

        The first plan without a lane of its own creates the lane that such plans share, which
        is collective.
        """
        if lane is None:
            with self._setup:
                if self._plans is None:
                    self._plans = self.lane("plans")
                lane = self._plans
        codec = get_compressor(self.config.compression if compression is None else compression)
        return Plan(lane, specs, name, op, codec, self.config)

    def exchange(self, payload: bytes) -> list[bytes]:
        """All-gather of bytes over the control plane: for set-up, from one thread at a time."""
        with self._setup:
            return self._control.exchange(payload, self.config.timeout)

    def close(self) -> None:
        """Leave the group. Waits for nobody; what is pending fails."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lanes = list(self._lanes)
        self.named.close()
        for lane in lanes:
            lane.close()
        self._control.leave()

    def join(self, timeout: float) -> bool:
        """After `close`, let operations under way end; whether none is any more.

        Args:
            timeout: Seconds to wait at most, for each lane.
        """
        ended = [self.named.join(timeout), *(lane.join(timeout) for lane in self._lanes)]
        return all(ended)

    def abort(self, code: int = 1) -> None:
        """End the whole job at once."""
        self._control.abort(code)

    def finalize(self) -> None:
        """End the communication library, where ringplug began it; the last thing to do."""
        self._control.finalize()

    def departed(self) -> frozenset[int]:
        """Ranks that have left the group, as far as heard."""
        return self._control.departed()

    def _check_settings(self) -> None:
        """Raise, on every rank, where settings differ that must not.

        Raises:
            MismatchError: Names each such setting with every rank's value.
        """
        mine = {
            field.name: getattr(self.config, field.name)
            for field in dataclasses.fields(self.config)
            if field.name not in _OWN_SETTINGS
        }
        shown = [json.loads(part) for part in self.exchange(json.dumps(mine).encode())]
        different = [
            f"{name} is {', '.join(str(other[name]) for other in shown)} on ranks "
            f"0 to {len(shown) - 1}"
            for name in mine
            if len({other[name] for other in shown}) > 1
        ]
        if different:
            raise MismatchError("all ranks need the same settings: " + "; ".join(different))

    def _subset(self, ranks: Sequence[int] | None) -> Control:
        members = range(self.world.size) if ranks is None else ranks
        if any(not 0 <= rank < self.world.size for rank in members):
            raise UsageError(f"ranks {list(members)} are not all in 0..{self.world.size - 1}")
        if len(set(members)) != len(members):
            raise UsageError(f"ranks {list(members)} name a rank twice")
        return self._control.subset(members, self.config.timeout)


_log = log.get_logger(__name__)

_LAST_JOIN = 3.0
_OWN_SETTINGS = ("log_level", "host_id", "expected_size", "start_timeout", "stall_warning")
"""Settings in which ranks may differ."""

_current: Runtime | None = None
_last: Runtime | None = None


def init(comm: Any = None, **settings: Any) -> Runtime:
    """Join the group of ranks; a process that no launcher started is a world of one.

    A second call returns the runtime that is there.

    Args:
        comm: An ``mpi4py.MPI.Comm`` whose processes form the world; it is duplicated. By
            default all processes that were launched.
        **settings: See the table of settings; they override the environment.

    Raises:
        ConfigError: A setting is wrong, or MPI's world is not the one that was launched.
        UnavailableError: The control or data plane asked for cannot be had.
        StalledError: Not every rank called init in time.
        UsageError: This is a child process of a rank.
    """
    global _current, _last  # noqa: PLW0603 - the one global of this package
    if _current is not None:
        if comm is not None or settings:
            raise UsageError("ringplug is initialised already; shutdown() before other settings")
        return _current
    config = Config.load(**settings)
    if config.log_level:
        log.set_level(config.log_level)
    start = settings_module.launched()
    _refuse_child(comm is not None or (start is not None and start.size > 1))
    if _last is not None:
        # A thread of the last one must not be in MPI any more when this one ends it.
        _last.join(_LAST_JOIN)
    control = open_control(config, start, comm)
    world = control.world
    log.set_rank(world.rank if world.size > 1 else None)
    if world.size > 1:
        settings_module.claim_process()
        settings_module.export_ranks(world.rank, world.size, world.local_rank, world.local_size)
    try:
        runtime = Runtime(config, control)
    except BaseException:
        # The others must not wait for this rank, whatever its caller makes of the error.
        control.leave()
        raise
    if _last is None:
        atexit.register(_at_exit)
    _current = _last = runtime
    if world.size > 1:
        _install_hooks()
    return runtime


def shutdown() -> None:
    """Leave the group. Never waits: ranks that still wait for this one get an error."""
    global _current  # noqa: PLW0603 - the one global of this package
    if _current is not None:
        _current.close()
        _current = None


def current() -> Runtime:
    """The runtime between `init` and `shutdown`."""
    if _current is None:
        raise NotInitializedError("ringplug has not been initialized; call init() first")
    return _current


def is_initialized() -> bool:
    """Whether `current` has something to return."""
    return _current is not None


def was_initialized() -> bool:
    """Whether this process has ever been part of a world."""
    return _last is not None


def _refuse_child(launched: bool) -> None:
    if launched and (
        multiprocessing.parent_process() is not None or settings_module.claimed_by_parent()
    ):
        raise UsageError(
            "init() in a child process of a rank (a data loader's worker, for example): it would "
            "join the job as a second copy of that rank. Call init() in the training process only"
        )


_hooks_installed = False


def _install_hooks() -> None:
    """End the job when this rank dies of an exception: the others would wait for ever."""
    global _hooks_installed  # noqa: PLW0603 - hooks of the interpreter, once per process
    if _hooks_installed:
        return
    _hooks_installed = True
    previous, previous_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        _end_job(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        previous_thread(args)
        if args.exc_type is not SystemExit:
            _end_job(1)

    sys.excepthook = hook
    threading.excepthook = thread_hook


def _end_job(code: int) -> None:
    if _last is None:
        return
    # torch.distributed's hook, around ours, collects what is printed and shows it too late.
    held = getattr(sys.stderr, "getvalue", None)
    if held is not None and sys.__stderr__ is not None:
        sys.__stderr__.write(held())
        sys.__stderr__.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    # The launcher forwards what was written; it drops what comes after the abort.
    time.sleep(0.2)
    _last.abort(code)


def _at_exit() -> None:
    shutdown()
    runtime = _last
    if runtime is None:
        return
    # Finalising waits for every rank, busily; asleep until they come costs nothing.
    others = set(range(runtime.world.size)) - {runtime.world.rank}
    warn_at = time.monotonic() + runtime.config.stall_warning
    while not others <= runtime.departed():
        time.sleep(0.005)
        if time.monotonic() > warn_at:
            warn_at = float("inf")
            _log.warning("finished; waiting for %s", name_ranks(others - runtime.departed()))
    # Another thread that still waits hears of that within a second. One that does not end must
    # not find MPI gone: the launcher then ends the job.
    if runtime.join(_LAST_JOIN):
        runtime.finalize()
