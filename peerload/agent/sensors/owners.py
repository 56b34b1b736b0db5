"""Whose process is it: of which attempt that a launcher of peerload has started, or somebody else's.

A process of a task says so in its environment, and so does its cgroup; one that has neither is known by those it descends
from. Everything else is foreign, also what cannot be looked into.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

ANCESTORS_MAX = 64
KEPT_MAX = 4096
"""Processes whose owner is remembered; a process never changes it."""
_ENVIRONMENT = re.compile(rb"(?:^|\0)PEERLOAD_UNIT=[^\0]*?/peerload-([0-9a-f]{32}-[0-9]+)(?:\0|$)")
_CGROUP = re.compile(rb"/peerload-([0-9a-f]{32}-[0-9]+)(?:/|$)", re.MULTILINE)


class Owners:
    """``proc``: where the kernel tells of processes."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._known: OrderedDict[tuple[int, bytes], str] = OrderedDict()

    def key_of(self, pid: int) -> str:
        """The execution key of the attempt that a process is of; "" if it is of none, or there is no such process here."""
        for _ in range(ANCESTORS_MAX):
            parent, start = self._stat(pid)
            if not start:
                return ""
            known = self._known.get((pid, start))
            if known is None:
                known = self._said(pid)
                if known:
                    self._keep(pid, start, known)
            if known or parent <= 1:
                return known
            pid = parent
        return ""

    def _keep(self, pid: int, start: bytes, key: str) -> None:
        self._known[pid, start] = key
        if len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)

    def _said(self, pid: int) -> str:
        for name, pattern in (("environ", _ENVIRONMENT), ("cgroup", _CGROUP)):
            found = pattern.search(self._read(pid, name))
            if found is not None:
                return found[1].decode()
        return ""

    def _stat(self, pid: int) -> tuple[int, bytes]:
        """(its parent, when it started); the latter is empty if it is gone."""
        raw = self._read(pid, "stat")
        fields = raw[raw.rfind(b")") + 2 :].split()
        return (int(fields[1]), fields[19]) if len(fields) > 19 else (0, b"")  # noqa: PLR2004 -- field 22 of its stat

    def _read(self, pid: int, name: str) -> bytes:
        try:
            return (self._proc / str(pid) / name).read_bytes()
        except OSError:
            return b""
