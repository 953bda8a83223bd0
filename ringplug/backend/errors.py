"""The error tree. Layer 0: imports nothing of ringplug.

RingplugError
├── ConfigError          a setting is wrong: names it, its value and where it came from
├── UnavailableError     nothing fits here: every candidate with its reason
├── NotInitializedError  a call before init() or after shutdown()  (a ValueError too)
├── UsageError           a call or a tensor that cannot work       (a ValueError too)
│   └── NotSupportedError   ... yet                                (a NotImplementedError too)
├── NotReducedError      a training step whose gradients were not averaged
├── RankFailedError      a rank that run() started: .rank .code .host .pid .error .traceback
└── CollectiveError      a collective failed, here and on the other ranks
    ├── MismatchError    ranks disagree: the same text on every rank
    ├── ShutDownError    shutdown() came first                     (a NotInitializedError too)
    └── RecoverableError training can go on after the group is rebuilt
        ├── PeerLostError    a rank has ended:          .ranks
        ├── StalledError     a rank did not come in time: .what .absent .seconds
        └── TransportError   the library below failed, raised ``from`` its own error

Horovod's `HorovodInternalError` is CollectiveError; its `HostsUpdatedInterrupt` is here too.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CollectiveError",
    "ConfigError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "NotInitializedError",
    "NotReducedError",
    "NotSupportedError",
    "PeerLostError",
    "RankFailedError",
    "RecoverableError",
    "RingplugError",
    "ShutDownError",
    "StalledError",
    "TransportError",
    "UnavailableError",
    "UsageError",
]


class RingplugError(RuntimeError):
    """Base of everything that ringplug raises on purpose."""


class ConfigError(RingplugError, ValueError):
    """A setting has a value that cannot be used."""


class UnavailableError(RingplugError):
    """Nothing that was asked for works here; the message lists every candidate and why not."""


class NotInitializedError(RingplugError, ValueError):
    """A call that needs `ringplug.init()` came before it, or after `ringplug.shutdown()`."""


class UsageError(RingplugError, ValueError):
    """A call or an argument that cannot work, whatever the other ranks do."""


class NotSupportedError(UsageError, NotImplementedError):
    """A combination that Horovod or TensorFlow calls not implemented."""


class NotReducedError(RingplugError):
    """A training step updated weights with gradients that were not averaged over the ranks."""


class RankFailedError(RingplugError):
    """A rank that `ringplug.run` started has failed; raised in the caller.

    Attributes:
        rank: The rank that failed first.
        code: Its exit code, as a shell reports it.
        host: Where it ran.
        pid: Its process there.
        error: Its exception in one line, or empty.
        traceback: Its exception with the traceback, as text, or empty.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        code: int = 1,
        host: str = "",
        pid: int = 0,
        error: str = "",
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.code = code
        self.host = host
        self.pid = pid
        self.error = error
        self.traceback = traceback


class CollectiveError(RingplugError):
    """A collective failed, on this rank and on the others that took part."""


HorovodInternalError = CollectiveError


class MismatchError(CollectiveError):
    """Ranks passed different things to one collective; raised on every rank with both sides."""


class ShutDownError(NotInitializedError, CollectiveError):
    """An operation was under way when this rank called `ringplug.shutdown()`."""


class RecoverableError(CollectiveError):
    """The group of ranks is broken, the process is not: training can go on in a new group."""


class PeerLostError(RecoverableError):
    """Ranks have ended while others still wait for them."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StalledError(RecoverableError):
    """Ranks did not enter a collective before its deadline."""

    def __init__(
        self, message: str, what: str = "", absent: Sequence[int] = (), seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.what = what
        self.absent = tuple(absent)
        self.seconds = seconds


class TransportError(RecoverableError):
    """The communication library below reported a failure."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went while an elastic job trains; raised between steps.

    Args:
        skip_sync: Whether the state need not be broadcast, because ranks only left.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync
