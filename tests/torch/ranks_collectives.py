"""Every collective of torch.distributed on the backend ring."""

from __future__ import annotations

import datetime
import gc
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

import ringplug.torch  # noqa: F401
from ringplug.backend.errors import MismatchError, RingplugError, UnavailableError, UsageError
from tests.checks import check, run_checks

warnings.filterwarnings("ignore")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)


def values(rank, dtype, shape=(3, 5)):
    """Small numbers that every dtype holds exactly, and whose sums and products it holds too."""
    count = int(np.prod(shape))
    numbers = (torch.arange(count) + rank) % 3 + 1
    if dtype is torch.bool:
        return (numbers > 1).reshape(shape)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers * rank).double()).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def expected(op, dtype, size, shape=(3, 5)):
    parts = [values(rank, dtype, shape) for rank in range(size)]
    if dtype is torch.bool:
        stack = torch.stack(parts)
        both = {ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR}
        return stack.any(0) if op in both else stack.all(0)
    total = parts[0].clone()
    for part in parts[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            total = total + part
        elif op == ReduceOp.PRODUCT:
            total = total * part
        elif op == ReduceOp.MIN:
            total = torch.minimum(total, part)
        elif op == ReduceOp.MAX:
            total = torch.maximum(total, part)
        else:
            fold = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or}
            total = fold.get(op, torch.bitwise_xor)(total, part)
    if op == ReduceOp.AVG:
        exact = dtype.is_floating_point or dtype.is_complex
        total = total / size if exact else torch.div(total, size, rounding_mode="trunc")
    return total.to(dtype)


@check
def allreduce_of_every_dtype_and_op(rank, size):
    plain = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
    bits = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    cases = [(dtype, op) for dtype in FLOATS for op in plain]
    cases += [(dtype, op) for dtype in INTS for op in (*plain, *bits)]
    cases += [(dtype, op) for dtype in COMPLEX for op in plain[:3]]
    cases += [(torch.bool, op) for op in (*plain[:1], *plain[2:], *bits[:2])]
    for dtype, op in cases:
        tensor = values(rank, dtype)
        # Below the Python wrapper, which would turn complex into real.
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.asyncOp = False
        dist.group.WORLD.allreduce([tensor], options).wait()
        torch.testing.assert_close(tensor, expected(op, dtype, size), msg=f"{dtype} {op}")


@check
def allreduce_of_every_memory_layout(rank, size):
    total = sum(range(1, size + 1))
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4) + 1
    for change in (
        lambda t: t,
        lambda t: t.transpose(0, 2),
        lambda t: t[:, ::2],
        lambda t: t[0, 0, 0],
        lambda t: t[:0],
        lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last),
    ):
        storage = base * (rank + 1)
        view = change(storage)
        dist.all_reduce(view)
        torch.testing.assert_close(view, change(base * total))
    rows = torch.ones(4, 6) * (rank + 1)
    dist.all_reduce(rows[:, 1])
    assert rows[:, 1].tolist() == [total] * 4
    assert rows[:, 0].tolist() == [rank + 1] * 4
    conj = torch.complex(torch.ones(3), torch.ones(3) * (rank + 1)).conj()
    dist.group.WORLD.allreduce([conj]).wait()
    torch.testing.assert_close(conj, torch.complex(torch.ones(3) * size, -torch.ones(3) * total))


@check
def premultiplied_sums(rank, size):
    total = sum(range(1, size + 1))
    for factor in (0.5, torch.tensor([0.5])):
        tensor = torch.ones(4) * (rank + 1)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        assert tensor.tolist() == [0.5 * total] * 4
    source = torch.ones(size * 2) * (rank + 1)
    target = torch.empty(2)
    dist.reduce_scatter_tensor(target, source, dist._make_nccl_premul_sum(0.5))
    assert target.tolist() == [0.5 * total] * 2
    assert source[0] == rank + 1


@check
def half_precision_sums_do_not_overflow(rank, size):
    tensor = torch.full((4,), 60000.0, dtype=torch.float16)
    dist.all_reduce(tensor, ReduceOp.AVG)
    assert tensor.tolist() == [60000.0] * 4


@check
def broadcasts(rank, size):
    for dtype in (*FLOATS, *INTS, *COMPLEX, torch.bool, torch.float8_e4m3fn):
        tensor = (
            values(rank, torch.float32).to(dtype) if "8_e" in str(dtype) else values(rank, dtype)
        )
        dist.broadcast(tensor, src=size - 1)
        wanted = (
            values(size - 1, torch.float32).to(dtype)
            if "8_e" in str(dtype)
            else values(size - 1, dtype)
        )
        assert torch.equal(
            tensor.float() if "8_e" in str(dtype) else tensor,
            wanted.float() if "8_e" in str(dtype) else wanted,
        )
    strided = torch.full((3, 4), float(rank))[:, 1:3]
    dist.broadcast(strided, src=1)
    assert strided.tolist() == [[1.0, 1.0]] * 3


