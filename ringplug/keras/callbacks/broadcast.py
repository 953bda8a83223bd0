"""All ranks start from one rank's state."""

from __future__ import annotations

from typing import Any

from ringplug.backend import ops
from ringplug.keras.callbacks.base import RingCallback, check_root
from ringplug.keras.local import LocalVariables, variables_of
from ringplug.keras.optimizer import reduction_of
from ringplug.keras.state import broadcast_model

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(RingCallback):
    """Give every rank the weights and the optimizer's state of one rank, before the first batch.

    The optimizer is built first, so its slots, iterations and learning rate are included, and
    so is the epoch to start from. Put it after ``BackupAndRestore``, which restores at the same
    moment, and before everything that reads the state. A subclassed model that TensorFlow
    builds in its first batch is broadcast right after that batch.

    Args:
        root_rank: Whose state everybody gets.
        device: Accepted for Horovod's sake; without effect.
        local_variables: A variable or several that every rank keeps as they are, and so what the
            optimizer keeps for them.
        seeds_differ: Random layers such as dropout draw other numbers on each rank (default)
            or the same ones (False).
        process_set: Who gets root's state; the others keep theirs. None: all ranks. `root_rank`
            counts among all ranks.

    Raises:
        UsageError: Something among `local_variables` is no variable.
        MismatchError: From `fit`, on every rank, when the ranks' models differ in the shape or
            dtype of a variable; with a table of the differences.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        seeds_differ: bool = True,
        process_set: Any = None,
    ) -> None:
        super().__init__(process_set)
        self._local = LocalVariables()
        for variable in () if local_variables is None else variables_of(local_variables):
            self._local.add(variable)
        check_root(type(self).__name__, root_rank)
        del device
        self.root_rank = root_rank
        self.seeds_differ = seeds_differ
        self._waits = False

    def register_local_var(self, var: Any) -> None:
        """Let a variable stay as it is on each rank.

        Raises:
            UsageError: It is no variable.
        """
        self._local.add(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.check_root(self.root_rank)
        if not self.distributed:
            return
        model = self.model
        built = ops.allgather_object(
            bool(model.built and model.variables), "keras.built", self.process_set
        )
        epoch = getattr(model, "_initial_epoch", None)
        model._initial_epoch = ops.broadcast_object(
            epoch, self.root_rank, "keras.initial_epoch", self.process_set
        )
        self._waits = not all(built)
        reduction = reduction_of(model.optimizer)
        if reduction is not None:
            # What differs now is about to be made the same.
            reduction.compared = True
        if not self._waits:
            self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        if self._waits and self.model.built and self.model.optimizer.built:
            self._late()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._waits:
            self._late()

    def _late(self) -> None:
        self._waits = False
        self.watch.mark(self._watched, "broadcast of what the first batch has built")
        self._broadcast()

    def _broadcast(self) -> None:
        broadcast_model(
            self.model, self.root_rank, self.seeds_differ, self._local, self.process_set
        )
