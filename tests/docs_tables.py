"""Tables of the reference pages, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def section(page: str, heading: str) -> str:
    """The text under a heading, down to the next one of its level or above."""
    text = (DOCS / page).read_text(encoding="utf-8")
    level = len(heading) - len(heading.lstrip("#"))
    start = text.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"^#{{1,{level}}} ", text[start:], re.MULTILINE)
    return text[start : start + end.start()] if end else text[start:]


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table; `\\|` is a bar inside a cell. Headings and rules are left out."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_heading = number + 1 < len(lines) and lines[number + 1].startswith("|---")
        if line.startswith("|") and not line.startswith("|---") and not is_heading:
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            found.append([cell.strip().replace("\\|", "|") for cell in cells])
    return found


def code(cell: str) -> str:
    """The first thing set as code in a cell, "" if there is none."""
    found = re.search(r"`([^`]*)`", cell)
    return found[1] if found else ""