@check
def gathers(rank, size):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        outputs = [torch.empty(3, 5, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, values(rank, dtype))
        for other, output in enumerate(outputs):
            assert torch.equal(output, values(other, dtype))
    uneven = [torch.empty(other + 1) for other in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [output.tolist() for output in uneven] == [[float(r)] * (r + 1) for r in range(size)]
    together = torch.empty(size * 2, 3)
    dist.all_gather_into_tensor(together, torch.full((2, 3), float(rank)))
    assert together[:, 0].tolist() == [float(r) for r in range(size) for _ in range(2)]
    inside = torch.zeros(size, 2)
    inside[rank] = rank + 1
    dist.all_gather_into_tensor(inside.view(-1), inside[rank])
    assert inside[:, 0].tolist() == [r + 1.0 for r in range(size)]
    on_root = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.full((2,), float(rank)), on_root, dst=1)
    if rank == 1:
        assert [t[0].item() for t in on_root] == list(range(size))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]


@check
def scatters(rank, size):
    total = sum(range(1, size + 1))
    outputs = torch.empty(rank + 1)
    inputs = [torch.full((other + 1,), float((rank + 1) * other)) for other in range(size)]
    dist.reduce_scatter(outputs, inputs)
    assert outputs.tolist() == [float(total * rank)] * (rank + 1)
    single = torch.empty(2)
    dist.reduce_scatter_tensor(single, torch.arange(size * 2).float() * (rank + 1), ReduceOp.AVG)
    torch.testing.assert_close(single, torch.arange(2 * rank, 2 * rank + 2) * total / size)
    whole = torch.ones(size, 2) * (rank + 1)
    dist.reduce_scatter_tensor(whole[rank], whole.view(-1))
    assert whole[rank].tolist() == [total] * 2
    got = torch.empty(2)
    parts = [torch.full((2,), float(other)) for other in range(size)] if rank == 0 else None
    dist.scatter(got, parts, src=0)
    assert got.tolist() == [float(rank)] * 2
    reduced = torch.full((3,), float(rank + 1))
    dist.reduce(reduced, dst=1)
    assert reduced.tolist() == [float(total if rank == 1 else rank + 1)] * 3


@check
def exchanges(rank, size):
    target = torch.empty(size * 2)
    dist.all_to_all_single(target, torch.arange(size * 2) * 1.0 + 100 * rank)
    wanted = [100.0 * other + 2 * rank + i for other in range(size) for i in range(2)]
    assert target.tolist() == wanted
    # Rank a sends b + 1 rows to rank b.
    send = [other + 1 for other in range(size)]
    source = torch.cat([torch.full((n, 3), 10.0 * rank + b) for b, n in enumerate(send)])
    target = torch.empty((rank + 1) * size, 3)
    dist.all_to_all_single(target, source, [rank + 1] * size, send)
    assert target[:: rank + 1, 0].tolist() == [10.0 * other + rank for other in range(size)]
    outputs = [torch.empty(other + rank) for other in range(size)]
    dist.all_to_all(outputs, [torch.full((rank + other,), float(rank)) for other in range(size)])
    assert [o.tolist() for o in outputs] == [[float(r)] * (r + rank) for r in range(size)]
    sizes = [2 if rank == 0 else 1] * size
    with pytest.raises(MismatchError, match="elements to rank"):
        dist.all_to_all_single(torch.empty(sum(sizes)), torch.empty(size), sizes, [1] * size)


@check
def coalesced(rank, size):
    total = sum(range(1, size + 1))
    tensors = [
        torch.full((n,), float(rank + 1), dtype=d)
        for n, d in ((1, torch.float32), (4, torch.float64), (0, torch.float32), (3, torch.float32))
    ]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(tensor.tolist() == [total] * tensor.numel() for tensor in tensors)
    outputs = [torch.empty(size), torch.empty(size * 2)]
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outputs[0], torch.full((1,), float(rank)))
        dist.all_gather_into_tensor(outputs[1], torch.full((2,), float(rank)))
    manager.wait()
    assert outputs[0].tolist() == list(range(size))
    pieces = [torch.empty(1), torch.empty(2)]
    with _coalescing_manager(device=torch.device("cpu")):
        dist.reduce_scatter_tensor(pieces[0], torch.ones(size))
        dist.reduce_scatter_tensor(pieces[1], torch.ones(size * 2))
    assert pieces[0].tolist() + pieces[1].tolist() == [size] * 3
    lists = [[torch.empty(1), torch.empty(2)] for _ in range(size)]
    dist.group.WORLD.allgather_coalesced(
        lists, [torch.full((1,), float(rank)), torch.full((2,), -float(rank))]
    ).wait()
    assert [row[1].tolist() for row in lists] == [[-float(r)] * 2 for r in range(size)]


