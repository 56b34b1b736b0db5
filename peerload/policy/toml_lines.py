"""Where in a TOML text each table and key stands, which `tomllib` does not tell.

Only for texts that `tomllib` has read: of sound TOML no more needs to be understood than where strings, comments, arrays and
inline tables end, so that nothing in them is taken for a key.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str, ...]

_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_TABLE_ENDS = re.compile(r"[ \t]*\]+")
_BLANK = re.compile(r"[ \t]*")
_BLANK_AND_COMMENTS = re.compile(r"(?:[ \t\r\n,]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'  # a text of several lines may end in one or two quotes of its own
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]*")


def lines_of(source: str) -> dict[Path, int]:
    """The line (the first is 1) of each table and key, by its path: ``("location", "sender", "probes")``. The tables of
    an array (``[[name]]``) count as one, and of several places the first is told. ``source`` must be sound TOML."""
    return _Scanner(source).lines


class _Scanner:
    def __init__(self, source: str) -> None:
        self._source = source.replace("\r\n", "\n")
        self._at = 0
        self._line = 1
        self._counted_to = 0
        self.lines: dict[Path, int] = {}
        self._document()

    def _document(self) -> None:
        table: Path = ()
        while self._skip(_BLANK_AND_COMMENTS) < len(self._source):
            if self._source[self._at] == "[":
                while self._source[self._at] in "[ \t":
                    self._at += 1
                table = self._key(())
                self._skip(_TABLE_ENDS)
            else:
                self._pair(table)

    def _pair(self, table: Path) -> None:
        """One ``key = value``."""
        path = self._key(table)
        self._skip(_EQUALS)
        self._value(path)

    def _key(self, table: Path) -> Path:
        """A key, dotted perhaps; each of its parts stands on this line, unless it was seen before."""
        path = table
        while True:
            self._skip(_BLANK)
            found = _KEY_PART.match(self._source, self._at)
            assert found is not None, "no sound TOML"
            line = self._line_here()
            self._at = found.end()
            word = found[0]
            path = (*path, str(tomllib.loads(f"word = {word}")["word"]) if word[0] in "\"'" else word)
            self.lines.setdefault(path, line)
            self._skip(_BLANK)
            if self._source[self._at : self._at + 1] != ".":
                return path
            self._at += 1

    def _value(self, path: Path) -> None:
        """Go past a value; the keys of tables inside it are noted."""
        begins = self._source[self._at : self._at + 1]
        if begins in ("[", "{"):
            ends = "]" if begins == "[" else "}"
            self._at += 1
            while self._skip(_BLANK_AND_COMMENTS) < len(self._source) and self._source[self._at] != ends:
                if begins == "[":
                    self._value(path)
                else:
                    self._pair(path)
            self._at += 1
        else:
            self._skip(_STRING if begins in ("'", '"') else _SCALAR)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._source, self._at)
        if found is not None:
            self._at = found.end()
        return self._at

    def _line_here(self) -> int:
        self._line += self._source.count("\n", self._counted_to, self._at)
        self._counted_to = self._at
        return self._line
