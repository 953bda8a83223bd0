from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from ringplug.backend.config import Config
from ringplug.backend.errors import UsageError
from ringplug.launch.arguments import parse, rank_command
from ringplug.launch.horovod_options import REFUSED, SATISFIED, WITHOUT_EFFECT, explain
from ringplug.launch.hosts import Host

HERE = "/venv/bin/python"
WORKER = ["-m", "ringplug.launch.worker"]


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_options_end_at_the_first_word_that_is_none():
    options = parse(["-np", "4", "--verbose", "python", "train.py", "-np", "9", "--unknown"])
    assert options.np == 4
    assert options.verbose
    assert options.command == ("python", "train.py", "-np", "9", "--unknown")


def test_two_dashes_end_the_options():
    assert parse(["-np", "2", "--", "train.py"]).command == ("train.py",)


@pytest.mark.parametrize("flag", ["-np", "--num-proc"])
def test_horovodruns_names_for_the_number_of_processes(flag):
    assert parse([flag, "3", "a"]).np == 3


def test_a_value_may_follow_an_equals_sign():
    assert parse(["--num-proc=3", "--output-filename=logs", "a"]).output_filename == Path("logs")


@pytest.mark.parametrize("word", ["--auto-tune", "-z", "--num-pro", "--auto-tune=1"])
def test_an_unknown_option_is_an_error_and_not_a_command(word):
    with pytest.raises(UsageError, match=f"unknown option {word.partition('=')[0]}"):
        parse(["-np", "2", word, "python", "train.py"])


def test_hosts_give_the_number_of_processes():
    options = parse(["-H", "a:2,b:4", "x"])
    assert options.np == 6
    assert options.hosts == (Host("a", 2), Host("b", 4))


def test_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n")
    assert parse(["--hostfile", str(file), "x"]).hosts == (Host("a", 2),)
    with pytest.raises(UsageError, match="cannot be combined"):
        parse(["--hostfile", str(file), "-H", "a", "x"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["python", "x.py"], "how many processes"),
        (["-np", "0", "x"], "at least 1"),
        (["-np", "-3", "x"], "at least 1"),
        (["-np", "two", "x"], "invalid int value: 'two'"),
        (["-np", "2"], "no command"),
        (["-np"], "expected one argument"),
        (["-np", "2", "-x", "A B=1", "x"], "not the name of a variable"),
        (["-np", "2", "--timeout", "soon", "x"], "--timeout soon: expected a time"),
        (["-np", "2", "--fusion-threshold-mb", "x", "x"], "whole number of MiB"),
    ],
)
def test_what_is_wrong_is_named(argv, message):
    with pytest.raises(UsageError, match=message):
        parse(argv)


def test_variables_and_settings():
    line = (
        "-np 2 -x A=1=2 --env B --timeout 5min --stall-check-warning-time-seconds 7 "
        "--fusion-threshold-mb 32 --log-level info --start-timeout 30 x"
    )
    options = parse(line.split())
    assert options.env == (("A", "1=2"), ("B", None))
    assert dict(options.settings) == {
        "timeout": "5min",
        "stall_warning": "7",
        "fusion_bytes": "32MiB",
        "log_level": "info",
        "start_timeout": "30",
    }


def test_the_timeline_and_the_stall_check():
    line = "-np 2 --timeline-filename t.json --timeline-mark-cycles --no-stall-check x"
    options = parse(line.split())
    assert dict(options.settings) == {"timeline": "t.json", "timeline_mark_cycles": "1"}
    assert options.env == (("HOROVOD_STALL_CHECK_DISABLE", "1"),)
    options = parse(["-np", "2", "--no-timeline-mark-cycles", "--stall-check", "x"])
    assert options.settings == (("timeline_mark_cycles", "0"),)
    assert options.env == (("HOROVOD_STALL_CHECK_DISABLE", "0"),)
    # What nobody asked for stays as the user's own variables have it.
    assert parse(["-np", "2", "x"]).settings == parse(["-np", "2", "x"]).env == ()


def test_what_is_off_with_0_in_horovod_is_left_to_the_variable_that_says_so():
    line = "-np 2 --stall-check-shutdown-time-seconds 0 --fusion-threshold-mb 0 x"
    options = parse(line.split())
    assert options.settings == ()
    assert dict(options.env) == {
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
        "HOROVOD_FUSION_THRESHOLD": "0",
    }
    for name in dict(options.env):
        assert name in {field.metadata["horovod"] for field in dataclasses.fields(Config)}


