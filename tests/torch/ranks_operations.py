"""The named operations of ringplug.torch, with Horovod's names and semantics, on any ranks."""

from __future__ import annotations

import json
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import ringplug.torch as hvd
from tests.checks import check, run_checks
from tests.torch import ranks_operations_errors, ranks_operations_grad  # noqa: F401

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
COMPLEX = (torch.complex64, torch.complex128)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


def value(rank, dtype, shape=(3, 5)):
    """Numbers of 1 to 3, whose sums and products every dtype holds exactly."""
    numbers = (np.arange(int(np.prod(shape))) + rank) % 3 + 1
    tensor = torch.from_numpy(numbers).reshape(shape)
    if dtype is torch.bool:
        return tensor > 1
    if dtype.is_complex:
        return torch.complex(tensor.double(), tensor.double() * rank).to(dtype)
    return tensor.to(dtype)


def wide(tensor):
    """As numpy computes with it: without rounding on the way."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).numpy()
    if tensor.dtype is torch.bool:
        return tensor.numpy()
    return tensor.to(torch.float64).numpy() if tensor.is_floating_point() else tensor.numpy()


def reduced(op, parts):
    """What numpy makes of all ranks' tensors."""
    arrays = [wide(part) for part in parts]
    dtype = parts[0].dtype
    fold = {hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}.get(op, np.add)
    total = arrays[0]
    for array in arrays[1:]:
        total = fold(total, array)
    if op == hvd.Average:
        exact = dtype.is_floating_point or dtype.is_complex
        total = total / len(arrays) if exact else np.trunc(total / len(arrays))
    return torch.from_numpy(np.asarray(total)).to(dtype)


def same(found, expected):
    assert isinstance(found, torch.Tensor)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def cases():
    for dtype in (*FLOATS, *INTS, *COMPLEX, torch.bool):
        for op in OPS:
            if dtype is torch.bool and op == hvd.Average:
                continue
            if dtype.is_complex and op in (hvd.Min, hvd.Max):
                continue
            yield dtype, op


@check
def allreduce_of_every_dtype_and_op(rank, size):
    for dtype, op in cases():
        tensor = value(rank, dtype)
        before = tensor.clone()
        result = hvd.allreduce(tensor, op=op)
        if (dtype in FLOATS and op == hvd.Average) or (dtype.is_complex and op == hvd.Average):
            torch.testing.assert_close(result, reduced(op, [value(r, dtype) for r in range(size)]))
        else:
            same(result, reduced(op, [value(r, dtype) for r in range(size)]))
        same(tensor, before)


@check
def allreduce_of_every_shape(rank, size):
    total = sum(range(1, size + 1))
    for shape in ((), (1,), (0,), (3, 0, 2), (17,), (17, 17), (17, 17, 17)):
        result = hvd.allreduce(torch.full(shape, float(rank + 1)), op=hvd.Sum)
        same(result, torch.full(shape, float(total)))


@check
def allreduce_of_every_memory_layout(rank, size):
    total = sum(range(1, size + 1))
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4) + 1
    for change in (
        lambda t: t.transpose(0, 2),
        lambda t: t[:, ::2],
        lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last),
        lambda t: t[0].expand(5, 3, 4),
    ):
        same(hvd.allreduce(change(base * (rank + 1)), op=hvd.Sum), change(base * total))
        handle = hvd.allreduce_async(change(base * (rank + 1)), op=hvd.Sum)
        same(hvd.synchronize(handle), change(base * total))
    conj = torch.complex(torch.ones(3), torch.ones(3) * (rank + 1)).conj()
    same(
        hvd.allreduce(conj, op=hvd.Sum), torch.complex(torch.ones(3) * size, -torch.ones(3) * total)
    )
    same(hvd.allreduce(conj.imag, op=hvd.Sum), -torch.ones(3) * total)


