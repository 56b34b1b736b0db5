"""How `map` makes commands of inputs, keeps its log, and decides to stop; without an agent."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerload.cli.common.output import bar_text
from peerload.cli.map import template as map_inputs
from peerload.cli.map.run import HEADER, Halt, Joblog, MapResult
from peerload.cli.map.template import (
    SEPARATORS,
    BadInput,
    CommandTemplate,
    LineReader,
    MapInputs,
    opened,
    shown,
    split,
)
from peerload.cli.verbs import map as map_verb
from peerload.cli.verbs.change import to_retry
from peerload.cli.verbs.map import JSON_OUTPUT_BYTES_MAX, Outputs
from peerload.model.errors import PeerloadError, UsageError
from tests.each import each

NO_NUL = st.binary(max_size=30).map(lambda raw: raw.replace(b"\0", b""))


def taken(inputs: MapInputs) -> list[tuple[bytes, ...]]:
    found = []
    while not inputs.is_over:
        values = inputs.next()
        if values is not None:
            found.append(values)
        elif inputs.descriptor is not None:
            inputs.read()
    return found


# -- flags among the inputs ---------------------------------------------------------------------------------------------


@each(
    ("words", "out", "sources"),
    [
        (["--tag", "c", ":::", "a", "b", "--out", "out/*"], ["out/*"], [["a", "b"]]),
        (["--out=x", "--", "c", ":::", "1", "--tag", "2", "--out=y", ":::", "3"], ["x", "y"], [["1", "2"], ["3"]]),
        (["--tag", "c", "--out", ":::", "-j", "--verbose", "--outer=1"], [], [["-j", "--verbose", "--outer=1"]]),
        (["c", ":::", "a", "--", "--tag", ":::", "--", "--out", "x"], [], [["a", "--"], ["--out", "x"]]),
        (["c", ":::", "--", "--", ":::", "--tag", "b"], [], [["--"], ["b"]]),
    ],
)
def test_long_flags_among_the_inputs_are_flags_until_a_separator_and_two_dashes(
    words: list[str], out: list[str], sources: list[list[str]]
) -> None:
    flags, rest = map_verb._reader().read_command(words, SEPARATORS)
    assert (flags.tag, flags.outputs) == (True, out)
    assert [values for _, values in split(rest)[1]] == sources


def test_a_flag_behind_the_inputs_needs_its_value() -> None:
    with pytest.raises(UsageError, match="--out"):
        map_verb._reader().read_command(["c", ":::", "a", "--out"], SEPARATORS)


# -- commands ----------------------------------------------------------------------------------------------------------


@given(st.lists(NO_NUL, min_size=1, max_size=3))
def test_a_line_for_the_shell_gives_back_each_input_as_one_word(values: list[bytes]) -> None:
    template = CommandTemplate([b"printf '<%s>' {}"], is_shell=True, inputs=len(values))
    argv = template.argv(1, values)
    done = subprocess.run(argv, capture_output=True, check=True)
    assert done.stdout == b"".join(b"<%s>" % value for value in values)


@given(NO_NUL)
def test_what_is_shown_of_a_command_can_be_typed(value: bytes) -> None:
    argv = CommandTemplate([b"cmd", b"-{}", b"{}"], is_shell=False).argv(1, [value])
    assert [os.fsencode(word) for word in shlex.split(os.fsdecode(shown(argv)))] == argv


@each(
    ("place", "value", "is_"),
    [
        ("{.}", "a.b/c.tar.gz", "a.b/c.tar"),
        ("{.}", "a.b/c", "a.b/c"),
        ("{.}", ".hidden", ""),
        ("{/}", "a/b/c.d", "c.d"),
        ("{/}", "c", "c"),
        ("{//}", "a/b/c", "a/b"),
        ("{//}", "/c", "/"),
        ("{//}", "c", "."),
        ("{/.}", "a/b.c/d.e", "d"),
        ("{1.}", "x.y", "x"),
        ("{print}", "x", "{print}"),
        ("{ }", "x", "{ }"),
    ],
)
def test_places_are_those_of_gnu_parallel(place: str, value: str, is_: str) -> None:
    assert CommandTemplate([b"c", place.encode(), b"{#}"], is_shell=False).argv(7, [value.encode()])[1:] == [
        is_.encode(),
        b"7",
    ]


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_sources_are_split_off_and_combined(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1\n2\n")
    command, sources = split(["cmd", "{}", ":::", "a", "b", "::::", str(tmp_path / "x"), ":::+", "p", "q"])
    assert command == ["cmd", "{}"]
    inputs = opened(sources)
    assert inputs.total == 4
    assert taken(inputs) == [(b"a", b"1", b"p"), (b"a", b"2", b"q"), (b"b", b"1", b"p"), (b"b", b"2", b"q")]
    files = opened([("::::", [str(tmp_path / "x"), str(tmp_path / "x")])])
    assert files.total is None
    assert taken(files) == [(b"1", b"1"), (b"1", b"2"), (b"2", b"1"), (b"2", b"2")]
    assert files.total == 4
    assert taken(opened([(":::", []), (":::", ["1"])])) == []


def test_lines_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_inputs, "LINE_BYTES_MAX", 100_000)
    (tmp_path / "long").write_bytes(b"x" * 300_000)
    lines = LineReader(str(tmp_path / "long"))
    lines.read()
    with pytest.raises(BadInput, match="longer than"):
        lines.read()
    os.close(lines.descriptor)
    monkeypatch.setattr(map_inputs, "HELD_BYTES_MAX", 1000)
    (tmp_path / "many").write_bytes(b"y\n" * 2000)
    with pytest.raises(BadInput, match="has more than"):
        opened([(":::", ["1"]), ("::::", [str(tmp_path / "many")])])
    many = opened([("::::", [str(tmp_path / "many")])])
    while many.descriptor is not None:
        many.read()
    assert len(many._stream.ahead) >= map_inputs.LINES_AHEAD_MAX  # type: ignore[union-attr]
    assert len(taken(many)) == 2000


# -- the log -----------------------------------------------------------------------------------------------------------


def test_a_log_of_gnu_parallel_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(
        HEADER
        + b"2\t:\t1700000000.123\t     0.005\t0\t2\t0\t0\techo b\n"
        + b"1\t:\t1700000000.123\t     0.005\t0\t2\t3\t0\techo a\n"
        + b"3\t:\t1700000000.123\t     0.005\t0\t2\t0\t9\techo\0c\n"
    )
    read = Joblog(str(log), resumes=True)
    assert [read.has(number, line) for number, line in enumerate((b"echo a", b"echo b", b"echo\nc", b"new"), 1)] == [
        True,
        True,
        True,
        False,
    ]
    again = Joblog(str(log), resumes=True, again_failed=True)
    assert [again.has(number, line) for number, line in enumerate((b"echo a", b"echo b", b"echo\nc"), 1)] == [
        False,
        True,
        False,
    ]
    assert (read.skipped, again.skipped) == (3, 1)


def test_a_line_that_is_cut_off_ends_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that becomes full takes a part of a line; the next one would be joined to that."""
    log = Joblog(str(tmp_path / "log"))
    taken = iter((4,))

    def write(_file: int, _line: bytes) -> int:
        for count in taken:
            return count
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(PeerloadError, match="No space left"):
        log.add(1, {"exit_code": 0}, b"true 1")


