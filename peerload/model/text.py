"""Sanitizing of foreign text for terminals and logs: the one function for that (rule T1). Counts as words."""

from __future__ import annotations

_FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
"""Invisible letters and marks."""
MARKS_MAX = 2
"""Limit on the marks on one letter; with more of them text overlaps other lines."""


def times_text(number: int) -> str:
    """``once``, ``3 times``."""
    return "once" if number == 1 else f"{number} times"


def printable(text: object) -> str:
    r"""Foreign text made safe for a terminal or a log: on one line, and without effects on the terminal.

    Control characters (C0, C1, ESC, DEL), bidi controls, line separators, invisible characters (zero width, tags,
    private ones), piles of marks, and bytes that are not UTF-8 become ``\x1b``-style escapes. bytes: as UTF-8.
    """
    words = text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else str(text)
    if words.isascii() and words.isprintable():
        return words
    import unicodedata  # noqa: PLC0415 -- most text is plain, and a client starts sooner without

    shown, marks = [], 0
    for character in words:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        shown.append(_escaped(character, hidden=marks > MARKS_MAX))
    return "".join(shown)


def _escaped(character: str, *, hidden: bool) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # noqa: PLR2004 -- a byte that was no UTF-8, as surrogateescape keeps it
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable() and character not in _FILLERS and not hidden:
        return character
    if code < 0x100:  # noqa: PLR2004 -- as Python writes it
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004 -- as Python writes it