@check
def the_average_is_the_default(rank, size):
    mean = sum(range(size)) / size
    assert hvd.allreduce(torch.tensor([float(rank)])).item() == mean
    assert hvd.allreduce(torch.tensor([rank])).item() == int(mean)
    assert hvd.allreduce(torch.tensor([-rank])).item() == -int(mean)
    assert hvd.reducescatter(torch.full((size,), float(rank))).item() == mean


@check
def average_is_the_deprecated_spelling(rank, size):
    tensor = torch.ones(2)
    for function in (hvd.allreduce, hvd.allreduce_):
        for average, expected in ((True, 1), (False, size)):
            with pytest.warns(DeprecationWarning, match="op") as caught:
                result = function(tensor.clone(), average=average)
            assert caught[0].filename.endswith("ranks_operations.py")
            assert result.tolist() == [expected] * 2
    for function in (hvd.allreduce_async, hvd.allreduce_async_):
        with pytest.warns(DeprecationWarning, match="op"):
            handle = function(tensor.clone(), average=False)
        assert hvd.synchronize(handle).tolist() == [size] * 2
    with pytest.warns(DeprecationWarning, match="op"):
        assert hvd.grouped_allreduce([tensor], average=False)[0].tolist() == [size] * 2
    for function in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="op"):
            function(tensor, average=True, op=hvd.Sum)
    for function in (hvd.grouped_allreduce, hvd.grouped_allreduce_async_):
        with pytest.raises(ValueError, match="op"):
            function([tensor], average=False, op=hvd.Sum)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.allreduce(tensor, op=hvd.Sum)


@check
def factors_before_and_after(rank, size):
    for dtype in (torch.int32, torch.int64):
        tensor = torch.arange(-20, 20, dtype=dtype)
        before = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.3)
        same(before, torch.from_numpy(np.trunc(tensor.numpy() * 0.3)).to(dtype) * size)
        after = hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.3)
        same(after, torch.from_numpy(np.trunc(tensor.numpy() * size * 0.3)).to(dtype))
    for dtype in FLOATS:
        tensor = value(rank, dtype)
        total = reduced(hvd.Sum, [value(r, torch.float64) for r in range(size)])
        for function in (hvd.allreduce, hvd.allreduce_):
            found = function(tensor.clone(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=0.25)
            torch.testing.assert_close(found.double(), total * 0.125, rtol=1e-2, atol=0)
        found = hvd.synchronize(hvd.allreduce_async(tensor, prescale_factor=4.0))
        torch.testing.assert_close(found.double(), total * 4 / size, rtol=1e-2, atol=0)
    big = torch.full((4,), 60000.0, dtype=torch.float16)
    assert hvd.allreduce(big).tolist() == [60000.0] * 4
    rows = torch.full((size, 2), float(rank + 1))
    found = hvd.reducescatter(rows, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert found.tolist() == [[1.5 * sum(range(1, size + 1))] * 2]


@check
def adasum_of_parallel_and_orthogonal_vectors(rank, size):
    equal = torch.tensor([1.0, 2.0, 3.0])
    if size & (size - 1):
        with pytest.raises(NotImplementedError):
            hvd.allreduce(equal, op=hvd.Adasum)
    else:
        torch.testing.assert_close(hvd.allreduce(equal, op=hvd.Adasum), equal)
        own = torch.zeros(size)
        own[rank] = rank + 1.0
        torch.testing.assert_close(
            hvd.allreduce(own, op=hvd.Adasum), torch.arange(1, size + 1, dtype=torch.float32)
        )
    assert hvd.allreduce(equal).tolist() == equal.tolist()


@check
def in_place(rank, size):
    total = sum(range(1, size + 1))
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4) + 1
    for change in (
        lambda t: t,
        lambda t: t.transpose(0, 2),
        lambda t: t[:, ::2],
        lambda t: t[0, 0, 0],
        lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last),
    ):
        view = change(base * (rank + 1))
        assert hvd.allreduce_(view, op=hvd.Sum) is view
        same(view, change(base * total))
        view = change(base * (rank + 1))
        handle = hvd.allreduce_async_(view, op=hvd.Sum)
        assert hvd.synchronize(handle) is view
        same(view, change(base * total))
        view = change(base * (rank + 1))
        assert hvd.broadcast_(view, root_rank=size - 1) is view
        same(view, change(base * size))
    rows = torch.ones(4, 6) * (rank + 1)
    hvd.allreduce_(rows[:, 1], op=hvd.Sum)
    assert rows[:, 1].tolist() == [total] * 4
    assert rows[:, 0].tolist() == [rank + 1] * 4
    for dtype in (*FLOATS, *INTS, torch.bool, *COMPLEX):
        tensor = value(rank, dtype)
        hvd.allreduce_(tensor, op=hvd.Sum)
        same(tensor, reduced(hvd.Sum, [value(r, dtype) for r in range(size)]))
        tensor = value(rank, dtype)
        hvd.synchronize(hvd.broadcast_async_(tensor, 0))
        same(tensor, value(0, dtype))


