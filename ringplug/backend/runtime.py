"""The runtime: everything that one rank holds, from init to shutdown. Layer 6.

`init`, `shutdown` and `current` manage the package's only global, the current runtime. Several
runtimes can live in one process (the tests' ranks are threads), each used explicitly.
"""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import threading
import time
from collections.abc import Sequence
from typing import Any

from ringplug.backend import config as settings_module
from ringplug.backend import hooks, log
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.compression import Compressor, get_compressor
from ringplug.backend.config import Config
from ringplug.backend.control import Control, open_control
from ringplug.backend.errors import MismatchError, NotInitializedError, UsageError
from ringplug.backend.fusion import TensorSpec
from ringplug.backend.groups import Groups, parse_world
from ringplug.backend.lane import Lane
from ringplug.backend.named import NamedLane
from ringplug.backend.plan import Plan
from ringplug.backend.process_set import ProcessSet, global_process_set
from ringplug.backend.same_settings import check_same_settings
from ringplug.backend.stall import name_ranks
from ringplug.backend.trace import Timeline
from ringplug.backend.trace.operations import Operations
from ringplug.backend.transport import open_transport
from ringplug.backend.world import World

__all__ = ["Runtime", "current", "init", "is_initialized", "shutdown"]


class Runtime:
    """One rank's settings, world and lanes.

    Args:
        config: The settings, the same on every rank.
        control: The control plane; the runtime owns it.

    Attributes:
        timeline: What this rank records of itself.
    """

    def __init__(self, config: Config, control: Control) -> None:
        self.config = config
        self.world: World = control.world
        self._control = control
        # Setting up is collective and may wait for others; closing must not wait for that.
        self._setup = threading.RLock()
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._closed = False
        # How often all ranks have joined. What ranks count together begins anew then, since
        # some did not make all the steps.
        self.joins = 0
        self.timeline = Timeline(self.world.rank, self.world.size)
        check_same_settings(config, self.exchange)
        # Made here, where all ranks are: a rank may later use it alone for a while.
        self.groups = Groups(
            self.world.rank,
            self.world.size,
            self.exchange,
            control.members,
            self._named_lane,
            config.dynamic_process_sets,
        )
        self.timeline.follow_setting(config.timeline, config.timeline_mark_cycles)

    @property
    def named(self) -> NamedLane:
        """Named operations over all ranks."""
        return self.groups.everyone.named

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
        process_set: ProcessSet | int | None = None,
    ) -> Plan:
        """A plan over the given tensors; see `Plan`.

        The first plan without a lane of its own creates the lane that such plans of a process
        set share, which is collective over its members.

        Raises:
            UsageError: This rank is not in the process set.
        """
        if lane is None:
            group = self.groups.find(process_set)
            with self._setup:
                if group.plans is None:
                    group.plans = self.lane(f"plans of process set {group.number}", group.ranks)
                lane = group.plans
        codec = get_compressor(self.config.compression if compression is None else compression)
        return Plan(lane, specs, name, op, codec, self.config, self.timeline)

    def join(self) -> int:
        """Take part in what the other ranks do, with neutral values, until all have joined.

        Covers named operations over all ranks, and plans over all ranks without a lane of
        their own.

        Returns:
            The rank that joined last.
        """
        group = self.groups.everyone
        handle = group.named.join()
        followed = None
        if group.plans is not None and self.world.size > 1:
            followed = 0
            while group.plans.follow("join"):
                group.named.touch()
                followed += 1
        last: int = group.named.wait(handle)
        if followed is not None and group.plans is not None:
            # Announcements of ranks that follow plans may overtake each other.
            counts = group.plans.gather(followed, "join")
            latest = [rank for rank, count in enumerate(counts) if count == min(counts)]
            last = last if last in latest else latest[-1]
        self.joins += 1
        return last

    def size_of(self, process_set: ProcessSet | int | None) -> int:
        """How many ranks are in a process set; the divisor of its averages."""
        return self.groups.size_of(process_set)

    def members_of(self, comm: Any) -> list[int]:
        """The ranks of the processes of an MPI communicator."""
        return self._control.members(comm)

    @property
    def control_name(self) -> str:
        """How ranks talk: ``mpi``, ``threads`` or ``alone``."""
        return self._control.name

    @property
    def thread_multiple(self) -> bool:
        """Whether several threads may use the control plane at the same time."""
        return self._control.thread_multiple()

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
        self.groups.close()
        for lane in lanes:
            lane.close()
        self.timeline.close()
        self._control.leave()

    def ended(self, timeout: float) -> bool:
        """After `close`, let operations under way end; whether none is any more.

        Args:
            timeout: Seconds to wait at most, for each lane.
        """
        named = [group.named.ended(timeout) for group in self.groups.open]
        return all([*named, *(lane.ended(timeout) for lane in self._lanes)])

    def abort(self, code: int = 1) -> None:
        """End the whole job at once."""
        self.timeline.close()
        self._control.abort(code)

    def finalize(self) -> None:
        """End the communication library, where ringplug began it; the last thing to do."""
        self._control.finalize()

    def departed(self) -> frozenset[int]:
        """Ranks that have left the group, as far as heard."""
        return self._control.departed()

    def _named_lane(self, number: int, ranks: Sequence[int]) -> NamedLane:
        control = self._subset(ranks)
        lane = self.lane(f"named operations of process set {number}", ranks)
        own = None if control.world.rank == 0 else self.world.rank
        shown = Operations(self.timeline, own, f"process set {number}" if number else "")
        return NamedLane(control, lane, self.config, shown)

    def _subset(self, ranks: Sequence[int] | None) -> Control:
        members = range(self.world.size) if ranks is None else ranks
        if any(not 0 <= rank < self.world.size for rank in members):
            raise UsageError(f"ranks {list(members)} are not all in 0..{self.world.size - 1}")
        if len(set(members)) != len(members):
            raise UsageError(f"ranks {list(members)} name a rank twice")
        return self._control.subset(members, self.config.timeout)


