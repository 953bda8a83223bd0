"""A sampler that knows which samples of an epoch have been used."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from ringplug.backend import place

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its share of a data set, and after `reset` of what is left of it.

    Put it into a `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end
    of each epoch; an epoch that was interrupted then goes on where it was committed.

    All ranks get equally many samples: where they do not divide evenly, some are used twice.

    Args:
        dataset: Of constant length.
        shuffle: Whether the order changes from epoch to epoch.
        seed: Of the order; the same on every rank.

    Attributes:
        epoch: The epoch.
        processed_num: How many samples of it all ranks together have used.
        num_replicas: Number of ranks.
        rank: This one.
        remaining_indices: What was not used when `reset` was called last, in order.
        num_samples: How many of these each rank gets.
        total_size: How many all ranks get together.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample has been used. Call it at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have used a batch.

        Args:
            batch_idx: Its number; without effect.
            batch_size: Samples of one rank.
        """
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Epoch and number of samples used, for `load_state_dict`."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was called; the ranks may be others."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out anew what has not been used."""
        self.num_replicas = place.size()
        self.rank = place.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """This rank's samples of what was left at the last `reset`."""
        left = self.remaining_indices
        return iter(
            [
                left[place % len(left)]
                for place in range(self.rank, self.total_size, self.num_replicas)
            ]
        )

    def __len__(self) -> int:
        return self.num_samples
