"""The backend on real processes: transports, named operations, plans, on 1 to 4 ranks."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

WORK = """
import os, sys
import numpy as np
import ml_dtypes

if len(sys.argv) > 1:
    # Which host each rank pretends to be on.
    os.environ["RINGPLUG_HOST_ID"] = sys.argv[1][int(os.environ["OMPI_COMM_WORLD_RANK"])]

import ringplug
from ringplug.backend import runtime
from ringplug.backend.buffers import ReduceOp
from ringplug.backend.fusion import TensorSpec

rt = ringplug.init(timeout=30)
rank, size = ringplug.rank(), ringplug.size()
sum_of_ranks = size * (size - 1) // 2

# Named operations, every dtype
for code in ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16",
             ml_dtypes.bfloat16]:
    dtype = np.dtype(code)
    for count in (0, 1, size + 1, 20_011):
        x = np.full(count, rank, dtype)
        got = ringplug.allreduce(x, op=ringplug.Sum)
        assert got.dtype == dtype
        wanted = np.array(sum_of_ranks if dtype.kind != "b" else size > 1).astype(dtype)
        assert (got == wanted).all(), (dtype, count, got[:3])
        assert (ringplug.broadcast(x, size - 1) == np.array(size - 1).astype(dtype)).all()
    rows = ringplug.allgather(np.full((rank, 2), rank, dtype))
    assert rows.shape == (sum_of_ranks, 2)

objects = ringplug.allgather_object({"rank": rank, "data": "x" * 100_000 * rank})
assert [o["rank"] for o in objects] == list(range(size))
assert ringplug.broadcast_object(objects, 0) == objects

order = range(300) if rank % 2 else reversed(range(300))
handles = {i: ringplug.allreduce_async(np.full(10, i, np.float32), name=f"g{i}") for i in order}
for i, handle in handles.items():
    assert np.allclose(ringplug.synchronize(handle), i)

# Errors on all ranks, and the process goes on
if size > 1:
    for name, call in {
        "shape": lambda: ringplug.allreduce(np.zeros(3 + rank), name="shape"),
        "dtype": lambda: ringplug.allreduce(np.zeros(3, ["f4", "i4"][rank % 2]), name="dtype"),
        "root": lambda: ringplug.broadcast(np.zeros(3), rank, name="root"),
    }.items():
        try:
            call()
        except ringplug.MismatchError as error:
            texts = ringplug.allgather_object(str(error))
            assert len(set(texts)) == 1 and "rank" in texts[0] and name in texts[0], texts
        else:
            raise AssertionError(name)

# Plans
shapes = [(10,), (), (0, 4), (1000, 30), (700_001,), (3,)]
specs = [TensorSpec(f"t{i}", s, np.dtype("f4")) for i, s in enumerate(shapes)]
for codec in ("none", "fp16", "bf16"):
    plan = rt.plan(specs, name=f"grads {codec}", compression=codec)
    for step in range(3):
        arrays = [np.full(s, rank + step, np.float32) for s in shapes]
        if step % 2:
            for i in np.random.default_rng(rank).permutation(len(specs)):
                plan.ready(int(i), arrays[i])
            plan.finish()
        else:
            plan.run(arrays, arrays)
        mean = (size - 1) / 2 + step
        assert all(np.allclose(a, mean, rtol=1e-2) for a in arrays)
        assert ringplug.allgather_object(b"".join(a.tobytes() for a in arrays)) == [
            b"".join(a.tobytes() for a in arrays)] * size

