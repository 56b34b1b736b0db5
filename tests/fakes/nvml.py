"""The stand-in for NVIDIA's library, compiled, and the file by which a test says what machine it plays (nvml.c)."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
GIB = 1 << 30
VARIABLE = "FAKE_NVML_STATE"


@functools.cache
def library(*without: str) -> Path:
    """`libnvidia-ml.so.1` in a directory of its own, for LD_LIBRARY_PATH; ``without``: what older drivers lack."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    directory = Path(tempfile.mkdtemp(prefix="pl-nvml-", dir="/tmp"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "libnvidia-ml.so.1"
    missing = [f"-DWITHOUT_{name}" for name in without]
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", *missing, "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", str(path), str(SOURCE)], check=True)
    return path


class Machine:
    """What is played. Each change is seen by the next call of whoever uses the library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gpus: dict[str, dict[str, object]] = {}
        self.slices: dict[str, dict[str, object]] = {}
        self.lines: list[str] = []
        self._xids = 0

    def gpu(self, index: int, **values: object) -> None:
        """A card, or changes to one. Sizes in bytes."""
        of = self.gpus.setdefault(f"{index}", {"total": 24 * GIB, "name": "Fake", "temp": 40})
        of |= values
        self.write()

    def slice(self, index: int, number: int, **values: object) -> None:
        """A slice of a card."""
        of = self.slices.setdefault(f"{index} {number}", {"total": 5 * GIB, "name": "Slice", "gi": number + 1, "ci": 0})
        of |= values
        self.write()

    def say(self, *lines: str) -> None:
        """Further lines."""
        self.lines += lines
        self.write()

    def unsay(self, start: str) -> None:
        """No line that begins so any more."""
        self.lines = [line for line in self.lines if not line.startswith(start)]
        self.write()

    def process(self, card: str, pid: int, used: int, kind: str = "proc") -> None:
        """A process on a card, whose memory is in use there."""
        entry = self.gpus.get(card)
        if entry is not None:
            entry["used"] = int(str(entry.get("used", 0))) + used
        self.say(f"{kind} {card} {pid} {used}")

    def xid(self, card: int, code: int, instances: str = "") -> None:
        """A card reports an error."""
        self._xids += 1
        self.unsay("xid ")
        self.say(f"xid {card} {code} {self._xids} {instances}")

    def settings(self, index: int) -> tuple[int, int]:
        """Power limit in mW and locked clock in MHz (0: not locked) that are in force on a card."""
        file = Path(f"{self.path}.{index}")
        limit, clock = map(int, file.read_text(encoding="ascii").split()) if file.exists() else (400_000, 0)
        return limit, clock

    def write(self) -> None:
        """Change the machine at once."""
        lines = [f"{kind} {of} {_fields(values)}" for kind, all_ in (("gpu", self.gpus), ("slice", self.slices))
                 for of, values in all_.items()]  # fmt: skip
        new = self.path.with_suffix(".new")
        new.write_text("\n".join([*lines, *self.lines]) + "\n", encoding="utf-8")
        new.replace(self.path)


def _fields(values: dict[str, object]) -> str:
    return " ".join(f"{name}={str(value).replace(' ', '_')}" for name, value in values.items())


def load(monkeypatch: pytest.MonkeyPatch, state: Path, *without: str) -> Any:
    """The real `pynvml` on the stand-in."""
    import pynvml

    path = library(*without)
    monkeypatch.setenv(VARIABLE, str(state))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(path)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return pynvml


def environment(state: Path, *without: str) -> dict[str, str]:
    """The variables with which a process finds the stand-in."""
    paths = [str(library(*without).parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": ":".join(paths), VARIABLE: str(state)}
