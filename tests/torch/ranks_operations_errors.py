"""What goes wrong with the named operations of ringplug.torch, on every rank, and goes on."""

from __future__ import annotations

import pytest
import torch

import ringplug.torch as hvd
from ringplug.backend.errors import MismatchError, NotInitializedError, UsageError
from tests.checks import check


def alive(size):
    """The operations after an error work."""
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2


def mismatch(operation, size, *words):
    """The same error on every rank, also when it was started asynchronously."""
    if size == 1:
        return
    with pytest.raises(hvd.HorovodInternalError) as caught:
        found = operation()
        hvd.synchronize(found)
    assert isinstance(caught.value, (MismatchError, RuntimeError))
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert len(set(hvd.allgather_object(text.split(":", 1)[-1]))) == 1, text
    alive(size)


def refused(operation, rank, size, match="", culprit=0):
    """A ValueError on one rank, which is an error on the others as well."""
    kind = ValueError if rank == culprit else hvd.HorovodInternalError
    with pytest.raises(kind, match=match or None):
        hvd.synchronize(operation(rank == culprit))
    alive(size)


@check
def mismatched_dtypes(rank, size):
    tensor = torch.ones(size, 2, dtype=torch.int32 if rank % 2 == 0 else torch.float32)
    words = ("data types", "int32", "float32", "rank")
    for operation in (
        lambda: hvd.allreduce(tensor),
        lambda: hvd.allreduce_(tensor),
        lambda: hvd.allreduce_async(tensor, name="dtype"),
        lambda: hvd.grouped_allreduce([tensor, tensor]),
        lambda: hvd.allgather(tensor),
        lambda: hvd.grouped_allgather([tensor]),
        lambda: hvd.broadcast(tensor, 0),
        lambda: hvd.broadcast_async_(tensor, 0),
        lambda: hvd.alltoall(tensor),
        lambda: hvd.reducescatter(tensor),
        lambda: hvd.grouped_reducescatter_async([tensor]),
    ):
        mismatch(operation, size, *words)


@check
def mismatched_kinds(rank, size):
    tensor = torch.ones(size)
    mismatch(
        lambda: (
            hvd.allreduce(tensor, name="kind") if rank == 0 else hvd.allgather(tensor, name="kind")
        ),
        size,
        "operations",
        "ALLREDUCE",
        "ALLGATHER",
    )


@check
def mismatched_shapes(rank, size):
    for shape in ((17 + rank,) * 3, (17, 23 * 2) if rank == 0 else (17, 23, 2)):
        tensor = torch.ones(shape)
        for operation in (
            lambda: hvd.allreduce(tensor),  # noqa: B023
            lambda: hvd.broadcast(tensor, 0),  # noqa: B023
            lambda: hvd.reducescatter(tensor),  # noqa: B023
            lambda: hvd.grouped_allreduce([torch.ones(2), tensor]),  # noqa: B023
        ):
            mismatch(operation, size, "shapes", "17")
    mismatch(lambda: hvd.grouped_allreduce([torch.ones(2)] * (rank + 1)), size, "rank 0")


@check
def mismatched_dimensions(rank, size):
    tensor = torch.ones(2 * size, 10 * (rank + 1), 3)
    mismatch(lambda: hvd.allgather(tensor), size, "ALLGATHER", "dimension", "10")
    mismatch(lambda: hvd.alltoall(tensor), size, "ALLTOALL", "dimension", "10")
    tensor = torch.ones(2 * size, *[1] * rank)
    mismatch(lambda: hvd.allgather(tensor), size, "ALLGATHER", "dimension")
    mismatch(lambda: hvd.alltoall(tensor), size, "ALLTOALL", "dimension")


@check
def mismatched_factors_and_reductions(rank, size):
    tensor = torch.ones(size)
    op = hvd.Sum if rank == 0 else hvd.Average
    mismatch(lambda: hvd.allreduce(tensor, prescale_factor=rank + 0.5), size, "prescale")
    mismatch(lambda: hvd.reducescatter(tensor, postscale_factor=rank + 0.5), size, "postscale")
    mismatch(lambda: hvd.allreduce(tensor, op=op), size, "reduction", "SUM", "AVERAGE")
    mismatch(lambda: hvd.reducescatter(tensor, op=op), size, "reduction", "SUM", "AVERAGE")
    compression = hvd.Compression.fp16 if rank == 0 else hvd.Compression.none
    mismatch(lambda: hvd.allreduce(tensor, compression=compression), size, "fp16", "none")


