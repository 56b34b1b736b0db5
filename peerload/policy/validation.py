"""Validation of the answers of policies. Each function returns the answer or raises TypeError or ValueError, so that
an invalid answer counts as a failure of the policy and reaches no other node. The messages are the same in every
process, as decisions are: they contain no address of an object."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from peerload.model.load import LOAD_MAX, Thresholds
from peerload.model.power import TaskCost
from peerload.policy.api import ANY_LOAD, Broadcast, Keep, Probe, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence


def valid_load(answer: object) -> float:
    """Validate a load index: a number, 0 … LOAD_MAX."""
    if not isinstance(answer, int | float):
        raise TypeError(f"a {type(answer).__name__} is no load index")
    if not 0.0 <= answer <= LOAD_MAX:
        raise ValueError(f"a load index of {answer!r}")
    return float(answer)


def valid_thresholds(answer: object) -> Thresholds:
    """Validate thresholds: finite numbers ≥ 0."""
    if not isinstance(answer, Thresholds):
        raise TypeError(f"a {type(answer).__name__} is not Thresholds")
    for threshold in (answer.send_at, answer.accept_below, answer.receive_below, answer.give_above, answer.prefetch):
        if not isinstance(threshold, int | float):
            raise TypeError(f"a {type(threshold).__name__} is no threshold")
        if threshold < 0 or not isfinite(threshold):
            raise ValueError(f"a threshold of {threshold!r}")
    return answer


def valid_partner(answer: object) -> str | None:
    """Validate a partner: a node's name, or None."""
    if not isinstance(answer, str | None):
        raise TypeError(f"a {type(answer).__name__} is no node's name")
    return answer


def valid_answer(answer: object) -> bool:
    """Validate a Boolean answer."""
    if not isinstance(answer, bool):
        raise TypeError(f"a {type(answer).__name__} is neither yes nor no")
    return answer


def valid_audience(answer: object, peers: Sequence[str]) -> Sequence[str] | None:
    """Validate an audience: different names of peers; None: all."""
    if answer is None:
        return None
    if not isinstance(answer, (tuple, list)):
        raise TypeError(f"a {type(answer).__name__} is no audience")
    if not set(answer) <= set(peers) or len(set(answer)) < len(answer):
        raise ValueError(f"an audience of {answer!r}")
    return answer


def valid_step(answer: object) -> Probe | Broadcast | Transfer | Keep:
    """Validate a step of a search: names and reasons are texts."""
    if isinstance(answer, (Transfer, Keep)) and not all(isinstance(cost, TaskCost) for cost in answer.compared):
        raise TypeError("what was compared is no costs")
    if isinstance(answer, Keep) and not isinstance(answer.wakes, str):
        raise TypeError("what is woken has no name")
    match answer:
        case Probe(nodes=tuple() as nodes) if all(isinstance(node, str) for node in nodes):
            return answer
        case Broadcast(otherwise=None):
            return answer
        case Broadcast(otherwise=Transfer() as late):
            valid_step(late)
            return answer
        case Transfer(to=str(), load_tasks_max=int() as most) if -1 <= most <= ANY_LOAD and not isinstance(most, bool):
            return answer
        case Keep(reason=str()):
            return answer
        case _:
            raise TypeError(f"a {type(answer).__name__} is no step of a search")
