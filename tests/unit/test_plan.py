"""Plans: a fixed list of tensors, agreed once, reduced at once or as it becomes ready."""

from __future__ import annotations

import numpy as np
import pytest

from ringplug.backend.buffers import BFLOAT16, ReduceOp
from ringplug.backend.control.alone import AloneControl
from ringplug.backend.errors import (
    ConfigError,
    MismatchError,
    PeerLostError,
    StalledError,
    TransportError,
    UsageError,
)
from ringplug.backend.fusion import TensorSpec
from ringplug.backend.runtime import Runtime
from tests.ranks import Together, config, run_runtimes

F4, F8, I4 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32)

SHAPES = [
    ((3, 4), F4),
    ((), F4),
    ((0, 5), F4),
    ((1000,), F8),
    ((5000,), F4),
    ((7,), I4),
    ((1,), F4),
]
SPECS = [TensorSpec(f"layer{i}.weight", shape, dtype) for i, (shape, dtype) in enumerate(SHAPES)]
SMALL = {"fusion_bytes": 4096, "first_bucket_bytes": 64}

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def tensors(rank, specs=SPECS):
    return [
        np.array(np.arange(spec.size).reshape(spec.shape) % 11 + rank * 2 * (i + 1), spec.dtype)
        for i, spec in enumerate(specs)
    ]


def summed(size, specs=SPECS):
    return [sum(t) for t in zip(*(tensors(r, specs) for r in range(size)), strict=True)]


def check(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other).astype(one.dtype))


@SIZES
@pytest.mark.parametrize("settings", [SMALL, {}], ids=["many buckets", "few buckets"])
def test_run(size, settings):
    def rank(rt):
        plan = rt.plan(SPECS, name="grads", op=ReduceOp.SUM)
        for _ in range(3):
            sources = tensors(rt.world.rank)
            targets = [np.full_like(s, 77) for s in sources]
            plan.run(sources, targets)
            check(targets, summed(size))
            check(sources, tensors(rt.world.rank))
            plan.run(sources, sources)
            check(sources, summed(size))

    run_runtimes(rank, size, **settings)


@SIZES
def test_average(size):
    def rank(rt):
        plan = rt.plan(SPECS, name="grads")
        targets = tensors(rt.world.rank)
        plan.run(targets, targets)
        for got, total in zip(targets, summed(size), strict=True):
            if got.dtype == I4:
                np.testing.assert_array_equal(got, np.trunc(np.asarray(total) / size))
            else:
                np.testing.assert_allclose(got, np.asarray(total) / size, rtol=1e-6)

    run_runtimes(rank, size, **SMALL)


@SIZES
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_other_reductions(size, op):
    ufunc = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}[op]

    def rank(rt):
        plan = rt.plan(SPECS, name="x", op=op)
        targets = tensors(rt.world.rank)
        plan.run(targets, targets)
        check(targets, [ufunc.reduce(t) for t in zip(*map(tensors, range(size)), strict=True)])

    run_runtimes(rank, size, **SMALL)


@SIZES
def test_ready_in_any_order(size):
    def rank(rt):
        plan = rt.plan(SPECS, name="grads", op=ReduceOp.SUM)
        for step in range(10):
            arrays = tensors(rt.world.rank)
            order = np.random.default_rng(rt.world.rank + 100 * step).permutation(len(SPECS))
            for done, index in enumerate(order):
                assert len(plan.pending()) == len(SPECS) - done
                plan.ready(int(index), arrays[index])
            assert plan.pending() == []
            plan.finish()
            check(arrays, summed(size))

    run_runtimes(rank, size, **SMALL)


def test_buckets_leave_before_the_last_tensor_is_ready():
    def rank(rt):
        plan = rt.plan(SPECS, name="grads", op=ReduceOp.SUM)
        arrays = tensors(rt.world.rank)
        plan.ready(0, arrays[0])
        plan.ready(1, arrays[1])
        for i in (2, 3, 4):
            plan.ready(i, arrays[i])
        for handle in plan._handles:
            handle.wait(20)
        assert len(plan._handles) >= 2
        check(arrays[:1], summed(2)[:1])
        for i in (5, 6):
            plan.ready(i, arrays[i])
        plan.finish()
        check(arrays, summed(2))

    run_runtimes(rank, 2, **SMALL)


def test_run_and_ready_take_turns():
    def rank(rt):
        plan, other = (rt.plan(SPECS, name=n, op=ReduceOp.SUM) for n in ("one", "other"))
        for _ in range(5):
            arrays, more = tensors(rt.world.rank), tensors(rt.world.rank)
            for i in reversed(range(len(SPECS))):
                plan.ready(i, arrays[i])
            other.run(more, more)
            plan.finish()
            check(arrays, summed(3))
            check(more, summed(3))

    run_runtimes(rank, 3, **SMALL)