@check
def in_place_on_a_parameter(rank, size):
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert hvd.broadcast_(weight, root_rank=size - 1) is weight
    assert weight.tolist() == [size - 1] * 3
    assert weight.requires_grad
    assert weight.is_leaf
    assert hvd.allreduce_(weight, op=hvd.Sum) is weight
    assert weight.tolist() == [(size - 1) * size] * 3
    (2 * weight).sum().backward()
    assert weight.grad.tolist() == [2] * 3


@check
def asynchronous_operations_are(rank, size):
    handles, seen = [], []
    for at in range(200):
        handle = hvd.allreduce_async(torch.full((500,), float(rank + at)), op=hvd.Sum)
        seen.append(hvd.poll(handle))
        handles.append(handle)
    assert len(set(handles)) == 200
    assert all(isinstance(handle, int) for handle in handles)
    assert not all(seen)
    for at, handle in enumerate(handles):
        assert hvd.synchronize(handle)[0] == sum(range(size)) + at * size
        assert hvd.poll(handle)
    assert hvd.synchronize(handles[0])[0] == sum(range(size))
    gathers = [hvd.allgather_async(torch.full((1, 50), rank)) for _ in range(50)]
    moves = [hvd.broadcast_async(torch.full((50,), rank), 0) for _ in range(50)]
    assert all(hvd.synchronize(one)[:, 0].tolist() == list(range(size)) for one in gathers)
    assert all(hvd.synchronize(one)[0] == 0 for one in moves)


@check
def polling_is_enough_to_get_done(rank, size):
    handles = [hvd.allreduce_async(torch.ones(5), name=f"polled{at}") for at in range(5)]
    handles.append(hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "polled", hvd.Sum))
    deadline = time.monotonic() + 60
    while not all(hvd.poll(handle) for handle in handles):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@check
def operations_without_their_handles_go_on(rank, size):
    tensor = torch.ones(100)
    hvd.allreduce_async_(tensor, op=hvd.Sum)
    hvd.broadcast_async(torch.ones(100), 0)
    del tensor
    hvd.barrier()
    kept = torch.ones(100)
    handle = hvd.allreduce_async_(kept, op=hvd.Sum)
    hvd.synchronize(handle)
    assert kept.tolist() == [size] * 100


@check
def results_have_memory_of_their_own(rank, size):
    tensor = torch.ones(size, 2)
    for function in (
        hvd.allreduce,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        lambda t: hvd.broadcast(t, 0),
        lambda t: hvd.grouped_allreduce([t])[0],
        lambda t: hvd.allreduce(t, compression=hvd.Compression.fp16),
        lambda t: hvd.synchronize(hvd.allreduce_async(t)),
        lambda t: hvd.synchronize(hvd.broadcast_async(t, 0)),
    ):
        result = function(tensor)
        assert result.is_contiguous()
        result.mul_(7)
        assert tensor.tolist() == [[1, 1]] * size


