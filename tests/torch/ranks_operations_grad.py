"""Gradients through the named operations of ringplug.torch."""

from __future__ import annotations

import numpy as np
import torch

import ringplug.torch as hvd
from tests.checks import check


def weights(rank, shape):
    """What a rank's loss multiplies the result by: its gradient."""
    return torch.from_numpy(np.random.default_rng(rank).normal(size=shape))


def leaf(rank, shape):
    return torch.from_numpy(np.random.default_rng(rank + 100).normal(size=shape)).requires_grad_()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def gradient(function, source, weight):
    """The gradient of sum(weight * function(source)), and that it can be differentiated again."""
    result = function(source)
    assert result.requires_grad
    (found,) = torch.autograd.grad((result * weight).sum(), source, create_graph=True)
    return found


@check
def gradients_of_every_operation(rank, size):
    all_gradients(hvd.global_process_set, list(range(size)), rank)


def all_gradients(process_set, members, at):
    """Every operation on the members; `at` is this rank's place among them."""
    rank, size = hvd.rank(), len(members)

    def total(shape):
        return sum(weights(r, shape) for r in members)

    shape = (3, 2)
    for op, divisor in ((hvd.Average, size), (hvd.Sum, 1)):
        for name in (None, "named"):
            found = gradient(
                lambda x, op=op, name=name: hvd.allreduce(
                    x, None, name, op=op, prescale_factor=3.0, postscale_factor=0.5,
                    process_set=process_set,
                ),
                leaf(rank, shape),
                weights(rank, shape),
            )  # fmt: skip
            close(found, total(shape) * 1.5 / divisor)
    for op, fold in ((hvd.Min, np.minimum), (hvd.Max, np.maximum), (hvd.Product, np.multiply)):
        found = gradient(
            lambda x, op=op: hvd.allreduce(x, op=op, process_set=process_set),
            leaf(rank, shape),
            weights(rank, shape),
        )
        close(found, torch.from_numpy(fold.reduce([weights(r, shape).numpy() for r in members])))

    rows = [3, 1, 0, 2]
    whole = (sum(rows[r % 4] for r in members), 2)
    start = sum(rows[r % 4] for r in members[:at])
    found = gradient(
        lambda x: hvd.allgather(x, process_set=process_set),
        leaf(rank, (rows[rank % 4], 2)),
        weights(rank, whole),
    )
    close(found, (total(whole) / size)[start : start + rows[rank % 4]])

    for root in members:
        found = gradient(
            lambda x, root=root: hvd.broadcast(x, root, process_set=process_set),
            leaf(rank, shape),
            weights(rank, shape),
        )
        close(found, total(shape) / size if rank == root else torch.zeros(shape).double())

    # Rank number i of the set sends i + 1 rows to each.
    source = leaf(rank, (size * (at + 1), 2))
    received = sum(range(1, size + 1))
    for splits in ([at + 1] * size, None):

        def exchange(x, splits=splits):
            out = hvd.alltoall(x, splits, process_set=process_set)
            return out if splits is None else out[0]

        found = gradient(exchange, source, weights(rank, (received, 2)))
        before = sum(range(1, at + 1))
        close(
            found,
            torch.cat([weights(r, (received, 2))[before : before + at + 1] for r in members]),
        )

    shape = (2 * size + 1, 2)
    shares = [(3 if place == 0 else 2, 2) for place in range(size)]
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        found = gradient(
            lambda x, op=op: hvd.reducescatter(
                x, op=op, prescale_factor=3.0, postscale_factor=0.5, process_set=process_set
            ),
            leaf(rank, shape),
            weights(rank, shares[at]),
        )
        expected = torch.cat([weights(r, share) for r, share in zip(members, shares, strict=True)])
        close(found, expected * 1.5 * factor)


@check
def gradients_are_of_this_ranks_own_loss_and_only_its_own(rank, size):
    # The weight that multiplies is left alone: Horovod's rule for a sum scales nothing in place.
    weight = torch.ones(size + 1, dtype=torch.float64)
    mine = hvd.reducescatter(torch.ones(size * (size + 1)).double().requires_grad_(), op=hvd.Sum)
    mine.backward(weight)
    assert weight.tolist() == [1] * (size + 1)


