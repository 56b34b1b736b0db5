"""`validate`: a node whose machines contradict each other is found, with the facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from peerload.agent.effects import Consumer
from peerload.core.work import HomePhase
from peerload.model import events
from peerload.model.errors import InvariantBroken
from tests.core.given import Given, offer
from tests.core.invariants import validate
from tests.core.test_executor import KEY, commit

if TYPE_CHECKING:
    from collections.abc import Callable


def busy() -> Given:
    """A node with a task that runs, one that waits, and an accepted offer of another home."""
    x = Given(slots=1, peers=("h",))
    x.submit()
    x.submit()
    x.hear("h", offer(only=True))
    validate(x.node)
    return x


def waiting(x: Given) -> Any:
    return x.task(2)


def _lost_from_index(x: Given) -> None:
    del x.node.home.singles["x/1"]


def _wrong_phase(x: Given) -> None:
    waiting(x).phase = HomePhase.AWAY


def _runs_unseen(x: Given) -> None:
    x.node.runs._works.clear()


def _holds_no_room(x: Given) -> None:
    x.node.ledger.running.clear()


def _waits_twice(x: Given) -> None:
    x.node.home.stranded[waiting(x).uid] = waiting(x)


def _is_miscounted(x: Given) -> None:
    x.node.ledger.waiting += 1


def _reserves_nothing(x: Given) -> None:
    x.node.ledger.inbound.clear()


def _is_not_fenced(x: Given) -> None:
    x.hear("h", commit(x))
    x.end(x.task(1).key)
    x.end(x.task(2).key)
    assert KEY in x.node.ledger.running
    x.node.executor.fences._fences.clear()


@pytest.mark.parametrize(
    "corrupt",
    [
        _lost_from_index,
        _wrong_phase,
        _runs_unseen,
        _holds_no_room,
        _waits_twice,
        _is_miscounted,
        _reserves_nothing,
        _is_not_fenced,
    ],
)
def test_a_contradiction_is_found(corrupt: Callable[[Given], None]) -> None:
    x = busy()
    corrupt(x)
    with pytest.raises(InvariantBroken):
        validate(x.node)


def test_the_task_is_told_with_its_story() -> None:
    x = busy()
    _wrong_phase(x)
    with pytest.raises(InvariantBroken, match="x/2: ") as raised:
        validate(x.node)
    assert "TaskRecord(task='x/2'" in raised.value.story


def test_the_agent_ends_over_a_broken_invariant() -> None:
    failed: list[str] = []

    class Broken:
        def handle(self, *_: object) -> None:
            raise InvariantBroken("x/1: WAITING → AWAY", story="submitted")

    class Run:
        has_failed = False
        fail = staticmethod(failed.append)

    class Nothing:
        perform = None

        def flush(self) -> None:
            pass

    node, run, nothing = cast("Any", Broken()), cast("Any", Run()), cast("Any", Nothing())
    Consumer(node, nothing, nothing, run, None).consume([events.ClientGone(7)])
    assert failed == ["an internal invariant was broken"]
