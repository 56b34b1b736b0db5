"""The measures, against cases worked out by hand."""

from __future__ import annotations

import pytest

from peerload.model import actions, events, messages, timers
from peerload.model.events import Instant
from peerload.model.task import Exit, TaskSpec
from peerload.wire import recording
from tests.fidelity.live import Delays, Ran, measured
from tests.fidelity.measures import idle_while_waiting


def ran(submitted_s: float, started_s: float, ended_s: float, node: str = "n1") -> Ran:
    return Ran("n1", node, submitted_s, started_s, ended_s, 0)


def test_nobody_waits() -> None:
    assert idle_while_waiting([ran(0, 0, 4)], 2) == 0.0


def test_one_waits_while_two_are_idle() -> None:
    """Ten seconds of three nodes; from 1 to 2 two nodes are idle while a task waits."""
    assert idle_while_waiting([ran(0, 0, 10), ran(1, 2, 5, "n2")], 3) == pytest.approx(2 / 30)


def test_all_are_busy_while_tasks_wait() -> None:
    assert idle_while_waiting([ran(0, 0, 2), ran(0, 0, 2, "n2"), ran(1, 2, 4)], 2) == 0.0


def test_delays_are_read_from_recordings() -> None:
    """A ping that takes 0.1 s; an acknowledgement behind a row, 0.3 s; a start after 0.2 s, an end known after 0.05 s."""
    ping, leaving = messages.Ping(1), messages.Leaving()
    row = actions.PutFloor(bytes(16), 1, 0.0)
    spec = TaskSpec((b"true",), b"/tmp")
    first: list[tuple[float, events.Event, list[actions.Action]]] = [
        (
            1.0,
            events.TimerExpired(timers.RenewalDue()),
            [actions.Send("b", ping), actions.SpawnTask("k", "a/1", 1, "a", spec)],
        ),
        (2.0, events.TimerExpired(timers.RenewalDue()), [actions.Persist((row,)), actions.Send("b", leaving)]),
        (3.05, events.TaskEnded("k", Exit(0, started_at=1.2, ended_at=3.0)), []),
    ]
    second: list[tuple[float, events.Event, list[actions.Action]]] = [
        (1.1, events.MessageReceived("a", ping), []),
        (2.3, events.MessageReceived("a", leaving), []),
    ]
    told = {
        node: recording.MAGIC
        + b"".join(recording.encode_handled(Instant(at_s, at_s), event, done) for at_s, event, done in life)
        for node, life in {"a": first, "b": second}.items()
    }
    assert measured(told) == pytest.approx(Delays(0.1, 0.1, 0.2, 0.2, 0.05))
