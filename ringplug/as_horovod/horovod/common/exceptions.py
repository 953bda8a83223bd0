"""``horovod.common.exceptions``."""

from __future__ import annotations

from ringplug.backend.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text for a framework that is not the one that something was built against."""
    return f"built against {name} {version}, but {name} {installed_version} is installed"


class HorovodVersionMismatchError(ImportError):
    """Never raised: ringplug is built against no framework. There to be named in `except`."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
