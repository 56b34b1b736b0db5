"""`peerload sim --energy`: cases of machines, tasks and presets, with the published figures beside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.model.errors import ConfigError, UsageError
from peerload.sim.energy_cases import read_cases
from peerload.sim.energy_model import play_case

if TYPE_CHECKING:
    from argparse import Namespace

FILE_BYTES_MAX = 256 << 20
OTHER_FLAGS = ("policy", "compare", "nodes", "load", "service", "speeds", "model", "tasks", "warmup", "plot", "csv")
PUBLISHED = {
    ("t1-unequal", "reserve"): (476.0, 73.47),
    ("t1-unequal", "norequest"): (430.0, 66.53),
    ("t1-unequal", "marginal"): (399.0, 60.03),
    ("t2", "exclusive"): (887.0, 71.92),
    ("t2", "time10"): (364.0, 36.93),
    ("t2", "mps10"): (200.0, 27.60),
}
"""Time in s and energy in Wh as printed [HPE24], by case and run."""
COLUMNS = (
    ("time s", "makespan_s", ".1f"),
    ("Wh", "wh", ".2f"),
    ("J/task", "joules_per_task", ".1f"),
    ("response s", "mean_response_s", ".2f"),
    ("slowdown", "mean_slowdown", ".3f"),
    ("W at end", "watts_at_end", ".1f"),
    ("price", "price", ".2f"),
    ("late", "late", "d"),
)


def results(flags: Namespace) -> dict[str, dict[str, Any]]:
    """Play all runs of all cases → by case and run. Raises UsageError or ConfigError."""
    for flag in OTHER_FLAGS:
        if getattr(flags, flag):
            raise UsageError(f"--energy plays the cases of a file, and --{flag} is not for it")
    path = Path(flags.energy)
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError("--energy", f"{path} has more than {FILE_BYTES_MAX >> 20} MiB")
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError("--energy", f"{path} cannot be read", why=error.strerror or str(error)) from None
    cases = read_cases(text, str(path))
    return {case.id: {run.name: play_case(case, run) for run in case.runs} for case in cases}


def lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Table of the results beside the published ones."""
    rows = [["case", "run", *(title for title, _, _ in COLUMNS), "printed s", "printed Wh"]]
    for case, runs in found.items():
        for run, result in runs.items():
            cells = ["-" if result[key] is None else format(result[key], how) for _, key, how in COLUMNS]
            printed = PUBLISHED.get((case, run))
            rows.append([case, run, *cells, *(("", "") if printed is None else (f"{printed[0]:g}", f"{printed[1]:g}"))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)  # noqa: PLR2004 -- the names are to the left
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