_log = log.get_logger(__name__)

_LAST_JOIN = 3.0
_current: Runtime | None = None
_last: Runtime | None = None


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None, **settings: Any
) -> Runtime:
    """Join the group of ranks; a process that no launcher started is a world of one.

    A second call returns the runtime that is there.

    Args:
        comm: Who forms the world; all processes that were launched by default. An
            ``mpi4py.MPI.Comm``, which is duplicated; or ranks of MPI's world, in the order of
            their rank here; or several communicators, of which the first is the world and
            the others become process sets.
        process_sets: Process sets to set up; or ``"dynamic"``, which lets them come and go by
            `add_process_set` and `remove_process_set`.
        **settings: See the table of settings; they override the environment.

    Raises:
        ConfigError: A setting is wrong, or MPI's world is not the one that was launched.
        UnavailableError: The control or data plane asked for cannot be had.
        StalledError: Not every rank called init in time.
        UsageError: This is a child process of a rank.
    """
    global _current, _last  # noqa: PLW0603 - the one global of this package
    given, (comm, sets) = comm, parse_world(comm, process_sets)
    if _current is not None:
        fits = process_sets != "dynamic" or _current.config.dynamic_process_sets
        known = all(one.process_set_id is not None for one in sets)
        if settings or given is not None or not fits or not known:
            raise UsageError("ringplug is initialised already; shutdown() before other settings")
        return _current
    if process_sets == "dynamic":
        settings["dynamic_process_sets"] = True
    config = Config.load(**settings)
    if config.log_level:
        log.set_level(config.log_level)
    start = settings_module.launched()
    _refuse_child(comm is not None or (start is not None and start.size > 1))
    if _last is not None:
        # A thread of the last one must not be in MPI any more when this one ends it.
        _last.ended(_LAST_JOIN)
    control = open_control(config, start, comm)
    world = control.world
    log.set_rank(world.rank if world.size > 1 else None)
    if world.size > 1:
        settings_module.claim_process()
        settings_module.export_ranks(world.rank, world.size, world.local_rank, world.local_size)
    try:
        runtime = Runtime(config, control)
        runtime.groups.establish(sets)
        runtime.groups.bind(global_process_set, 0)
    except BaseException:
        # The others must not wait for this rank, whatever its caller makes of the error.
        control.leave()
        raise
    if _last is None:
        atexit.register(_at_exit)
    _current = _last = runtime
    if world.size > 1:
        hooks.install(_abort)
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


def _abort(code: int) -> None:
    if _last is not None:
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
    if runtime.ended(_LAST_JOIN):
        runtime.finalize()
