from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings

import pytest

from ringplug.backend import config
from ringplug.backend.config import Config, Launched, launched
from ringplug.backend.errors import ConfigError
from ringplug.backend.parsing import parse_bool, parse_bytes, parse_seconds


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_true(text):
    assert parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off", ""])
def test_false(text):
    assert parse_bool(text) is False


@pytest.mark.parametrize("text", ["2", "maybe", "truee"])
def test_neither(text):
    with pytest.raises(ValueError, match="expected one of"):
        parse_bool(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (65536, 65536),
        ("65536", 65536),
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("1GB", 10**9),
        ("1.5k", 1500),
        ("2Ki", 2048),
        ("7b", 7),
        ("0", 0),
    ],
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1TB", "1 2", "0x10"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [(30, 30.0), ("30", 30.0), ("30s", 30.0), ("500ms", 0.5), ("10m", 600.0), ("2h", 7200.0)],
)
def test_times(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "-1", "1d", "soon"])
def test_wrong_times(text):
    with pytest.raises(ValueError, match="expected a time"):
        parse_seconds(text)


def test_defaults():
    loaded = Config.load({})
    assert loaded == Config()
    assert loaded.fusion_bytes == 64 * 2**20
    assert loaded.expected_size is None


def test_an_argument_wins_over_our_variable_and_that_over_horovods():
    env = {"HOROVOD_FUSION_THRESHOLD": "1024"}
    assert Config.load(env).fusion_bytes == 1024
    env["RINGPLUG_FUSION_BYTES"] = "2KiB"
    assert Config.load(env).fusion_bytes == 2048
    assert Config.load(env, fusion_bytes="3KiB").fusion_bytes == 3072
    assert Config.load(env, fusion_bytes=None).fusion_bytes == 2048


def test_horovods_zero_means_what_it_means_there():
    env = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0", "HOROVOD_FUSION_THRESHOLD": "0"}
    with pytest.warns(UserWarning, match="=0 has no equal here and is taken as") as warned:
        loaded = Config.load(env)
    assert {str(one.message).split("=")[0] for one in warned} == set(env)
    assert loaded.timeout == Config().timeout
    assert loaded.fusion_bytes == 2**20


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        ({"RINGPLUG_TIMEOUT": "soon"}, {}, r"RINGPLUG_TIMEOUT='soon': expected a time"),
        ({"RINGPLUG_TIMEOUT": "0"}, {}, "more than 0 seconds"),
        ({"RINGPLUG_FUSION_BYTES": "0"}, {}, "more than 0 bytes"),
        ({"HOROVOD_FUSION_THRESHOLD": "x"}, {}, "HOROVOD_FUSION_THRESHOLD='x'"),
        ({}, {"compression": "fp8"}, "argument compression='fp8': expected one of none"),
        ({"RINGPLUG_EXPECTED_SIZE": "two"}, {}, "RINGPLUG_EXPECTED_SIZE='two'"),
    ],
)
def test_a_wrong_value_is_named_with_its_source(env, arguments, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(env, **arguments)


def test_an_unknown_argument_is_an_error():
    with pytest.raises(TypeError, match="unknown settings: fusion_byte"):
        Config.load({}, fusion_byte=1)


def test_an_unknown_variable_warns_once_with_the_nearest_name(monkeypatch):
    monkeypatch.setattr(config, "_warned", set())
    env = {"RINGPLUG_FUSION_BYTE": "1"}
    with pytest.warns(UserWarning, match="did you mean RINGPLUG_FUSION_BYTES"):
        Config.load(env)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.load(env)
        Config.load({"OTHER": "1"})


def test_what_ringrun_and_init_export_is_known(monkeypatch):
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.setattr(os, "environ", {})
    config.claim_process()
    env = {**os.environ, config.JOB: "/tmp/x", config.variable("expected_size"): "2"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.load(env).expected_size == 2


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "RANK": "9",
                "WORLD_SIZE": "10",
                "TORCHELASTIC_RUN_ID": "x",
            },
            Launched("mpi", 3, 4, 1, 2),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            Launched("mpi", 1, 2, 0, 1),
        ),
        # Anybody may set RANK; torchrun also sets its run's id.
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"},
            Launched("torchrun", 1, 2, 0, 2),
        ),
        # An allocation without a step has started nothing.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"},
            Launched("slurm", 5, 8, 1, 8),
        ),
    ],
)
def test_launchers_marks(env, expected):
    assert launched(env) == expected


