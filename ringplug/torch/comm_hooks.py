"""A DDP communication hook that sends gradients in 16 bits.

The sum is formed in float32 and divided before it is rounded again, so that neither the number
of ranks nor its size costs range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ringplug.backend.buffers import Buffer, ReduceOp
from ringplug.backend.compression import Compressor, get_compressor
from ringplug.backend.errors import ConfigError, UsageError
from ringplug.backend.transport import Transport
from ringplug.torch import collectives
from ringplug.torch.collectives import Task
from ringplug.torch.compression import CompressionChoice, user_compressor, wire_codec
from ringplug.torch.process_group import RingProcessGroup
from ringplug.torch.reductions import reduction
from ringplug.torch.tensors import Flat, check_devices, describe
from ringplug.torch.work import RingWork

__all__ = ["compress_hook"]

dist: Any = torch.distributed
Hook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


def compress_hook(compression: CompressionChoice) -> Hook:
    """A hook for ``DistributedDataParallel.register_comm_hook``.

    Args:
        compression: ``bf16`` or ``fp16``, or the member of `Compression`; ``none`` and None send
            gradients as they are. Sparse gradients are gathered as they are in any case.

    Returns:
        A hook whose state is the process group, a RingProcessGroup.

    Raises:
        ConfigError: No such compression, or a user's own class, which DDP's buckets cannot be
            given to.
    """
    if user_compressor(compression) is not None:
        raise ConfigError(
            f"compression={compression!r}: DDP's buckets take none, fp16 and bf16; put classes of "
            "your own in a hook, ddp_comm_hook"
        )
    codec = get_compressor(wire_codec(compression) or "none")

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        group = dist.group.WORLD if state is None else state
        if not isinstance(group, RingProcessGroup):
            raise UsageError(f"compression={codec.name} needs a process group with backend ring")
        gradients = bucket.buffer()
        handle = group.start(
            "allreduce", lambda: _task(gradients, bucket.index(), codec, group.size()), later=True
        )
        return RingWork(handle, gradients).get_future()

    # DDP wants to see types here, not the text that this module's annotations are.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    return hook


def _task(gradients: Tensor, index: int, codec: Compressor, size: int) -> Task:
    check_devices("allreduce", [gradients])
    if gradients.layout is not torch.strided:
        return collectives.allreduce([gradients], reduction(dist.ReduceOp.AVG), size)

    def job(transport: Transport) -> None:
        numbers = Flat(gradients).numbers

        def fill(memory: Buffer, place: slice) -> None:
            codec.encode(numbers[place], memory)

        def drain(memory: Buffer, place: slice) -> None:
            codec.decode(memory, numbers[place], 1.0)

        transport.allreduce_stream(
            numbers.size,
            codec.wire_dtype(numbers.dtype),
            ReduceOp.SUM,
            1 / size,
            fill,
            drain,
        )

    return Task(f"of bucket {index}, {describe(gradients)}, {codec.name}", job)
