"""Several policies, several loads: the outcomes of `peerload sim` side by side, as a table, CSV and JSON."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import re
from typing import TYPE_CHECKING

from peerload.cli.simulate.report import load_text
from peerload.distribution import how_to_add
from peerload.model.errors import PeerloadError
from peerload.model.text import printable
from peerload.sim.outcome import paired
from peerload.text.format import counted, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

Told = dict[str, "Any"]
"""One outcome, as `report.as_json` tells it."""

CSV_KEYS = (
    "policy", "nodes", "slots", "load", "arrivals", "service", "tasks", "replications", "seed", "stable",
    "mean_response", "ci95", "p50_response", "p95_response", "p99_response", "mean_wait", "transfers_per_task",
    "probes_per_task", "messages_per_task", "announcements_per_task", "idle_while_waiting", "homes_max_over_min",
    "homes_variation", "one_queue", "no_sharing",
    "version", "command",
)  # fmt: skip


WORKLOAD = ("load", "nodes", "slots", "arrivals", "service", "transfer_delay", "message_delay")
"""Keys in which results agree that had the same tasks."""
NUMBERS = re.compile(r"[0-9][0-9.,]*")
"""Two warnings that differ in nothing else are of one kind."""


def as_json(results: Sequence[Told]) -> Told:
    """All of them, policies first, and the bounds of theory once a load."""
    keys = ("load", "one_queue", "no_sharing")
    by_load = {told["load"]: {key: told[key] for key in keys} for told in results}
    return {"results": list(results), "bounds": list(by_load.values()), "paired": pairs(results)}


def pairs(results: Sequence[Told]) -> list[Told]:
    """Each policy against the first with the same workload, where both are stable, from replications with the same tasks."""
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
    """A header and one line each; what is not known is empty."""
    written = io.StringIO()
    writer = csv.DictWriter(written, CSV_KEYS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(results)
    return written.getvalue()


def check_parquet() -> None:
    """Raises an error with a hint if no Parquet file could be written, before anything is simulated."""
    if importlib.util.find_spec("pyarrow") is None:
        raise PeerloadError("sim: --parquet needs pyarrow, which is not installed", hint=how_to_add("parquet"))


def write_parquet(path: str, results: Sequence[Told]) -> None:
    """The rows of the CSV; seed, version and command are also metadata of the schema. Raises OSError."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{key: told.get(key) for key in CSV_KEYS} for told in results]
    metadata = {f"peerload.{key}": str(results[0][key]) for key in ("seed", "version", "command")}
    parquet.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), path)


def lines(results: Sequence[Told]) -> list[str]:
    """Mean responses: a row a load, a column a policy, and what theory says beside them."""
    first = results[0]
    policies = list(dict.fromkeys(told["policy"] for told in results))
    rows = {load: [load_text(load)] for load in dict.fromkeys(told["load"] for told in results)}
    for told in results:
        rows[told["load"]].append(_cell(told))
    headings = ["LOAD", *map(printable, policies)]
    for key, heading in (
        ("no_sharing", f"M/M/{first['slots']}"),
        ("one_queue", f"M/M/{first['slots'] * first['nodes']}"),
    ):
        if any(told[key] is not None for told in results):
            headings.append(heading)
            found = {told["load"]: told[key] for told in results}
            for load, row in rows.items():
                row.append("-" if found[load] is None else f"{found[load]:.4g}")
    unit = "seconds" if first["unit"] == "s" else "mean service times"
    head = (
        f"mean response in {unit}: {counted(first['nodes'], 'node')} of {counted(first['slots'], 'slot')}, arrivals"
        f" {printable(first['arrivals'])}, service {printable(first['service'])}"
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
        sure = "" if told["low"] > 0 else ", which may be chance"
        lines.append(
            f"  at load {load_text(told['load'])} {printable(told['better'])} is better than {printable(told['than'])} by"
            f" {told['percent']:.1f} % [{told['low']:.1f}, {told['high']:.1f}]{sure}"
        )
    return ["", "paired by equal tasks:", *lines] if lines else []


def _cell(told: Told) -> str:
    half = "" if told["ci95"] is None else f" ± {told['ci95']:.2g}"
    return f"{told['mean_response']:.4g}{half}{_mark(told)}"


def _mark(told: Told) -> str:
    if told["stable"] is False:
        return " !"
    return " ?" if told["warnings"] else ""


def _footnotes(results: Sequence[Told]) -> list[str]:
    """Footnotes: one line for each kind of warning and policy, or for all policies that have it at the same loads."""
    found = []
    for mark, says in ((" !", "! NOT STABLE: the number only says how long the run was"), (" ?", "? not sure:")):
        kinds: dict[str, dict[str, list[tuple[Told, str]]]] = {}
        for told in results:
            for warning in told["warnings"] if _mark(told) == mark else ():
                kinds.setdefault(NUMBERS.sub("", warning), {}).setdefault(told["policy"], []).append((told, warning))
        notes = [note for by_policy in kinds.values() for note in _notes(by_policy)]
        found += ["", says, *notes] if notes else []
    return found


def _notes(by_policy: dict[str, list[tuple[Told, str]]]) -> list[str]:
    """Warnings of one kind; if there are several loads, the numbers of the last one."""
    together: dict[str, list[str]] = {}
    for policy, warned in by_policy.items():
        loads = ", ".join(load_text(told["load"]) for told, _ in warned)
        told, warning = warned[-1]
        last = f"at {load_text(told['load'])}, " if len({says for _, says in warned}) > 1 else ""
        where = f" at load {loads}: {last}{warning}"
        together.setdefault(where, []).append(printable(policy))
    return [f"  {', '.join(policies)}{where}" for where, policies in together.items()]
