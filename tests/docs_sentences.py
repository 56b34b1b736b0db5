"""Sentences of the user pages that begin with a relative clause or an inversion, for a person to read; and the size of these pages.

`make docs-sentences` prints them with page and line, then the number of words, whose bound a test holds (tests/unit/test_docs.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
WORDS_MAX = 35_000
START = re.compile(
    r"(?:^|(?<=[.!?:] )|(?<=\| )|(?<=^- ))(?:\*\*)?"
    r"((?:What|Whatever|Who|Whoever|Whom|Whose|Which|Whether|Where|Wherever|How|That which|Those (?:that|who|which)"
    r"|Nor|Neither of|So do|So does|So is)\b[^.?!|]*[.!|]?)"
)


def found(text: str) -> list[tuple[int, str]]:
    """Line number and sentence; questions, headings and blocks of code are left out."""
    lines = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return [
        (number, match[1])
        for number, line in enumerate(lines.splitlines(), start=1)
        if not line.startswith("#")
        for match in START.finditer(line)
        if line[match.end(1) : match.end(1) + 1] != "?"
    ]


def user_pages() -> list[Path]:
    """The pages for users: README.md, deploy/README.md, and those of docs/ that its index does not list for developers."""
    listed = (DOCS / "index.md").read_text(encoding="utf-8").partition("## For developers")[2]
    developers = set(re.findall(r"\]\(([^)#]+)\)", listed))
    root = DOCS.parent
    pages = sorted(page for page in DOCS.glob("*.md") if page.name not in developers)
    return [root / "README.md", root / "deploy/README.md", *pages]


def words_in(pages: Iterable[Path]) -> int:
    """The number of words of these pages, as wc counts them."""
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


if __name__ == "__main__":
    for page in user_pages():
        for number, sentence in found(page.read_text(encoding="utf-8")):
            sys.stdout.write(f"{page.relative_to(DOCS.parent)}:{number}: {sentence}\n")
    sys.stdout.write(f"{words_in(user_pages()):,} words in the user pages; at most {WORDS_MAX:,}\n")