@check
def mismatched_roots(rank, size):
    mismatch(lambda: hvd.broadcast(torch.ones(2), rank), size, "BROADCAST", "root")


@check
def mismatched_sparse_tensors(rank, size):
    tensor = torch.eye(3 + rank).to_sparse()
    mismatch(lambda: hvd.sparse_allreduce_async(tensor, "sparse.shape", hvd.Sum), size, "shapes")
    tensor = torch.ones(2, *[2] * rank).to_sparse()
    mismatch(lambda: hvd.sparse_allreduce_async(tensor, "sparse.ndim", hvd.Sum), size, "dimension")


@check
def tensors_without_dimensions(rank, size):
    tensor = torch.tensor(1.0)
    for operation in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises((hvd.HorovodInternalError, ValueError), match="dimensions|zero"):
            operation(tensor)
        with pytest.raises((hvd.HorovodInternalError, ValueError), match="dimensions|zero"):
            operation(tensor.clone().requires_grad_())
        alive(size)


@check
def names_in_flight(rank, size):
    tensor = torch.ones(17, 17)
    for function in (
        lambda: hvd.allreduce_async(tensor, name="twice"),
        lambda: hvd.allreduce_async_(tensor, name="twice"),
        lambda: hvd.allgather_async(tensor, name="twice"),
        lambda: hvd.broadcast_async(tensor, 0, name="twice"),
        lambda: hvd.alltoall_async(torch.ones(size), name="twice"),
        lambda: hvd.reducescatter_async(tensor, name="twice"),
    ):
        if size > 1:
            # Some rank is late, so that the first cannot be over.
            hvd.barrier()
            if rank != size - 1:
                first = function()
                with pytest.raises(ValueError, match="twice"):
                    function()
            hvd.barrier()
            if rank == size - 1:
                first = function()
            hvd.synchronize(first)
    alive(size)


@check
def roots_that_are_no_ranks(rank, size):
    for root in (-1, size, 10**6):
        with pytest.raises(ValueError, match="root"):
            hvd.broadcast(torch.ones(2), root)
        with pytest.raises(ValueError, match="root"):
            hvd.broadcast_async_(torch.ones(2), root_rank=root)
    refused(lambda me: hvd.broadcast(torch.ones(2), size if me else 0, "bad root"), rank, size)


@check
def arguments_that_contradict_or_are_none(rank, size):
    here = torch.ones(size)
    refused(
        lambda me: hvd.allreduce(here, average=True if me else None, name="both", op=hvd.Sum),
        rank,
        size,
        "both",
    )
    refused(
        lambda me: hvd.allreduce(here, name="codec", compression="zip" if me else "none"),
        rank,
        size,
        "zip",
    )
    refused(
        lambda me: hvd.reducescatter_async(here, "factor", prescale_factor="x" if me else 1.0),
        rank,
        size,
        "prescale_factor",
    )
    refused(
        lambda me: hvd.broadcast_async(here, None if me else 0, "no root"), rank, size, "root_rank"
    )
    assert hvd.allreduce(here, name=3, op=hvd.Sum)[0] == size


@check
def splits_that_do_not_fit(rank, size):
    tensor = torch.ones(size, 2)
    for splits in (
        [1] * (size + 1),
        [2] * size,
        torch.ones(size + 1, dtype=torch.int32),
        torch.full((size,), 2, dtype=torch.int32),
        torch.ones(1, size, dtype=torch.int32),
        torch.ones(size),
        torch.ones(size, dtype=torch.int64),
        [-1, *[0] * (size - 1)],
        [0.5] * size,
    ):
        with pytest.raises(ValueError, match="split"):
            hvd.alltoall(tensor, splits)
        with pytest.raises(ValueError, match="split"):
            hvd.alltoall_async(tensor, splits)
    if size > 1:
        with pytest.raises(ValueError, match="split|evenly"):
            hvd.alltoall(torch.ones(size + 1))
    refused(
        lambda me: hvd.alltoall(tensor, [1] * (size + me), "bad splits")[0], rank, size, "split"
    )
    refused(
        lambda me: hvd.alltoall_async(
            tensor, torch.ones(size, dtype=torch.int64 if me else torch.int32), "bad dtype"
        ),
        rank,
        size,
        "int32",
    )


