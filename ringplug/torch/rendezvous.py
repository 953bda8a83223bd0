"""How ``init_process_group("ring")`` learns rank, size and store, and makes groups.

torch's ``env://`` needs MASTER_ADDR and MASTER_PORT. Under an MPI launcher nobody sets them,
and nobody needs to: the ranks can already talk, so rank 0 opens a store on a free port and
tells the others.

torch's world can also be a process set, whose number is in the URL::

    ringplug.init(process_sets=[evens, odds])
    mine = evens if evens.included() else odds
    dist.init_process_group("ring", init_method=f"ring://?process_set={mine.process_set_id}")

Ranks of torch then count within the set, and both sets have a world of their own at the same time.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import socket
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed

from ringplug.backend import config, log, ops, runtime
from ringplug.backend.errors import UsageError
from ringplug.backend.runtime import Runtime
from ringplug.torch.process_group import RingProcessGroup
from ringplug.torch.selftest import check_once

__all__ = ["create_group", "make_store", "register"]

dist: Any = torch.distributed
_log = log.get_logger(__name__)
_DEFAULT_TIMEOUT = timedelta(minutes=30)
# In the store, whose ranks are torch's world; groups are made of ranks in that.
_MEMBERS = "ringplug/members"


def register() -> None:
    """Make ``ring`` known to torch.distributed. Starts nothing; may be called again."""
    if hasattr(dist.Backend, "RING"):
        return
    dist.Backend.register_backend("ring", create_group, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler("ring", _rendezvous)
    # As an attribute, torch.distributed.rendezvous is the function of that name.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", None)
    if handlers is None or "env" not in handlers:
        _log.warning(
            "torch %s keeps its rendezvous handlers elsewhere: pass init_method='ring://' to "
            "init_process_group",
            torch.__version__,
        )
        return
    of_torch = handlers["env"]

    def env(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        start = config.launched()
        if start is not None and start.by == "mpi":
            # Also exports the rank and the size, which torch looks for.
            runtime.init()
        alone = start is None and not (
            runtime.is_initialized() and runtime.current().world.size > 1
        )
        if config.has_master() or "?" in url or (alone and not _ring_is_asked_for()):
            # Alone, another backend would silently become a world of one.
            return of_torch(url, *args, **kwargs)
        return _rendezvous(url, *args, **kwargs)

    handlers["env"] = env


def _ring_is_asked_for() -> bool:
    """Whether the init_process_group that is under way names the backend ring.

    A handler is not told the backend, so it is read from torch's frame; where there is no such
    frame, the answer is no.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _code(dist.init_process_group):
            backend = str(frame.f_locals.get("backend") or "")
            return "ring" in backend.lower().replace(",", ":").split(":")
        frame = frame.f_back
    return False


def _code(function: Any) -> Any:
    """The code of a function below its decorators."""
    return inspect.unwrap(function).__code__


def _rendezvous(
    url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """What torch calls: yields store, rank and size once."""
    rt = runtime.init()
    query = parse_qs(urlsplit(url).query, keep_blank_values=True)
    number = _process_set(url, query.pop("process_set", ["0"]), set(query))
    members = rt.groups.find(number).ranks
    own = {"rank": members.index(rt.world.rank), "world_size": len(members)}
    # torch adds what init_process_group was told, and takes what is yielded.
    wrong = [f"{name}={query[name][0]}" for name in query if query[name] != [str(own[name])]]
    if wrong:
        raise UsageError(
            f"init_process_group({', '.join(wrong)}), but this is rank {own['rank']} of "
            f"{own['world_size']} among ranks {list(members)}: pass neither rank nor world_size"
        )
    yield make_store(rt, timeout, number), own["rank"], own["world_size"]
    raise RuntimeError("a ring rendezvous cannot be repeated; destroy the group and begin anew")


def _process_set(url: str, given: Sequence[str], others: set[str]) -> int:
    """The number of the process set that a URL names; 0, all ranks, where it names none.

    Args:
        url: The URL.
        given: The values of its argument `process_set`.
        others: The names of its other arguments.
    """
    if others - {"rank", "world_size"} or len(given) > 1 or not given[0].isdecimal():
        raise UsageError(
            f"init_method={url!r}: the backend ring knows ring:// and ring://?process_set=NUMBER, "
            "with the process_set_id of a set that was given to ringplug.init(process_sets=[...])"
        )
    return int(given[0])


def make_store(rt: Runtime, timeout: timedelta, process_set: int = 0) -> Any:
    """A key-value store that ranks share, served by the first on a free port.

    Args:
        rt: The runtime.
        timeout: How long reading waits for a key.
        process_set: The number of the set whose ranks share it. Collective over them.
    """
    members = rt.groups.find(process_set).ranks
    address = ""
    store: Any = None
    if rt.world.rank == members[0]:
        alone = len({rt.world.hosts[rank] for rank in members}) == 1
        address = "127.0.0.1" if alone else _own_address()
        store = dist.TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
        store.set(_MEMBERS, ",".join(map(str, members)))
    host, port = ops.broadcast_object(
        (address, store.port if store else 0), root_rank=members[0], process_set=process_set
    )
    if store is None:
        store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    return store


def _own_address() -> str:
    """An address of this host that other hosts reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: only asks which interface leads out.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def create_group(options: Any, backend_options: Any = None) -> RingProcessGroup:
    """Called by torch for each group with the backend ``ring``; collective over its ranks.

    Args:
        options: torch's: rank, size and name of the group, its ranks in torch's world (none:
            all), store and timeout.
        backend_options: ``pg_options`` of the user; there are none for this backend.

    Raises:
        UsageError: torch's ranks are not those of the launched processes.
    """
    if backend_options is not None:
        raise UsageError("the backend ring has no pg_options")
    rt = runtime.init()
    members = _members(rt, options)
    if options.group_size != len(members) or (
        rt.world.rank not in members or members.index(rt.world.rank) != options.group_rank
    ):
        raise UsageError(
            f"torch.distributed was told rank {options.group_rank} of {options.group_size}, but "
            f"this is rank {rt.world.rank} of {rt.world.size} by ringplug; start the processes "
            "with ringrun, mpirun or srun and pass neither rank nor world_size (for some of them: "
            "init_method='ring://?process_set=NUMBER')"
        )
    name = str(options.group_id)
    timeout = options.timeout.total_seconds()
    settings = rt.config
    if options.timeout != _DEFAULT_TIMEOUT:
        settings = dataclasses.replace(settings, timeout=timeout)
    group = RingProcessGroup(
        rt.lane(f"process group {name}", members, timeout=settings.timeout),
        rt.lane(f"messages of process group {name}", members, timeout=settings.timeout),
        settings,
        name,
        members,
    )
    check_once(group)
    return group


def _members(rt: Runtime, options: Any) -> Sequence[int]:
    """The ranks of a group in ringplug's world; none where torch's world has more ranks."""
    store = getattr(options.store, "_underlying_non_prefix_store", options.store)
    world = list(range(rt.world.size))
    if isinstance(store, dist.TCPStore) and store.check([_MEMBERS]):
        world = [int(rank) for rank in store.get(_MEMBERS).decode().split(",")]
    ranks = list(options.global_ranks_in_group)
    if any(rank >= len(world) for rank in ranks):
        return []
    return [world[rank] for rank in ranks] or world
