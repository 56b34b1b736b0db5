from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerload.model.text import printable
from peerload.text.format import ago_text, coloured, duration_text, number_text, size_text, table
from peerload.text.tasks import instant_text
from tests.each import each

HARMFUL = set(range(0x20)) | set(range(0x7F, 0xA0)) | {0x2028, 0x2029, 0x200E, 0x200F, 0x061C}
HARMFUL |= set(range(0x202A, 0x202F)) | set(range(0x2066, 0x206A)) | set(range(0xD800, 0xE000))


@each(
    ("text", "shown"),
    [
        ("plain words", "plain words"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("a\nb\tc\x7f", "a\\x0ab\\x09c\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202etxt.exe", "abc\\u202etxt.exe"),
        ("one\u2028two", "one\\u2028two"),
        (b"\xff\xfe ok", "\\xff\\xfe ok"),
        ("größe 数", "größe 数"),
        (None, "None"),
    ],
)
def test_printable(text: object, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.rule("T1")
@given(st.one_of(st.text(), st.binary()))
def test_nothing_harmful_is_left(text: str | bytes) -> None:
    shown = printable(text)
    assert not HARMFUL & set(map(ord, shown))
    assert printable(shown) == shown
    shown.encode()


def test_table_is_aligned_and_harmless() -> None:
    lines = table(("ID", "N"), [("ws1/1", 5), ("w\x1b[2J", 100)], right=("N",))
    assert lines == ["ID          N", "ws1/1       5", "w\\x1b[2J  100"]


@each(
    ("seconds", "shown"),
    [(0.42, "0.4s"), (59, "59s"), (185, "3m05s"), (7800, "2h10m"), (4 * 86400 + 3 * 3600, "4d03h"), (None, "-")],
)
def test_durations(seconds: object, shown: str) -> None:
    assert duration_text(seconds) == shown


@each("number", [1e18, 1e300, float("inf"), -float("inf"), float("nan")])
def test_times_that_another_node_makes_up_are_no_bug(number: float) -> None:
    assert instant_text(number) == ago_text(number) == "-"
    assert duration_text(number) in ("-", "0.0s")
    assert number_text(number)


def test_instants_after_2038() -> None:
    assert instant_text(4e9).startswith("2096-10-0")


@each(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 30, "64 GiB"), (3 << 40, "3 TiB"), (None, "-")],
)
def test_sizes(size: object, shown: str) -> None:
    assert size_text(size) == shown


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("x", "red", io.StringIO()) == "x"
    assert coloured("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("x", "red", Terminal()) == "x"