@check
def reductions_that_are_not_possible(rank, size):
    tensor = torch.ones(size)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises((ValueError, RuntimeError), match="reducescatter"):
            hvd.reducescatter(tensor, op=op)
        with pytest.raises((ValueError, RuntimeError), match="reducescatter"):
            hvd.grouped_reducescatter_async([tensor], op=op)
        with pytest.raises(ValueError, match="sparse"):
            hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "x", op)
    for op in (77, "sum"):
        with pytest.raises(ValueError, match="op"):
            hvd.allreduce(tensor, op=op)
    with pytest.raises(ValueError, match="bool"):
        hvd.allreduce(torch.tensor([True]))
    with pytest.raises(ValueError, match="complex"):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max)
    refused(
        lambda me: hvd.reducescatter(tensor, "bad op", op=hvd.Max if me else hvd.Sum), rank, size
    )
    bits = torch.ones(2, dtype=torch.bool)
    refused(
        lambda me: hvd.allreduce(bits, name="bad bool", op=hvd.Average if me else hvd.Sum),
        rank,
        size,
    )


@check
def tensors_that_are_elsewhere(rank, size):
    away = torch.empty(size, 2, device="meta")
    here = torch.ones(size, 2)
    for operation in (
        lambda t: hvd.allreduce(t),
        lambda t: hvd.allreduce_(t),
        lambda t: hvd.allreduce_async(t),
        lambda t: hvd.grouped_allreduce([torch.ones(2), t]),
        lambda t: hvd.grouped_allreduce_async_([torch.ones(2), t]),
        lambda t: hvd.allgather(t),
        lambda t: hvd.broadcast(t, 0),
        lambda t: hvd.broadcast_(t, 0),
        lambda t: hvd.alltoall(t),
        lambda t: hvd.reducescatter(t),
    ):
        with pytest.raises(ValueError, match=r"meta.*shared_memory"):
            operation(away)
    refused(lambda me: hvd.allreduce(away if me else here, name="away"), rank, size, "meta")
    refused(lambda me: hvd.alltoall(away if me else here, name="away"), rank, size, "meta")
    refused(lambda me: hvd.allreduce_(away if me else here, name="away"), rank, size, "meta")


@check
def tensors_that_no_array_holds(rank, size):
    quantized = torch.quantize_per_tensor(torch.ones(size), 0.1, 0, torch.qint8)
    for wrong in (quantized, torch.eye(size).to_sparse(), torch.eye(size).to_sparse_csr(), "text"):
        for operation in (hvd.allreduce, hvd.allgather, hvd.allreduce_async):
            with pytest.raises(ValueError, match=r"\w"):
                operation(wrong)
    refused(
        lambda me: hvd.allreduce(quantized if me else torch.ones(size), name="quantized"),
        rank,
        size,
        "q",
    )
    refused(
        lambda me: hvd.sparse_allreduce_async(
            torch.eye(2) if me else torch.eye(2).to_sparse(), "dense", hvd.Sum
        ),
        rank,
        size,
        "layout",
    )


@check
def shutdown_and_again(rank, size):
    for _ in range(3):
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.is_initialized()
        for function in (
            hvd.rank,
            hvd.size,
            lambda: hvd.allreduce(torch.ones(2)),
            lambda: hvd.allreduce_async(torch.ones(2)),
            lambda: hvd.broadcast_(torch.ones(2), 0),
            lambda: hvd.alltoall(torch.ones(2)),
            hvd.barrier,
        ):
            with pytest.raises((NotInitializedError, ValueError), match="init"):
                function()
        hvd.init(process_sets="dynamic")
        assert (hvd.rank(), hvd.size()) == (rank, size)
        alive(size)


@check
def errors_are_value_errors_and_runtime_errors(rank, size):
    assert issubclass(UsageError, ValueError)
    assert issubclass(UsageError, RuntimeError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(MismatchError, hvd.HorovodInternalError)
