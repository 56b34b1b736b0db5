"""From one machine to several, as their user types it: invite, join, run there; and out again, by will or by force."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

from peerload.model.errors import BadRequest
from tests.integration.cluster import processes_with
from tests.integration.machines import Lab, Machine
from tests.integration.test_two_machines import ADDRESSES, machines  # noqa: F401 -- a fixture
from tests.support import wait_until
from tests.wording import Says

ON_LOOPBACK = ("--listen", "127.0.0.1:0")
REVOKED_S_MAX = 10.0
"""It takes about one second, and this at most."""


def refused(machine: Machine, *words: str) -> str:
    """What it says of that it does not do."""
    done = machine.type(*words)
    assert done.returncode == 125, done.stdout
    return done.stderr


def certificate_of_ca(machine: Machine) -> bytes:
    return (machine.directory / "config" / "peerload" / "cluster" / "ca.pem").read_bytes()


@pytest.mark.rule("P3")
def test_a_second_machine_joins_and_runs_a_task_with_three_commands() -> None:
    with Lab() as lab:
        first, second, other = lab.machine("ws1"), lab.machine("ws2"), lab.machine("ws9")
        first.done("up")
        second.done("join", *ON_LOOPBACK, first.token(*ON_LOOPBACK))
        told = ("-d", "/", "sh", "-c", "echo $PEERLOAD_NODE")
        assert second.done("run", "--node", "ws1", *told) == "ws1\n"
        assert first.done("run", "--node", "ws2", *told) == "ws2\n"
        kept = second.directory / "config" / "peerload" / "cluster"
        assert stat.S_IMODE(kept.stat().st_mode) == 0o700
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in kept.iterdir()} == {
            "cluster.toml": 0o600,
            "ca.pem": 0o600,
            "seal.key": 0o600,
        }, "the CA's key stays where it was"
        assert stat.S_IMODE((second.state / "tls" / "node.pem").stat().st_mode) == 0o600
        assert not (second.state / "joining.pem").exists()
        assert first.call("info")["notices"] == second.call("info")["notices"] == []
        second.done("down")
        second.done("up")  # with no flag: a member again
        wait_until(lambda: first.sees("ws2") and second.sees("ws1"), what="both to be back")
        elsewhere = str(lab.directory / "elsewhere")
        examined = second.type("doctor", "--json", XDG_STATE_HOME=elsewhere, PEERLOAD_SOCKET=second.socket)
        checks = json.loads(examined.stdout)["checks"]
        assert {check["name"]: check["result"] for check in checks}["restart"] == "ok", (
            "its state is where the agent says"
        )
        assert "peerload invite" in refused(second, "invite"), "it does not have the key of the CA"
        nothing_is_done_by_way_of_another(first, second)
        # A machine that has a cluster of its own keeps that, whether its agent runs or not.
        other.done("up")
        other.token(*ON_LOOPBACK)
        token, before = first.token(), certificate_of_ca(other)
        refused(other, "join", token)
        other.done("down")
        refused(other, "join", token)
        assert certificate_of_ca(other) == before


def nothing_is_done_by_way_of_another(one: Machine, two: Machine) -> None:
    """What is for users of the machine itself, no member may ask for."""
    for verb, fields in (
        ("invite", {}),
        ("revoke", {"node": "ws2"}),
        ("rotate", {}),
        ("restart", {}),
        ("cancel_remote", {"guests": ["ws1/1"]}),
    ):
        with pytest.raises(BadRequest, match=Says.FROM_ANOTHER_NODE("ws2")):
            two.call(verb, at="ws1", **fields)
    info = one.call("info")
    assert (info["seal_key"], info["revoked"]) == (0, [])


def test_two_machines_on_a_wire(machines: dict[str, str]) -> None:  # noqa: F811 -- a fixture
    with Lab() as lab:
        first, second = (lab.machine(node, namespace) for node, namespace in machines.items())
        first.done("up")
        token = first.token("--listen", f"{ADDRESSES['n1']}:7117")
        said = second.done("join", token)
        assert f"{ADDRESSES['n2']}:7117" in said, "at its address towards the other"
        assert second.done("run", "--node", "n1", "-d", "/", "sh", "-c", "echo $PEERLOAD_NODE") == "n1\n"
        assert first.done("run", "--node", "n2", "-d", "/", "sh", "-c", "echo $PEERLOAD_NODE") == "n2\n"


@pytest.mark.long
def test_tasks_run_on_while_the_agent_becomes_a_member() -> None:
    with Lab() as lab:
        first, second = lab.machine("ws1"), lab.machine("ws2")
        for machine in (first, second):
            machine.done("up", "--slots", "3")
        tasks = {machine: machine.done("submit", "-d", "/", "sleep", "8").strip() for machine in (first, second)}
        for machine, task in tasks.items():
            wait_until(lambda m=machine, t=task: "running" in m.done("show", t), what="it runs")  # type: ignore[misc]
        second.done("join", *ON_LOOPBACK, first.token(*ON_LOOPBACK))
        for machine, task in tasks.items():
            machine.done("wait", task)
            assert '"attempt": 1' in machine.done("show", "--json", task), "it was not started again"
            assert machine.call("info")["slots"] == 3, "with the flags it was started with"


@pytest.mark.long
def test_names_that_are_taken_or_none() -> None:
    with Lab() as lab:
        first, second, third = lab.cluster("ws1", "ws2"), lab.machine("ws2x"), None
        del third
        one, two = first
        token = one.token()
        for name in ("ws1", "ws2"):
            refused = second.type("join", "--node", name, *ON_LOOPBACK, token, PEERLOAD_NODE=name)
            assert refused.returncode == 125
            assert name in refused.stderr
            assert "--node NAME" in refused.stderr
        for name in ("WS9", "a/b", "a" * 41, "ws2\x1b[31m"):
            refused = second.type("join", "--node", name, token)
            assert refused.returncode == 2
            assert "\x1b" not in refused.stderr
        refused = two.type("join", token)
        assert refused.returncode == 125
        assert "already: ws2" in refused.stderr, "which is no reason for another name"
        second.done("join", "--node", "ws3", *ON_LOOPBACK, token, PEERLOAD_NODE="ws3")  # still good
        wait_until(lambda: one.sees("ws2", "ws3") and two.sees("ws1", "ws3"), what="all to know all")


def test_a_machine_that_left_returns_by_the_command_that_leave_and_a_refused_join_print() -> None:
    with Lab() as lab:
        first, second = lab.cluster("ws1", "ws2")
        wait_until(lambda: first.sees("ws2") and second.sees("ws1"), what="both to know both")
        second.done("drain", "--wait")
        again = second.done("leave").partition("Join again:  ")[2].strip()
        wait_until(lambda: first.states()["ws2"] == "left", what="the other to know")
        assert first.call("info")["peers"] == 0
        assert again in refused(second, "join", *ON_LOOPBACK, first.token())
        assert "peerload undrain" in second.done(*again.split()[1:])
        wait_until(lambda: first.states()["ws2"] == "alive", what="it is back")


def test_a_machine_that_left_and_whose_cluster_directory_was_moved_starts_alone_by_the_command_that_up_prints() -> None:
    with Lab() as lab:
        machine = lab.machine("ws1")
        machine.done("up")
        machine.token(*ON_LOOPBACK)
        machine.done("leave")
        directory = machine.directory / "config" / "peerload" / "cluster"
        directory.rename(f"{directory}.old")
        said = refused(machine, "up")
        assert str(directory) in said
        assert "cluster init" not in said
        typed = said.partition("start without a cluster:  ")[2].partition("        ")[0].strip()
        assert typed == f"mv {machine.state}/joined.toml {machine.state}/joined.toml.old ; peerload up"
        (machine.state / "joined.toml").rename(machine.state / "joined.toml.old")
        machine.done("up")
        assert machine.call("info")["cluster_local"]


def test_invite_names_the_agents_of_this_machine_that_are_not_in_the_new_cluster_and_forgets_them() -> None:
    with Lab() as lab:
        first, socket = lab.machine("ws1"), str(lab.directory / "other.sock")
        first.done("up")
        place = ("--node", "ws2", "--state", str(lab.directory / "other"), "--socket", socket)
        first.done("up", *place, "--peer", first.call("info")["listen"])
        wait_until(lambda: first.sees("ws2"), what="both to know both")
        assert "ws2" in first.type("invite", *ON_LOOPBACK).stderr
        assert first.states() == {"ws1": "alive"}
        assert "ws2" not in first.done("nodes")
        first.done("down", "--socket", socket)


def test_mistyped_tokens_are_told_without_asking_anybody() -> None:
    with Lab() as lab:
        machine = lab.machine("ws1")
        for word in ("plj1-aeyy6ied6mwfeybdqraha5hq3n2lhajygo4s", "hello", "plj1-", "plj1-\u0661"):
            said = refused(machine, "join", word)
            assert "token" in said.splitlines()[0], word
            assert said.count("\n") == 2, "one line and a hint"
            assert not machine.state.exists(), "nothing is left"


@pytest.mark.rule("J4")
@pytest.mark.long
def test_who_is_revoked_is_out_everywhere_and_comes_back_by_a_new_invitation_alone() -> None:
    with Lab() as lab:
        one, two, three = lab.cluster("ws1", "ws2", "ws3")
        wait_until(lambda: two.sees("ws1", "ws3") and three.sees("ws1", "ws2"), what="all to know all")
        two.done("down")
        one.done("revoke", "ws3")
        wait_until(lambda: three.call("info")["revoked"] == ["ws3"], what="it is told")
        two.done("up")
        wait_until(lambda: two.call("info")["revoked"] == ["ws3"], what="who was away hears of it")
        wait_until(lambda: one.states().get("ws3") == "dead", what="it is not heard any more")
        (shown,) = [line for line in one.done("nodes").splitlines() if line.startswith("ws3")]
        assert shown.split()[1] == "revoked", "people are told why"
        told = {node["node"]: node["revoked"] for node in one.call("nodes")["nodes"]}
        assert told == {"ws1": False, "ws2": False, "ws3": True}
        assert "ws3" in one.type("doctor").stdout
        wait_until(lambda: one.type("ls", "--cluster").returncode == 0, what="nobody to be missed")
        assert one.type("submit", "-d", "/", "-w", "ws3", "true").returncode == 125, "nothing waits for it"
        words = ("submit", "--wait-for-node", "-d", "/", "-w")
        task = one.done(*words, "ws3", "true").strip()
        assert "(revoked)" in one.call("why", task=task)["summary"]
        task = three.done(*words, "ws1", "true").strip()
        assert "(revoked)" in three.call("why", task=task)["summary"]
        for machine in (one, three):
            machine.kill()
            machine.done("up")
        wait_until(lambda: one.sees("ws2") and two.sees("ws1"), what="the others go on")
        wait_until(
            lambda: one.counters().get('peer_frames_dropped_total{reason="certificate_revoked"}', 0),
            what="it tries",
        )
        assert one.call("info")["revoked"] == ["ws3"], "kept over a kill"
        assert three.sees()
        three.done("join", "--node", "ws3", *ON_LOOPBACK, one.token())
        wait_until(lambda: one.sees("ws2", "ws3") and two.sees("ws1", "ws3"), what="it is back")
        assert three.done("run", "--node", "ws2", "-d", "/", "echo", "hi") == "hi\n"


@pytest.mark.rule("J4")
def test_who_was_away_when_it_was_revoked_is_told_when_it_returns() -> None:
    with Lab() as lab:
        one, two = lab.cluster("ws1", "ws2")
        wait_until(lambda: one.sees("ws2") and two.sees("ws1"), what="both to know both")
        two.done("down")
        one.done("revoke", "ws2")
        two.done("up")
        wait_until(lambda: two.call("info")["revoked"] == ["ws2"], what="it is told")
        checks = json.loads(two.type("doctor", "--json").stdout)["checks"]
        assert {check["name"]: check["result"] for check in checks}["cluster"] == "fail"
        assert two.call("nodes")["nodes"][0]["revoked"]
        assert two.call("info")["seal_key"] == 0, "nothing else is"
        assert one.call("info")["seal_key"] == 1


@pytest.mark.rule("J4")
def test_the_tasks_of_who_is_revoked_end_on_every_node() -> None:
    def here(machine: Machine) -> dict[str, str]:
        return {task["id"]: task["state"] for task in machine.call("remote")["tasks"]}

    def processes() -> list[str]:
        return [line for line in processes_with(str(lab.directory)).values() if line.startswith("sleep 987")]

    with Lab() as lab:
        one, two, three = lab.cluster("ws1", "ws2", "ws3")
        wait_until(lambda: three.sees("ws1", "ws2") and one.sees("ws2", "ws3"), what="all to know all")
        words = ("submit", "--wait-for-node", "-d", "-", "-w")
        for node in ("ws1", "ws1", "ws2"):
            three.done(*words, node, "sleep", "987")
        given = {"ws3/1": "running", "ws3/2": "leased"}
        wait_until(
            lambda: (here(one), here(two)) == (given, {"ws3/3": "running"}), what="all to be where they are to run"
        )
        two.kill()
        three.done("down")  # which parks them: they have no deadline
        wait_until(lambda: all("away" in task["reason"] for task in one.call("remote")["tasks"]), what="it to be away")
        wait_until(lambda: len(processes()) == 2, what="both to run")
        one.done("revoke", "ws3")
        wait_until(lambda: not here(one) and len(processes()) == 1, what="its tasks here to end")
        two.done("up")
        wait_until(lambda: not here(two) and not processes(), what="those to end on the node that was away")


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.rule("J4")
def test_a_revocation_reaches_all_within_ten_seconds() -> None:
    """If the machine stood still meanwhile, that of another node does."""
    with Lab() as lab:
        everybody = lab.cluster("ws1", "ws2", "ws3", "ws4", "ws5")
        wait_until(lambda: all(m.call("info")["peers"] == 4 for m in everybody), what="all to know all")
        one, *others = everybody
        out: list[Machine] = []
        took_s: list[float] = []
        while len(others) > 1 and not (took_s and min(took_s) < REVOKED_S_MAX):
            out.append(others.pop())
            began_s = time.monotonic()
            one.done("revoke", out[-1].name)
            gone = {m.name for m in out}
            wait_until(lambda: all(set(m.call("info")["revoked"]) == gone for m in (one, *others)), what="all to know")  # noqa: B023
            took_s.append(time.monotonic() - began_s)
        assert min(took_s) < REVOKED_S_MAX, took_s
        left = [one, *others]
        stay, gone = {m.name for m in left}, {m.name for m in out}
        wait_until(lambda: not any(stay & _alive(m) for m in out), what="they hear nobody any more")
        wait_until(lambda: not any(gone & _alive(m) for m in left), what="nobody hears them any more")


def _alive(machine: Machine) -> set[str]:
    return {node["node"] for node in machine.call("nodes")["nodes"] if node["state"] == "alive"}


@pytest.mark.long
def test_a_new_key_for_gossip_reaches_those_who_were_away() -> None:
    with Lab() as lab:
        one, two, three = lab.cluster("ws1", "ws2", "ws3")
        three.done("down")
        assert "number 1" in one.done("cluster", "rotate")
        wait_until(lambda: two.call("info")["seal_key"] == 1, what="who is there gets it")
        assert "number 2" in one.done("cluster", "rotate")
        wait_until(lambda: two.call("info")["seal_key"] == 2, what="and the next one")
        three.done("up")
        wait_until(lambda: three.call("info")["seal_key"] == 2, what="who was away gets it")
        four = lab.machine("ws4")
        four.done("join", *ON_LOOPBACK, one.token())
        assert four.call("info")["seal_key"] == 2
        everybody = {"ws1", "ws2", "ws3", "ws4"}
        for machine in (one, two, three, four):
            wait_until(lambda m=machine: m.sees(*everybody - {m.name}), what=f"{machine.name} sees all")  # type: ignore[misc]
        refused = two.type("cluster", "rotate")
        assert refused.returncode == 125


@pytest.mark.long
@pytest.mark.rule("J1")
def test_a_member_without_the_cas_key_gets_a_new_certificate_in_time() -> None:
    with Lab() as lab:
        one, two = lab.cluster("ws1", "ws2", config="certificate_s = 15\n")
        first_ends_at = two.call("info")["certificate_ends_at"]
        ends_at = {first_ends_at}

        def made_anew() -> int:
            ends_at.add(two.call("info")["certificate_ends_at"])
            return len(ends_at) - 1

        wait_until(lambda: made_anew() >= 2, what="it was made anew, twice")
        assert one.counters()["certificates_issued_total"] >= 1
        wait_until(lambda: time.time() > first_ends_at + 1, what="the first one has ended")
        one.kill()
        one.done("up")
        wait_until(lambda: one.sees("ws2") and two.sees("ws1"), what="a new link with the new certificate")


@pytest.mark.rule("J1")
def test_who_is_let_in_as_an_issuer_lets_others_in() -> None:
    with Lab() as lab:
        one, two, three = lab.machine("ws1"), lab.machine("ws2"), lab.machine("ws3")
        one.done("up")
        two.done("join", *ON_LOOPBACK, one.token(*ON_LOOPBACK, "--issuer"))
        assert Path(two.directory, "config", "peerload", "cluster", "ca.key").exists()
        three.done("join", *ON_LOOPBACK, two.token())
        wait_until(lambda: one.sees("ws2", "ws3"), what="all to know all")


@pytest.mark.long
@pytest.mark.rule("J4")
def test_who_is_shut_out_is_not_told_the_new_key() -> None:
    """By the node that shuts it out as little as by those that pass it on: it had the key before, and must not have this one."""
    with Lab() as lab:
        one, two, three = lab.cluster("ws1", "ws2", "ws3")
        wait_until(lambda: all(m.call("info")["peers"] == 2 for m in (one, two, three)), what="all to know all")
        one.done("revoke", "ws3")
        wait_until(lambda: two.call("info")["seal_key"] == 1, what="who stays gets the new key")
        wait_until(lambda: three.call("info")["revoked"] == ["ws3"], what="it is told that it is out")
        wait_until(
            lambda: one.states().get("ws3") == "dead" and two.states().get("ws3") == "dead", what="it is cut off"
        )
        assert three.call("info")["seal_key"] == 0
