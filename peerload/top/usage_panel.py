"""What the chosen task uses while it runs: the newest figures, and how they were."""

from __future__ import annotations

from peerload.text.format import size_text
from peerload.top import lines as draw
from peerload.top.model import Series, is_number, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from peerload.top.lines import Line

MEMORY_HIGH_BYTES_MIN = 1 << 20
"""Nothing that uses less is drawn as if it filled its line."""

PROCESSES_CELLS = 8
"""So much room the number of processes takes."""


class UsagePanel:
    """Of one task: cores kept busy, and bytes of memory, a value a look."""

    def __init__(self) -> None:
        self.cpus = Series()
        self.memory = Series()
        self.processes = 0

    def take(self, told: Mapping[str, Any]) -> None:
        """What its node said (`usage` of docs/wire.md)."""
        self.cpus.append(_value(told.get("cpus_busy")))
        self.memory.append(_value(told.get("memory_bytes")))
        self.processes = int(_value(told.get("processes")) or 0)

    def words(self) -> str:
        """The newest figures alone, where there is no room for how they were; "" where there are none."""
        parts = [] if self.cpus.now is None else [f"{self.cpus.now:.1f} cpus"]
        parts += [] if self.memory.now is None else [size_text(self.memory.now)]
        return " ".join(parts)

    def lines(self, task: Mapping[str, Any], spark: int, label_cells: int, *, ascii_only: bool) -> list[Line]:
        """A line for processors and one for memory, each drawn against what it has asked for, or the most it had."""
        lines = []
        for label, series, least, asked in (
            ("cpu", self.cpus, 1.0, number(task.get("cpus"))),
            ("memory", self.memory, float(MEMORY_HIGH_BYTES_MIN), number(task.get("mem_bytes"))),
        ):
            if series.now is None:
                continue
            high = max(asked, least, *(value or 0.0 for value in series))
            text = draw.sparkline(series, max(spark - PROCESSES_CELLS, 0), high=high, ascii_only=ascii_only)
            words = f" {series.now:.1f} cpus" if label == "cpu" else f" {size_text(series.now)}"
            if label == "memory" and self.processes > 1:
                words += f" in {self.processes} procs"
            lines.append([(draw.padded(f" {label}", label_cells), "dim"), (text, "accent"), (words, "")])
        return lines


def _value(told: object) -> float | None:
    return number(told) if is_number(told) and number(told) >= 0 else None