@each(
    "line",
    [b"x\n", b"1\t:\t0\t0\t0\t0\tx\t0\tc\n", b"0\t:\t0\t0\t0\t0\t0\t0\tc\n", b"99999999999\t:\t0\t0\t0\t0\t0\t0\tc\n"],
)
def test_what_is_no_log_is_left_alone(tmp_path: Path, line: bytes) -> None:
    log = tmp_path / "log"
    log.write_bytes(line)
    with pytest.raises(UsageError, match="is not a joblog"):
        Joblog(str(log), resumes=True)
    assert log.read_bytes() == line


def test_a_log_begins_anew_without_resume(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("what was there\n")
    kept = Joblog(str(log))
    kept.add(
        1,
        {"node": "n1", "started_at": 10.0, "ended_at": 11.5, "exit_code": 137, "signal": 9, "stdout_bytes": 4},
        b"a\nb",
    )
    assert log.read_bytes() == HEADER + b"1\tn1\t10.000\t     1.500\t0\t4\t0\t9\ta\0b\n"


# -- the end -----------------------------------------------------------------------------------------------------------


@each(
    ("text", "failed", "succeeded", "is_due"),
    [
        ("never", 9, 9, False),
        ("now,fail=1", 0, 9, False),
        ("now,fail=1", 1, 0, True),
        ("soon,fail=10%", 1, 9, True),
        ("soon,fail=10%", 1, 10, False),
        ("soon,fail=50%", 2, 0, False),  # of three at least
        ("now,success=2", 5, 2, True),
        ("now,done=3", 1, 2, True),
    ],
)
def test_when_it_is_enough(text: str, failed: int, succeeded: int, is_due: bool) -> None:
    assert Halt(text).is_due(failed=failed, succeeded=succeeded) is is_due
    assert Halt(text).is_now is text.startswith("now")


@each(
    "text",
    ["", "now", "now,fail", "now,fail=", "now,fail=x", "later,fail=1", "now,fail=0", "never,fail=1", "now,fail=-1"],
)
def test_what_no_halt_is(text: str) -> None:
    with pytest.raises(UsageError):
        Halt(text)


def test_outputs_keep_their_order_within_a_bound(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerload.cli.verbs.map.KEPT_BYTES_MAX", 5)
    asked: list[str] = []

    def fetch(task: str) -> list[dict[str, object]]:
        asked.append(task)
        return [{"stream": 1, "offset": 0, "data": f"{task}\n".encode()}]

    outputs = Outputs(lambda task: iter(fetch(task)), keeps_order=True)

    def end(number: int) -> None:
        text = b"t%d\n" % number
        outputs.ended(
            MapResult(
                number, b"", {"id": f"t{number}", "stdout": text, "stderr": b"", "stdout_bytes": 3, "stderr_bytes": 0}
            )
        )

    for number in (4, 3, 2):
        end(number)
    outputs.skipped(1)
    end(7)
    outputs.finish()
    assert capfdbinary.readouterr().out == b"t2\nt3\nt4\nt7\n"
    assert asked == ["t2", "t3"]


def test_the_bar_says_how_far_it_is() -> None:
    assert bar_text(5, 1, 10, 20.0) == "[###############               ] 50% 5/10  1 failed  ETA 20s"
    assert bar_text(10, 0, 10, 20.0).endswith("100% 10/10  20s")
    assert bar_text(7, 0, None, 3.0) == "7 done  3.0s"
    assert "ETA -" in bar_text(0, 0, 3, 0.0)


def test_what_was_not_queued_again_is() -> None:
    def task(name: str, state: str = "failed", retry_of: str | None = None) -> dict[str, object]:
        return {"id": name, "state": state, "retry_of": retry_of}

    tasks = [
        *(task(f"x/1.{member}") for member in (1, 2)),
        task("x/2"),
        *(task(f"x/3.{member}") for member in (1, 2, 3)),
        task("x/4", retry_of="x/2"),
        task("x/5.2", "done", retry_of="x/3.2"),
        task("x/6.1", "cancelled"),
        task("x/7", "unknown"),
    ]
    assert to_retry(tasks) == [  # x/2 was queued again as x/4, which failed
        ("x/1", ["x/1.1", "x/1.2"]),
        ("", ["x/3.1", "x/3.3"]),
        ("x/4", ["x/4"]),
        ("x/7", ["x/7"]),
    ]


@pytest.mark.parametrize(
    ("sizes", "pieces", "is_told"),
    [
        ((4, 2), [(1, b"ab"), (2, b"e\n"), (1, b"c\n")], True),
        ((9, 2), [(1, b"ab"), (2, b"e\n")], False),
        ((JSON_OUTPUT_BYTES_MAX, 1), [], False),
    ],
)
def test_an_object_has_the_whole_output_or_says_why_not(
    sizes: tuple[int, int], pieces: list[tuple[int, bytes]], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete: dict[str, str] = {}
    mapping: Any = SimpleNamespace(
        output=lambda _task: iter([{"stream": stream, "data": data} for stream, data in pieces]),
        incomplete=incomplete,
        note_incomplete=incomplete.setdefault,
    )
    body = {"id": "n1/1.1", "command": b"x", "stdout_bytes": sizes[0], "stderr_bytes": sizes[1]}
    map_verb._print_ended(mapping, MapResult(1, b"", body))
    told = json.loads(capsys.readouterr().out)
    if is_told:
        assert (told["stdout"], told["stderr"], incomplete) == ("abc\n", "e\n", {})
        assert "output_missing" not in told
    else:
        assert (told["stdout"], told["stderr"]) == (None, None)
        assert incomplete == {"n1/1.1": told["output_missing"]}


@each(
    ("body", "said"),
    [
        ({"exit_code": 3, "reason": "exit code 3", "error_line": "oops"}, "  exit 3  c 1  (on b: oops)"),
        ({"exit_code": 125, "reason": "staging: no r", "error_line": ""}, "  exit 125  c 1  (on b: staging: no r)"),
        ({"signal": 9, "reason": "ended by signal 9 (KILL)"}, "  signal 9  c 1  (on b)"),
        ({"exit_code": 1, "reason": "exit code 1; its disk was full"}, "  exit 1  c 1  (on b: its disk was full)"),
    ],
)
def test_the_line_of_a_failure_has_its_reason(body: dict[str, Any], said: str) -> None:
    assert map_verb.failure_text({"id": "a/1.1", "state": "failed", "node": "b", **body}, b"c 1") == f"a/1.1{said}"