@check
def what_is_no_handle(rank, size):
    assert hvd.synchronize(10**9) is None
    assert hvd.synchronize(None) is None
    for wrong in (10**9, None, "x"):
        with pytest.raises(ValueError, match="poll"):
            hvd.poll(wrong)
    with pytest.raises(ValueError, match="synchronize"):
        hvd.synchronize("x")


@check
def tensors_of_asynchronous_operations_are_kept(rank, size):
    handles = [hvd.allreduce_async(torch.full((1000,), float(at))) for at in range(20)]
    _ = [torch.full((1000,), -1.0) for _ in range(20)]
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == list(range(20))


@check
def names_match_in_any_order(rank, size):
    order = np.random.default_rng(rank).permutation(300)
    handles = {at: hvd.allreduce_async(torch.tensor([at]), None, f"n{at}", hvd.Sum) for at in order}
    for at in np.random.default_rng(rank + 9).permutation(300):
        assert hvd.synchronize(handles[at]).item() == at * size


@check
def names_match_from_several_threads(rank, size):
    failed = []

    def work(thread):
        for at in range(20):
            result = hvd.allreduce(torch.tensor([thread + at]), name=f"{thread}.{at}", op=hvd.Sum)
            if result.item() != (thread + at) * size:
                failed.append((thread, at))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@check
def groups(rank, size):
    def tensors(rank):
        return [
            value(rank, torch.float32),
            value(rank, torch.int64, (7,)),
            value(rank, torch.float16, (2, 2, 2)),
            value(rank, torch.float32, (0, 3)),
        ]

    for op in (hvd.Sum, hvd.Max, hvd.Product):
        expected = [
            reduced(op, parts) for parts in zip(*(tensors(r) for r in range(size)), strict=True)
        ]
        mine = tensors(rank)
        found = hvd.grouped_allreduce(mine, op=op)
        assert isinstance(found, list)
        results = [found, hvd.synchronize(hvd.grouped_allreduce_async(tuple(mine), op=op))]
        same(mine[0], tensors(rank)[0])
        for function in (
            hvd.grouped_allreduce_,
            lambda ts, op: hvd.synchronize(hvd.grouped_allreduce_async_(ts, op=op)),
        ):
            mine = tensors(rank)
            results.append(function(mine, op=op))
            assert all(a is b for a, b in zip(results[-1], mine, strict=True))
        for result in results:
            for one, other in zip(result, expected, strict=True):
                same(one, other)
    same(hvd.grouped_allreduce([torch.tensor([float(rank)])], name="group")[0],
         torch.tensor([sum(range(size)) / size]))  # fmt: skip


@check
def a_group_of_many(rank, size):
    many = [torch.full((3,), float(at + rank)) for at in range(100)]
    found = hvd.grouped_allreduce(many, op=hvd.Sum)
    assert [one[0].item() for one in found] == [at * size + sum(range(size)) for at in range(100)]


@check
def allgathers(rank, size):
    for dtype in (*FLOATS, *INTS, *COMPLEX, torch.bool):
        for dims in (1, 2, 3):
            rows = [3, 0, 5, 1][:size]
            parts = [value(r, dtype, (rows[r], *[2] * (dims - 1))) for r in range(size)]
            expected = torch.cat(parts)
            same(hvd.allgather(parts[rank]), expected)
            same(hvd.synchronize(hvd.allgather_async(parts[rank], name="g")), expected)
    many = [torch.full((rank + 1, at), at + rank) for at in range(4)]
    expected = [
        torch.cat([torch.full((r + 1, at), at + r) for r in range(size)]) for at in range(4)
    ]
    for found in (hvd.grouped_allgather(many), hvd.synchronize(hvd.grouped_allgather_async(many))):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    strided = torch.arange(12).reshape(3, 4).t() + rank
    same(hvd.allgather(strided), torch.cat([strided - rank + r for r in range(size)]))
    assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4)


