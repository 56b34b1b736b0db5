"""What can be done, and the command that does the same."""

from __future__ import annotations

import pytest

from peerload.top import actions
from peerload.top.world import Node
from tests.unit.top.given import NOW, node, task


def command(action: actions.Action | actions.Refused) -> str:
    assert isinstance(action, actions.Action)
    return action.command()


def why(action: actions.Action | actions.Refused) -> str:
    assert isinstance(action, actions.Refused)
    return action.why


def test_each_is_a_command() -> None:
    assert command(actions.cancel(task("ws1/1"))) == "peerload cancel ws1/1"
    assert command(actions.hold(task("ws1/1", "queued"))) == "peerload hold ws1/1"
    assert command(actions.release(task("ws1/1", "held"))) == "peerload release ws1/1"
    assert command(actions.release(task("ws1/1", "failed"))) == "peerload retry ws1/1"
    assert command(actions.drain(Node(node("ws1"), NOW), "ws1")) == "peerload drain"
    assert command(actions.drain(Node(node("ws2"), NOW), "ws1")) == "peerload drain ws2"
    assert command(actions.drain(Node(node("ws2", drained=True), NOW), "ws1")) == "peerload undrain ws2"


def test_what_ends_or_stops_something_asks_first() -> None:
    for action in (actions.cancel(task("ws1/1")), actions.drain(Node(node("ws1"), NOW), "ws1")):
        assert isinstance(action, actions.Action)
        assert action.asks


def test_another_node_is_asked_by_name() -> None:
    action = actions.drain(Node(node("ws2"), NOW), "ws1")
    assert isinstance(action, actions.Action)
    assert action.fields == {"at": "ws2"}
    action = actions.drain(Node(node("ws1"), NOW), "ws1")
    assert isinstance(action, actions.Action)
    assert action.fields == {}


def test_a_retry_is_done_once() -> None:
    one, two = actions.release(task("ws1/1", "done")), actions.release(task("ws1/1", "done"))
    assert isinstance(one, actions.Action)
    assert isinstance(two, actions.Action)
    assert one.fields["token"] != two.fields["token"]


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (actions.cancel(None), "no task is chosen"),
        (actions.cancel(task("ws1/1", "done")), "ws1/1 has ended already"),
        (actions.hold(None), "no task is chosen"),
        (actions.hold(task("ws1/1")), "ws1/1 does not wait: it is running"),
        (actions.release(None), "no task is chosen"),
        (actions.release(task("ws1/1")), "ws1/1 is neither held nor has it ended: it is running"),
        (actions.drain(None, "ws1"), "no node is chosen: Tab goes to the nodes"),
        (actions.drain(Node(node("ws2", state="dead"), NOW), "ws1"), "ws2 is dead"),
    ],
)
def test_what_cannot_be_done_is_said(action: actions.Action | actions.Refused, says: str) -> None:
    assert why(action) == says


@pytest.mark.parametrize(
    ("verb", "reply", "says"),
    [
        ("cancel", {"cancelled": ["ws1/1"]}, "cancelled"),
        ("cancel", {"cancelled": [], "already_ended": ["ws1/1"]}, "it had ended already"),
        ("hold", {"held": ["ws1/1"]}, "held"),
        ("hold", {}, "it does not wait any more"),
        ("release", {"released": ["x"]}, "released"),
        ("release", {}, "it was not held"),
        ("retry", {"id": "ws1/9"}, "queued as ws1/9"),
        ("drain", {"returned": 2, "running": 1}, "drained: 2 went back, 1 run on"),
        ("undrain", {"was_drained": True}, "takes tasks again"),
        ("undrain", {}, "it was not drained"),
    ],
)
def test_what_came_of_it(verb: str, reply: dict[str, object], says: str) -> None:
    assert actions.outcome(verb, reply) == says
