"""Users of one machine at one agent: what each may see and do, tried by processes that are those users (rules L1 to L4)."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.model.errors import BadRequest
from tests.security.users import ADMINS, GROUP, SystemCluster, User, needs_root
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.security.users import SystemAgent

pytestmark = [needs_root, pytest.mark.rule("L2")]
ABSENT = "n1/900900"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SystemCluster]:
    with SystemCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def agent(cluster: SystemCluster) -> SystemAgent:
    return cluster.system("n1").start()


@pytest.fixture(scope="module")
def other(cluster: SystemCluster, agent: SystemAgent) -> SystemAgent:
    """Another node of the same cluster, on which the users of the first are guests, but for one."""
    more = cluster.system("n2", "--peer", agent.listen, settings='[users]\n"n1:bob" = "alice"\n').start()
    cluster.await_acquainted([agent, more])
    return more


def submit(cluster: SystemCluster, user: User, *argv: str, at: str = "", held: bool = True, **more: Any) -> str:
    spec = cluster.spec(*argv or ("true",), **more.pop("spec", {}))
    reply = user.call("submit", token=secrets.token_hex(8), spec=spec, held=held, at=at, **more)
    return str(reply["id"])


def listed(user: User, verb: str = "tasks", **fields: Any) -> set[str]:
    return {task["id"] for task in user.call(verb, **fields)["tasks"]}


NAMING: list[tuple[str, dict[str, Any]]] = [
    ("show", {"tasks": ["{}"]}),
    ("why", {"task": "{}"}),
    ("events", {"tasks": ["{}"]}),
    ("wait", {"tasks": ["{}"], "timeout_s": 0.0}),
    ("output", {"task": "{}"}),
    ("cancel", {"tasks": ["{}"]}),
    ("cancel", {"tasks": ["{}"], "wait": True}),
    ("retry", {"task": "{}", "token": "t" * 16}),
    ("hold", {"tasks": ["{}"]}),
    ("release", {"tasks": ["{}"]}),
    ("prio", {"tasks": ["{}"], "priority": 7}),
    ("signal", {"task": "{}", "signal": 10}),
    ("input", {"task": "{}", "data": b"x"}),
    ("resize", {"task": "{}", "rows": 1, "columns": 1}),
    ("attend", {"task": "{}"}),
    ("detach", {"task": "{}"}),
    ("clean", {"tasks": ["{}"]}),
]


def naming(fields: dict[str, Any], task: str) -> dict[str, Any]:
    return {key: [task] if value == ["{}"] else task if value == "{}" else value for key, value in fields.items()}


def test_a_task_of_another_user_is_as_one_that_is_not_there(cluster: SystemCluster, agent: SystemAgent) -> None:
    alice, bob, carol = (cluster.user(agent, name) for name in ("alice", "bob", "carol"))
    task = submit(cluster, alice)
    before = agent.show(task)
    for verb, fields in NAMING:
        foreign = bob.refused(verb, **naming(fields, task))
        absent = bob.refused(verb, **naming(fields, ABSENT))
        assert foreign == tuple(word.replace(ABSENT, task) for word in absent), verb
        assert foreign[0] == "no-such-task", verb
    waits = {"spec": cluster.spec("true"), "token": "u" * 16}
    assert bob.refused("submit", **waits, terms={"after": [task]})[0] == "no-such-task"
    assert agent.show(task) == before, "nothing has moved it"
    assert bob.call("submit", **waits)["id"] != task
    for verb, fields in NAMING[:4]:
        carol.call(verb, **naming(fields, task))
    assert alice.call("cancel", tasks=[task])["cancelled"] == [task]


def test_lists_and_events_tell_each_of_its_own(cluster: SystemCluster, agent: SystemAgent) -> None:
    alice, bob, carol = (cluster.user(agent, name) for name in ("alice", "bob", "carol"))
    mine = submit(cluster, alice, spec={"name": "mine"}, terms={"group": "hers"})
    done = submit(cluster, alice, held=False)
    theirs = submit(cluster, bob)
    alice.stream("wait", tasks=[done], timeout_s=60.0)
    assert {mine, done} <= listed(alice)
    assert not {mine, done} & listed(bob)
    assert {mine, done, theirs} <= listed(carol)
    assert {mine, done, theirs} <= listed(cluster.user(agent, "0"))
    users = {task["id"]: task["user"] for task in carol.call("tasks")["tasks"]}
    assert (users[mine], users[theirs]) == ("alice", "bob")
    assert done in listed(alice, "history")
    assert done not in listed(bob, "history")
    for user, sees in ((alice, True), (bob, False), (carol, True)):
        events = [event for part in user.stream("events", limit=1000) for event in part["events"]]
        assert any(event["task"] == done for event in events) == sees
        overview = user.call("overview", events_max=1000)
        assert (mine in {task["id"] for task in overview["tasks"]}) == sees
        assert any(event["task"] == done for event in overview["events"]) == sees
        assert ("hers" in {group["name"] for group in user.call("groups")["groups"]}) == sees
    for user, sees in ((alice, True), (bob, False), (carol, True)):
        gone = {task for part in user.stream("clean", dry_run=True) for task in part["tasks"]}
        assert (done in gone) == sees
    assert alice.call("show", tasks=["@"])["tasks"][0]["id"] == done
    assert bob.call("show", tasks=["@"])["tasks"][0]["id"] == theirs


@pytest.mark.rule("L1")
def test_who_asks_is_known_from_the_operating_system(cluster: SystemCluster, agent: SystemAgent) -> None:
    bob = cluster.user(agent, "bob")
    task = submit(cluster, bob, spec={"user": "root"}, terms={"owner": 0})
    assert bob.call("show", tasks=[task])["tasks"][0]["user"] == "bob"
    assert task not in listed(cluster.user(agent, "alice"))
    assert cluster.user(agent, "olga").refused("info")[0] == "not-allowed"  # has the group's number, and is not in it
    assert cluster.user(agent, "20077").refused("info")[0] == "not-allowed"
    root, service = cluster.user(agent, "0"), cluster.user(agent, "service")
    for user in (root, service):
        with pytest.raises(BadRequest):
            submit(cluster, user)
    assert service.call("info")["node"] == "n1"


@pytest.mark.rule("L1")
def test_the_socket_is_the_groups_and_admin_verbs_are_the_admins(cluster: SystemCluster, agent: SystemAgent) -> None:
    found = Path(agent.socket).stat()
    assert (found.st_mode & 0o777, found.st_uid, found.st_gid) == (0o660, 0, GROUP)
    alice, carol = cluster.user(agent, "alice"), cluster.user(agent, "carol")
    admin: list[tuple[str, dict[str, Any]]] = [
        ("drain", {}),
        ("undrain", {}),
        ("group", {"name": "g", "slots": 1}),
        ("forget", {"node": "n9"}),
        ("invite", {}),
        ("revoke", {"node": "n9"}),
        ("rotate", {}),
        ("cancel_remote", {"guests": ["n2/1"]}),
        ("restart", {}),
        ("leave", {}),
        ("stop", {"all": True}),
    ]
    for verb, fields in admin:
        assert alice.refused(verb, **fields)[0] == "not-allowed", verb
    carol.call("group", name="g", slots=1)
    carol.call("group", name="g", removed=True)
    carol.call("drain")
    assert carol.call("undrain")["was_drained"]
    assert {event["node"] for part in carol.stream("events", what=["security"]) for event in part["events"]} >= {
        "alice"
    }
    assert [part["events"] for part in alice.stream("events", what=["security"])] == []
    administrator = User(agent.socket, 20003, (ADMINS,))  # carol, whose process is not in the group of users
    assert administrator.call("info")["node"] == "n1"
    administrator.close()
    outside = User(agent.socket, 20005, ())  # has no group at all: the file itself is shut
    assert outside.refused("info")
    outside.close()


@pytest.mark.rule("P3")
def test_users_of_another_node(cluster: SystemCluster, agent: SystemAgent, other: SystemAgent) -> None:
    alice, bob, carol = (cluster.user(agent, name) for name in ("alice", "bob", "carol"))
    local = submit(cluster, cluster.user(other, "alice"))
    hers = submit(cluster, alice, at="n2")
    assert hers.startswith("n2/")
    assert alice.call("show", tasks=[hers])["tasks"][0]["user"] == "alice@n1"
    assert listed(alice, at="n2") == {hers}, "another alice than the one there"
    assert listed(bob, at="n2") == {local}, "who is mapped to the one there"
    for user, task in ((alice, local), (bob, hers)):
        foreign, absent = user.refused("show", tasks=[task]), user.refused("show", tasks=["n2/900900"])
        assert foreign == tuple(word.replace("n2/900900", task) for word in absent)
        assert (
            user.refused("submit", token="v" * 16, spec=cluster.spec("true"), terms={"after": [task]})[0]
            == "no-such-task"
        )
    his = submit(cluster, bob, at="n2")
    assert his in listed(cluster.user(other, "alice"))
    assert submit(cluster, alice, terms={"after": [hers]})
    for verb in ("drain", "undrain", "stop", "leave"):
        for user in (alice, carol, cluster.user(agent, "0")):
            assert user.refused(verb, at="n2")[0] == "not-allowed", verb

    def everywhere() -> set[str]:
        """Of n2; a node that says nothing for 3 s is left out."""
        tasks = alice.call("tasks", cluster=True)["tasks"]
        return {task["id"] for task in tasks if task["id"].startswith("n2/")}

    wait_until(lambda: everywhere() == {hers}, 60.0, "n2 to answer in time, with hers alone")
    assert alice.call("cancel", tasks=[hers])["cancelled"] == [hers]


@pytest.mark.long
@pytest.mark.rule("L3", "L4")
def test_a_flood_of_one_user_does_not_stop_another(cluster: SystemCluster) -> None:
    limits = "user_connections_max = 3\nuser_requests_per_s = 5.0\nuser_tasks_max = 4\n"
    agent = cluster.system("n3", settings=limits).start()
    flood, calm = cluster.user(agent, "alice"), cluster.user(agent, "bob")
    answers = flood.flood("info", 600)
    assert answers.count("ok") >= 5
    assert "slow-down" in answers
    assert calm.call("info")["node"] == "n3"
    wait_until(lambda: flood.flood("info", 1) == ["ok"], 60.0, "the flood to be served again")
    wait_until(lambda: flood.submits(cluster.spec("true")), 60.0, "the flood to submit again")
    assert submit(cluster, calm, array=[(1, 4, 1)])
    with pytest.raises(BadRequest) as refused:
        submit(cluster, calm)
    assert refused.value.code == "slow-down"
    wait_until(lambda: flood.submits(cluster.spec("true")), 60.0, "the other's tasks to be no matter")
    held = cluster.user(agent, "carol").hold_connections(5)
    assert held == ["ok"] * 3 + ["slow-down"] * 2
    assert calm.call("info")["node"] == "n3"
