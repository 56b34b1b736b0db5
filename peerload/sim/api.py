"""Python interface of the simulator.

import peerload.sim

table = peerload.sim.run(["adaptive", "threshold"], loads=[0.5, 0.9], nodes=10, tasks=2000)
pandas.DataFrame(table)     # a table is a list of dicts; a notebook shows it as one
"""

from __future__ import annotations

import csv
import html
import io
from typing import TYPE_CHECKING, Any

from peerload import __version__
from peerload.model.errors import ConfigError
from peerload.sim.outcome import outcome
from peerload.sim.replication import CONTROL
from peerload.sim.scenario import Scenario, play, tasks_for
from peerload.sim.service import read_service

if TYPE_CHECKING:
    from collections.abc import Iterable

REPLICATIONS = 4


class Table(list[dict[str, Any]]):
    """Rows with the same keys: one for each policy and load."""

    def _repr_html_(self) -> str:
        rows = [[*self[0]]] + [[*row.values()] for row in self] if self else []
        cells = (
            "".join(f"<td>{html.escape(f'{cell:.4g}' if isinstance(cell, float) else str(cell))}</td>" for cell in row)
            for row in rows
        )
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    def to_csv(self) -> str:
        written = io.StringIO()
        writer = csv.DictWriter(written, [*self[0]] if self else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        return written.getvalue()


def run(
    policies: str | Iterable[str] = "adaptive",
    *,
    loads: float | Iterable[float] = 0.9,
    nodes: int = 20,
    slots: int = 1,
    replications: int = REPLICATIONS,
    seed: int = 1,
    tasks: int | None = None,
    **others: Any,  # noqa: ANN401 -- of any field
) -> Table:
    """Simulate presets, by name or path, at loads → a row for each: the parameters, and every metric with half of its 95 %
    interval. ``others``: fields of `Scenario`, such as ``changes=(("threshold", 2),)`` or ``speeds``; ``service`` may be a text.
    With equal seeds all policies get the same tasks. Raises ConfigError."""
    if replications < 1:
        raise ConfigError("replications", f"{replications} is out of range", why="allowed: 1 or more")
    if isinstance(others.get("service"), str):
        others["service"] = read_service(others["service"])
    table = Table()
    for policy in [policies] if isinstance(policies, str) else policies:
        for load in [loads] if isinstance(loads, float | int) else loads:
            length, warm_up = (tasks, tasks // 4) if tasks is not None else tasks_for(nodes, slots, load)
            sized: dict[str, Any] = {"tasks": length, "warm_up": warm_up, **others}
            scenario = Scenario(policy=policy, nodes=nodes, slots=slots, load=load, **sized)
            scenario.check()
            samples = [
                play(scenario, seed, number, clock=lambda: 0.0, passed=lambda _tasks: None)
                for number in range(replications)
            ]
            found = outcome(scenario, samples)
            row = {
                "policy": scenario.label,
                "nodes": nodes,
                "slots": slots,
                "load": load,
                "tasks": length,
                "seed": seed,
                "version": __version__,
            }
            row |= {"replications": replications, "stable": found.is_stable, "warnings": "; ".join(found.warnings)}
            for name, interval in found.metrics.items():
                if name != CONTROL:
                    row |= {name: interval.value, f"{name}_ci95": interval.half}
            table.append(row)
    keys = dict.fromkeys(key for row in table for key in row)
    return Table({key: row.get(key) for key in keys} for row in table)
