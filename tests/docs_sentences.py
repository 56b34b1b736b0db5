"""Sentences of the user pages that begin with a relative clause or an inversion, for a person to read; and the size of these pages.

`make docs-sentences` prints them with page and line, then the number of words. Neither is in the gate.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
DEVELOPERS = {"architecture.md", "benchmarks.md", "chaos.md", "membership.md", "testing.md", "wire.md"}
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


if __name__ == "__main__":
    root, words = DOCS.parent, 0
    others = (root / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md"))
    for page in (*others, *sorted(page for page in DOCS.glob("*.md") if page.name not in DEVELOPERS)):
        text = page.read_text(encoding="utf-8")
        words += len(text.split())
        for number, sentence in found(text):
            sys.stdout.write(f"{page.relative_to(root)}:{number}: {sentence}\n")
    sys.stdout.write(f"{words:,} words in the user pages; at most {WORDS_MAX:,}\n")
