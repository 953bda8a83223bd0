"""DistributedOptimizer's arguments, against one process with all ranks' data."""

from __future__ import annotations

import copy
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ringplug.torch as hvd
from ringplug.backend import runtime
from tests.checks import check, run_checks

warnings.filterwarnings("ignore", message=".*lr_scheduler.*", category=DeprecationWarning)
ROWS = 24


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def data(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 3, generator=generator)


def backward(model, step, rank=0, size=1):
    x, y = data(step)
    loss = F.mse_loss(model(x[rank::size]), y[rank::size])
    loss.backward()
    return loss


def train(model, optimizer, rank=0, size=1, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, rank, size)
        optimizer.step()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-3)


def same(model, reference, atol=1e-6):
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), atol=atol, rtol=1e-5)


def equal_on_all_ranks(model):
    flat = torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])
    assert all(torch.equal(one, flat) for one in hvd.allgather_object(flat))


def reference_of_training(steps=3):
    reference = network()
    train(reference, sgd(reference), steps=steps)
    return reference


@check
def arguments_that_do_not_change_results(rank, size):
    reference = reference_of_training()
    layers = lambda model: [list(model[0].parameters()), [model[2].weight, model[4].bias]]
    for arguments in (
        lambda model: {"groups": 2},
        lambda model: {"groups": 100},
        lambda model: {"groups": layers(model)},
        lambda model: {"groups": [*layers(model), [nn.Parameter(torch.ones(1))], []]},
        lambda model: {"gradient_predivide_factor": 3.0},
        lambda model: {"gradient_predivide_factor": float(size), "groups": layers(model)},
        lambda model: {"compression": hvd.Compression.none},
        lambda model: {"process_set": hvd.global_process_set},
        lambda model: {"process_set": None, "op": 0},
    ):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(model), named_parameters=model.named_parameters(), **arguments(model)
        )
        train(model, optimizer, rank, size)
        same(model, reference)
        equal_on_all_ranks(model)


@check
def groups_are_neighbours_in_the_plan(rank, size):
    from ringplug.torch.parameters import in_plan_order

    model = network()
    order = in_plan_order(list(model.named_parameters()), [[model[0].weight, model[4].weight]])
    names = [name for name, _ in order]
    assert names == [
        "4.bias", "2.bias", "2.weight", "0.bias", "4.weight", "0.weight",
    ]  # fmt: skip


@check
def num_groups_is_deprecated(rank, size):
    model = network()
    with pytest.warns(DeprecationWarning, match="groups"):
        hvd.DistributedOptimizer(sgd(model), num_groups=2)


@check
def errors_have_horovods_types(rank, size):
    model = network()
    named = list(model.named_parameters())
    weight = model[0].weight
    make = lambda: sgd(model)
    for arguments in (
        {"named_parameters": list(model.parameters())},
        {"named_parameters": [*named, ("0.weight", nn.Parameter(torch.ones(1)))]},
        {"named_parameters": named[1:]},
        {"groups": -1},
        {"groups": 0},
        {"groups": "two"},
        {"groups": [["weight"]]},
        {"groups": [[weight], [weight]]},
        {"backward_passes_per_step": 0},
        {"backward_passes_per_step": -1},
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"gradient_predivide_factor": 0.0},
        {"op": 17},
        {"compression": "zip"},
    ):
        plain = make()
        with pytest.raises(ValueError, match="."):
            hvd.DistributedOptimizer(plain, **arguments)
        assert type(plain) is torch.optim.SGD
    optimizer = hvd.DistributedOptimizer(make())
    for call in (
        lambda: hvd.DistributedOptimizer(optimizer),
        lambda: optimizer.set_backward_passes_per_step(0),
    ):
        with pytest.raises(ValueError, match="."):
            call()


@check
def attributes_and_names(rank, size):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, 0.1), backward_passes_per_step=3, op=hvd.Sum
    )
    names = set(optimizer._parameter_names.values())
    assert len(names) == 4
    assert all(other == names for other in hvd.allgather_object(names))
    assert optimizer.backward_passes_per_step == 3
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    assert optimizer.op == hvd.Sum
    assert optimizer.gradient_predivide_factor == 1.0
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD


