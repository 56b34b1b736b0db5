from __future__ import annotations

import argparse
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from datetime import datetime, tzinfo

import pytest

from peerload.cli.common import options
from peerload.cli.common.command import command_options, task_name
from peerload.cli.main import VERBS, load
from peerload.cli.verbs.submit import array_ranges
from peerload.client.submission import captured_variables, looks_secret, packed_variables
from peerload.model.errors import BadRequest, UsageError
from peerload.text.units import duration, size
from tests.each import each


@each(
    ("text", "bytes_"),
    [("8G", 8 << 30), ("8GiB", 8 << 30), ("8gi", 8 << 30), ("8GB", 8 * 10**9), ("512M", 512 << 20), ("1.5K", 1536)],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert size(text) == bytes_


@each(
    ("text", "says"),
    [
        ("8", "8G is 8 GiB, 8M is 8 MiB"),
        ("8X", "not a size"),
        ("", "not a size"),
        ("0G", "not between"),
        ("-1G", "not a size"),
        ("9999999T", "not between"),
    ],
)
def test_sizes_refused(text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        size(text)


@each(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("90m", 5400),
        ("2h", 7200),
        ("1h30m", 5400),
        ("0:30:00", 1800),
        ("1-12:00:00", 129_600),
        ("0.5s", 0.5),
        ("15 m", 900.0),
        ("1h 30 m", 5400.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@each(
    ("text", "says"),
    [
        ("30", "30m is 30 minutes, 30s is 30 seconds"),
        ("1", "1m is 1 minute, 1s is 1 second"),
        ("0:30", "0:30:00 is hours and minutes, 0:0:30 is minutes and seconds"),
        ("x", "not a duration"),
        ("", "not a duration"),
        ("1:2:x", "not a duration"),
        ("0s", "more than 0 s, and at most"),
        ("1h30", "not a duration"),
        ("1.2.3s", "not a duration"),
    ],
)
def test_durations_refused(text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        duration(text)


@each(
    ("words", "command"),
    [
        (["ls", "-l", "--json"], ["ls", "-l", "--json"]),
        (["-c2", "ls", "-c", "3"], ["ls", "-c", "3"]),
        (["-c", "2", "--mem=8G", "--", "--odd", "--"], ["--odd", "--"]),
        (["-d", "-", "cat", "-"], ["cat", "-"]),
        (["--prio", "-5", "a"], ["a"]),
        (["--local", "--env", "A=b c", "x"], ["x"]),
        (["-J", "ls", "ps"], ["ps"]),
        ([], []),
    ],
)
def test_flags_end_at_the_first_word_that_is_none(words: list[str], command: list[str]) -> None:
    assert command_options("run", "", usage="").read_command(words)[1] == command


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(UsageError, match="--tim"):
        command_options("run", "", usage="").read_command(["--tim", "3h", "x"])


def test_signals() -> None:
    assert [options.signal_number(word) for word in ("INT", "SIGTERM", "kill", "9")] == [2, 15, 9, 9]
    for word in ("NOPE", "0", "65", "-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            options.signal_number(word)


def test_names() -> None:
    assert task_name([b"python3.11", b"/home/a/big.py", b"x"], shell=False) == "big.py"
    assert task_name([b"python", b"-c", b"pass"], shell=False) == "python"
    assert task_name([b"/bin/ls", b"-l"], shell=False) == "ls"
    assert task_name([b"/bin/sh", b"-c", b"sort a | uniq"], shell=True) == "sort"
    assert task_name([b"/bin/sh", b"-c", b"cat; echo bad"], shell=True) == "cat"
    assert task_name([b"\xff"], shell=False) == "\ufffd"


def test_array_ranges() -> None:
    assert array_ranges("1-100") == [(1, 100, 1)]
    assert array_ranges("0-9:3,12") == [(0, 9, 3), (12, 12, 1)]
    for text in ("", "a", "5-1", "1-2:0", "0-2000000", "-3", "1-", "1:2:3", "²"):
        with pytest.raises(UsageError):
            array_ranges(text)


ENVIRONMENT = {
    b"PATH": b"/bin",
    b"PWD": b"/here",
    b"DISPLAY": b":0",
    b"DBUS_SESSION_BUS_ADDRESS": b"x",
    b"SSH_AUTH_SOCK": b"x",
    b"XDG_RUNTIME_DIR": b"/run/user/1",
    b"GITHUB_TOKEN": b"t",
    b"API_KEY": b"k",
    b"AWS_PROFILE": b"p",
    b"db_password": b"p",
    b"ODD": b"\xff",
}


@pytest.mark.rule("X5")
def test_environment_less_login_and_secrets() -> None:
    kept, secret = captured_variables(ENVIRONMENT, [], [], moved=False)
    assert kept == {b"PATH": b"/bin", b"PWD": b"/here", b"ODD": b"\xff"}
    assert secret == ["API_KEY", "AWS_PROFILE", "GITHUB_TOKEN", "db_password"]
    assert b"PWD" not in captured_variables(ENVIRONMENT, [], [], moved=True)[0]


def test_export_adds_and_none_empties() -> None:
    kept, secret = captured_variables(ENVIRONMENT, ["API_KEY,DISPLAY"], ["A=1=2"], moved=False)
    assert kept[b"API_KEY"] == b"k"
    assert kept[b"DISPLAY"] == b":0"
    assert kept[b"A"] == b"1=2"
    assert "API_KEY" not in secret
    assert captured_variables(ENVIRONMENT, ["none"], [], moved=False) == ({}, [])
    assert captured_variables(ENVIRONMENT, ["none,PATH"], ["B=c"], moved=False) == ({b"PATH": b"/bin", b"B": b"c"}, [])


def test_export_mistakes() -> None:
    with pytest.raises(BadRequest, match="not set here"):
        captured_variables({}, ["NOPE"], [], moved=False)
    with pytest.raises(UsageError, match="takes names"):
        captured_variables({}, ["A=b"], [], moved=False)
    with pytest.raises(UsageError, match="NAME=VALUE"):
        captured_variables({}, [], ["A"], moved=False)


def test_environment_too_large_names_the_largest() -> None:
    with pytest.raises(BadRequest, match=r"the largest: BIG \(300 KiB\), SMALL"):
        packed_variables({b"SMALL": b"x", b"BIG": b"x" * (300 << 10)})


def test_secret_names() -> None:
    assert all(map(looks_secret, (b"MY_TOKEN", b"tokenizer", b"SECRET_X", b"DB_PASSWORD", b"S3_KEY", b"AWS_REGION")))
    assert not any(map(looks_secret, (b"PATH", b"KEYBOARD", b"MONKEY", b"LAWS_X")))


def test_a_value_may_look_like_a_flag_with_a_number() -> None:
    reader = options.Options("test", "")
    reader.flag("--by")
    reader.switch("--far")
    reader.add_argument("words", nargs="*")
    assert reader.read(["--by", "-5ms", "a", "--far"]).by == "-5ms"
    assert reader.read(["--far", "--by=1", "b"]).words == ["b"]


PLAIN = (
    (),
    ("-c", "2", "--mem=8G", "-x", "a", "--exclude", "b", "--once", "--env", "A=b", "--env=C=-d"),
    ("--time", "1h30m", "--prio", "3", "--prio=4", "--json", "--name", ""),
)


@each("words", PLAIN)
def test_plain_flags_are_read_as_argparse_reads_them(words: tuple[str, ...]) -> None:
    reader = command_options("run", "", usage="")
    plain = reader._plain(list(words))
    assert plain is not None
    assert vars(plain) == vars(reader.parser().parse_args(words))


@each(
    "words",
    [("--help",), ("-c2",), ("--cpu", "2"), ("--mem", "8"), ("--env",), ("--env", "--json"), ("--once=1",), ("a",)],
)
def test_what_is_no_plain_flag_is_left_to_argparse(words: tuple[str, ...]) -> None:
    assert command_options("run", "", usage="")._plain(list(words)) is None


@each("verb", ["submit", "run"])
def test_a_task_is_sent_without_argparse(verb: str) -> None:
    """Nobody listens: all that comes before that was loaded."""
    program = f"""
import sys
from peerload.cli.main import main
assert main([{verb!r}, "--socket", "/nowhere/s", "--env", "A=b", "true"]) == 125
print(sorted({{"argparse", "typing", "re", "socket", "msgspec", "shutil"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


@each("verb", sorted(VERBS))
def test_each_verb_shows_its_help(verb: str) -> None:
    with pytest.raises(SystemExit) as ended:
        load(verb)(["--help"])
    assert not ended.value.code


def test_an_instant_is_in_so_long_a_time_of_day_or_a_date() -> None:
    now = time.time()
    assert options.instant("8h") == pytest.approx(now + 8 * 3600, abs=60)
    assert now < options.instant("06:00") <= now + 86_400 + 3600
    assert options.instant("2130-01-31T06:00Z") == 5_051_743_200.0
    for text in ("2001-01-31T06:00Z", "soon", "25:00", "12", "0001-01-01T00:00"):
        with pytest.raises(ArgumentTypeError):
            options.instant(text)


@each(
    ("now", "text", "at"),
    [
        ("2026-03-28T22:00+01:00", "06:00", "2026-03-29T06:00+02:00"),
        ("2026-10-24T22:00+02:00", "06:00", "2026-10-25T06:00+01:00"),
        ("2026-03-28T22:00+01:00", "2026-03-29T06:00", "2026-03-29T06:00+02:00"),
        ("2026-03-28T22:00+01:00", "8h", "2026-03-29T07:00+02:00"),
    ],
)
def test_a_time_of_day_is_by_the_clock_of_that_day(
    now: str, text: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the nights in which clocks change."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(datetime.fromisoformat(now).timestamp(), tz)

    try:
        with monkeypatch.context() as patched:
            patched.setenv("TZ", "Europe/Berlin")
            time.tzset()
            patched.setattr("datetime.datetime", Clock)
            found = options.instant(text)
    finally:
        time.tzset()
    assert found == datetime.fromisoformat(at).timestamp()