# The transport itself
lane = rt.lane("mine")
def job(t):
    random = np.random.default_rng(7)
    parts = [random.integers(-9, 9, 300_007).astype(np.float32) for _ in range(size)]
    memory = t.allocate(300_007 * 4).view(np.float32)
    for buffer in (memory, np.empty_like(memory)):
        buffer[:] = parts[rank]
        t.allreduce(buffer, ReduceOp.SUM)
        assert (buffer == sum(parts)).all()
    counts = [1000 * r for r in range(size)]
    out = np.empty(counts[rank], np.float32)
    t.reducescatter(parts[rank][: sum(counts)].copy(), out, ReduceOp.SUM, counts, 1.0)
    start = sum(counts[:rank])
    assert (out == sum(parts)[start : start + counts[rank]]).all()
    everything = np.empty(sum(counts), np.float32)
    t.allgather(out, everything, counts)
    assert (everything == sum(parts)[: sum(counts)]).all()
    lengths = [[(a * 3 + b) % 4 * 5000 for b in range(size)] for a in range(size)]
    send, receive = lengths[rank], [row[rank] for row in lengths]
    target = np.empty(sum(receive), np.int64)
    t.alltoall(np.full(sum(send), rank), target, send, receive)
    assert target.tolist() == [r for r in range(size) for _ in range(receive[r])]
    t.agree(5, "five")
    return t.name, t.traffic.sent
print("transport", *lane.run(job, "check"))

if size > 2:
    some = [size - 1, 0]
    if rank in some:
        pair = rt.lane("pair", some)
        x = np.full(5, rank)
        pair.run(lambda t: t.allreduce(x, ReduceOp.SUM), "pair")
        assert (x == size - 1).all()

