"""Program of tasks: execution costs by node, communication costs by pair of tasks, capacities of nodes; from TOML.

nodes = ["ws1", "ws2"]
[tasks.a]
cost = { ws1 = 5, ws2 = inf }       # inf: cannot run there
mem = "2G"                          # optional, with command, after
[communication.a]
b = 6                               # if a and b are on different nodes
[limits.ws1]
mem = "8G"
tasks = 3
"""

from __future__ import annotations

import argparse
import math
import tomllib
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from peerload.model.errors import ConfigError
from peerload.text.units import size

TASKS_MAX, NODES_MAX = 100, 50
FILE_BYTES_MAX = 1 << 20
COST_MAX = 1e12


class ProgramTask(NamedTuple):
    """Task of a program. costs: of execution, by node, math.inf where it cannot run; mem_bytes: 0 = not stated; command: a
    line for a shell, or words; after: tasks that must succeed before."""

    name: str
    costs: tuple[float, ...]
    mem_bytes: int = 0
    command: str | tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class Limit(NamedTuple):
    """Limits of a node: memory and number of tasks."""

    mem_bytes: float = math.inf
    tasks: float = math.inf


class Program(NamedTuple):
    """Tasks, nodes, and the communication cost of each pair of tasks on different nodes, by index (0 is left out)."""

    nodes: tuple[str, ...]
    tasks: tuple[ProgramTask, ...]
    apart: dict[tuple[int, int], float]
    limits: tuple[Limit, ...]

    def cost(self, places: tuple[int, ...] | list[int]) -> tuple[float, float]:
        """The costs of execution and of communication of an assignment. places: the node of each task."""
        execution = sum(task.costs[node] for task, node in zip(self.tasks, places, strict=True))
        return execution, sum(cost for (one, other), cost in self.apart.items() if places[one] != places[other])

    def fits(self, places: tuple[int, ...] | list[int]) -> bool:
        for node, limit in enumerate(self.limits):
            here = [task for task, place in zip(self.tasks, places, strict=True) if place == node]
            if len(here) > limit.tasks or sum(task.mem_bytes for task in here) > limit.mem_bytes:
                return False
        return math.isfinite(self.cost(places)[0])

    @property
    def is_limited(self) -> bool:
        """True if a node cannot hold all tasks."""
        mem_bytes = sum(task.mem_bytes for task in self.tasks)
        return any(limit.tasks < len(self.tasks) or limit.mem_bytes < mem_bytes for limit in self.limits)