def test_traffic_of_a_step():
    """No negotiation beside the check of the plan, and each byte once."""
    specs = [TensorSpec(f"t{i}", (1024,), F4) for i in range(16)]

    def rank(rt):
        plan = rt.plan(specs, name="grads")
        assert len(plan.buckets) == 4
        arrays = tensors(rt.world.rank, specs)
        traffic = plan.lane.transport.traffic
        for _ in range(3):
            calls, sent = traffic.calls, traffic.sent
            plan.run(arrays, arrays)
            assert traffic.calls - calls == 4
        return traffic.sent - sent

    settings = {"fusion_bytes": 16384, "first_bucket_bytes": 16384}
    assert sum(run_runtimes(rank, 2, **settings)) == 2 * 16 * 1024 * 4


@pytest.mark.parametrize(("codec", "itemsize"), [("none", 4), ("fp16", 2), ("bf16", 2)])
def test_compression_halves_the_traffic(codec, itemsize):
    specs = [TensorSpec("w", (8192,), F4)]

    def rank(rt):
        plan = rt.plan(specs, name="grads", compression=codec)
        arrays = [np.full(8192, 1 + rt.world.rank, F4)]
        plan.run(arrays, arrays)
        assert (arrays[0] == 1.5).all()
        return plan.lane.transport.traffic.sent

    assert sum(run_runtimes(rank, 2)) == 2 * 8192 * itemsize


@SIZES
@pytest.mark.parametrize("codec", ["none", "fp16", "bf16"])
def test_compression_of_every_reduction(size, codec):
    """Integers and complex numbers travel as they are; floats lose bits, never their size."""
    dtypes = [F4, F8, I4, np.dtype(np.float16), BFLOAT16, np.dtype(np.complex64), np.dtype(np.int8)]
    specs = [TensorSpec(str(d), (50,), d) for d in dtypes]

    def rank(rt):
        r = rt.world.rank
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            plan = rt.plan(specs, name=op.name, op=op, compression=codec)
            arrays = [np.full(50, r + 1, d) for d in dtypes]
            plan.run(arrays, arrays)
            exact = sum(range(1, size + 1))
            for array, dtype in zip(arrays, dtypes, strict=True):
                value = exact if op is ReduceOp.SUM else exact / size
                value = int(value) if dtype.kind == "i" else value
                wide = array.astype(complex)
                np.testing.assert_allclose(wide, value, rtol=2**-7, err_msg=f"{op} {dtype}")
                if dtype.kind in "ic":
                    assert (wide == value).all(), (op, dtype)

    run_runtimes(rank, size)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
def test_a_narrow_wire_does_not_overflow(op):
    def rank(rt):
        plan = rt.plan([TensorSpec("w", (9000,), F4)], name="x", op=op, compression="fp16")
        arrays = [np.full(9000, 50_000, F4)]
        plan.run(arrays, arrays)
        return arrays[0]

    for result in run_runtimes(rank, 4):
        wanted = 200_000 if op is ReduceOp.SUM else 50_000
        np.testing.assert_allclose(result, wanted, rtol=1e-3)


def test_unknown_compression():
    with pytest.raises(ConfigError, match="compression='zip': expected one of none, fp16, bf16"):
        alone().plan(SPECS, name="x", compression="zip")


def alone(**settings):
    return Runtime(config(**settings), AloneControl())


def test_usage_errors_name_plan_and_tensor():
    plan = alone(**SMALL).plan(SPECS, name="grads")
    good = tensors(0)
    with pytest.raises(UsageError, match="grads: 7 tensors are planned, got 6 sources"):
        plan.run(good[:-1], good)
    with pytest.raises(UsageError, match="7 targets|2 targets"):
        plan.run(good, good[:2])
    wrong = [*good[:3], good[3].astype(F4), *good[4:]]
    with pytest.raises(
        UsageError,
        match=r"layer3.weight is planned as float64\[1000\], got float32\[1000\]",
    ):
        plan.run(wrong, good)
    with pytest.raises(UsageError, match=r"layer0.weight is planned .*\[3, 4\].*\[4, 3\]"):
        plan.ready(0, good[0].T)
    with pytest.raises(UsageError, match="layer0.weight is not contiguous"):
        plan.run([good[0].T.copy().T, *good[1:]], good)
    with pytest.raises(UsageError, match="layer1.weight is no array"):
        plan.run([*good[:1], good[1][()], *good[2:]], good)
    assert plan.pending() == list(range(7))
    with pytest.raises(UsageError, match="BAND"):
        alone().plan(SPECS, name="x", op=ReduceOp.BAND)


def test_missing_and_twice():
    def rank(rt):
        plan = rt.plan(SPECS, name="grads", op=ReduceOp.SUM)
        arrays = tensors(rt.world.rank)
        for i in range(7):
            if i not in (3, 5):
                plan.ready(i, arrays[i])
        with pytest.raises(UsageError, match="grads: tensor layer0.weight became ready twice"):
            plan.ready(0, arrays[0])
        assert plan.pending() == [3, 5]
        with pytest.raises(
            UsageError,
            match="grads: 2 tensors never became ready: layer3.weight, layer5.weight",
        ):
            plan.finish()
        with pytest.raises(TransportError, match="never became ready"):
            plan.run(arrays, arrays)

    run_runtimes(rank, 2, **SMALL)


