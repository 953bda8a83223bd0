"""Loggers that know the rank. Layer 0.

`ringplug` never configures the root logger and never prints. Messages below WARNING appear
where the application sets up logging, or with ``RINGPLUG_LOG_LEVEL=info``.
"""

from __future__ import annotations

import logging

__all__ = ["get_logger", "set_level", "set_rank"]


class _RankFilter(logging.Filter):
    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.ringplug_rank = "-" if self.rank is None else str(self.rank)
        return True


_RANK = _RankFilter()


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; its records carry `ringplug_rank`."""
    logger = logging.getLogger(name)
    if _RANK not in logger.filters:
        logger.addFilter(_RANK)
    return logger


def set_rank(rank: int | None) -> None:
    """Name the rank that later records carry."""
    _RANK.rank = rank


def set_level(level: str) -> None:
    """Show ringplug's records from `level` up on standard error, each with its rank."""
    logger = logging.getLogger("ringplug")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("[ringplug rank %(ringplug_rank)s] %(levelname)s %(message)s")
        )
        handler.addFilter(_RANK)
        logger.addHandler(handler)
        logger.propagate = False