w = rt.world
print("world", w.rank, w.local_rank, w.local_size, w.cross_rank, w.cross_size)
ringplug.barrier()
ringplug.shutdown()
print("fine")
"""


@pytest.mark.parametrize(
    ("size", "transport", "hosts"),
    [
        (1, "alone", ""),
        (2, "shared_memory", ""),
        (4, "shared_memory", ""),
        (2, "ring", ""),
        (3, "ring", ""),
        (4, "hierarchical", "aabb"),
        (3, "hierarchical", "abb"),
    ],
)
def test_everything(size, transport, hosts):
    env = {"RINGPLUG_TRANSPORT": "ring"} if transport == "ring" else {}
    done = run_ranks(WORK, size, *([hosts] if hosts else []), env=env)
    for rank in range(size):
        lines = done.lines(rank)
        assert lines[-1] == "fine"
        assert next(x for x in lines if x.startswith("transport")).split()[1] == transport
        names = hosts or "a" * size
        local = [r for r in range(size) if names[r] == names[rank]]
        world = next(x for x in lines if x.startswith("world")).split()[1:]
        assert world[:3] == [str(rank), str(local.index(rank)), str(len(local))]


def test_under_bare_mpirun():
    done = run_ranks(WORK, 2, launcher="mpirun")
    assert done.stdout.count("fine") == 2


def test_the_control_plane():
    done = run_ranks(
        """
        import numpy as np
        import time
        from ringplug.backend.config import Config, launched
        from ringplug.backend.control import open_control
        from ringplug.backend.errors import PeerLostError, StalledError, UsageError

        control = open_control(Config.load(), launched())
        rank, size = control.world.rank, control.world.size
        for turn in range(3):
            for length in (0, 1, 3_000_000):
                mine = bytes([rank + turn]) * (length + rank)
                shown = control.exchange(mine, 20)
                assert shown == [bytes([r + turn]) * (length + r) for r in range(size)]

        # Posts of one sender keep their order.
        for to in range(size):
            for i in range(50):
                control.post(to, f"{rank} {i}".encode())
        got = {r: [] for r in range(size)}
        deadline = time.monotonic() + 20
        while sum(map(len, got.values())) < 50 * size:
            assert time.monotonic() < deadline
            message = control.poll()
            if message:
                got[message[0]].append(message[1].decode())
        assert got == {r: [f"{r} {i}" for i in range(50)] for r in range(size)}
        assert control.poll() is None

        def finish(*pending):
            while not all([p.done() for p in pending]):
                assert time.monotonic() < deadline
                time.sleep(0)

        right, left = (rank + 1) % size, (rank - 1) % size
        for count in (0, 1, 5_000_000):
            a, b = np.empty(count), np.empty(count, np.int16)
            # Tags keep messages apart, whatever their order.
            receives = [control.irecv(b, left, 2), control.irecv(a, left, 1)]
            sends = [control.isend(np.full(count, rank * 1.5), right, 1),
                     control.isend(np.full(count, rank, np.int16), right, 2)]
            finish(*receives, *sends)
            assert (a == left * 1.5).all() and (b == left).all()

        everyone = control.subset(range(size), 20)
        assert everyone.world.rank == rank
        flipped = control.subset(range(size)[::-1], 20)
        assert flipped.world.rank == size - 1 - rank
        assert flipped.exchange(bytes([rank]), 20) == [bytes([r]) for r in range(size)[::-1]]
        # Channels are private: what is posted on one never comes out of another.
        flipped.post(0, b"flipped")
        everyone.exchange(b"", 20)
        assert everyone.poll() is None and control.poll() is None
        if rank in (0, 2):
            pair = control.subset([2, 0], 20)
            assert pair.world.origin == (2, 0)
            assert pair.exchange(bytes([rank]), 20) == [b"\\2", b"\\0"]
        else:
            try:
                control.subset([2, 0], 20)
            except UsageError as error:
                assert "rank 1 is not among [2, 0]" in str(error)
        control.exchange(b"", 20)

        # A rank that does not come is named, on all ranks.
        if rank != 1:
            try:
                everyone.exchange(b"", 0.5)
            except StalledError as error:
                assert error.absent == (1,), error.absent
            else:
                raise AssertionError
        control.exchange(b"", 20)

        # So is one that has left.
        assert control.departed() == frozenset()
        private = control.subset(range(size), 20)
        if rank == 2:
            private.leave()
        else:
            try:
                private.exchange(b"", 20)
            except PeerLostError as error:
                assert error.ranks == (2,), error.ranks
            else:
                raise AssertionError
            assert private.departed() == {2}
        control.exchange(b"", 20)
        print("fine")
        control.finalize()
        """,
        3,
    )
    assert done.stdout.count("fine") == 3


def test_a_communicator_of_the_users():
    """MPI is the user's: initialised and finalised by them, and two worlds of two."""
    done = run_ranks(
        """
        from mpi4py import MPI
        import numpy as np
        import ringplug

        half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
        ringplug.init(comm=half)
        assert (ringplug.size(), ringplug.rank()) == (2, MPI.COMM_WORLD.rank % 2)
        total = ringplug.allreduce(MPI.COMM_WORLD.rank, op=ringplug.Sum)
        assert total == [1, 5][MPI.COMM_WORLD.rank // 2]
        # Their traffic and ours don't meet.
        assert half.allreduce(1) == 2
        ringplug.shutdown()
        assert not MPI.Is_finalized()
        MPI.COMM_WORLD.Barrier()
        ringplug.init()
        assert ringplug.size() == 4
        print("fine")
        """,
        4,
    )
    assert done.stdout.count("fine") == 4


def test_children_of_a_rank():
    """A worker process may import everything; joining the job is refused."""
    done = run_ranks(
        """
        import multiprocessing, subprocess, sys
        import numpy as np
        import ringplug

        def work(how):
            import ringplug
            assert not ringplug.is_initialized() or how == "fork"
            return float(np.ones(3).sum())

        def join(_):
            import ringplug.backend.runtime as runtime
            runtime._current = None
            try:
                ringplug.init()
            except ringplug.UsageError as error:
                return str(error)

        if __name__ == "__main__":
            ringplug.init()
            for how in ("fork", "spawn"):
                with multiprocessing.get_context(how).Pool(1) as pool:
                    assert pool.map(work, [how]) == [3.0]
                    (text,) = pool.map(join, [0])
                    assert "child process of a rank" in text, text
            child = subprocess.run(
                [sys.executable, "-c", "import ringplug; ringplug.init()"],
                capture_output=True, text=True, timeout=30)
            assert child.returncode == 1 and "child process of a rank" in child.stderr, child
            assert ringplug.allreduce(1, op=ringplug.Sum) == 2
            print("fine")
        """,
        2,
    )
    assert done.stdout.count("fine") == 2