def test_a_launchers_mark_that_is_no_number_is_an_error():
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_RANK"):
        launched({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"})


def test_ranks_are_exported_where_nobody_has(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "7"})
    config.export_ranks(1, 4, 0, 2)
    assert os.environ == {
        "RANK": "7",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }


def test_threads_are_set_unless_the_user_chose(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "8"})
    config.set_default_threads(0)
    assert os.environ["OMP_NUM_THREADS"] == "8"
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == os.environ["NPROC"] == "1"


def test_only_what_ranks_need_goes_to_other_hosts(monkeypatch):
    environ = {
        "RINGPLUG_TIMEOUT": "1",
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HOME": "/",
    }
    monkeypatch.setattr(os, "environ", environ)
    assert config.forwarded_names() == ["KERAS_BACKEND", "PYTHONPATH", "RINGPLUG_TIMEOUT"]


def test_a_child_of_a_rank_is_known(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    assert not config.claimed_by_parent()
    config.claim_process()
    assert not config.claimed_by_parent()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert config.claimed_by_parent()


def test_a_childs_environment_is_a_copy(monkeypatch):
    monkeypatch.setattr(os, "environ", {"A": "1"})
    assert config.child_environment(B="2") == {"A": "1", "B": "2"}
    assert os.environ == {"A": "1"}


def test_the_table_lists_every_setting():
    done = subprocess.run(
        [sys.executable, "-m", "ringplug.backend.config"],
        capture_output=True,
        text=True,
        check=True,
    )
    for setting in dataclasses.fields(Config):
        assert f"| `{setting.name}` | `{config.variable(setting.name)}`" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "field", "wanted"),
    [
        ("HOROVOD_DYNAMIC_PROCESS_SETS", "1", "dynamic_process_sets", True),
        ("HOROVOD_DISABLE_GROUP_FUSION", "1", "group_fusion", False),
        ("HOROVOD_DISABLE_GROUP_FUSION", "0", "group_fusion", True),
        ("HOROVOD_TIMELINE", "/tmp/t.json", "timeline", "/tmp/t.json"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_warning", float("inf")),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "7", "stall_warning", 7.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90", "timeout", 90.0),
        ("HOROVOD_FUSION_THRESHOLD", "1000", "fusion_bytes", 1000),
        ("HOROVOD_START_TIMEOUT", "5", "start_timeout", 5.0),
        ("HOROVOD_LOG_LEVEL", "debug", "log_level", "debug"),
    ],
)
def test_horovods_variables(name, value, field, wanted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(Config.load({name: value}), field) == wanted


def test_an_own_name_is_stronger_than_horovods():
    both = {"HOROVOD_STALL_CHECK_DISABLE": "1", "RINGPLUG_STALL_WARNING": "3"}
    assert Config.load(both).stall_warning == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("HOROVOD_CYCLE_TIME", "no cycle"),
        ("HOROVOD_CACHE_CAPACITY", "by number"),
        ("HOROVOD_AUTOTUNE_LOG", "fusion_bytes"),
        ("HOROVOD_GLOO_IFACE", "no gloo"),
        ("HOROVOD_NUM_NCCL_STREAMS", "GPU"),
        ("HOROVOD_WITH_MPI", "nothing is compiled"),
        ("HOROVOD_RANK", "ringrun"),
        ("HOROVOD_SOMETHING_ELSE", "not known"),
    ],
)
def test_other_variables_of_horovod_warn_once(name, reason, monkeypatch):
    monkeypatch.setattr(config, "_warned", set())
    with pytest.warns(UserWarning, match=f"{name} has no effect in ringplug: .*{reason}") as caught:
        Config.load({name: "1"})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.load({name: "1"})


@pytest.mark.parametrize("value", ["mpi", "MPI"])
def test_what_is_done_anyway_needs_no_warning(value, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.load({"HOROVOD_CONTROLLER": value, "HOROVOD_CPU_OPERATIONS": value})
    monkeypatch.setattr(config, "_warned", set())
    with pytest.warns(UserWarning, match="HOROVOD_CONTROLLER has no effect"):
        Config.load({"HOROVOD_CONTROLLER": "gloo"})
