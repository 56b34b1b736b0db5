"""Every reachable state of a model, the nearest broken one, and whether an end can be reached from everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model.state import NOBODY, broken

if TYPE_CHECKING:
    from tests.model.handoff import Handoff
    from tests.model.state import State

STUCK = "L1 no end can be reached"
SWAPPED = {0: 1, 1: 0}


class Found(NamedTuple):
    """broken: the invariant, "" if all hold; story: the shortest way there; is_complete: every state was seen."""

    broken: str
    story: tuple[str, ...]
    states: int
    is_complete: bool


def explore(model: Handoff, *, states_max: int = 3_000_000, liveness: bool = True) -> Found:
    """Breadth first, so that a story is a shortest one. The two executors are alike: of a state and its mirror image
    one is looked at, so that in a story their names may change places."""
    order: list[State] = [model.initial()]
    index: dict[State, int] = {order[0]: 0}
    came_from: list[tuple[int, str]] = [(0, "")]
    after: list[tuple[int, ...]] = []
    here = 0
    while here < len(order):
        reached: list[int] = []
        for step, state in model.steps(order[here]):
            state = _canonical(model, state)  # noqa: PLW2901 -- the same, seen from the other side
            known = index.get(state)
            if known is None:
                known = index[state] = len(order)
                order.append(state)
                came_from.append((here, str(step)))
                what = broken(state, at_most_once=model.at_most_once)
                if what:
                    return Found(what, _story(came_from, known), len(order), is_complete=True)
            reached.append(known)
        if liveness:
            after.append(tuple(reached))
        here += 1
        if len(order) > states_max:
            return Found("", (), len(order), is_complete=False)
    stuck = _stuck(model, order, after) if liveness else None
    if stuck is not None:
        return Found(STUCK, _story(came_from, stuck), len(order), is_complete=True)
    return Found("", (), len(order), is_complete=True)


def _stuck(model: Handoff, order: list[State], after: list[tuple[int, ...]]) -> int | None:
    """The first state from which no end can be reached."""
    before: list[list[int]] = [[] for _ in order]
    for here, reached in enumerate(after):
        for there in reached:
            before[there].append(here)
    waiting = [here for here, state in enumerate(order) if model.is_end(state) or model.is_bound(state)]
    good = bytearray(len(order))
    for here in waiting:
        good[here] = 1
    while waiting:
        for there in before[waiting.pop()]:
            if not good[there]:
                good[there] = 1
                waiting.append(there)
    return next((here for here in range(len(order)) if not good[here]), None)


def _canonical(model: Handoff, state: State) -> State:
    first, second = state.executors
    if first < second:
        return state
    home = state.home
    swapped = state._replace(
        home=home._replace(holder=SWAPPED.get(home.holder, home.holder), offered=SWAPPED.get(home.offered, NOBODY)),
        executors=(second, first),
        messages=model.wire.mirrored(state.messages),
    )
    return swapped if second < first or swapped < state else state


def _story(came_from: list[tuple[int, str]], here: int) -> tuple[str, ...]:
    story = []
    while here:
        here, step = came_from[here]
        story.append(step)
    return tuple(reversed(story))