@check
def reductions(rank, size):
    expected = {
        hvd.Sum: sum(r + 1.0 for r in range(size)),
        hvd.Average: sum(r + 1.0 for r in range(size)) / size,
        hvd.Min: 1.0,
        hvd.Max: float(size),
        hvd.Product: float(torch.tensor([r + 1.0 for r in range(size)]).prod()),
    }
    for op, value in expected.items():
        layer = nn.Linear(1, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1), op=op)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.full((1, 1), rank + 1.0)).sum().backward()
            assert layer.weight.grad.item() == pytest.approx(value)
            optimizer.step()


@check
def sums_with_losses_that_share_no_parameters(rank, size):
    # Legal in Horovod: each gradient is computed once in the step.
    parts = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parts.parameters(), 0.1), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        for part in parts[:2]:
            part(torch.ones(1, 1)).sum().backward()
        assert [part.weight.grad.item() for part in parts[:2]] == [size] * 2
        optimizer.step()
        assert parts[2].weight.grad is None
    if size > 1:
        with pytest.raises(AssertionError, match="reduced already in this step"):
            for _ in range(2):
                parts[0](torch.ones(1, 1)).sum().backward()


@check
def more_passes_than_announced_are_reduced(rank, size):
    for passes in (1, 2, 3):
        reference, model = network(), network()
        plain = sgd(reference)
        optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=passes)
        for _ in range(2):
            plain.zero_grad()
            optimizer.zero_grad()
            for step in range(5):
                backward(reference, step)
                backward(model, step, rank, size)
            plain.step()
            optimizer.step()
        same(model, reference)
        equal_on_all_ranks(model)


@check
def synchronize_then_step_warns(rank, size):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    optimizer.zero_grad()
    backward(model, 0, rank, size)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    (warning,) = seen
    assert warning.category is UserWarning
    text = "optimizer.step() called without optimizer.skip_synchronize()"
    assert text in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, 0, rank, size)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.step()
        optimizer.synchronize()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()


@check
def all_of_torchs_optimizers(rank, size):
    kinds = [
        kind
        for kind in torch.optim.Optimizer.__subclasses__()
        if kind.__module__.startswith("torch.optim")
        and kind.__name__ not in ("LBFGS", "SparseAdam", "Muon")
    ]
    assert len(kinds) >= 10
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        reference, model = network(), network()
        plain = kind(reference.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), lr=0.01), model.named_parameters()
        )
        train(reference, plain)
        train(model, optimizer, rank, size)
        equal_on_all_ranks(model)
        if kind.__name__ != "Rprop":  # looks at signs of gradients that are nearly 0
            same(model, reference, atol=1e-4)


@check
def forced_reduction_with_other_graphs(rank, size):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x):
            first = self.fc2(F.relu(self.fc1(x)))
            return first, self.fc3(F.relu(first))

    torch.manual_seed(0)
    model = Net()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    x, y = data(0)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(x)
        F.mse_loss(outputs[0 if rank == 0 else 1], y).backward()
        optimizer.step()
    equal_on_all_ranks(model)
    optimizer.zero_grad()
    if rank == 0:
        F.mse_loss(model(x)[0], y).backward()
    optimizer.step()
    equal_on_all_ranks(model)


@check
def gradients_turned_on_and_off(rank, size):
    gen, disc = nn.Linear(2, 3), nn.Linear(3, 1)
    hvd.broadcast_parameters(gen.state_dict(), 0)
    hvd.broadcast_parameters(disc.state_dict(), 0)
    gen_opt = hvd.DistributedOptimizer(sgd(gen), gen.named_parameters())
    disc_opt = hvd.DistributedOptimizer(sgd(disc), disc.named_parameters())
    for step in range(6):
        train_gen = step % 2 == 0
        for parameter in gen.parameters():
            parameter.requires_grad_(train_gen)
        for parameter in disc.parameters():
            parameter.requires_grad_(not train_gen)
        gen_opt.zero_grad()
        disc_opt.zero_grad()
        disc(gen(torch.full((1, 2), rank + 1.0))).sum().backward()
        assert (gen.weight.grad is not None) == train_gen
        assert (disc.weight.grad is not None) != train_gen
        (gen_opt if train_gen else disc_opt).step()
    equal_on_all_ranks(gen)
    equal_on_all_ranks(disc)
    # Off when wrapped, on later: reduced from then on.
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1))
    layer.bias.requires_grad_(True)
    optimizer.zero_grad()
    (layer(torch.zeros(1, 2)) * rank).sum().backward()
    optimizer.step()
    assert layer.bias.grad.item() == pytest.approx((size - 1) / 2)


