"""Reports of `peerload sim`: one outcome, several side by side, and energy cases, as JSON, as CSV and Parquet, and as text
for people."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.cli.simulate.flags import reader
from peerload.distribution import how_to_add
from peerload.model.errors import ConfigError, PeerloadError, UsageError
from peerload.model.text import printable
from peerload.sim.energy_model import play_case, read_cases
from peerload.sim.outcome import paired
from peerload.text.format import counted, number_text, table

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from peerload.sim.outcome import Interval, Outcome
    from peerload.sim.scenario import Scenario


DIGITS = 6
"""Significant digits of a measured number."""
HOMES_TOLD_MAX = 1000
"""Maximum number of home nodes listed with their mean response; for more, only the spread is shown."""

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
    """All results, with the keys documented in docs/json.md first. Numbers depend only on the flags."""
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
    """The rows with the decimal points of the second column aligned, if that column is right-aligned."""
    behind = [len(row[1]) - _point(row[1]) for row in rows]
    return [[row[0], row[1] + " " * (max(behind) - length), *row[2:]] for row, length in zip(rows, behind, strict=True)]


def _point(number: str) -> int:
    """Index of the decimal point, or of its position if there is none."""
    digits = len(number.removesuffix(" %"))
    return number.find(".") if "." in number else digits


def _comparison(told: dict[str, Any]) -> list[str]:
    found = []
    if told["one_queue"] is not None:
        times = f", this is {told['over_one_queue']:.3f} times that" if told["stable"] else ""
        found.append(f"one queue for all slots (lower bound): {_digits(told['one_queue'])}{times}")
    if told["no_sharing"] is not None:
        found.append(f"without load sharing: {_digits(told['no_sharing'])}")
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


# -- several policies, several loads -----------------------------------------------------------------------------------


Told = dict[str, Any]
"""Outcome of a scenario as `as_json` returns it."""

CSV_KEYS = (
    "policy", "nodes", "slots", "load", "arrivals", "service", "tasks", "replications", "seed", "stable",
    "mean_response", "ci95", "p50_response", "p95_response", "p99_response", "mean_wait", "transfers_per_task",
    "probes_per_task", "messages_per_task", "announcements_per_task", "idle_while_waiting", "homes_max_over_min",
    "homes_variation", "one_queue", "no_sharing",
    "version", "command",
)  # fmt: skip


WORKLOAD = ("load", "nodes", "slots", "arrivals", "service", "transfer_delay", "message_delay", "tasks", "warmup")
"""Keys with equal values in results from the same tasks."""
LENGTH = ("tasks", "warmup")
"""Keys of the length of a run, which may differ: a scenario is lengthened until it is in steady state."""
NUMBERS = re.compile(r"[0-9][0-9.,]*")
"""Matches the numbers in a warning. Warnings that differ only in these are of one kind."""


def comparison_json(results: Sequence[Told]) -> Told:
    """All results, by policy, and the bounds of theory once for each load and size."""
    keys = ("load", "nodes", "slots", "one_queue", "no_sharing")
    found = {tuple(told[key] for key in keys[:3]): {key: told[key] for key in keys} for told in results}
    return {"results": list(results), "bounds": list(found.values()), "paired": pairs(results)}


def is_one_size(results: Sequence[Told]) -> bool:
    """True if all results have the same number of nodes and slots, so that the same bounds apply."""
    return len({(told["nodes"], told["slots"]) for told in results}) == 1


def pairs(results: Sequence[Told]) -> list[Told]:
    """Comparisons of each policy with the first one on the same workload, if both are stable, from replications with the same tasks."""
    first: dict[tuple[object, ...], Told] = {}
    found = []
    for told in results:
        base = first.setdefault(tuple(told.get(key) for key in WORKLOAD), told)
        if told is base or told["stable"] is False or base["stable"] is False or not told.get("means"):
            continue
        share = paired(base["means"], told["means"])
        better, than = (base, told) if share.value >= 0 else (told, base)
        share = paired(better["means"], than["means"])
        if math.isfinite(share.half):
            ends = [round(100 * end, 2) for end in (share.value, share.value - share.half, share.value + share.half)]
            names = {"better": better["policy"], "than": than["policy"], "load": told["load"]}
            found.append(names | dict(zip(("percent", "low", "high"), ends, strict=True)))
    return found


def as_csv(results: Sequence[Told]) -> str:
    """CSV with a header and one line for each result; unknown values are empty."""
    written = io.StringIO()
    writer = csv.DictWriter(written, CSV_KEYS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(results)
    return written.getvalue()


def write_csv(path: str, results: Sequence[Told]) -> None:
    Path(path).write_text(as_csv(results), encoding="utf-8")


def check_parquet() -> None:
    """Check before the simulation that a Parquet file can be written. Raises an error with a hint."""
    if importlib.util.find_spec("pyarrow") is None:
        raise PeerloadError("sim: --parquet needs pyarrow, which is not installed", hint=how_to_add("parquet"))


def write_parquet(path: str, results: Sequence[Told]) -> None:
    """Write the rows of the CSV; seed, version and command are also metadata of the schema. Raises OSError."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{key: told.get(key) for key in CSV_KEYS} for told in results]
    metadata = {f"peerload.{key}": str(results[0][key]) for key in ("seed", "version", "command")}
    parquet.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), path)


