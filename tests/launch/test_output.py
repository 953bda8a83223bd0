from __future__ import annotations

import io
import os

import pytest

from ringplug.launch.output import Console, launcher_lines, open_streams


def test_lines_are_tagged_and_the_last_fifty_kept(tmp_path):
    out, err = io.BytesIO(), io.BytesIO()
    console = Console(out, err, tmp_path)
    for number in range(60):
        console.line(1, "stdout", b"line %d" % number)
    console.line(0, "stderr", b"oh")
    console.line(-1, "stderr", b"ringrun: itself")
    console.flush()
    console.close()
    assert out.getvalue().splitlines()[0] == b"[1] line 0"
    assert err.getvalue() == b"[0] oh\nringrun: itself\n"
    assert console.tail(1) == [f"line {number}" for number in range(10, 60)]
    assert console.tail(5) == []
    assert (tmp_path / "rank.1" / "stdout").read_text().splitlines()[59] == "line 59"
    assert (tmp_path / "rank.0" / "stderr").read_text() == "oh\n"


def test_of_a_progress_bar_only_its_last_state_is_shown():
    out = io.BytesIO()
    Console(out, io.BytesIO()).line(0, "stdout", b"\r1/3\r2/3\r3/3\r")
    assert out.getvalue() == b"[0] 3/3\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_stream_cuts_pieces_into_lines(tmp_path, terminal):
    streams = open_streams(tmp_path, range(2), {"stdout": terminal, "stderr": False})
    stream = next(one for one in streams if (one.rank, one.stream) == (1, "stdout"))
    end = os.open(tmp_path / "rank.1.stdout", os.O_WRONLY | os.O_NOCTTY)
    assert os.isatty(end) == terminal
    assert stream.read() == []
    os.write(end, b"ab")
    assert stream.read() == []
    os.write(end, b"c\n\xff\nd")
    assert stream.read() == [b"abc", b"\xff"]
    assert stream.rest() == [b"d"]
    assert stream.rest() == []
    os.close(end)
    for one in streams:
        one.close()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"plain", [(-1, "stderr", b"plain")]),
        (b"[1,3]<stdout>: text", [(3, "stdout", b"text")]),
        (b"[1,0]<stderr>: a[1,1]<stderr>: b", [(0, "stderr", b"a"), (1, "stderr", b"b")]),
        (b"[2] text [1] not", [(2, "stderr", b"text [1] not")]),
    ],
)
def test_launchers_marks(line, parts):
    assert launcher_lines(line, "stderr") == parts