def test_a_world_of_another_size():
    done = run_ranks(
        "import ringplug; ringplug.init()",
        2,
        env={"RINGPLUG_EXPECTED_SIZE": "3"},
        launcher="mpirun",
        expect=1,
    )
    assert "3 processes were launched, but MPI sees a world of 2" in done.stderr
    assert "ringrun" in done.stderr


def test_init_and_shutdown_leave_nothing():
    done = run_ranks(
        """
        import gc, os, threading
        import numpy as np
        import ringplug
        from ringplug.backend.fusion import TensorSpec

        def count():
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        for turn in range(20):
            rt = ringplug.init()
            assert ringplug.init() is rt
            handle = ringplug.allreduce_async(np.ones(3), name="x")
            plan = rt.plan([TensorSpec("w", (9000,), np.dtype("f4"))], name="p")
            array = np.ones(9000, np.float32)
            plan.ready(0, array)
            plan.finish()
            handle.wait()
            ringplug.barrier()
            ringplug.shutdown()
            ringplug.shutdown()
            for thread in threading.enumerate():
                if thread.name.startswith("ringplug"):
                    thread.join(10)
            if turn == 1:
                first = count()
        gc.collect()  # threads and lanes refer to each other
        threads, files = count()
        assert threads == first[0], threading.enumerate()
        assert files <= first[1] + 1, (files, first)
        print("fine")
        """,
        2,
    )
    assert done.stdout.count("fine") == 2


def test_idle_costs_nothing():
    """The one bound on time here; the goal is 1 % of a core, 5 % allows for a busy machine."""
    done = run_ranks(
        """
        import time
        import numpy as np
        import ringplug
        from ringplug.backend.fusion import TensorSpec

        rt = ringplug.init()
        plan = rt.plan([TensorSpec("w", (9000,), np.dtype("f4"))], name="p")
        array = np.ones(9000, np.float32)
        plan.ready(0, array)
        plan.finish()
        ringplug.allreduce_async(np.ones(3), name="x").wait()
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(2)
        print("used", (time.process_time() - before) / 2)
        ringplug.barrier()
        """,
        2,
    )
    used = [float(line.split()[-1]) for line in done.stdout.splitlines() if "used" in line]
    assert len(used) == 2
    assert max(used) < 0.05


@pytest.mark.slow
def test_beyond_two_to_the_31_elements():
    """Broadcast by shared memory, then over the ring in pieces beyond 1 GiB."""
    code = """
        import numpy as np
        import ringplug
        from ringplug.backend.buffers import ReduceOp

        rt = ringplug.init()
        count = 2**31 + 7
        x = np.zeros(count, np.uint8)
        if ringplug.rank() == 0:
            x[::1_000_003] = 5
            x[-1] = 9
        lane = rt.lane("big")
        lane.run(lambda t: t.broadcast(x, 0), "big")
        assert x[-1] == 9 and (x[::1_000_003] == 5).all() and x[1] == 0
        part = x[: 2**31 - 2**20] if lane.transport.name == "ring" else x
        lane.run(lambda t: t.allreduce(part, ReduceOp.MAX), "big")
        assert x[-1] == 9 and (x[::1_000_003] == 5).all() and x[1] == 0
        if lane.transport.name == "ring":
            size = 2**30 + 13
            half = x[:size] if ringplug.rank() == 0 else x[-size:]
            control = lane.transport.control
            pending = (control.isend(half, 1) if ringplug.rank() == 0
                       else control.irecv(half, 0))
            while not pending.done():
                pass
            assert half[0] == 5 and half[1_000_003 * 1000] == 5 and half[1] == 0
        print("fine")
        """
    for transport in ("shared_memory", "ring"):
        env = {"RINGPLUG_TRANSPORT": transport}
        assert run_ranks(code, 2, timeout=150, env=env).stdout.count("fine") == 2