def comparison_lines(results: Sequence[Told]) -> list[str]:
    """Table of mean responses: a row for each load, a column for each policy, and columns with the values of theory."""
    first = results[0]
    policies = list(dict.fromkeys(told["policy"] for told in results))
    cells = {(told["load"], told["policy"]): _cell(told) for told in results}
    rows = {
        load: [load_text(load), *(cells.get((load, policy), "-") for policy in policies)]
        for load in dict.fromkeys(told["load"] for told in results)
    }
    headings = ["LOAD", *map(printable, policies)]
    for key, heading in (
        ("no_sharing", f"M/M/{first['slots']}"),
        ("one_queue", f"M/M/{first['slots'] * first['nodes']}"),
    ):
        if is_one_size(results) and any(told[key] is not None for told in results):
            headings.append(heading)
            found = {told["load"]: told[key] for told in results}
            for load, row in rows.items():
                row.append("-" if found[load] is None else f"{found[load]:.4g}")
    unit = "seconds" if first["unit"] == "s" else "mean service times"
    size = f"{counted(first['nodes'], 'node')} of {counted(first['slots'], 'slot')}, " * is_one_size(results)
    head = (
        f"mean response in {unit}: {size}arrivals {printable(first['arrivals'])}, service {printable(first['service'])}"
    )
    tasks = sorted({told["tasks"] for told in results})
    how = (
        f"{counted(first['replications'], 'replication')} of {' to '.join(map(str, dict.fromkeys((tasks[0], tasks[-1]))))} tasks,"
        f" seed {first['seed']}, {first['model']} model"
    )
    return [
        head,
        how,
        "",
        *table(headings, list(rows.values()), right=headings),
        *_paired(results),
        *_footnotes(results),
    ]


def _paired(results: Sequence[Told]) -> list[str]:
    lines = []
    for told in pairs(results):
        if told["low"] == told["high"] == 0:
            lines.append(
                f"  at load {load_text(told['load'])} {printable(told['better'])} and {printable(told['than'])} are equal"
            )
            continue
        sure = "" if told["low"] > 0 else ", which may be chance"
        lines.append(
            f"  at load {load_text(told['load'])} {printable(told['better'])} is better than {printable(told['than'])} by"
            f" {told['percent']:.1f} % [{told['low']:.1f}, {told['high']:.1f}]{sure}"
        )
    lines = ["", "paired by equal tasks:", *lines] if lines else []
    lengths: dict[tuple[object, ...], set[int]] = {}
    for told in results:
        if told["stable"] is not False:
            lengths.setdefault(tuple(told.get(key) for key in WORKLOAD if key not in LENGTH), set()).add(told["tasks"])
    longest = max((max(tasks) for tasks in lengths.values() if len(tasks) > 1), default=0)
    more = f"not paired: policies that need other numbers of tasks to settle; equal ones:  --tasks {longest}"
    return [*lines, *(["", more] if longest else [])]


def _cell(told: Told) -> str:
    half = "" if told["ci95"] is None else f" ± {told['ci95']:.2g}"
    return f"{told['mean_response']:.4g}{half}{_mark(told)}"


def _mark(told: Told) -> str:
    if told["stable"] is False:
        return " !"
    return " ?" if told["warnings"] else ""


def _footnotes(results: Sequence[Told]) -> list[str]:
    """Footnotes: one line for each kind of warning and policy; policies with the same warning at the same loads share a line."""
    found = []
    for mark, says in ((" !", "! NOT STABLE: the number depends on the length of the run"), (" ?", "? not sure:")):
        kinds: dict[str, dict[str, list[tuple[Told, str]]]] = {}
        for told in results:
            for warning in told["warnings"] if _mark(told) == mark else ():
                kinds.setdefault(NUMBERS.sub("", warning), {}).setdefault(told["policy"], []).append((told, warning))
        notes = [note for by_policy in kinds.values() for note in _notes(by_policy)]
        found += ["", says, *notes] if notes else []
    return found


def _notes(by_policy: dict[str, list[tuple[Told, str]]]) -> list[str]:
    """Warnings of one kind; for several loads, with the numbers of the last one."""
    together: dict[str, list[str]] = {}
    for policy, warned in by_policy.items():
        loads = ", ".join(load_text(told["load"]) for told, _ in warned)
        told, warning = warned[-1]
        last = f"at {load_text(told['load'])}, " if len({says for _, says in warned}) > 1 else ""
        where = f" at load {loads}: {last}{warning}"
        together.setdefault(where, []).append(printable(policy))
    return [f"  {', '.join(policies)}{where}" for where, policies in together.items()]


# -- energy cases ------------------------------------------------------------------------------------------------------


FILE_BYTES_MAX = 256 << 20
ENERGY_FLAGS = ("energy", "json", "socket")
"""Flags for energy cases. All others are for queueing models."""
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


def energy_results(flags: Namespace) -> dict[str, dict[str, Any]]:
    """Simulate all runs of all cases → the results by case and run. Raises UsageError or ConfigError."""
    usual = vars(reader().read([]))
    for name, value in vars(flags).items():
        if name not in ENERGY_FLAGS and value != usual[name]:
            flag = "class" if name == "classes" else name.replace("_", "-")
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


def energy_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Table of the results beside the published ones."""
    headings = ["case", "run", *(title for title, _, _ in COLUMNS), "printed s", "printed Wh"]
    rows = []
    for case, runs in found.items():
        for run, result in runs.items():
            cells = ["-" if result[key] is None else format(result[key], how) for _, key, how in COLUMNS]
            printed = PUBLISHED.get((case, run))
            rows.append([case, run, *cells, *(("", "") if printed is None else (f"{printed[0]:g}", f"{printed[1]:g}"))])
    return table(headings, rows, right=headings[2:])