@check
def gradients_of_groups(rank, size):
    shapes = [(2, 3), (4,), ()]
    sources = [leaf(rank, shape) for shape in shapes]
    whole = torch.arange(3)
    results = hvd.grouped_allreduce([*sources, whole], op=hvd.Sum, name="group.grad")
    assert not results[3].requires_grad
    assert results[3].tolist() == [0, size, 2 * size]
    for result, source in zip(results, sources, strict=False):
        # One by one, as Horovod allows; the others then get zeros.
        result.backward(torch.ones_like(result), retain_graph=True)
        assert torch.equal(source.grad, torch.full_like(source, size))
    plain = torch.ones(2)
    results = hvd.grouped_allreduce([leaf(rank, (2,)), plain])
    results[0].sum().backward()
    assert plain.grad is None

    sources = [leaf(rank, (rank + 1, 2)), leaf(rank, (2,))]
    for result in hvd.grouped_allgather(sources):
        result.backward(torch.full_like(result, float(rank)))
    for source in sources:
        close(source.grad, torch.full_like(source, sum(range(size)) / size))

    sources = [leaf(rank, (2 * size, 2)), leaf(rank, (size + 1,))]
    results = hvd.grouped_reducescatter(sources, op=hvd.Sum, prescale_factor=0.5)
    sum(result.sum() for result in results).backward()
    for source in sources:
        close(source.grad, torch.full_like(source, size * 0.5))


@check
def gradients_of_gradients(rank, size):
    source = leaf(rank, (4,))
    mean = hvd.allreduce(source**2)
    (first,) = torch.autograd.grad(mean.sum(), source, create_graph=True)
    close(first, 2 * source)
    # d/dx of the mean over ranks of sum(2x): 2, averaged again.
    (second,) = torch.autograd.grad(hvd.allreduce(first, op=hvd.Sum).sum(), source)
    close(second, torch.full((4,), 2.0 * size).double())
    source = leaf(rank, (1, 2))
    (first,) = torch.autograd.grad(hvd.allgather(source**3).sum(), source, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), source)
    close(second, 6 * source.detach())


@check
def gradients_of_other_dtypes(rank, size):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        source = torch.ones(3, dtype=dtype, requires_grad=True)
        hvd.allreduce(source, op=hvd.Sum).backward(torch.full((3,), rank + 1, dtype=dtype))
        assert source.grad.dtype == dtype
        assert source.grad.tolist() == [sum(range(1, size + 1))] * 3
    images = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    hvd.allreduce(images, op=hvd.Sum).sum().backward()
    assert torch.equal(images.grad, torch.full_like(images, size))
    empty = torch.ones(0, 3, requires_grad=True)
    hvd.allgather(empty).sum().backward()
    assert empty.grad.shape == (0, 3)


class Doubling(hvd.Compressor):
    """Differentiable, as the values' way into the collective and out of it."""

    @staticmethod
    def compress(tensor):
        return 2 * tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return 3 * tensor


@check
def gradients_through_compression(rank, size):
    fine = 1 + 2**-14
    for compression, expected in (
        (hvd.Compression.none, fine),
        (hvd.Compression.fp16, 1.0),
        (hvd.Compression.bf16, 1.0),
        (Doubling, 6 * fine),
    ):
        source = torch.ones(3, requires_grad=True)
        hvd.allreduce(source, compression=compression).backward(torch.full((3,), fine))
        assert source.grad.tolist() == [expected] * 3
        many = [torch.ones(3, requires_grad=True) for _ in range(2)]
        results = hvd.grouped_allreduce(many, compression=compression)
        sum(result @ torch.full((3,), fine) for result in results).backward()
        assert many[1].grad.tolist() == [expected] * 3


@check
def nothing_is_recorded_without_need(rank, size):
    source = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(source).requires_grad
    assert not hvd.allreduce(torch.ones(3)).requires_grad
    for started in (
        hvd.allreduce_async(source),
        hvd.allgather_async(source),
        hvd.broadcast_async(source, 0),
        hvd.reducescatter_async(torch.ones(size, requires_grad=True)),
    ):
        assert not hvd.synchronize(started).requires_grad


@check
def a_network_trains_as_one_process_would(rank, size):
    # Activations go through allgather and reducescatter, parameters' gradients are averaged.
    torch.manual_seed(0)
    first = torch.randn(4, 6, dtype=torch.float64)
    inputs = torch.randn(2 * size, 4, dtype=torch.float64)
    mine = first.clone().requires_grad_()
    hidden = hvd.allgather(torch.tanh(inputs[2 * rank : 2 * rank + 2] @ mine))
    (hidden**2).mean().backward()
    hvd.allreduce_(mine.grad, op=hvd.Sum)
    alone = first.clone().requires_grad_()
    (torch.tanh(inputs @ alone) ** 2).mean().backward()
    close(mine.grad, alone.grad)
