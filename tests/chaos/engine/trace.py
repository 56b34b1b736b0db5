"""Trace of a run, line by line, and the hash that tells two runs apart."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Trace:
    """Every event and every action as one line; ``digest()`` is the SHA-256 of them all. ``write`` gets each line."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._hash = hashlib.sha256()
        self._write = write
        self.lines = 0

    def add(self, at_s: float, node: str, thing: object) -> None:
        """One line: when (simulated s), where, what."""
        line = f"{at_s:.9f} {node} {thing!r}"
        self.lines += 1
        self._hash.update(line.encode() + b"\n")
        if self._write is not None:
            self._write(line)

    def digest(self) -> str:
        """The trace hash: equal for equal seeds."""
        return self._hash.hexdigest()