def test_horovodruns_options_without_a_meaning_here_are_accepted_and_named():
    line = "-np 2 --cycle-time-ms 5 --autotune --cache-capacity=9 --tcp --autotune-log-file f x y"
    options = parse(line.split())
    assert options.command == ("x", "y")
    names = ["--tcp", "--cycle-time-ms", "--cache-capacity", "--autotune", "--autotune-log-file"]
    assert list(options.without_effect) == names
    text = explain(options.without_effect)
    for name in names:
        assert text.count(name) == (2 if name == "--autotune" else 1)
    assert "--autotune, --autotune-log-file (" in text


def test_every_option_without_effect_has_its_reason():
    for name in WITHOUT_EFFECT:
        reason = explain([name]).partition(" (")[2]
        assert len(reason) > 10
        assert "HOROVOD_" not in reason
        assert "not known here" not in reason


@pytest.mark.parametrize("name", SATISFIED)
def test_switches_for_what_is_done_anyway_are_accepted_in_silence(name):
    options = parse(["-np", "2", name, "x"])
    assert options.command == ("x",)
    assert options.without_effect == ()


@pytest.mark.parametrize("name", REFUSED)
def test_options_for_what_is_not_there_are_errors_that_say_what_to_do(name):
    with pytest.raises(UsageError, match=f"{name} is not offered: .{{10}}"):
        parse(["-np", "2", name, "1", "x"])


def test_network_interfaces_and_the_launchers_own_options():
    line = "-np 2 --network-interface=lo --network-interfaces a,b --mpi-args=-v --binding-args=-w x"
    options = parse(line.split())
    assert options.interfaces == ("lo", "a", "b")
    assert options.mpi_args == ("-v", "-w")


@pytest.mark.parametrize("flag", ["--check", "--check-build", "-cb"])
def test_check_needs_no_command(flag):
    assert parse([flag]).check


def test_mpi_args_are_split_as_a_shell_would():
    assert parse(["-np", "2", "--mpi-args=--mca a 'b c'", "x"]).mpi_args == ("--mca", "a", "b c")


@pytest.mark.parametrize(
    ("command", "rank"),
    [
        (["python", "train.py", "-v"], [*WORKER, "--script", "train.py", "-v"]),
        (["python3", "train.py"], [*WORKER, "--script", "train.py"]),
        (["train.py", "a"], [*WORKER, "--script", "train.py", "a"]),
        ([HERE, "train.py"], None),
        (
            ["python", "-u", "-W", "error", "-Xdev", "train.py"],
            ["-u", "-W", "error", "-Xdev", *WORKER, "--script", "train.py"],
        ),
        (["python", "-m", "pkg.mod", "-x"], [*WORKER, "-m", "pkg.mod", "-x"]),
        (["python", "-mpkg"], [*WORKER, "-m", "pkg"]),
        (["python", "-O", "-c", "print(1)", "a"], ["-O", *WORKER, "-c", "print(1)", "a"]),
        (["bash", "-c", "echo"], [*WORKER, "bash", "-c", "echo"]),
        (["./a.out"], [*WORKER, "./a.out"]),
        (["/other/bin/python", "train.py"], [*WORKER, "/other/bin/python", "train.py"]),
    ],
)
def test_what_a_rank_executes(script, command, rank):
    if rank is None:
        command, rank = [sys.executable, script], [*WORKER, "--script", script]
        assert rank_command(command) == [sys.executable, *rank]
        return
    assert rank_command(command, HERE) == [HERE, *rank]


def test_as_horovod_is_the_first_word_for_the_bootstrap(script):
    line = rank_command(["python", "-u", script, "-v"], HERE, as_horovod=True)
    assert line == [HERE, "-u", *WORKER, "--as-horovod", "--script", script, "-v"]


def test_a_script_of_the_interpreter_runs_in_it_whatever_path_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "bin"
    folder.mkdir()
    python = str(folder / "python3")
    texts = {
        "tool": f"#!{folder}/python3\n",
        "long": f"#!/bin/sh\n'''exec' \"{folder}/python3.11\" \"$0\" \"$@\"\n' '''\n",
        "other": "#!/usr/bin/python3\n",
        "shell": "#!/bin/sh\necho\n",
        "binary": "\x7fELF",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("tool", "long"):
        expected = [python, *WORKER, "--script", str(folder / name), "a"]
        assert rank_command([name, "a"], python) == expected
    assert rank_command(["bin/tool", "a"], python)[3:] == ["--script", str(folder / "tool"), "a"]
    for name in ("other", "shell", "binary", "missing", "/usr/bin/tool"):
        assert rank_command([name], python) == [python, *WORKER, name]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["python"], "no script"),
        (["python", "-u"], "no script"),
        (["python", "-m"], "needs an argument"),
        (["python", "missing.py"], "missing.py: no such file"),
        (["missing.py"], "no such file"),
        (["python3.1", "train.py"], "ringrun runs in Python 3"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_any_rank_starts(script, command, message):
    with pytest.raises(UsageError, match=message):
        rank_command(command, HERE)
