from __future__ import annotations

import platform
import stat

import pytest

from ringplug.backend.errors import UnavailableError, UsageError
from ringplug.launch.hosts import Host, all_local, check_reachable, parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a", 1)]),
        ("a:3,b.example.com:1", [Host("a", 3), Host("b.example.com", 1)]),
        ("10.0.0.1:2", [Host("10.0.0.1", 2)]),
        ("[fe80::1]:2,[::1]", [Host("fe80::1", 2), Host("::1", 1)]),
    ],
)
def test_hosts(text, hosts):
    assert list(parse_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=x:1",
        "a b:1",
        "a;rm:1",
        "$(x):1",
        "",
        "a:",
        "a:0",
        "a:-1",
        "a:x",
        "a:1,",
        "a,a",
    ],
)
def test_names_that_could_be_options_or_commands_are_refused(text):
    with pytest.raises(UsageError):
        parse_hosts(text)


def test_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two hosts\na slots=2  # fast\n\nb:3\nc\n")
    assert parse_hostfile(file) == (Host("a", 2), Host("b", 3), Host("c", 1))


@pytest.mark.parametrize("line", ["a slots=x", "a max=2", "a slots=1 more", "-a slots=1", "# none"])
def test_a_wrong_hostfile_is_refused(tmp_path, line):
    file = tmp_path / "hosts"
    file.write_text(line + "\n")
    with pytest.raises(UsageError):
        parse_hostfile(file)


def test_a_missing_hostfile_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere: No such file"):
        parse_hostfile(tmp_path / "nowhere")


def test_local():
    assert all_local([])
    assert all_local([Host("localhost", 2), Host(platform.node(), 1)])
    assert not all_local([Host("localhost", 2), Host("elsewhere", 1)])


def test_all_hosts_that_do_not_answer_are_named_at_once(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    # The host's name comes after the options and `--`, and before the command.
    ssh.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n'
        '[ "$2 $3" = "good true" ] && exit 0\necho "$2 refused" >&2\nexit 255\n'
    )
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    check_reachable([Host("good", 1), Host("localhost", 1)])
    with pytest.raises(UnavailableError) as caught:
        check_reachable([Host("good", 1), Host("bad1", 1), Host("bad2", 1)])
    assert "bad1: bad1 refused" in str(caught.value)
    assert "bad2: bad2 refused" in str(caught.value)
    assert "good" not in str(caught.value)