@check
def broadcasts(rank, size):
    for root in range(size):
        for dtype in (*FLOATS, *INTS, *COMPLEX, torch.bool):
            tensor = value(rank, dtype)
            same(hvd.broadcast(tensor, root), value(root, dtype))
            same(tensor, value(rank, dtype))
        found = hvd.broadcast_async(torch.full((2, 2), rank), root_rank=root, name="b")
        assert hvd.synchronize(found).tolist() == [[root] * 2] * 2
        assert hvd.broadcast(torch.tensor(float(rank)), root).item() == root
        assert hvd.broadcast(torch.empty(0), root).shape == (0,)
        column = torch.arange(6).reshape(2, 3)[:, 1] + rank
        same(hvd.broadcast(column, root), column - rank + root)


@check
def alltoalls(rank, size):
    for dtype in (*FLOATS, *INTS, *COMPLEX, torch.bool):
        for dims in (1, 2, 3):
            shape = (size * (rank + 1), *[2] * (dims - 1))
            sent = torch.repeat_interleave(torch.arange(size), rank + 1)
            tensor = sent.reshape(-1, *[1] * (dims - 1)).expand(shape).to(dtype)
            rows = sum(range(1, size + 1))
            expected = torch.full((rows, *shape[1:]), rank).to(dtype)
            same(hvd.alltoall(tensor), expected)
            for splits in ([rank + 1] * size, torch.full((size,), rank + 1, dtype=torch.int32)):
                found, received = hvd.alltoall(tensor, splits)
                same(found, expected)
                same(received, torch.arange(1, size + 1, dtype=torch.int32))
    # Rank r sends r rows to rank 0 only, and keeps some.
    splits = [rank, *[0] * (size - 1)]
    found, received = hvd.synchronize(
        hvd.alltoall_async(torch.full((rank + 2, 3), rank), splits=splits, name="uneven")
    )
    assert received.tolist() == (list(range(size)) if rank == 0 else [0] * size)
    assert found[:, 0].tolist() == [r for r in range(size) for _ in range(r) if rank == 0]
    both = hvd.synchronize(hvd.alltoall_async(torch.arange(2 * size) + 10 * rank))
    assert both[1].tolist() == [2] * size
    assert both[0].tolist() == [10 * r + 2 * rank + i for r in range(size) for i in (0, 1)]


@check
def reducescatters(rank, size):
    for dtype in (torch.int32, torch.int64, *FLOATS, torch.uint8, torch.complex64):
        for op in (hvd.Sum, hvd.Average):
            for rows in (size, size + 1, 3 * size - 1, 0, 1):
                parts = [value(r, dtype, (rows, 2)) for r in range(size)]
                whole = reduced(op, parts)
                small, extra = divmod(rows, size)
                start = rank * small + min(rank, extra)
                mine = whole[start : start + small + (rank < extra)]
                for found in (
                    hvd.reducescatter(parts[rank], op=op),
                    hvd.synchronize(hvd.reducescatter_async(parts[rank], name="rs", op=op)),
                ):
                    assert found.dtype == dtype
                    torch.testing.assert_close(found, mine)
    many = [torch.full((size, 2), rank), torch.full((2 * size,), float(rank))]
    for found in (
        hvd.grouped_reducescatter(many, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async(many, op=hvd.Sum)),
    ):
        same(found[0], torch.full((1, 2), sum(range(size))))
        same(found[1], torch.full((2,), float(sum(range(size)))))
    strided = torch.ones(3, size).t() * (rank + 1)
    assert hvd.reducescatter(strided, op=hvd.Sum).tolist() == [[sum(range(1, size + 1))] * 3]