@check
def adversarial_training_as_in_plain_torch(rank, size):
    def run(wrap, rows):
        torch.manual_seed(1)
        gen, disc = nn.Linear(2, 3), nn.Linear(3, 1)
        gen_opt, disc_opt = wrap(sgd(gen, 0.01)), wrap(sgd(disc, 0.01))
        for step in range(4):
            x, _ = data(step)
            noise, real = x[rows][:, :2], x[rows][:, 2:5]
            disc_opt.zero_grad()
            F.softplus(-disc(real)).mean().backward()
            F.softplus(disc(gen(noise).detach())).mean().backward()
            disc_opt.step()
            # Gradients flow into the discriminator, too, and are thrown away.
            gen_opt.zero_grad()
            F.softplus(-disc(gen(noise))).mean().backward()
            gen_opt.step()
        return nn.ModuleList([gen, disc])

    model = run(hvd.DistributedOptimizer, slice(rank, None, size))
    same(model, run(lambda optimizer: optimizer, slice(None)))
    equal_on_all_ranks(model)


@check
def sparse_gradients(rank, size):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1)

        def forward(self, words):
            return self.out(self.table(words))

    batches = [torch.tensor([[r, 4, 5], [4, (3 * r + 1) % 10, 2]]) for r in range(size)]
    for op in (hvd.Average, hvd.Sum):
        for as_dense in (False, True):
            torch.manual_seed(0)
            reference = Net()
            model = copy.deepcopy(reference)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 0.01),
                model.named_parameters(),
                op=op,
                sparse_as_dense=as_dense,
            )
            plain = torch.optim.SGD(reference.parameters(), 0.01)
            for _ in range(4):
                plain.zero_grad()
                optimizer.zero_grad()
                loss = sum(reference(batch).pow(2).sum() for batch in batches)
                (loss / size if op == hvd.Average else loss).backward()
                model(batches[rank]).pow(2).sum().backward()
                assert model.table.weight.grad.is_sparse
                assert model.table.weight.grad.is_coalesced() or size == 1
                torch.testing.assert_close(
                    model.table.weight.grad.to_dense(), reference.table.weight.grad.to_dense()
                )
                plain.step()
                optimizer.step()
                if size > 1 and not as_dense:
                    slots = optimizer._ringplug_reducer._exchange._slots
                    assert len(slots) == 2, "the table has left the plan"
            same(model, reference)
            equal_on_all_ranks(model)
            # A rank without a gradient; no rank with one.
            optimizer.zero_grad()
            if rank == 0:
                model.table(torch.tensor([1])).sum().backward()
            optimizer.step()
            assert model.table.weight.grad.is_sparse
            optimizer.zero_grad()
            optimizer.step()
            assert model.table.weight.grad is None
            equal_on_all_ranks(model)


@check
def sparse_adam(rank, size):
    for as_dense in (False, True):
        table = nn.Embedding(10, 3, sparse=True)
        hvd.broadcast_parameters(table.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(table.parameters()), lr=0.1), sparse_as_dense=as_dense
        )
        words = torch.tensor([1, 2, 5, 9]) if rank == 0 else torch.tensor([1, 3, 3])
        for _ in range(2):
            optimizer.zero_grad()
            table(words).sum().backward()
            optimizer.step()
        equal_on_all_ranks(table)


