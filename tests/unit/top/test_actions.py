"""What can be done, and the command that does the same."""

from __future__ import annotations

from peerload.top import actions
from peerload.top.actions import BY_NAME, KEYS
from peerload.top.model import NodeModel
from tests.each import each
from tests.unit.top.given import NOW, look, node, sample, task


def command(action: actions.Action | actions.ActionRefused) -> str:
    assert isinstance(action, actions.Action)
    return action.command()


def why(action: actions.Action | actions.ActionRefused) -> str:
    assert isinstance(action, actions.ActionRefused)
    return action.why


def test_each_is_a_command() -> None:
    assert command(actions.cancel([task("ws1/1")])) == "peerload cancel ws1/1"
    assert command(actions.hold([task("ws1/1", "queued")])) == "peerload hold ws1/1"
    assert command(actions.release([task("ws1/1", "held")])) == "peerload release ws1/1"
    assert command(actions.release([task("ws1/1", "failed")])) == "peerload retry ws1/1"
    assert command(actions.drain(NodeModel(node("ws1"), NOW), "ws1")) == "peerload drain"
    assert command(actions.drain(NodeModel(node("ws2"), NOW), "ws1")) == "peerload drain ws2"
    assert command(actions.drain(NodeModel(node("ws2", drained=True), NOW), "ws1")) == "peerload undrain ws2"


def test_what_ends_or_stops_something_asks_first() -> None:
    for action in (actions.cancel([task("ws1/1")]), actions.drain(NodeModel(node("ws1"), NOW), "ws1")):
        assert isinstance(action, actions.Action)
        assert action.asks


def test_another_node_is_asked_by_name() -> None:
    action = actions.drain(NodeModel(node("ws2"), NOW), "ws1")
    assert isinstance(action, actions.Action)
    assert action.requests == ({"at": "ws2"},)
    action = actions.drain(NodeModel(node("ws1"), NOW), "ws1")
    assert isinstance(action, actions.Action)
    assert action.requests == ({},)


def test_a_retry_is_done_once() -> None:
    one, two = actions.release([task("ws1/1", "done")]), actions.release([task("ws1/1", "done")])
    assert isinstance(one, actions.Action)
    assert isinstance(two, actions.Action)
    assert one.requests[0]["token"] != two.requests[0]["token"]


@each(
    ("action", "says"),
    [
        (actions.cancel([]), "no task is chosen"),
        (actions.cancel([task("ws1/1", "done")]), "ws1/1 has ended already"),
        (actions.hold([]), "no task is chosen"),
        (actions.hold([task("ws1/1")]), "ws1/1 does not wait: it is running"),
        (actions.release([]), "no task is chosen"),
        (actions.release([task("ws1/1")]), "ws1/1 is neither held nor ended: it is running"),
        (actions.drain(None, "ws1"), "no node is chosen: press Tab to go to the nodes"),
        (actions.drain(NodeModel(node("ws2", state="dead"), NOW), "ws1"), "ws2 is dead"),
    ],
)
def test_what_cannot_be_done_is_said(action: actions.Action | actions.ActionRefused, says: str) -> None:
    assert why(action) == says


@each(
    ("verb", "reply", "says"),
    [
        ("cancel", {"cancelled": ["ws1/1"]}, "cancelled"),
        ("cancel", {"cancelled": [], "already_ended": ["ws1/1"]}, "it had ended already"),
        (
            "cancel",
            {"cancelled": ["ws1/1"], "unreachable": [{"id": "ws1/1", "node": "ws2", "state": "dead"}]},
            "cancelled; it may run on at ws2, which does not answer",
        ),
        ("hold", {"held": ["ws1/1"]}, "held"),
        ("hold", {}, "it is not waiting any more"),
        ("release", {"released": ["x"]}, "released"),
        ("release", {}, "it was not held"),
        ("retry", {"id": "ws1/9"}, "queued as ws1/9"),
        ("drain", {"returned": 2, "running": 1}, "drained: 2 went back, 1 run on"),
        ("undrain", {"was_drained": True}, "takes tasks again"),
        ("undrain", {}, "it was not drained"),
    ],
)
def test_what_came_of_it(verb: str, reply: dict[str, object], says: str) -> None:
    assert actions.outcome(verb, [reply]) == says


def marked(*names: str) -> list[dict[str, object]]:
    seen = look(
        sample(
            tasks=[
                task("ws1/1"), task("ws1/2", "queued"), task("ws1/3", "held"),
                task("ws1/5.1"), task("ws1/5.2"), task("ws1/5.3", "queued"),
            ],
            ended=[task("ws1/4", "failed"), task("ws1/5.4", "done")],
        )
    )  # fmt: skip
    seen.opened.add("ws1/5")
    for name in names:
        seen.choose("tasks", [row["id"] for row in seen.rows("tasks")].index(name))
        seen.mark()
    return seen.acted_on()


def test_all_that_are_marked_are_acted_on_at_once() -> None:
    action = actions.cancel(marked("ws1/1", "ws1/2", "ws1/4"))
    assert isinstance(action, actions.Action)
    assert action.requests == ({"tasks": ("ws1/1", "ws1/2")},)
    assert action.asks == "cancel 2 tasks ?"
    action = actions.release(marked("ws1/4", "ws1/3"))
    assert isinstance(action, actions.Action)
    assert (action.verb, action.requests) == ("release", ({"tasks": ("ws1/3",)},))
    assert why(actions.hold(marked("ws1/1", "ws1/4"))) == "2 tasks do not wait: they are failed, running"


def test_an_array_is_acted_on_as_a_whole() -> None:
    rows = marked("ws1/5", "ws1/5.3")
    assert [row["id"] for row in rows] == ["ws1/5"]
    action = actions.cancel(rows)
    assert isinstance(action, actions.Action)
    assert action.requests == ({"tasks": ("ws1/5",)},)
    assert action.asks == "cancel ws1/5 (3 tasks) ?"
    assert command(actions.hold(rows)) == "peerload hold ws1/5"


def test_a_signal_goes_to_what_runs() -> None:
    action = actions.send(marked("ws1/5", "ws1/2", "ws1/1"), "HUP")
    assert isinstance(action, actions.Action)
    assert action.requests == tuple({"task": name, "signal": 1} for name in ("ws1/1", "ws1/5.1", "ws1/5.2"))
    assert action.asks == "send HUP to 3 tasks that run ?"
    assert command(action) == "peerload signal HUP ws1/1 ws1/5.1 ws1/5.2"
    assert why(actions.send(marked("ws1/2"), "KILL")) == "ws1/2 does not run: it is queued"
    assert why(actions.send([], "KILL")) == "no task is chosen"


def test_no_key_does_two_things() -> None:
    names = [name for key in KEYS for name in key.names]
    assert len(names) == len(set(names)) == len(BY_NAME)