@check
def sparse_sums(rank, size):
    indices = torch.tensor([[0, 2, rank % 2 + 3]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(3, 2) * (rank + 1), (5, 2))
    if rank == 1:
        sparse = torch.sparse_coo_tensor(indices[:, :0], torch.ones(0, 2), (5, 2))
    dense = sparse.to_dense()
    dist.all_reduce(dense)
    dist.all_reduce(sparse)
    torch.testing.assert_close(sparse.to_dense(), dense)
    assert sparse.is_coalesced()
    with pytest.raises(UsageError, match="sparse"):
        dist.all_reduce(sparse, ReduceOp.MAX)


@check
def both_generations_of_method_names(rank, size):
    group = dist.group.WORLD
    for old, new in (
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("alltoall_base", "all_to_all_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ):
        assert getattr(type(group), old) is getattr(type(group), new)
    output = torch.empty(size)
    group._allgather_base(output, torch.full((1,), float(rank))).wait()
    assert output.tolist() == list(range(size))
    assert (dist.get_backend(), group.name(), group.rank(), group.size()) == (
        "ring",
        "ring",
        rank,
        size,
    )


@check
def values_in_inference_mode(rank, size):
    # Inference tensors may not be written by a thread that is not in inference mode.
    with torch.inference_mode():
        tensor = torch.ones(3, 2).t() * (rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.sum() == 6 * sum(range(1, size + 1))
        outputs = [torch.zeros(2, 3).t() for _ in range(size)]
        dist.all_gather(outputs, tensor.new_full((3, 2), float(rank)), async_op=True).wait()
        assert [o[0, 0].item() for o in outputs] == list(range(size))
        sparse = torch.sparse_coo_tensor([[rank]], torch.ones(1), (size,))
        dist.all_reduce(sparse, async_op=True).wait()
        assert sparse.to_dense().tolist() == [1.0] * size


@check
def futures_and_nested_operations(rank, size):
    first = torch.ones(2)
    nested = []

    def then(future):
        # As PowerSGD does: a collective from the callback of another one.
        second = future.value()[0] * 10
        dist.all_reduce(second)
        nested.append(second)
        return second

    future = dist.all_reduce(first, async_op=True).get_future().then(then)
    later = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(5)]
    assert future.wait().tolist() == [10.0 * size * size] * 2
    assert all(work.wait() for work in later)
    assert later[0].is_completed()
    assert later[0].result()[0].item() == size


@check
def differences_are_shown_on_all_ranks(rank, size):
    for wrong in (
        lambda: dist.all_reduce(torch.ones(2 + rank)),
        lambda: dist.all_reduce(torch.ones(2, dtype=FLOATS[2 + rank % 2])),
        lambda: dist.all_reduce(torch.ones(2), ReduceOp.MAX if rank else ReduceOp.SUM),
        lambda: dist.broadcast(torch.ones(2), src=min(rank, 1)),
        lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(1)),
    ):
        with pytest.raises(MismatchError, match=r"(?s)ranks? 0.*: .*ranks? 1.*: "):
            wrong()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


@check
def one_rank_with_wrong_arguments(rank, size):
    error = UsageError if rank == 0 else MismatchError
    for wrong in (
        lambda: dist.all_gather_into_tensor(torch.empty(size + (rank == 0)), torch.ones(1)),
        lambda: (
            dist.all_gather(
                [torch.empty(1, dtype=torch.int32 if rank == 0 else torch.float32)] * size,
                torch.ones(1, dtype=torch.float32),
            )
            if rank
            else dist.group.WORLD.allgather([[torch.empty(1)]], [torch.ones(2)]).wait()
        ),
    ):
        with pytest.raises(error):
            wrong()
    work = dist.all_reduce(torch.ones(1, dtype=torch.bool), ReduceOp.AVG, async_op=True)
    with pytest.raises(UsageError, match="truth value"):
        work.wait()
    with pytest.raises(RuntimeError, match="truth value"):
        work.get_future().wait()
    assert isinstance(work.exception(), UsageError)
    assert not work.is_success()
    dist.barrier()


@check
def other_devices_are_refused(rank, size):
    with pytest.raises(UnavailableError, match=r"shared_memory.*hierarchical"):
        dist.all_reduce(torch.ones(1, device="meta"))
    with pytest.raises(UnavailableError, match="nccl"):
        dist.send(torch.ones(1, device="meta"), (rank + 1) % size)
    dist.barrier()


@check
def messages(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 3, 2000, 3_000_000):
        sent = torch.arange(count, dtype=torch.float32) + rank
        got = torch.empty(count)
        # Everyone sends first: a send must not wait for its receive.
        works = [dist.isend(sent, right), dist.irecv(got, left)]
        for work in works:
            work.wait()
        torch.testing.assert_close(got, torch.arange(count, dtype=torch.float32) + left)
    if rank == 0:
        dist.send(torch.tensor([1.0]), 1, tag=1)
        dist.send(torch.tensor([2]), 1, tag=2)
        dist.send(torch.ones(4, 4).t()[:, 1], 1)
        for _ in range(1, size):
            box = torch.empty(2)
            source = dist.recv(box)
            assert box.tolist() == [source] * 2
    else:
        if rank == 1:
            second, first, third = torch.tensor([0]), torch.tensor([0.0]), torch.empty(8)[::2]
            dist.recv(second, 0, tag=2)
            dist.recv(first, 0, tag=1)
            dist.recv(third, 0)
            assert (first.item(), second.item(), third.tolist()) == (1.0, 2, [1.0] * 4)
        dist.send(torch.full((2,), float(rank)), 0)
    # What comes now must not be taken for the messages that rank 0 takes from anyone.
    dist.barrier()
    ops = [
        dist.P2POp(dist.irecv, torch.empty(2), left),
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), right),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert ops[0].tensor.tolist() == [left] * 2
    # A large message goes on while its sender is in a collective, and its receiver too.
    big, got = torch.full((3_000_000,), float(rank)), torch.empty(3_000_000)
    sending = dist.isend(big, right)
    receiving = dist.irecv(got, left)
    dist.barrier()
    receiving.wait()
    sending.wait()
    assert got[-1] == left
    self_got = torch.empty(3)
    dist.isend(torch.ones(3), rank).wait()
    dist.irecv(self_got, rank).wait()
    assert self_got.tolist() == [1.0] * 3


@check
def messages_that_do_not_fit(rank, size):
    for count in (3, 5000):
        if rank == 0:
            dist.send(torch.ones(count), 1)
        elif rank == 1:
            with pytest.raises(MismatchError, match=rf"rank 0 sent float32\[{count}\], got int64"):
                dist.recv(torch.empty(count, dtype=torch.int64), 0)
    dist.barrier()


@check
def subgroups(rank, size):
    evens = dist.new_group(list(range(0, size, 2)))
    if rank % 2 == 0:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=evens)
        assert tensor.item() == len(range(0, size, 2))
        assert dist.get_rank(evens) == rank // 2
    pair = dist.new_group([1, 0], timeout=datetime.timedelta(seconds=20))
    if rank < 2:
        tensor = torch.full((1,), float(rank))
        dist.broadcast(tensor, src=1, group=pair)
        assert tensor.item() == 1.0
        assert pair.lane.transport._config.timeout == 20
        got = torch.empty(1)
        work = dist.isend(torch.full((1,), float(rank)), 1 - rank, group=pair)
        dist.recv(got, 1 - rank, group=pair)
        work.wait()
        assert got.item() == 1 - rank
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=gloo)
    assert tensor.item() == size
    if rank < 2:
        dist.destroy_process_group(pair)
    dist.barrier()


@check
def messages_that_never_come(rank, size):
    group = dist.new_group()
    work = dist.irecv(torch.empty(1), (rank + 1) % size, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(RingplugError, match=r"destroyed|shut down|left"):
        work.wait()
    dist.barrier()


@check
def destroyed_and_made_again_without_leaks(rank, size):
    def held():
        segments = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line
        ]
        return len(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir())), len(segments)

    counts = []
    for _ in range(12):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("ring")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, async_op=True).wait()
        got = torch.empty(1)
        work = dist.isend(tensor, (rank + 1) % size)
        dist.recv(got, (rank - 1) % size)
        work.wait()
        assert (tensor.item(), got.item()) == (size, size)
        del tensor, got, work
        gc.collect()
        counts.append(held())
    # The first rounds fill caches of the libraries below.
    assert counts[-1][0] <= counts[4][0], counts
    assert counts[-1][1] <= counts[4][1] + 2, counts
    assert counts[-1][2] <= counts[4][2], counts


dist.init_process_group("ring")
run_checks(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
