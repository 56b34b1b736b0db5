"""Whether what was seen of one task in a run is something the model allows: the run *refines* the model.

Some steps of the model are seen from outside (a row became durable, a message was sent, a process began or ended,
something crashed), others are not (a message arrived and changed memory, time went by). So after each thing seen, there is a set
of states in which the model may be: those that a step of that name leads to, from whatever the unseen steps can reach.
If the set is empty, the run did what the model rules out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model.state import NOBODY, broken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.model.handoff import Handoff
    from tests.model.state import State, Step

UNSEEN = frozenset(
    {
        "tick",
        "offer times out",
        "reservation ends",
        "commit taken",
        "renewed",
        "parked",
        "revoked",
        "acknowledged",
        "dropped",
        "RENEW_OK",
        "COMMIT again",
        "REVOKE",
        "home is back",
    }
)
STATES_MAX = 5_000
"""More states in which the model may be at a time than this: the run is too long to be followed."""


class Seen(NamedTuple):
    """One thing seen. what: the names of the steps that look like this from outside; must: it changes something in the
    model; what need not may be a repetition, and leaves a state in which no such step can be taken as it is."""

    what: tuple[str, ...]
    attempt: int = 0
    node: int = NOBODY
    must: bool = True


class TooMany(Exception):
    """The run cannot be followed any further."""


def explained(model: Handoff, seen: Sequence[Seen]) -> int:
    """How many of the things seen the model can explain, one after the other; all of them in a good run."""
    states = {model.initial()}
    for number, thing in enumerate(seen):
        reachable = _unseen(model, states)
        states = set()
        for state in reachable:
            matching = [after for step, after in model.steps(state) if _is(step, thing)]
            if not matching and not thing.must:
                matching.append(state)
            states.update(after for after in matching if not broken(after, at_most_once=model.at_most_once))
        if not states:
            return number
    return len(seen)


def _is(step: Step, thing: Seen) -> bool:
    return step.what in thing.what and thing.attempt in (0, step.attempt) and thing.node in (NOBODY, step.node)


def _unseen(model: Handoff, states: Iterable[State]) -> set[State]:
    """Every state that the unseen steps lead to."""
    found = set(states)
    waiting = list(found)
    while waiting:
        for step, after in model.steps(waiting.pop()):
            if step.what in UNSEEN and after not in found:
                found.add(after)
                waiting.append(after)
        if len(found) > STATES_MAX:
            raise TooMany
    return found
