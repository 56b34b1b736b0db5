"""What a line may hold, and how wide it is."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from peerload.top import lines as draw
from tests.each import each
from tests.unit.top.given import ESCAPES

TEXT = st.text(max_size=60) | st.text(alphabet="aé漢\u0301\u200b\u202e\x1b\n[]😀क\u093e", max_size=60)


@pytest.mark.rule("T1")
@given(TEXT)
def test_nothing_foreign_can_move_the_cursor_or_hide(text: str) -> None:
    shown = draw.plain(text)
    assert shown.isprintable() or not shown
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(TEXT, st.integers(0, 80))
def test_a_padded_text_has_the_width_asked_for(text: str, width: int) -> None:
    shown = draw.padded(draw.plain(text), width)
    assert cell_len(shown) == width


@given(st.lists(st.tuples(TEXT, st.sampled_from(["", "bold"])), max_size=5), st.integers(0, 60))
def test_a_fitted_line_has_the_width_asked_for(spans: list[tuple[str, str]], width: int) -> None:
    assert draw.width_of(draw.fitted([(draw.plain(text), style) for text, style in spans], width)) == width


def test_escapes_markup_and_bidi_are_shown_not_done() -> None:
    shown = draw.plain(ESCAPES)
    assert "\\x1b[31mred" in shown
    assert "[bold red]markup[/]" in shown
    assert "\\x0d\\x0a" in shown
    assert "\\u202e" in shown
    assert "\\u200b" in shown
    assert shown.count("\u0301") == draw.MARKS_IN_A_ROW_MAX


@each("text", ["plain", "naïve", "日本語", "हिन्दी", "ไทย"])
def test_writing_is_left_as_it_is(text: str) -> None:
    assert draw.plain(text) == unicodedata.normalize("NFC", text)


def test_bytes_that_are_no_text_are_escaped() -> None:
    assert draw.plain(b"a\xffb") == "a\\xffb"


def test_long_foreign_text_is_cut_before_it_is_looked_at() -> None:
    assert len(draw.plain("x" * 1_000_000)) == draw.LINE_CHARS_MAX


def test_a_wide_character_is_not_cut_in_half() -> None:
    assert draw.padded("日本語", 4) == "日… "


@each(
    ("share", "shown"),
    [
        (0.0, "··········"),
        (0.01, "■·········"),
        (0.5, "■■■■■·····"),
        (1.0, "■■■■■■■■■■"),
        (2.0, "■■■■■■■■■+"),
        (None, " " * 10),
    ],
)
def test_bars(share: float | None, shown: str) -> None:
    assert draw.as_text(draw.bar(share, 10)) == shown


def test_a_bar_changes_its_style_where_it_gets_tight() -> None:
    assert draw.bar(1.0, 10) == [("■■■■■■", "good"), ("■■", "warn"), ("■■", "bad")]


def test_a_bar_without_colour_or_other_characters_still_tells() -> None:
    assert draw.as_text(draw.in_ascii(draw.bar(0.5, 10))) == "#####....."


@given(st.none() | st.floats(0, 10, allow_nan=False), st.integers(0, 50))
def test_a_bar_has_the_width_asked_for(share: float | None, width: int) -> None:
    assert draw.width_of(draw.bar(share, width)) == width


@given(st.lists(st.none() | st.floats(0, 2, allow_nan=False), max_size=40), st.integers(0, 30))
def test_a_sparkline_has_the_size_asked_for(values: list[float | None], width: int) -> None:
    drawn = draw.sparkline(values, width)
    assert len(drawn) == width
    assert draw.as_text(draw.in_ascii([(drawn, "")])).isascii()


def test_a_sparkline_ends_with_now() -> None:
    assert draw.sparkline([0.0, 0.5, 1.0], 5) == "  ▁▄█"
    assert draw.sparkline([None, 1.0], 2) == " █"
    assert draw.in_ascii([(draw.sparkline([0.0, 1.0], 2), "")]) == [(".@", "")]


def test_a_frame_has_its_title_and_its_size() -> None:
    framed = [draw.as_text(line) for line in draw.framed([("nodes", "")], [[("x", "")]], 12, 4, focus=False)]
    assert framed == ["╭─ nodes ──╮", "│x         │", "│          │", "╰──────────╯"]
    framed = [draw.as_text(draw.in_ascii(line)) for line in draw.framed([("nodes", "")], [], 12, 3, focus=True)]
    assert framed == ["+- nodes --+", "|          |", "+----------+"]


@each(("width", "height"), [(0, 0), (3, 5), (10, 1), (4, 2), (5, 2), (6, 3)])
def test_a_frame_without_room_is_no_trouble(width: int, height: int) -> None:
    lines = draw.framed([("a long title", "")], [], width, height, focus=False)
    assert [draw.width_of(line) for line in lines] == [width] * height
