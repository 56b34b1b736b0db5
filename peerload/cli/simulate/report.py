"""The outcome of one simulation: as JSON, and as text for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from peerload.model.text import printable
from peerload.text.format import counted, number_text, table

if TYPE_CHECKING:
    from typing import Any

    from peerload.sim.outcome import Outcome
    from peerload.sim.scenario import Scenario
    from peerload.sim.statistics import Interval

DIGITS = 6
"""Significant digits of a measured number."""
HOMES_TOLD_MAX = 1000
"""Home nodes whose mean response is listed; of more only the spread is."""

METRICS = {
    "mean_response": "mean_response",
    "p50_response": "p50",
    "p95_response": "p95",
    "p99_response": "p99",
    "mean_response_executed_at_origin": "mean_response_executed_at_origin",
    "mean_response_executed_remotely": "mean_response_executed_remotely",
    "mean_wait": "mean_wait",
    "transfers_per_task": "transfers_per_task",
    "probes_per_task": "probes_per_task",
    "messages_per_task": "messages_per_task",
    "announcements_per_task": "announcements_per_task",
    "idle_while_waiting": "idle_while_waiting",
    "utilization": "utilization",
}
"""Key → name of the metric in a replication."""
SHARES = ("idle_while_waiting", "utilization")
"""Measures that are never more than 1."""


def as_json(scenario: Scenario, outcome: Outcome, replications: int, seed: int) -> dict[str, Any]:
    """All of it, keys that docs/json.md fixes first. Numbers depend on nothing but the flags."""
    measured = {key: outcome.metrics.get(metric) for key, metric in METRICS.items()}
    largest, variation = outcome.spread
    shown = {key: _rounded(interval.value if interval else None) for key, interval in measured.items()}
    one_queue = outcome.one_queue
    return {
        "policy": scenario.label,
        "nodes": scenario.nodes,
        "load": _rounded(scenario.offered_load),
        "tasks": scenario.tasks,
        **shown,
        "executed_at_origin": outcome.executed_at_origin,
        "executed_remotely": outcome.executed_remotely,
        "seed": seed,
        "ci95": _rounded(outcome.mean_response.half),
        "stable": outcome.is_stable,
        "warnings": outcome.warnings,
        "unit": "s" if scenario.is_in_seconds else "mean service time",
        "slots": scenario.slots,
        "arrivals": _arrivals(scenario),
        "service": _service(scenario),
        "transfer_delay": scenario.transfer_s,
        "message_delay": scenario.message_s,
        "model": "live" if scenario.is_live else "reference",
        "replications": replications,
        "warmup": scenario.warm_up,
        "one_queue": _rounded(one_queue),
        "no_sharing": _rounded(outcome.no_sharing),
        "over_one_queue": _rounded(outcome.mean_response.value / one_queue) if one_queue else None,
        "homes_max_over_min": _rounded(largest),
        "homes_variation": _rounded(variation),
        "homes": [_rounded(mean) for mean in outcome.homes] if len(outcome.homes) <= HOMES_TOLD_MAX else None,
        "means": [_rounded(mean) for mean in outcome.means],
        "intervals": {key: _ends(interval, 1.0 if key in SHARES else math.inf) for key, interval in measured.items()},
    }


def _rounded(number: float | None) -> float | None:
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.{DIGITS}g}")


def _ends(interval: Interval | None, most: float) -> list[float | None]:
    if interval is None or not math.isfinite(interval.half):
        return [None, None]
    return [_rounded(max(interval.value - interval.half, 0.0)), _rounded(min(interval.value + interval.half, most))]


def _arrivals(scenario: Scenario) -> str:
    if scenario.trace is not None:
        return f"trace:{scenario.trace.source}"
    if scenario.modulation is not None:
        return str(scenario.modulation)
    return f"hotspot:{scenario.hot}" if scenario.hot else "poisson"


def _service(scenario: Scenario) -> str:
    if scenario.classes:
        return f"{len(scenario.classes)} classes"
    if scenario.service is not None:
        return str(scenario.service)
    return "trace" if scenario.is_in_seconds else "exp"


# -- for people --------------------------------------------------------------------------------------------------------


def load_text(load: float | None) -> str:
    """Text of the offered load; none for a trace that arrives all at once."""
    return "without bound" if load is None else f"{load:.4g}"


ROWS = (
    ("response", "mean_response"),
    ("  half of them within", "p50_response"),
    ("  95 % within", "p95_response"),
    ("  99 % within", "p99_response"),
    ("  of {executed_at_origin} executed at origin", "mean_response_executed_at_origin"),
    ("  of {executed_remotely} executed remotely", "mean_response_executed_remotely"),
    ("wait before it starts", "mean_wait"),
    ("transfers a task", "transfers_per_task"),
    ("probes a task", "probes_per_task"),
    ("messages a task", "messages_per_task"),
    ("announcements a task", "announcements_per_task"),
)


def lines(told: dict[str, Any]) -> list[str]:
    """The JSON object as text."""
    unit = "seconds" if told["unit"] == "s" else "mean service times"
    head = (
        f"{printable(told['policy'])} on {counted(told['nodes'], 'node')} of {counted(told['slots'], 'slot')}, load {load_text(told['load'])},"
        f" arrivals {printable(told['arrivals'])}, service {printable(told['service'])}; times in {unit}"
    )
    warm_up = f", the first {told['warmup']} of each not counted" if told["warmup"] else ""
    how = (
        f"{counted(told['replications'], 'replication')} of {counted(told['tasks'], 'task')}{warm_up},"
        f" seed {told['seed']}, {told['model']} model"
    )
    warned = [f"note: {warning}" for warning in told["warnings"]]
    if told["stable"] is False:  # the first says why
        warned[0] = f"NOT STABLE: {told['warnings'][0]}"
    rows = [[name.format(**told), _digits(told[key]), _interval(told["intervals"][key])] for name, key in ROWS]
    waiting, ends = told["idle_while_waiting"], told["intervals"]["idle_while_waiting"]
    rows.append(["idle while a task waits", _percent(waiting), _interval(ends, percent=True)])
    rows.append(["busy", _percent(told["utilization"]), _interval(told["intervals"]["utilization"], percent=True)])
    return [
        head,
        how,
        *warned,
        "",
        *table(("", "MEAN", "95 % INTERVAL"), _aligned(rows), right=("MEAN",)),
        "",
        *_comparison(told),
    ]


def _aligned(rows: list[list[str]]) -> list[list[str]]:
    """The second column with its decimal points one below another, if it is aligned to the right."""
    behind = [len(row[1]) - _point(row[1]) for row in rows]
    return [[row[0], row[1] + " " * (max(behind) - length), *row[2:]] for row, length in zip(rows, behind, strict=True)]


def _point(number: str) -> int:
    """Index of the decimal point, or of where it would be."""
    digits = len(number.removesuffix(" %"))
    return number.find(".") if "." in number else digits


def _comparison(told: dict[str, Any]) -> list[str]:
    found = []
    if told["one_queue"] is not None:
        times = f", this is {told['over_one_queue']:.3f} times that" if told["stable"] else ""
        found.append(f"one queue for all slots (nobody beats that): {_digits(told['one_queue'])}{times}")
    if told["no_sharing"] is not None:
        found.append(f"without any sharing: {_digits(told['no_sharing'])}")
    largest, variation = told["homes_max_over_min"], told["homes_variation"]
    found.append(
        f"by home node: the largest mean response is {number_text(largest)} times the smallest, they vary by"
        f" {_percent(variation)}"
    )
    return found


def _digits(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}".replace("%", " %")


def _interval(ends: list[float | None], *, percent: bool = False) -> str:
    low, high = ends
    if low is None or high is None:
        return "-"
    return f"{_percent(low)} … {_percent(high)}" if percent else f"{_digits(low)} … {_digits(high)}"