@check
def sparse_on_one_rank_dense_on_another(rank, size):
    table = nn.Embedding(4, 2)
    hvd.broadcast_parameters(table.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1))
    for _ in range(3):
        optimizer.zero_grad()
        table.sparse = rank == 0
        table(torch.tensor([rank])).sum().backward()
        grad = table.weight.grad
        assert not grad.is_sparse or size == 1
        expected = torch.zeros(4, 2)
        expected[:size] = 1 / size
        torch.testing.assert_close(grad.to_dense(), expected)
        optimizer.step()
    equal_on_all_ranks(table)
    half = nn.Embedding(4, 2, sparse=True).bfloat16()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(half.parameters(), 0.1))
    half(torch.tensor([1, 1])).sum().backward()
    assert half.weight.grad.dtype is torch.bfloat16
    assert half.weight.grad.to_dense().float().tolist()[1] == [2.0, 2.0]


class Halves(hvd.Compression.none):
    """A user's compressor, with a context."""

    @staticmethod
    def compress(tensor):
        return tensor.double() * 0.5, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor * 2).to(ctx)


@check
def compressors_of_ones_own(rank, size):
    reference = reference_of_training()
    seen = []

    class Watching(Halves):
        @staticmethod
        def compress(tensor):
            seen.append(tensor.shape)
            return Halves.compress(tensor)

    for compression, arguments in (
        (Halves, {}),
        (Watching, {"gradient_predivide_factor": 2.0}),
        (Halves(), {"groups": 2}),
    ):
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model), compression=compression, **arguments)
        train(model, optimizer, rank, size)
        same(model, reference)
        equal_on_all_ranks(model)
        # A gradient that only one rank has, and one that no rank has.
        optimizer.zero_grad()
        if rank == size - 1:
            model[4](torch.ones(1, 8)).sum().backward()
        optimizer.step()
        equal_on_all_ranks(model)
        assert model[0].weight.grad is None
        assert model[4].bias.grad.tolist() == pytest.approx([1 / size] * 3)
    assert seen or size == 1


@check
def process_sets(rank, size):
    even, odd = hvd.global_process_set, None
    if size > 1:
        even = hvd.add_process_set(range(0, size, 2))
        odd = hvd.add_process_set(range(1, size, 2))
    members = list(range(0, size, 2))
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), process_set=even
    )
    x, y = data(0)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::size]), y[rank::size]).backward()
        optimizer.step()
    optimizer.synchronize()
    reference = network()
    plain = sgd(reference)
    own = members if rank in members else [rank]
    for _ in range(3):
        plain.zero_grad()
        losses = [F.mse_loss(reference(x[r::size]), y[r::size]) for r in own]
        (sum(losses) / len(losses)).backward()
        plain.step()
    same(model, reference)
    if size > 1:
        hvd.remove_process_set(odd)
        hvd.remove_process_set(even)


@check
def wrapped_again_over_the_same_parameters(rank, size):
    model = network()
    first = hvd.DistributedOptimizer(sgd(model), op=hvd.Sum)
    second = hvd.DistributedOptimizer(sgd(model), op=hvd.Sum)
    backward(model, 0, rank, size)
    reference = network()
    backward(reference, 0)
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad * size)
    second.step()
    if size > 1:
        with pytest.raises(ValueError, match="made later"):
            first.step()


@check
def layouts(rank, size):
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    hvd.broadcast_parameters(conv.state_dict(), 0)
    half = nn.Linear(3, 2).half()
    empty = nn.Parameter(torch.ones(0, 3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*conv.parameters(), *half.parameters(), empty], 0.1)
    )
    images = torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    loss = conv(images).sum() + half(torch.ones(1, 3).half()).float().sum() + empty.sum()
    loss.backward()
    # 60000 is near the end of float16's range: sums are not made in it.
    half.weight.grad.fill_(60000)
    optimizer.step()
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    equal_on_all_ranks(conv)
    assert empty.grad.shape == (0, 3)
    big = nn.Linear(1, 1, bias=False).half()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(big.parameters(), 0.1))
    big(torch.full((1, 1), 60000.0).half()).sum().backward()
    assert big.weight.grad.item() == 60000


