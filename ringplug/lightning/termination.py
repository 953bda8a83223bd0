"""SIGTERM to one rank ends training on all of them, after the same batch.

Lightning answers the signal with a collective inside the handler, while the other ranks are
somewhere else, and then looks at rank 0's flag only. Here the handler sets a flag, and the
ranks vote once per batch. A world of one has nobody to vote with, and Lightning never asks it to:
there its own handler stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Termination"]


class Termination:
    """The flag of one strategy.

    Args:
        vote: Given this rank's flag and the place in training, the same on all ranks; returns
            whether any rank's flag is set. A collective.
    """

    def __init__(self, vote: Callable[[bool, str], bool]) -> None:
        self._vote = vote
        self._asked = False
        self._trainer: Any = None
        self._exception: type[BaseException] | None = None

    def watch(self, trainer: Any, exception: type[BaseException]) -> bool:
        """Take over the signal from the trainer.

        Args:
            trainer: Before it installs its handlers.
            exception: Lightning's SIGTERMException.

        Returns:
            Whether the trainer's loop calls `check` by itself before each batch.
        """
        self._asked = False
        self._trainer = trainer
        self._exception = exception
        trainer._signal_connector._sigterm_notifier_fn = self._notice
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = self.check
            return True
        return False

    def check(self) -> None:
        """Vote; a collective, called by all ranks before the same batch.

        Raises:
            SIGTERMException: Lightning's, on every rank, when any rank got the signal.
            MismatchError: The ranks are at different batches: some have fewer than others.
        """
        batch = self._trainer.fit_loop.epoch_loop.batch_idx + 1
        epoch = self._trainer.current_epoch
        if self._vote(self._asked, f"training batch {batch} of epoch {epoch}"):
            assert self._exception is not None
            self._trainer._signal_connector.received_sigterm = True
            raise self._exception

    def release(self) -> None:
        """Give the signal back, after a run."""
        if self._trainer is not None:
            vars(self._trainer._signal_connector).pop("_sigterm_notifier_fn", None)
            vars(self._trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
            self._trainer = None

    def _notice(self, signum: int, frame: Any) -> None:
        """The signal handler."""
        self._asked = True
        if self._trainer.state.fn != "fit":
            # Validation alone has no step at which ranks could vote: this rank ends after its
            # batch, and the launcher or the next collective ends the others.
            self._trainer._signal_connector.received_sigterm = True
