"""ringrun as a user runs it: real ranks, real signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launching import run_ranks, start_ranks

PLACE = """
import os, signal, sys, time
import ringplug
ringplug.init()
rank = ringplug.rank()
print("ready in", os.environ.get("RINGPLUG_JOB"), flush=True)
"""

WAIT = "\nwhile True:\n    time.sleep(0.1)\n"


def ringrun(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None):
    """ringrun without the harness's bootstrap, for what concerns the command itself."""
    repository = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-m", "ringplug.launch", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(repository), "PYTHONUNBUFFERED": "1", **(env or {})},
    )


def report_of(stderr: str) -> str:
    """What ringrun said last."""
    rule = "=" * 80
    assert stderr.rstrip().endswith(rule), stderr
    return stderr.split(rule)[-2]


def files_of(stdout: str) -> list[Path]:
    """Where the job that printed its directory (`PLACE` does) has its files."""
    (name,) = set(re.findall(r"ready in (\S+)", stdout))
    return [Path(name), Path("/dev/shm") / Path(name).name]


def runs(pid: int) -> bool:
    """Whether a process is there and not only waits to be collected by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_ranks_know_their_place_and_lines_are_tagged():
    done = run_ranks(PLACE + "print('rank', rank, 'of', ringplug.size())", 3)
    for rank in range(3):
        assert done.lines(rank)[1:] == [f"rank {rank} of 3"]
    assert done.stderr == ""


def test_an_exception_on_one_rank_ends_all_and_is_shown_last():
    done = run_ranks(
        PLACE + "if rank == 1:\n    raise ValueError('boom of rank 1')\n" + WAIT, 3, expect=1
    )
    report = report_of(done.stderr)
    assert "rank 1 (host " in report
    assert "failed with exit code 1" in report
    assert report.rstrip().endswith("ValueError: boom of rank 1")
    assert "Traceback (most recent call last)" in report
    assert "ringplug/launch/worker.py" not in report
    assert "The last lines of" not in report


def test_an_exception_before_init_ends_all():
    code = """
    import os, time
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        raise KeyError("early")
    time.sleep(1000)
    """
    done = run_ranks(code, 2, expect=1)
    assert report_of(done.stderr).rstrip().endswith("KeyError: 'early'")


def test_a_rank_that_loses_its_peer_says_whom():
    code = """
    if rank == 1:
        ringplug.shutdown()
        time.sleep(1000)
    import numpy as np
    ringplug.allreduce(np.ones(3), name="a")
    """
    done = run_ranks(PLACE + textwrap.dedent(code), 2, expect=1)
    report = report_of(done.stderr)
    assert "rank 0 (host " in report
    assert re.search(r"PeerLostError: .*rank 1", report)


@pytest.mark.parametrize("code", [3, 255])
def test_sys_exit_on_one_rank_ends_the_job_with_that_code(code):
    done = run_ranks(PLACE + f"if rank == 1:\n    sys.exit({code})\n" + WAIT, 2, expect=code)
    assert f"rank 1 (host {os.uname().nodename}, pid " in report_of(done.stderr)


def test_sys_exit_with_a_text():
    done = run_ranks(PLACE + "if rank == 0:\n    sys.exit('no data')\n" + WAIT, 2, expect=1)
    assert "[0] no data" in done.stderr
    assert report_of(done.stderr).rstrip().endswith("no data")


def test_an_exit_code_of_a_process_that_skips_pythons_end():
    run_ranks(PLACE + "if rank == 1:\n    os._exit(7)\n" + WAIT, 2, expect=7)


def test_a_rank_that_ends_well_before_the_others_is_no_failure():
    run_ranks(PLACE + "if rank == 0:\n    time.sleep(2)\nprint('end')", 2)


def test_a_killed_rank_ends_the_job_with_137():
    with start_ranks(PLACE + "print('pid', os.getpid())" + WAIT, 2) as job:
        job.wait_for_output("[1] pid ")
        job.wait_for_output("[0] pid ")
        pids = {
            line.split()[0]: int(line.split()[2])
            for line in job.output()[0].splitlines()
            if " pid " in line
        }
        os.kill(pids["[1]"], signal.SIGKILL)
        done = job.finish()
    assert done.returncode == 137
    report = report_of(done.stderr)
    assert f"rank 1 (host {os.uname().nodename}, pid {pids['[1]']}) was killed by SIGKILL" in report


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_ringrun_ends_all(number, code):
    with start_ranks(PLACE + WAIT, 2) as job:
        job.wait_for_output("ready", 2)
        assert all(path.exists() for path in files_of(job.output()[0]))
        job.process.send_signal(number)
        done = job.finish()
    assert done.returncode == code
    assert not any(path.exists() for path in files_of(done.stdout))


def test_ranks_may_end_well_on_sigterm():
    code = (
        PLACE
        + """
