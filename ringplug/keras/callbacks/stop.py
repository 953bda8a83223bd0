"""All ranks stop, or none."""

from __future__ import annotations

from typing import Any

from ringplug.backend import ops
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.errors import UsageError
from ringplug.keras.callbacks.base import RingCallback

__all__ = ["StopTogetherCallback"]


class StopTogetherCallback(RingCallback):
    """When a callback of one rank stops the training, all ranks stop, at the same batch.

    Without it that rank would leave, and the others would wait for it in their next step. A
    stop in the middle of an epoch (``TerminateOnNaN``) is held back until the ranks next agree.
    It must be the last callback, since it can only see what those before it decided.

    Args:
        every_batches: Agree every so many batches; None: at the end of every epoch.
        process_set: Who stops together; None: all ranks.
    """

    # It may run in the background: it only looks at a flag then.
    async_safe = True

    def __init__(self, every_batches: int | None = None, process_set: Any = None) -> None:
        super().__init__(process_set)
        if every_batches is not None and every_batches < 1:
            raise UsageError(f"every_batches={every_batches}: expected 1 or more")
        self.every_batches = every_batches
        self._wanted = False
        self._agreed = False
        self._next = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._wanted = self._agreed = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._next = self.every_batches or 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        if self.every_batches and batch >= self._next and self.distributed:
            self._next = batch + self.every_batches
            self.watch.mark(self._watched, "agreement whether to stop")
            self._agree()
            if self._agreed:
                # Keras looks at the flag after this batch, on every rank.
                self._watched.stop_training = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._watched.stop_training and not self._agreed and self.distributed:
            self._wanted = True
            self._watched.stop_training = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if not self.distributed:
            return
        self._wanted = self._wanted or bool(self._watched.stop_training)
        self._agree()
        self._watched.stop_training = self._agreed

    def _agree(self) -> None:
        mine = int(self._wanted or self._agreed)
        agreed = ops.allreduce(
            mine, op=ReduceOp.MAX, name="keras.stop", process_set=self.process_set
        )
        self._agreed = bool(agreed)