def read_program(raw: bytes, source: str) -> Program:
    """Read a program. Raises ConfigError that names the file, the key, and what is wrong there."""
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError("assign", f"has more than {FILE_BYTES_MAX >> 20} MiB", file=source)
    try:
        table = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError("assign", "is not TOML", why=str(error), file=source) from None
    return _Reader(source).program(table)


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source

    def _wrong(self, key: str, what: str, why: str = "", hint: str = "") -> ConfigError:
        return ConfigError(key, what, why=why, hint=hint, file=self._source)

    def _table(self, key: str, value: object, allowed: tuple[str, ...] | list[str]) -> dict[str, Any]:
        """A table with no other keys than these."""
        if not isinstance(value, dict):
            raise self._wrong(key, "is not a table")
        for name in value:
            if name not in allowed:
                raise self._wrong(f"{key}.{name}" if key else name, "is unknown", why=f"there are {', '.join(allowed)}")
        return value

    def _cost(self, key: str, value: object, most: float = COST_MAX) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise self._wrong(key, f"{value!r} is not a number")
        if value < 0:
            raise self._wrong(key, f"{value} is negative", why="a cost is 0 or more")
        if value > most or (value > COST_MAX and math.isfinite(value)):
            raise self._wrong(key, f"{value} is too large", why=f"at most {COST_MAX:g}")
        return float(value)

    def _names(self, key: str, value: object, least: int, most: int) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise self._wrong(key, "is not a list of names")
        if not least <= len(value) <= most or len(set(value)) < len(value):
            raise self._wrong(key, f"has {len(value)} names", why=f"allowed: {least} to {most} different ones")
        return tuple(value)

    def _size(self, key: str, value: object) -> int:
        try:
            return size(str(value), least=0)
        except argparse.ArgumentTypeError as error:
            raise self._wrong(key, str(error)) from None

    def program(self, table: dict[str, Any]) -> Program:
        table = self._table("", table, ("nodes", "tasks", "communication", "limits"))
        nodes = self._names("nodes", table.get("nodes"), 1, NODES_MAX)
        named = table.get("tasks")
        if not isinstance(named, dict) or not 0 < len(named) <= TASKS_MAX:
            raise self._wrong("tasks", "needs a table for each task", why=f"1 to {TASKS_MAX}: [tasks.NAME]")
        tasks = tuple(self._task(name, value, nodes, list(named)) for name, value in named.items())
        limits = self._table("limits", table.get("limits", {}), nodes)
        program = Program(
            nodes,
            tasks,
            self._apart(table.get("communication", {}), list(named)),
            tuple(self._limit(f"limits.{node}", limits.get(node, {})) for node in nodes),
        )
        in_order(program)
        return program

    def _task(self, name: str, value: object, nodes: tuple[str, ...], names: list[str]) -> ProgramTask:
        key = f"tasks.{name}"
        table = self._table(key, value, ("cost", "mem", "command", "after"))
        costs = self._table(f"{key}.cost", table.get("cost", {}), nodes)
        for node in nodes:
            if node not in costs:
                raise self._wrong(f"{key}.cost", f"no cost on {node} is known", hint="inf: it cannot run there")
        read = tuple(self._cost(f"{key}.cost.{node}", costs[node], math.inf) for node in nodes)
        if not any(map(math.isfinite, read)):
            raise self._wrong(f"{key}.cost", "it cannot run on any node", why="its cost is inf on every node")
        after = self._names(f"{key}.after", table.get("after", []), 0, TASKS_MAX)
        if missing := [one for one in after if one not in names]:
            raise self._wrong(f"{key}.after", f"no task {missing[0]!r}", why=f"there are {', '.join(names)}")
        command = table.get("command", ())
        if not isinstance(command, str):
            command = self._words(f"{key}.command", command)
        return ProgramTask(name, read, self._size(f"{key}.mem", table.get("mem", "0B")), command, after)

    def _words(self, key: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
            raise self._wrong(key, "is neither a line nor a list of words")
        return tuple(value)

    def _limit(self, key: str, value: object) -> Limit:
        table = self._table(key, value, ("mem", "tasks"))
        mem = self._size(f"{key}.mem", table["mem"]) if "mem" in table else math.inf
        return Limit(mem, self._cost(f"{key}.tasks", table.get("tasks", math.inf), math.inf))

    def _apart(self, value: object, names: list[str]) -> dict[tuple[int, int], float]:
        apart: dict[tuple[int, int], float] = {}
        for one, row in self._table("communication", value, names).items():
            for other, told in self._table(f"communication.{one}", row, names).items():
                key, cost = f"communication.{one}.{other}", self._cost(f"communication.{one}.{other}", told)
                if one == other:
                    raise self._wrong(key, "both are the same task")
                low, high = sorted((names.index(one), names.index(other)))
                if apart.setdefault((low, high), cost) != cost:
                    why = f"in the other direction it is {apart[low, high]:g}"
                    raise self._wrong(key, f"{cost:g} is asymmetric", why=why, hint="name each pair once")
        return {pair: cost for pair, cost in apart.items() if cost}


def in_order(program: Program) -> list[ProgramTask]:
    """The tasks, each after its dependencies. Raises ConfigError for a cycle."""
    tasks = {task.name: task for task in program.tasks}
    try:
        order = TopologicalSorter({name: task.after for name, task in tasks.items()}).static_order()
        return [tasks[name] for name in order]
    except CycleError as error:
        circle = ", ".join(sorted(set(error.args[1])))
        raise ConfigError("tasks", f"{circle} wait for one another", hint="after = […] must not form a cycle") from None