@check
def sparse_tensors(rank, size):
    def dense(rank, dtype=torch.float32):
        numbers = np.random.default_rng(rank).integers(1, 9, (17, 10))
        numbers[np.random.default_rng(rank + 50).random((17, 10)) < 0.8] = 0
        return torch.from_numpy(numbers).to(dtype)

    mine = dense(rank).to_sparse()
    handles = [
        hvd.sparse_allreduce_async(mine, name="sparse.average", op=hvd.Average),
        hvd.sparse_allreduce_async(mine, "sparse.sum", hvd.Sum),
    ]
    average, total = handles[0](), hvd.synchronize(handles[1])
    assert hvd.poll(handles[0])
    assert average.is_sparse
    everyone = [dense(r) for r in range(size)]
    torch.testing.assert_close(average.to_dense(), sum(everyone) / size)
    same(total.to_dense(), sum(everyone))
    # Hybrid, not coalesced, of integers, and without entries on one rank.
    indices = torch.tensor([[0, 2, 0]] if rank else [[]], dtype=torch.int64).reshape(1, -1)
    rows = torch.full((indices.shape[1], 2), 3)
    hybrid = torch.sparse_coo_tensor(indices, rows, (4, 2), check_invariants=True)
    found = hvd.sparse_allreduce_async(hybrid, "hybrid", hvd.Sum)()
    assert found.to_dense()[:, 0].tolist() == [6 * (size - 1), 0, 3 * (size - 1), 0]
    found = hvd.sparse_allreduce_async(hybrid, "hybrid", hvd.Average)()
    entry = int(3 / size)
    assert found.to_dense()[:, 1].tolist() == [2 * entry * (size - 1), 0, entry * (size - 1), 0]
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([rank % 5, 4])).sum().backward()
    found = hvd.sparse_allreduce_async(embedding.weight.grad, "embedding", hvd.Sum)().to_dense()
    counts = [0] * 5
    for r in range(size):
        counts[r % 5] += 1
        counts[4] += 1
    assert found[:, 0].tolist() == counts


class Halving(hvd.Compressor):
    """Sends half of the first values of a tensor, and as float64."""

    calls = 0

    @staticmethod
    def compress(tensor):
        Halving.calls += 1
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        Halving.calls += 1
        return (tensor * 2).to(ctx)


class Finer(hvd.FP16Compressor):
    """Derived from a class that the engine has a codec for, but does something else."""

    @classmethod
    def compress(cls, tensor):
        return tensor.double(), tensor.dtype


@check
def compressions(rank, size):
    fine = 1 + 2**-14
    tensor = torch.full((5,), fine)
    for choice, expected in (
        (hvd.Compression.none, fine),
        ("none", fine),
        (hvd.Compression.fp16, 1.0),
        ("fp16", 1.0),
        (hvd.Compression.bf16, 1.0),
        (Halving, fine),
        (Halving(), fine),
        (Finer, fine),
    ):
        for dtype in (torch.float32, torch.float64):
            for found in (
                hvd.allreduce(tensor.to(dtype), compression=choice),
                hvd.grouped_allreduce([tensor.to(dtype)] * 2, compression=choice)[1],
                hvd.reducescatter(tensor.to(dtype).repeat(size), compression=choice),
                hvd.grouped_reducescatter([tensor.to(dtype).repeat(size)], None, choice)[0],
            ):
                same(found, torch.full((5,), expected, dtype=dtype))
        assert hvd.allreduce(torch.tensor([70001]), compression=choice).item() == 70001
    assert Halving.calls
    # The sum of what fits fits.
    total = hvd.allreduce(torch.full((4,), 60000.0), compression=hvd.Compression.fp16, op=hvd.Sum)
    torch.testing.assert_close(total, torch.full((4,), 60000.0 * size), rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="compression"):
        hvd.allreduce(tensor, compression="zip")
    with pytest.raises(ValueError, match="compression"):
        hvd.allreduce(tensor, compression=int)


