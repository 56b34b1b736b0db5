"""The classical figure of `peerload sim`: mean response over load, policy by policy, between the bounds of theory."""

from __future__ import annotations

import importlib.util
import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.distribution import how_to_add
from peerload.model.errors import PeerloadError, UsageError
from peerload.sim.outcome import bounds
from peerload.text.format import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from matplotlib.axes import Axes

    from peerload.sim.scenario import Scenario

ENDINGS = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933", "#332288", "#117733")
"""Colours that people with colour-vision deficiency can distinguish too."""
MARKERS = "osD^vPX<>*"
BOUND_POINTS = 200
INCHES = (9.5, 5.2)
DOTS_PER_INCH = 150
MARK_POINTS = 8.0
"""Distance of marks that are stacked, in points of 1/72 inch."""
DOUBT_POINTS = 5.0
"""Distance of a question mark above its point."""
ROOM_BESIDE = 0.04
"""Margin on each side, as a share of the width."""
ROOM_ABOVE = 1.25
"""The axis ends at this multiple of the largest stable value; unstable values are drawn at its edge."""


def check(path: str, loads: int) -> None:
    """Check before the simulation that a figure can be drawn. Raises an error with a hint."""
    if loads < 2:  # noqa: PLR2004 -- a line has two ends
        raise UsageError("sim: --plot draws over loads", hint="give a range, such as:  --load 0.5:0.95")
    if Path(path).suffix.lower() not in ENDINGS:
        raise UsageError(
            f"sim: --plot {path!r} is not a picture file", why=f"allowed: a file ending in {', '.join(ENDINGS)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise PeerloadError("sim: --plot needs matplotlib, which is not installed", hint=how_to_add("plot"))
    check_writable("--plot", path)


def check_writable(flag: str, path: str) -> None:
    """Raises UsageError unless a file of this name can be written."""
    file = Path(path)
    directory = file.parent
    why = ""
    if file.is_dir():
        why = "it is a directory"
    elif not directory.is_dir():
        why = f"{directory} is not an existing directory"
    elif file.exists():
        why = "" if os.access(file, os.W_OK) else "it may not be written"
    else:
        try:  # the file mode does not show what may be written in /proc, or as root
            with file.open("x"):
                pass
            file.unlink()
        except OSError as error:
            why = error.strerror or str(error)
    if why:
        raise UsageError(f"sim: {flag} {path!r} cannot be written", why=why)


def draw(path: str, scenarios: Sequence[Scenario], results: Sequence[dict[str, Any]]) -> None:
    """Write the figure. The scenarios are those of the results. Raises OSError if the file cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.add_subplot()
    fine = [one["mean_response"] for one in results if one["stable"] is not False]
    is_one_size = len({(scenario.nodes, scenario.slots) for scenario in scenarios}) == 1
    bound = _draw_bounds(axes, scenarios) if is_one_size else 0.0
    top = max([bound, *fine]) or max(one["mean_response"] for one in results)
    top *= ROOM_ABOVE
    beyond: Counter[float] = Counter()
    for index, policy in enumerate(dict.fromkeys(told["policy"] for told in results)):
        _draw_policy(axes, index, [one for one in results if one["policy"] == policy], top, beyond)
    _explain(axes, results, is_beyond=bool(beyond))
    first, scenario = results[0], scenarios[0]
    unit = "s" if scenario.is_in_seconds else "mean service times"
    size = f"{counted(scenario.nodes, 'node')} of {counted(scenario.slots, 'slot')}, " * is_one_size
    axes.set_title(f"{size}arrivals {first['arrivals']}, service {first['service']}")
    axes.set_xlabel("load")
    low, high = min(one["load"] for one in results), max(one["load"] for one in results)
    axes.set_xlim(low - ROOM_BESIDE * (high - low), high + ROOM_BESIDE * (high - low))
    axes.set_ylabel(f"mean response ({unit})")
    axes.set_yscale("log")
    bottom = min(one["mean_response"] for one in results)
    axes.set_ylim(bottom=min(bottom * 0.9, 0.95 if not scenario.is_in_seconds else math.inf), top=top)
    axes.yaxis.set_major_locator(_ticks(axes.get_ylim()))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper", framealpha=0.9, fontsize="small")  # where it hides no curve
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _ticks(limits: tuple[float, float]) -> Any:  # noqa: ANN401 -- matplotlib's own
    """Axis ticks: 1, 2, 5 in each decade, and more if there is space."""
    from matplotlib.ticker import LogLocator

    decades = math.log10(limits[1] / limits[0])
    steps = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0) if decades < 1.0 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    return LogLocator(subs=steps if decades < 2.0 else (1.0, 2.0, 5.0), numticks=50)  # noqa: PLR2004 -- decades


def _draw_bounds(axes: Axes, scenarios: Sequence[Scenario]) -> float:
    """Draw the bounds of theory → the largest value drawn."""
    loads = [scenario.offered_load for scenario in scenarios]
    low, high = min(loads), max(loads)
    grid = [low + (high - low) * step / (BOUND_POINTS - 1) for step in range(BOUND_POINTS)]
    scenario = scenarios[0]
    top = 0.0
    lines = (
        (1, f"M/M/{scenario.slots}: no sharing", "#666666", "--"),
        (0, f"M/M/{scenario.slots * scenario.nodes}: one queue for all", "#000000", ":"),
    )
    for which, label, colour, style in lines:
        known = [(load, value) for load in grid if (value := bounds(scenario, load)[which]) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=colour, linestyle=style, linewidth=1.6, label=label, zorder=1)
            top = max(top, known[-1][1])
    return top


def _draw_policy(axes: Axes, index: int, told: Sequence[dict[str, Any]], top: float, beyond: Counter[float]) -> None:
    """Draw a line with its intervals through the stable points. Unstable points are empty marks, at the upper edge if they
    are beyond it; ``beyond`` counts these by load, to stack them. Points with a warning get a question
    mark."""
    from matplotlib.transforms import ScaledTranslation

    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    loads = [one["load"] for one in told]
    means = [one["mean_response"] if one["stable"] is not False else math.nan for one in told]
    halves = [one["ci95"] or 0.0 for one in told]
    low = [max(mean - half, mean * 0.05) for mean, half in zip(means, halves, strict=True)]
    high = [mean + half for mean, half in zip(means, halves, strict=True)]
    name = Path(told[0]["policy"]).name.replace(".toml", "")
    axes.fill_between(loads, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    axes.plot(loads, means, color=colour, linewidth=1.4, marker=marker, markersize=4.5, label=name, zorder=3)
    for one in told:
        if one["stable"] is not False and one["warnings"]:
            axes.annotate(
                "?", (one["load"], one["mean_response"]), (0, DOUBT_POINTS), textcoords="offset points", color=colour,
                ha="center", fontweight="bold",
            )  # fmt: skip
    label = f"{name}: not stable"
    for one in told:
        if one["stable"] is False:
            load, mean = one["load"], min(one["mean_response"], top)
            down = -beyond[load] * MARK_POINTS / 72 if mean == top else 0.0
            beyond[load] += mean == top
            place = axes.transData + ScaledTranslation(0, down, axes.figure.dpi_scale_trans)
            (hollow,) = axes.plot(
                load, mean, color=colour, marker=marker, linestyle="", clip_on=False, zorder=4, transform=place
            )
            hollow.set(markerfacecolor="white", markersize=6.5, label=label)
            label = ""


def _explain(axes: Axes, results: Sequence[dict[str, Any]], *, is_beyond: bool) -> None:
    """Add explanations to the legend that the entries of the curves lack."""
    if any(one["stable"] is not False and one["warnings"] for one in results):
        axes.plot([], [], linestyle="", marker="$?$", color="black", label="not sure: see the table")
    if is_beyond:
        axes.plot([], [], linestyle="", label="at the upper edge: beyond it")