@check
def adasum(rank, size):
    model = network()
    optimizer = sgd(model)
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
        return
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    if size > 1:
        local = hvd.ProcessSet([0])
        hvd.add_process_set(local)
        with pytest.raises(NotImplementedError, match="process set"):
            hvd.DistributedOptimizer(sgd(network()), op=hvd.Adasum, process_set=local)
        hvd.remove_process_set(local)
        with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
            raise KeyError
    before = copy.deepcopy(model)
    # Steps that are equal on all ranks are as those of one process.
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        optimizer.step()
        scheduler.step()
    plain = sgd(before)
    for step in range(3):
        plain.zero_grad()
        backward(before, step)
        plain.step()
    same(model, before)
    # Steps of different parameters do not meet: both are made.
    pair = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    hvd.broadcast_parameters(pair.state_dict(), 0)
    start = [part.weight.item() for part in pair]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(pair.parameters(), 0.5), op=hvd.Adasum, compression=hvd.Compression.bf16
    )
    pair[rank % 2](torch.ones(1, 1)).sum().backward()
    optimizer.step()
    moved = [old - part.weight.item() for old, part in zip(start, pair, strict=True)]
    assert moved == pytest.approx([0.5, 0.5 if size > 1 else 0.0], abs=1e-6)
    equal_on_all_ranks(pair)


@check
def ranks_that_end_earlier_join(rank, size):
    """Rank r makes r + 1 steps more than it must; the others contribute zeros meanwhile."""
    words = torch.tensor([rank, 2])
    for kind in ("plain", "sparse", "own compressor", "two optimizers"):
        first, second = nn.Linear(2, 2), nn.Linear(2, 1)
        table = nn.Embedding(8, 2, sparse=True)
        parts = nn.ModuleList([first, second, table] if kind == "sparse" else [first, second])
        hvd.broadcast_parameters(parts.state_dict(), 0)
        arguments = {"compression": Halves} if kind == "own compressor" else {}
        if kind == "two optimizers":
            optimizers = [
                hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), 0.1))
                for part in (first, second)
            ]
        else:
            optimizers = [
                hvd.DistributedOptimizer(torch.optim.SGD(parts.parameters(), 0.1), **arguments)
            ]
        for step in range(rank + 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x = table(words) if kind == "sparse" else torch.ones(2, 2)
            second(first(x)).sum().backward()
            # Divided by all ranks, whoever is still there.
            assert second.bias.grad.item() == pytest.approx(2 * (size - step) / size)
            if kind == "sparse":
                assert table.weight.grad.is_sparse
            for optimizer in optimizers:
                optimizer.step()
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="count")
            assert total.item() == size - step
        assert hvd.join() == size - 1
        # Models differ by the steps that a joined rank did not make; training can go on.
        hvd.broadcast_parameters(parts.state_dict(), root_rank=size - 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(first(torch.ones(2, 2))).sum().backward()
        assert second.bias.grad.item() == 2
        for optimizer in optimizers:
            optimizer.step()
        equal_on_all_ranks(nn.ModuleList([first, second]))


@check
def join_before_the_first_step(rank, size):
    layer = nn.Linear(1, 1)
    hvd.broadcast_parameters(layer.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1))
    if rank == 0 and size > 1:
        assert hvd.join() == hvd.broadcast_object(None, root_rank=size - 1)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert layer.bias.grad.item() == pytest.approx(max(1, size - 1) / size)
    if size > 1:
        hvd.broadcast_object(hvd.join(), root_rank=size - 1)


@check
def under_horovods_name_its_contract_holds(rank, size):
    names = ("horovod.torch", "ringplug.as_horovod")
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update({name: types.ModuleType(name) for name in absent})
    try:
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=2)
        optimizer.zero_grad()
        for step in range(2):
            backward(model, step, rank, size)
        if size > 1:
            with pytest.raises(AssertionError, match="before step"):
                optimizer.zero_grad()
            with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
                backward(model, 2, rank, size)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        train(model, optimizer, rank, size)
    finally:
        for name in absent:
            del sys.modules[name]


@check
def optimizers_survive_a_new_init(rank, size):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer, rank, size, steps=1)
    hvd.shutdown()
    optimizer.zero_grad()
    hvd.init()
    assert runtime.current().world.size == size
    train(model, optimizer, rank, size)
    equal_on_all_ranks(model)


hvd.init(process_sets="dynamic")
run_checks(hvd.rank(), hvd.size())
hvd.shutdown()