@check
def compressors_by_themselves(rank, size):
    for dtype in (torch.float16, torch.float32, torch.float64, torch.bfloat16):
        for choice, wire in (
            (hvd.Compression.none, dtype),
            (hvd.Compression.fp16, torch.float16),
            (hvd.Compression.bf16, torch.bfloat16),
        ):
            sent, ctx = choice.compress(torch.full((3,), 2.0, dtype=dtype))
            assert sent.dtype == wire
            same(choice.decompress(sent, ctx), torch.full((3,), 2.0, dtype=dtype))
    whole = torch.arange(3)
    sent, ctx = hvd.Compression.fp16.compress(whole)
    assert sent is whole
    same(hvd.Compression.fp16.decompress(sent, ctx), whole)


@check
def other_frameworks_and_numbers(rank, size):
    total = sum(range(size))
    assert hvd.allreduce(np.full(3, float(rank)), op=hvd.Sum).tolist() == [total] * 3
    assert hvd.allreduce(float(rank), op=hvd.Sum) == total
    assert hvd.allgather(np.array([rank])).tolist() == list(range(size))


@check
def process_sets(rank, size):
    if size == 1:
        return
    even = hvd.add_process_set([r for r in range(size) if r % 2 == 0])
    odd = hvd.add_process_set(hvd.ProcessSet([r for r in range(size) if r % 2 == 1]))
    mine, members = (odd, odd.ranks) if rank % 2 else (even, even.ranks)
    count, at = mine.size(), mine.rank()
    total = sum(members)
    full = torch.full((2 * count,), float(rank))
    assert hvd.allreduce(full, process_set=mine)[0] == total / count
    assert hvd.allreduce_(full.clone(), op=hvd.Sum, process_set=mine)[0] == total
    assert hvd.grouped_allreduce([full], op=hvd.Max, process_set=mine)[0][0] == max(members)
    assert hvd.synchronize(hvd.allreduce_async(full, process_set=mine))[0] == total / count
    assert hvd.allgather(full[:1], process_set=mine).tolist() == members
    assert hvd.grouped_allgather([full[:1]], process_set=mine)[0].tolist() == members
    for root in members:
        assert hvd.broadcast(full, root, process_set=mine)[0] == root
        assert hvd.broadcast_(full.clone(), root, process_set=mine)[0] == root
    found, received = hvd.alltoall(full, [2] * count, process_set=mine)
    assert found.tolist() == [r for r in members for _ in (0, 1)]
    assert received.tolist() == [2] * count
    assert hvd.alltoall(full, process_set=mine).tolist() == found.tolist()
    assert hvd.reducescatter(full, op=hvd.Sum, process_set=mine).tolist() == [total] * 2
    assert hvd.grouped_reducescatter([full], process_set=mine)[0].tolist() == [total / count] * 2
    sparse = torch.eye(3).to_sparse() * (rank + 1)
    found = hvd.sparse_allreduce_async(sparse, "ps", hvd.Average, process_set=mine)()
    torch.testing.assert_close(found.to_dense(), torch.eye(3) * (total + count) / count)
    # With one or two members each set works, where all three ranks together do not.
    equal = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(hvd.allreduce(equal, op=hvd.Adasum, process_set=mine), equal)
    hvd.barrier(mine)
    # Gradients stay in the set.
    ranks_operations_grad.all_gradients(mine, members, at)
    with pytest.raises(ValueError, match="process set|not in|member"):
        hvd.allreduce(full, process_set=even if rank % 2 else odd)
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)
    assert hvd.remove_process_set(hvd.global_process_set) is False
    with pytest.raises(ValueError, match="set"):
        hvd.allreduce(full, process_set=mine)
    mean = hvd.allreduce(torch.tensor([float(rank)]), process_set=hvd.global_process_set)
    assert mean.item() == (size - 1) / 2


