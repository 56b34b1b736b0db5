"""Rehearsal of a preset: a short simulation that finds policies that fail or that share state between nodes.

Each node has its own policy instances, so state in an instance belongs to one node. State in a class or in a
module is shared by all nodes of a simulation, but never by two agents, so such a policy behaves differently live.
"""

from __future__ import annotations

import inspect
from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.model import metrics
from peerload.policy.preset import KINDS
from peerload.sim.replication import Replication
from peerload.sim.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from peerload.policy.preset import PolicySet

NODES, TASKS, LOAD, SEED = 6, 400, 0.9, 1
DEPTH_MAX = 8
"""Depth to which nested values are compared."""
SHIPPED = "peerload"
"""Prefix of skipped modules: the shipped policies have their own tests."""


class Rehearsal(msgspec.Struct, frozen=True):
    """Result of a rehearsal. policy_errors: how often a policy raised an exception or returned an invalid answer; policy_failure:
    the first of these; shared: names of
    variables of classes and modules that changed, and so are shared by nodes; repeats: True if the same seed repeated the
    same run."""

    nodes: int
    tasks: int
    policy_errors: int
    policy_failure: str
    shared: tuple[str, ...]
    repeats: bool

    @property
    def is_good(self) -> bool:
        return not self.policy_errors and not self.shared and self.repeats


def rehearse(preset: str) -> Rehearsal:
    """Play a preset, by name or path, twice with the same seed. Raises ConfigError if it cannot be used."""
    scenario = Scenario(policy=preset, nodes=NODES, load=LOAD, tasks=TASKS, warm_up=0, is_live=True)
    setup = scenario.setup()
    before = dict(_variables(setup.policies))
    players = []
    for _ in range(2):
        player = Replication(setup, SEED)
        player.play(TASKS)
        player.drain()
        players.append(player)
    after = dict(_variables(setup.policies))
    first, again = players
    return Rehearsal(
        nodes=NODES,
        tasks=TASKS,
        policy_errors=int(first.counts().get(metrics.POLICY_ERRORS, 0)),
        policy_failure=first.policy_failure,
        shared=tuple(name for name, shown in after.items() if before.get(name) != shown),
        repeats=first.responses == again.responses and first.counts() == again.counts(),
    )


def _variables(policies: PolicySet) -> Iterator[tuple[str, str]]:
    """The variables of the modules and classes of policies that are not shipped, with their values as text."""
    for kind in KINDS:
        own = type(getattr(policies, kind.rpartition(".")[2]))
        if own.__module__.partition(".")[0].partition("_")[0] == SHIPPED and ":" not in own.__module__:
            continue
        for cls in own.__mro__:
            if cls.__module__ == own.__module__:
                yield from _shown(f"{cls.__name__}.", vars(cls))
        functions = [value for value in vars(own).values() if inspect.isfunction(value)]
        if functions:  # the functions refer to the module in use; the file may have been loaded more than once
            found = functions[0].__globals__
            yield from _shown("", found)
            for name, value in found.items():
                if inspect.isclass(value) and value.__module__ == own.__module__:
                    yield from _shown(f"{name}.", vars(value))


def _shown(prefix: str, variables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in variables.items():
        is_code = inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, ModuleType)
        if not name.startswith("__") and not is_code and not inspect.isdatadescriptor(value):
            yield prefix + name, _text(value, DEPTH_MAX)


def _text(value: object, depth: int) -> str:
    """Text of a value, equal for equal values as far as their attributes can be read."""
    inside: Any = getattr(value, "__dict__", None)
    if depth == 0:
        return "…"
    match value:
        case dict():
            return str([(_text(key, depth - 1), _text(inner, depth - 1)) for key, inner in value.items()])
        case list() | tuple() | deque():
            return str([_text(inner, depth - 1) for inner in value])
        case set() | frozenset():
            return str(sorted(_text(inner, depth - 1) for inner in value))
        case _ if isinstance(inside, dict) and inside:
            return f"{type(value).__name__} {_text(inside, depth - 1)}"
        case _:
            return repr(value)
