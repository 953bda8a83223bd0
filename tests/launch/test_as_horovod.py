"""``ringrun --as-horovod``: scripts written for Horovod, as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
SHIM = REPOSITORY / "ringplug" / "as_horovod"
SCRIPTS = Path(__file__).parent / "horovod_scripts"


@pytest.fixture
def rival(tmp_path):
    """A folder with another horovod, which is not to be imported."""
    package = tmp_path / "rival" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the wrong horovod')\n")
    return package.parent


def ringrun(*arguments, cwd, path=()):
    """ringrun --as-horovod, without the harness's bootstrap."""
    done = subprocess.run(
        [sys.executable, "-m", "ringplug.launch", "--allow-run-as-root", "--as-horovod"]
        + [str(word) for word in arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), str(REPOSITORY)])},
    )
    return done.returncode, done.stdout + done.stderr


def python(code, *path, shim=(SHIM,)):
    """Code in a fresh interpreter where `path` and the shim are importable."""
    folders = [str(folder) for folder in (*path, *shim, REPOSITORY)]
    environ = {"PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_script_written_for_horovod_trains_as_it_is(rival):
    done = run_ranks(
        SCRIPTS / "torch_script.py",
        2,
        timeout=120,
        options=("--as-horovod",),
        env={"PYTHONPATH": os.pathsep.join([str(rival), str(REPOSITORY)])},
    )
    first, second = done.lines(0), done.lines(1)
    assert first[-1] == second[-1] == "done"
    assert [line for line in first if line.startswith("loss")]
    assert first[:-1] == second[:-1]


def test_a_keras_script_written_for_horovod_trains_as_it_is(rival):
    done = run_ranks(
        SCRIPTS / "keras_script.py",
        2,
        timeout=200,
        options=("--as-horovod",),
        env={"PYTHONPATH": os.pathsep.join([str(rival), str(REPOSITORY)])},
    )
    assert done.lines(0)[-1] == done.lines(1)[-1] == "done"
    losses = [[line for line in done.lines(rank) if line.startswith("loss")] for rank in (0, 1)]
    assert losses[0] == losses[1] != []


TESTS = """
import os, subprocess, sys
import horovod
import horovod.torch as hvd
import torch

def test_sum():
    hvd.init()
    assert hvd.size() == 2
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3

def test_children_see_it_too():
    code = "import horovod; print(horovod.__file__)"
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert path.stdout.strip() == horovod.__file__, path.stderr
"""


@pytest.mark.parametrize("command", [["pytest"], ["python", "-m", "pytest"]])
def test_pytest_runs_tests_written_for_horovod(rival, command):
    # The rival lies in the working directory, which ``python -m`` imports from first.
    (rival / "test_old.py").write_text(TESTS)
    code, output = ringrun("-np", 2, *command, "-q", "test_old.py", cwd=rival, path=[rival])
    assert code == 0, output
    assert output.count("2 passed") == 2


def test_a_failing_test_fails_the_job(tmp_path):
    text = (
        "import horovod.torch as hvd\n\ndef test():\n    hvd.init()\n    assert hvd.rank() == 0\n"
    )
    (tmp_path / "test_old.py").write_text(text)
    code, output = ringrun("-np", 2, "pytest", "-q", "test_old.py", cwd=tmp_path)
    assert code == 1
    assert "1 failed" in output
    assert "rank 1 (host " in output


def test_without_the_option_horovod_is_what_is_installed(rival, tmp_path):
    code = "import horovod"
    done = run_ranks(code, 1, expect=1, env={"PYTHONPATH": f"{rival}{os.pathsep}{REPOSITORY}"})
    assert "the wrong horovod" in done.stderr


def test_the_users_own_import_path_stays_behind_it(tmp_path):
    (tmp_path / "mine.py").write_text("")
    code = "import mine, horovod, os; print(os.environ['PYTHONPATH'])"
    options = ["-np", 1, "-x", f"PYTHONPATH={tmp_path}{os.pathsep}{REPOSITORY}"]
    status, output = ringrun(*options, "python", "-c", code, cwd=tmp_path)
    assert (status, output) == (0, f"[0] {SHIM}{os.pathsep}{tmp_path}{os.pathsep}{REPOSITORY}\n")


# Every module and public name of Horovod that ringplug has, and where it has it.
OPERATIONS = """
allgather allreduce alltoall broadcast broadcast_ grouped_allgather grouped_allreduce
grouped_reducescatter join reducescatter
add_process_set global_process_set remove_process_set ProcessSet
init shutdown is_initialized start_timeline stop_timeline
size local_size cross_size rank local_rank cross_rank is_homogeneous
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
nccl_built ddl_built ccl_built cuda_built rocm_built
Average Sum Adasum Min Max Product
Compression allgather_object broadcast_object DistributedOptimizer
"""
TORCH = """
allreduce_ allreduce_async allreduce_async_ grouped_allreduce_ grouped_allreduce_async
grouped_allreduce_async_ sparse_allreduce_async allgather_async grouped_allgather_async
broadcast_async broadcast_async_ alltoall_async reducescatter_async grouped_reducescatter_async
barrier poll synchronize broadcast_parameters broadcast_optimizer_state SyncBatchNorm
HorovodInternalError elastic mpi_ops functions optimizer compression sync_batch_norm
"""
TENSORFLOW = """
rank_op size_op local_rank_op local_size_op process_set_included_op broadcast_variables
broadcast_object_fn broadcast_global_variables DistributedGradientTape
PartialDistributedGradientTape SyncBatchNormalization elastic mpi_ops functions compression
"""
KERAS = """
DistributedOptimizer broadcast_global_variables allreduce allgather broadcast reducescatter
load_model callbacks elastic Compression Average Sum
init shutdown is_initialized start_timeline stop_timeline
size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
nccl_built ddl_built ccl_built cuda_built rocm_built
ProcessSet global_process_set add_process_set remove_process_set
"""
CALLBACKS = """
BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback
LearningRateWarmupCallback BestModelCheckpoint
"""
MODULES = {
    "horovod": "run",
    "horovod.runner": "run",
    "horovod.run": "run",
    "horovod.common": "init shutdown size rank local_rank local_size",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt "
    "HorovodVersionMismatchError get_version_mismatch_message",
    "horovod.common.util": "check_extension gpu_available mpi_built gloo_built nccl_built "
    "ddl_built ccl_built cuda_built rocm_built split_list num_rank_is_power_2 env is_iterable "
    "extension_available check_installed_version get_ext_suffix get_extension_full_path "
    "get_average_backwards_compatibility_fun is_version_greater_equal_than",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set "
    "remove_process_set",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.elastic": "State ObjectState run_fn",
    "horovod.torch": OPERATIONS + TORCH,
    "horovod.torch.mpi_ops": "allreduce_async_ synchronize poll size rank Average "
    "HorovodInternalError",
    "horovod.torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.torch.functions": "broadcast_object broadcast_parameters broadcast_optimizer_state "
    "allgather_object",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "run TorchState ElasticSampler",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": "TorchState",
    "horovod.tensorflow": OPERATIONS + TENSORFLOW,
    "horovod.tensorflow.mpi_ops": "allgather broadcast alltoall size rank size_op Sum",
    "horovod.tensorflow.compression": "Compression",
    "horovod.tensorflow.functions": "broadcast_object broadcast_object_fn allgather_object "
    "broadcast_variables",
    "horovod.tensorflow.util": "_executing_eagerly",
    "horovod.tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "horovod.tensorflow.elastic": "run TensorFlowKerasState TensorFlowState",
    "horovod.tensorflow.keras": KERAS,
    "horovod.tensorflow.keras.callbacks": CALLBACKS,
    "horovod.tensorflow.keras.elastic": "run KerasState CommitStateCallback "
    "UpdateBatchStateCallback UpdateEpochStateCallback",
    "horovod.keras": KERAS + "PartialDistributedOptimizer Adasum",
    "horovod.keras.callbacks": CALLBACKS,
    "horovod.keras.elastic": "run KerasState CommitStateCallback UpdateBatchStateCallback "
    "UpdateEpochStateCallback",
}
CHECK = """
import importlib, sys
import ringplug
modules = {modules!r}
missing = []
for name, words in modules.items():
    module = importlib.import_module(name)
    assert module.__name__ == name, module
    assert module.__file__.startswith({shim!r}), module
    for word in words.split():
        scope = {{}}
        try:
            exec(f"from {{name}} import {{word}}", scope)
        except ImportError:
            missing.append(f"{{name}}.{{word}}")
            continue
        assert scope[word] is getattr(module, word)
print(missing)

import horovod
import horovod.torch as hvd
assert hvd.elastic is importlib.import_module("horovod.torch.elastic")
import ringplug.torch
assert hvd.allreduce is ringplug.torch.allreduce
assert hvd.HorovodInternalError is ringplug.HorovodInternalError
names = {{}}
exec("from horovod.torch import *", names)
assert names["size"] is hvd.size
assert "elastic" in dir(hvd) and "allreduce" in dir(hvd)
try:
    hvd.no_such_name
except AttributeError as error:
    assert str(error) == "module 'horovod.torch' has no attribute 'no_such_name'"
# One copy of ringplug, whatever the path by which it was reached.
twice = [name for name in sys.modules if name.startswith("ringplug.as_horovod.horovod")]
assert not twice, twice
"""


def test_every_name_of_horovod_is_there_and_is_ringplugs():
    done = python(CHECK.format(modules=MODULES, shim=str(SHIM)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_horovod_alone_loads_no_framework():
    done = python("import horovod, sys; print(*sys.modules)")
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "tensorflow", "keras", "numpy", "mpi4py"}
    assert "horovod" in loaded


def test_the_version_passes_checks_for_a_minimum():
    from packaging import version

    done = python("import horovod; print(horovod.__version__)")
    found = done.stdout.strip()
    assert version.parse("0.28.1") <= version.parse(found) < version.parse("0.29")
    assert [int(part) for part in found.split(".")[:3]] == [0, 28, 1]


def test_a_missing_framework_is_an_import_error(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    code = (
        "try:\n    import horovod.torch\nexcept ImportError as error:\n    print(error)\n"
        "try:\n    import horovod.spark\nexcept ImportError as error:\n    print(error)\n"
    )
    done = python(code, tmp_path)
    first, second = done.stdout.splitlines()
    assert first == "no torch here"
    assert "no Spark integration" in second


def test_small_things_of_common_util():
    code = """
import os, warnings
from horovod.common import util
assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
assert [n for n in range(9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
assert util.is_iterable("a") and not util.is_iterable(1)
assert util.is_version_greater_equal_than("2.11.0rc1", "2.11.0")
assert not util.is_version_greater_equal_than("2.9", "2.10.0")
os.environ["KEPT"] = "old"
with util.env(KEPT="new", OTHER="x", NOTHING=None):
    assert os.environ["KEPT"] == "new" and os.environ["OTHER"] == "x"
    assert "NOTHING" not in os.environ
assert os.environ["KEPT"] == "old" and "OTHER" not in os.environ
assert util.extension_available("torch") and not util.extension_available("mxnet")
util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", "here.py", "mpi_lib_v2")
try:
    util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", "", "mpi_lib")
except ImportError as error:
    assert "mxnet" in str(error)
else:
    raise AssertionError
assert util.gpu_available("torch") is False and util.gpu_available("mxnet") is False
assert util.mpi_built(verbose=True) is True and util.gloo_built() is False
import ringplug
choose = util.get_average_backwards_compatibility_fun(ringplug)
assert choose(None, None) == ringplug.Average and choose(ringplug.Min, None) == ringplug.Min
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert choose(None, False) == ringplug.Sum
assert [one.category for one in seen] == [DeprecationWarning]
try:
    choose(ringplug.Sum, True)
except ValueError:
    print("both refused")
from horovod.common.basics import HorovodBasics
basics = HorovodBasics("x", "y")
basics.init()
assert (basics.size(), basics.rank(), basics.Average) == (1, 0, ringplug.Average)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["both refused"]


def test_horovods_run_in_both_its_forms_and_with_its_arguments():
    code = """
import warnings
import horovod
def place(more, *, last):
    import horovod.common as hvd
    hvd.init()
    return hvd.rank(), more, last
if __name__ == "__main__":
    warnings.simplefilter("error")
    print(horovod.run(place, (5,), {"last": 6}, 2, use_mpi=True, disable_cache=True))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        from horovod.run import run
        print(run(place, (5,), {"last": 7}, np=1, verbose=0))
    assert [one.category for one in seen] == [DeprecationWarning]
    assert horovod.run.run is run
    for argument in ("min_num_proc", "slots", "ssh_port", "cooldown_range"):
        try:
            horovod.run(place, num_proc=1, **{argument: 1})
        except ValueError as error:
            assert argument in str(error)
        else:
            raise AssertionError(argument)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[(0, 5, 6), (1, 5, 6)]", "[(0, 5, 7)]"]


def test_install_in_a_process_wins_over_the_path_but_not_over_an_import(rival, tmp_path):
    code = (
        "import sys; sys.path.insert(0, {first!r})\n"
        "before = list(sys.path)\n"
        "from ringplug.as_horovod import install\n"
        "install(); install()\n"
        "import horovod; print(horovod.__version__, sys.path == before)\n"
        "def work():\n"
        "    import horovod.common as hvd, horovod.torch\n"
        "    hvd.init()\n"
        "    return hvd.size()\n"
        "print(horovod.run(work, num_proc=2))\n"
    )
    done = python(code.format(first=str(rival)), shim=())
    assert done.stdout == "0.28.1 True\n[2, 2]\n", done.stderr
    (tmp_path / "horovod.py").write_text("")
    code = "import horovod; from ringplug.as_horovod import install; install()"
    done = python(code, tmp_path, shim=())
    assert f"another horovod has been imported already, from {tmp_path}" in done.stderr