def stop(*_):
    time.sleep(3)  # longer than mpirun's patience with ranks that it ends itself
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("armed", flush=True)
"""
        + WAIT
    )
    with start_ranks(code, 2) as job:
        job.wait_for_output("armed", 2)
        job.process.terminate()
        done = job.finish()
    assert done.returncode == 0
    assert done.lines(0)[-1] == done.lines(1)[-1] == "saved"


def test_a_second_signal_kills_ranks_that_ignore_the_first():
    code = (
        PLACE
        + "signal.signal(signal.SIGTERM, lambda *_: print('not yet', flush=True))\n"
        + "print('armed', flush=True)\n"
        + WAIT
    )
    with start_ranks(code, 2) as job:
        job.wait_for_output("armed", 2)
        job.process.terminate()
        job.wait_for_output("not yet", 2)
        job.process.terminate()
        done = job.finish()
    assert done.returncode == 143
    assert "ending all ranks now" in done.stderr


def test_ringrun_killed_leaves_no_process_and_no_file():
    code = PLACE + "import subprocess\nsubprocess.Popen(['sleep', '1000'])\n" + WAIT
    with start_ranks(code, 2) as job:
        job.wait_for_output("ready", 2)
        files = files_of(job.output()[0])
        assert all(path.exists() for path in files)
        job.process.kill()
        job.process.wait()
        job.wait_until(lambda: not job.alive(), 5, "end of all processes")
        job.wait_until(lambda: not any(path.exists() for path in files), 5, "end of all files")


def test_a_process_that_a_rank_left_behind_is_ended():
    # It writes for ever, in a session of its own.
    code = (
        PLACE
        + "import subprocess\n"
        + "subprocess.Popen(['sh', '-c', 'while :; do echo noise; done'], start_new_session=True)\n"
        + "print('end')\n"
    )
    done = run_ranks(code, 2)
    assert done.stdout.count("end") == 2


def test_no_file_is_left_after_a_normal_end():
    done = run_ranks(PLACE, 2)
    assert not any(path.exists() for path in files_of(done.stdout))


def test_sigusr2_shows_the_stacks_of_all_ranks():
    code = PLACE + "def training():\n" + WAIT.replace("\n", "\n    ") + "\ntraining()\n"
    with start_ranks(code, 2) as job:
        job.wait_for_output("ready", 2)
        job.process.send_signal(signal.SIGUSR2)
        job.wait_until(lambda: job.output()[1].count("in training") == 2, what="stacks")
        assert "[0] " in job.output()[1]


def test_output_files(tmp_path):
    run_ranks(
        PLACE + "print('text', rank); print('oh', rank, file=sys.stderr)",
        2,
        options=("--output-filename", str(tmp_path / "logs")),
    )
    for rank in range(2):
        folder = tmp_path / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_text().splitlines()[1:] == [f"text {rank}"]
        assert (folder / "stderr").read_text() == f"oh {rank}\n"


def test_much_output_arrives_whole():
    code = PLACE + "for i in range(20000):\n    print('line', i, 'x' * 100)\n"
    done = run_ranks(code, 2)
    for rank in range(2):
        expected = [f"line {i} {'x' * 100}" for i in range(20000)]
        assert done.lines(rank)[1:] == expected


def test_a_reader_that_leaves_ends_the_job():
    code = "import os\nwhile True: print(os.getpid(), flush=True)"
    command = ["-m", "ringplug.launch", "--allow-run-as-root", "-np", "2", "python", "-c", code]
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).resolve().parents[2],
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
    assert not runs(pid)


def test_threads_share_the_cores_unless_the_user_chose(tmp_path):
    show = "import os; print(os.environ['OMP_NUM_THREADS'])"
    unset = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    cores = len(os.sched_getaffinity(0))
    command = ["--allow-run-as-root", "-np", "2", "python", "-c", show]
    for environ, threads in ((unset, max(1, cores // 2)), ({**unset, "OMP_NUM_THREADS": "9"}, 9)):
        done = subprocess.run(
            [sys.executable, "-m", "ringplug.launch", *command],
            env={**environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert sorted(done.stdout.splitlines()) == [f"[0] {threads}", f"[1] {threads}"]


def test_variables_reach_the_ranks():
    code = "import os; print(os.environ['A'], os.environ['RINGPLUG_TIMEOUT'])"
    command = ["--allow-run-as-root", "-np", "1", "-x", "A=b c", "--timeout", "7min"]
    done = ringrun(*command, "python", "-c", code)
    assert done.stdout == "[0] b c 7min\n"


def test_hosts_that_are_this_one():
    code = "import ringplug; ringplug.init(); print(ringplug.local_size())"
    done = ringrun("--allow-run-as-root", "-H", "localhost:3", "python", "-c", code)
    assert sorted(done.stdout.splitlines()) == ["[0] 3", "[1] 3", "[2] 3"], done.stderr


def test_more_ranks_than_other_hosts_have_slots_are_refused():
    done = ringrun("--allow-run-as-root", "-np", "3", "-H", "far.invalid:2", "true")
    assert done.returncode == 2
    assert "3 processes were asked for, but far.invalid:2 has 2 slots" in done.stderr


def test_a_host_that_does_not_answer_is_named():
    done = ringrun("--allow-run-as-root", "-H", "far.invalid:2", "true")
    assert done.returncode == 1
    assert "cannot be reached by ssh" in done.stderr
    assert "far.invalid: " in done.stderr


def test_a_variable_that_is_not_set_is_an_error(tmp_path):
    folder = {"TMPDIR": str(tmp_path)}
    command = ["--allow-run-as-root", "-np", "1", "-x", "NOT_SET_ANYWHERE", "true"]
    done = ringrun(*command, env=folder)
    assert not list(tmp_path.iterdir())
    assert done.returncode == 2
    assert "NOT_SET_ANYWHERE: the variable is not set" in done.stderr


def test_an_unknown_option_is_refused():
    done = ringrun("-np", "2", "--auto-tune", "python", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ringrun: unknown option --auto-tune; `ringrun --help` lists all\n"


def test_horovodruns_options_warn_once_or_reach_the_ranks(tmp_path):
    code = (
        "import os; print(*(os.environ[n] for n in "
        "('RINGPLUG_TIMELINE', 'RINGPLUG_TIMELINE_MARK_CYCLES', 'HOROVOD_STALL_CHECK_DISABLE')))"
    )
    line = "--allow-run-as-root -np 2 --mpi --cycle-time-ms 5 --autotune --network-interfaces lo "
    line += "--timeline-filename t.json --timeline-mark-cycles --no-stall-check "
    line += "--prefix-output-with-timestamp"
    done = ringrun(*line.split(), "--binding-args=--bind-to core", "python", "-c", code)
    assert done.returncode == 0, done.stderr
    lines = sorted(re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", text, flags=re.M)
                   for text in done.stdout.splitlines())  # fmt: skip
    assert lines == [f"[{rank}] t.json 1 1" for rank in range(2)]
    assert done.stderr.count("without effect") == 1
    assert done.stderr.count("--cycle-time-ms") == 1


def test_horovodruns_gloo_is_refused():
    done = ringrun("-np", "2", "--gloo", "python", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--gloo is not offered" in done.stderr


def test_help_and_version():
    done = ringrun("--help")
    assert done.returncode == 0
    assert "--output-filename" in done.stdout
    from ringplug import __version__

    assert ringrun("--version").stdout == f"ringrun {__version__}\n"


@pytest.fixture
def package(tmp_path):
    """A script, a module and a package that print how they see themselves."""
    code = "import sys; print(__name__, sys.argv[1:], sys.path[0], __spec__ is None)\n"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(code)
    (tmp_path / "mod.py").write_text(code)
    return tmp_path


def start(package, *command):
    done = ringrun("--allow-run-as-root", "-np", "2", *command, cwd=package)
    assert done.returncode == 0, done.stderr
    return {line[4:] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("python", [["python"], []])
def test_a_script_runs_as_python_runs_it(package, python):
    expected = f"__main__ ['-a', 'b c'] {package}/scripts True"
    assert start(package, *python, "scripts/script.py", "-a", "b c") == {expected}


def test_a_module_runs_as_python_runs_it(package):
    assert start(package, "python", "-m", "mod", "x") == {f"__main__ ['x'] {package} False"}


def test_a_program_that_is_not_python(package):
    assert start(package, "sh", "-c", "echo $OMPI_COMM_WORLD_SIZE") == {"2"}


def test_a_failing_program_gives_its_code():
    done = ringrun("--allow-run-as-root", "-np", "2", "sh", "-c", "exit 9")
    assert done.returncode == 9
    assert "failed with exit code 9" in report_of(done.stderr)


def test_a_program_that_does_not_exist():
    done = ringrun("--allow-run-as-root", "-np", "2", "no-such-program")
    assert done.returncode == 127
    assert report_of(done.stderr).rstrip().endswith("no-such-program: no such program")


def test_multiprocessing_and_pickle_find_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, pickle\n"
        "class Thing: pass\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    import ringplug\n"
        "    ringplug.init()\n"
        "    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    done = ringrun("--allow-run-as-root", "-np", "2", str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] [2, 4]", "[1] [2, 4]"]


def test_a_world_of_another_size_than_was_launched_is_an_error():
    size = {"RINGPLUG_EXPECTED_SIZE": "4"}
    done = run_ranks(PLACE, 2, expect=1, env=size, launcher="mpirun")
    assert "4 processes were launched, but MPI sees a world of 2" in done.stderr


def test_check_says_what_works_and_why_the_rest_does_not():
    done = ringrun("--check", "--allow-run-as-root")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[6:].split("  ")[0].strip(): line[:5].strip() for line in done.stdout.splitlines()}
    for what in ("Python", "mpi4py", "MPI library", "mpirun", "2 processes", "PyTorch", "Keras"):
        assert rows[what] == "works", done.stdout
    assert set(rows) >= {"JAX", "TensorFlow", "lightning", "CuPy, NCCL", "shared memory"}


def test_scripts_are_compiled_as_python_does():
    code = """
class A:
    x: int


assert A.__annotations__ == {"x": int}, A.__annotations__
"""
    run_ranks(code, 1)
    assert ringrun("--allow-run-as-root", "-np", "1", "python", "-c", code).returncode == 0


def test_processes_that_never_met_are_told():
    told = "its 2 processes did the same work, each alone"
    assert told in run_ranks("print(1)", 2).stderr
    assert told not in run_ranks("import ringplug; ringplug.init()", 2).stderr
    assert "each alone" not in run_ranks("print(1)", 1).stderr