@check
def joins(rank, size):
    for first in range(min(size, 2)):
        name = f"joined{first}"
        tensors = [torch.full((5,), 6.0), torch.full((7,), 12)]
        if rank == first:
            last = hvd.join()
        else:
            handles = [
                hvd.allreduce_async(one, name=f"{name}.{at}") for at, one in enumerate(tensors)
            ]
            found = [hvd.synchronize(handle) for handle in handles]
            torch.testing.assert_close(found[0], torch.full((5,), 6.0 * (size - 1) / size))
            same(found[1], torch.full((7,), 12 * (size - 1) // size))
            for op in (hvd.Min, hvd.Max, hvd.Product):
                left = hvd.allreduce(torch.tensor([-2.0]), op=op, name=f"{name}.{op}")
                assert left.item() == ((-2.0) ** (size - 1) if op == hvd.Product else -2.0)
            for operation in (
                lambda n: hvd.allgather(torch.ones(2), name=n),
                lambda n: hvd.broadcast(torch.ones(2), size - 1, name=n),
                lambda n: hvd.alltoall(torch.ones(size), name=n),
                lambda n: hvd.reducescatter(torch.ones(size), name=n),
            ):
                with pytest.raises(hvd.HorovodInternalError, match="join"):
                    operation(f"{name}.not")
            last = hvd.join(0)
        if size > 1:
            assert last != first
        assert hvd.allgather_object(last) == [last] * size
    assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == size


@check
def timelines(rank, size):
    with tempfile.TemporaryDirectory() as folder:
        for mark in (False, True):
            path = Path(folder) / f"{mark}.json"
            hvd.start_timeline(path, mark_cycles=mark)
            with pytest.raises(ValueError, match="timeline"):
                hvd.start_timeline(path)
            hvd.allreduce(torch.ones(3), name="recorded")
            hvd.stop_timeline()
            with pytest.raises(ValueError, match="timeline"):
                hvd.stop_timeline()
            hvd.barrier()
            if rank == 0:
                text = path.read_text()
                assert json.loads(text)
                for word in ("recorded", "NEGOTIATE_ALLREDUCE", "start_time_since_epoch_in_micros"):
                    assert word in text, word
                assert ("CYCLE_START" in text) == mark


@check
def inside_a_compiled_function(rank, size):
    if size != 2:
        # Importing the compiler takes seconds.
        return

    def step(x):
        y = hvd.allreduce(x * 2, op=hvd.Sum, name="compiled") + 1
        hvd.allreduce_(y, op=hvd.Max)
        handle = hvd.broadcast_async(y, 0)
        return hvd.synchronize(handle) + hvd.allgather(x[:1]).sum()

    source = torch.full((3,), float(rank + 1), requires_grad=True)
    same(torch.compile(step, backend="eager")(source).detach(), step(source).detach())


@check
def where_and_what_this_is(rank, size):
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous() is True
    assert hvd.global_process_set.size() == size
    assert hvd.global_process_set.rank() == rank
    assert hvd.global_process_set.process_set_id == 0
    for probe in ("mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "ddl_built",
                  "ccl_built", "cuda_built", "rocm_built"):  # fmt: skip
        assert isinstance(getattr(hvd, probe)(), bool), probe
    assert isinstance(hvd.nccl_built(), int)
    if hvd.mpi_enabled():
        assert isinstance(hvd.mpi_threads_supported(), bool)
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


@check
def every_name_of_the_module_is_also_in_mpi_ops(rank, size):
    from ringplug.torch import mpi_ops

    for name in mpi_ops.__all__:
        assert getattr(mpi_ops, name) is getattr(hvd, name), name
    for name in hvd.__all__:
        assert hasattr(hvd, name), name


if __name__ == "__main__":
    hvd.init(process_sets="dynamic")
    torch.manual_seed(hvd.rank())
    run_checks(hvd.rank(), hvd.size())
