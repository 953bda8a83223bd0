from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ringplug.backend.errors import UnavailableError, UsageError
from ringplug.launch import command, mpirun
from ringplug.launch.hosts import Host
from ringplug.launch.mpirun import Library, Mpirun, command_line, find, identify, root_reason

OPEN_MPI = Mpirun("/m/mpirun", "Open MPI", "5.0.11")
OPEN_MPI_4 = Mpirun("/m/mpirun", "Open MPI", "4.1.4")
MPICH = Mpirun("/m/mpiexec", "MPICH", "5.0.2")

SAYS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11\n\nReport bugs to ...",
    "openmpi4": "mpirun (Open MPI) 4.1.4\n",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20250101",
    "other": "Some launcher 1.0",
}


@pytest.fixture
def launchers(tmp_path):
    paths = {}
    for name, text in SAYS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        path.chmod(0o755)
        paths[name] = str(path)
    return paths


@pytest.mark.parametrize(
    ("name", "vendor", "version"),
    [
        ("openmpi5", "Open MPI", "5.0.11"),
        ("openmpi4", "Open MPI", "4.1.4"),
        ("mpich", "MPICH", "5.0.2"),
        ("intel", "Intel MPI", "2021.18"),
        ("other", "unknown", ""),
    ],
)
def test_launchers_are_known_by_what_they_say(launchers, name, vendor, version):
    assert identify(launchers[name]) == Mpirun(launchers[name], vendor, version)


def test_a_launcher_that_cannot_be_run_is_unknown(tmp_path):
    assert identify(str(tmp_path / "nothing")).vendor == "unknown"


def test_the_launcher_of_the_librarys_vendor_and_version_is_chosen(launchers):
    order = [launchers[name] for name in ("mpich", "openmpi4", "openmpi5")]
    assert find(Library("Open MPI", "5.0.11", ""), order).path == launchers["openmpi5"]
    assert find(Library("Open MPI", "5.0.99", ""), order).path == launchers["openmpi4"]
    assert find(Library("MPICH", "4.2.0", ""), order).path == launchers["mpich"]


def test_a_mixture_is_refused_with_both_sides(launchers):
    with pytest.raises(UnavailableError) as caught:
        find(Library("MPICH", "5.0.2", "/x/libmpi.so"), [launchers["openmpi5"], launchers["other"]])
    text = str(caught.value)
    assert "MPICH 5.0.2 (/x/libmpi.so)" in text
    assert f"{launchers['openmpi5']} (Open MPI 5.0.11)" in text
    assert "worlds of one rank" in text
    assert "pip install 'ringplug[mpi]'" in text


def test_no_launcher_at_all(launchers):
    with pytest.raises(UnavailableError, match="none found"):
        find(Library("Open MPI", "5.0.11", ""), [])


def test_the_one_of_this_environment_is_found():
    loaded = mpirun.library()
    found = find(loaded)
    assert found.vendor == loaded.vendor
    assert os.access(found.path, os.X_OK)


def test_an_interpreter_without_mpi4py_says_what_to_install(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    with pytest.raises(UnavailableError, match=r"No module named 'mpi4py'.*pip install"):
        mpirun.library(str(python))


def test_open_mpi_here():
    line = command_line(OPEN_MPI, 3, ["python", "x y.py"], fabric=False)
    assert line[0] == "/m/mpirun"
    assert line[-4:] == ["-n", "3", "python", "x y.py"]
    text = " ".join(line)
    assert "--bind-to none" in text
    assert "--mca pml ob1 --mca btl self,sm,tcp --mca osc ^ucx" in text
    assert "--oversubscribe" in line
    assert "--host" not in line
    assert ("--allow-run-as-root" in line) == (os.geteuid() == 0)


def test_binding_can_be_asked_for():
    line = command_line(OPEN_MPI, 2, ["a"], extra=["--bind-to", "core"])
    assert line.count("--bind-to") == 1
    assert "none" not in line


def test_older_open_mpi_has_another_name_for_shared_memory():
    line = command_line(OPEN_MPI_4, 2, ["a"], fabric=False, tagged=True)
    assert "self,vader,tcp" in line
    assert "--tag-output" in line


def test_a_fast_network_is_left_to_open_mpis_choice():
    assert "--mca" not in command_line(OPEN_MPI, 2, ["a"], fabric=True)


def test_open_mpi_on_several_hosts():
    hosts = [Host("far1", 2), Host("far2", 4)]
    line = command_line(OPEN_MPI, 6, ["a"], hosts=hosts, forward=["A", "B"], tagged=True)
    text = " ".join(line)
    assert "--host far1:2,far2:4" in text
    assert "-x A -x B" in text
    assert "--output tag" in text
    assert "--oversubscribe" not in line


def test_mpich():
    assert command_line(MPICH, 2, ["a", "-b"]) == ["/m/mpiexec", "-n", "2", "a", "-b"]
    hosts = [Host("far1", 2), Host("far2", 4)]
    line = command_line(MPICH, 6, ["a"], hosts=hosts, forward=["A"], tagged=True, extra=["-v"])
    assert line == ["/m/mpiexec", "-hosts", "far1:2,far2:4", "-l", "-v", "-n", "6", "a"]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        command_line(OPEN_MPI, 0, ["a"])
    with pytest.raises(UsageError, match="no command"):
        command_line(OPEN_MPI, 1, [])


def test_root_needs_leave_outside_containers(monkeypatch):
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert root_reason() == ""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(mpirun, "_in_container", lambda: True)
    assert root_reason() == "inside a container"
    monkeypatch.setattr(mpirun, "_in_container", lambda: False)
    with pytest.raises(
        UsageError, match=r"--allow-run-as-root.*OMPI_ALLOW_RUN_AS_ROOT=1"
    ) as caught:
        root_reason()
    assert "\n" not in str(caught.value)
    assert root_reason(allowed=True) == "allowed"
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", raising=False)
    with pytest.raises(UsageError):
        root_reason()
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    assert root_reason() == "allowed"


def test_values_of_variables_are_in_the_environment_and_never_in_the_list():
    line, environ = command(
        2, ["a"], hosts=[Host("far", 2)], env={"TOKEN": "secret"}, allow_run_as_root=True
    )
    assert environ["TOKEN"] == "secret"
    assert "secret" not in " ".join(line)
    text = " ".join(line)
    assert "-x TOKEN" in text
    assert "-x RINGPLUG_EXPECTED_SIZE" in text


def test_command_starts_ranks_without_a_supervisor():
    code = "import ringplug; ringplug.init(); print('rank', ringplug.rank(), ringplug.size())"
    line, environ = command(2, [sys.executable, "-c", code], allow_run_as_root=True)
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 2", "rank 1 2"]