def test_missing_on_one_rank_reaches_the_other():
    def rank(rt):
        plan = rt.plan(SPECS, name="grads", op=ReduceOp.SUM)
        arrays = tensors(rt.world.rank)
        for i in range(7):
            if rt.world.rank == 0 or i != 5:
                plan.ready(i, arrays[i])
        if rt.world.rank == 1:
            with pytest.raises(UsageError, match="1 tensors never became ready: layer5.weight"):
                plan.finish()
        else:
            with pytest.raises(PeerLostError, match="rank 1"):
                plan.finish()

    run_runtimes(rank, 2, **SMALL)


def other_plans(rank):
    """What rank 1 plans instead, and what the error shows of it."""
    renamed = [*SPECS[:2], TensorSpec("intruder", (0, 5), F4), *SPECS[3:]]
    reshaped = [TensorSpec("layer0.weight", (4, 3), F4), *SPECS[1:]]
    retyped = [*SPECS[:6], TensorSpec("layer6.weight", (1,), I4)]
    shorter = SPECS[:5]
    swapped = [SPECS[1], SPECS[0], *SPECS[2:]]
    return {
        "names": (renamed, {}, ["layer2.weight", "intruder"]),
        "shapes": (reshaped, {}, ["float32[3, 4]", "float32[4, 3]"]),
        "dtypes": (retyped, {}, ["float32[1]", "int32[1]"]),
        "number": (shorter, {}, ["7 tensors", "5 tensors", "layer6.weight"]),
        "order": (swapped, {}, ["tensor 0 layer0", "tensor 0 layer1"]),
        "op": (SPECS, {"op": ReduceOp.MAX}, ["average of grads", "max of grads"]),
        "compression": (SPECS, {"compression": "bf16"}, ["compression none", "compression bf16"]),
        "name": (SPECS, {"name": "others"}, ["of grads", "of others"]),
    }


@pytest.mark.parametrize("case", other_plans(0))
@pytest.mark.parametrize("way", ["run", "ready"])
def test_different_plans_fail_on_every_rank(case, way):
    def rank(rt):
        specs, arguments, shown = other_plans(0)[case]
        if rt.world.rank == 0:
            specs, arguments = SPECS, {}
        plan = rt.plan(specs, **{"name": "grads", **arguments})
        arrays = tensors(rt.world.rank, specs)
        with pytest.raises(MismatchError) as caught:
            if way == "run":
                plan.run(arrays, arrays)
            else:
                for i in range(len(specs)):
                    plan.ready(i, arrays[i])
                plan.finish()
        text = str(caught.value)
        assert "rank 0: " in text
        assert "rank 1: " in text
        for part in shown:
            assert part in text
        assert "layer4.weight" not in text
        # Nothing of the failed step is under way: the next one is right.
        again = rt.plan(SPECS, name="again", op=ReduceOp.SUM)
        for _ in range(2):
            arrays = tensors(rt.world.rank)
            again.run(arrays, arrays)
            check(arrays, summed(2))
        return text.partition(": ")[2]

    texts = run_runtimes(rank, 2, **SMALL)
    assert texts[0] == texts[1]


def test_plans_without_elements():
    def rank(rt):
        for specs in ([], [TensorSpec("none", (0, 3), F4)]):
            plan = rt.plan(specs, name="empty")
            arrays = tensors(0, specs)
            plan.run(arrays, arrays)
            for i, array in enumerate(arrays):
                plan.ready(i, array)
            plan.finish()

    run_runtimes(rank, 2)


def test_a_late_rank_is_named():
    both = Together(2)

    def rank(rt):
        plan = rt.plan(SPECS, name="grads")
        arrays = tensors(0)
        plan.run(arrays, arrays)
        if rt.world.rank == 0:
            with pytest.raises(
                StalledError, match="grads bucket 0: waited .* for rank 1"
            ) as caught:
                for i in range(7):
                    plan.ready(i, arrays[i])
                plan.finish()
            assert caught.value.absent == (1,)
            with pytest.raises(StalledError, match="grads"):
                plan.run(arrays, arrays)
        both()

    run_runtimes(rank, 2, timeout=0.4, **SMALL)


def test_a_plan_over_some_ranks():
    def rank(rt):
        if rt.world.rank == 1:
            with pytest.raises(UsageError, match=r"rank 1 is not among \[2, 0\]"):
                rt.lane("some", [2, 0])
            return None
        lane = rt.lane("some", [2, 0])
        assert (lane.transport.rank, lane.transport.size) == (int(rt.world.rank == 0), 2)
        plan = rt.plan([TensorSpec("w", (4,), F4)], name="x", op=ReduceOp.SUM, lane=lane)
        array = np.full(4, rt.world.rank, F4)
        plan.run([array], [array])
        return array.tolist()

    assert run_runtimes(rank, 3) == [[2.0] * 4, None, [2.0] * 4]


def test_lanes_must_be_the_same():
    def rank(rt):
        with pytest.raises(MismatchError, match="different things: rank 0: a; rank 1: b"):
            rt.lane("ab"[rt.world.rank])

    run_runtimes(rank, 2)
