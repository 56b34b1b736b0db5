"""A peer that vanishes, falls silent or lies in the middle of a handoff: the task is run all the same, once at a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from peerload.model.messages import (
    Accept,
    Commit,
    Decline,
    Died,
    NotStarted,
    Offer,
    Query,
    Renew,
    RenewOk,
    Result,
    ResultAck,
    Return,
    Revoke,
)
from peerload.model.task import Exit, TaskSpec
from tests.integration.cluster import SHORT_LEASE_S, Agent, Cluster
from tests.integration.fake_peer import FakePeer
from tests.integration.ledger import Ledger
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


LONG_LEASE_S = 60


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Iterator[Agent]:
    """An agent with one slot, which is taken by the task 1 until `free`, and short leases if nothing else is wanted."""
    with Cluster() as cluster:
        agent = cluster.agent("n1", slots=1, lease_s=getattr(request, "param", SHORT_LEASE_S))
        agent.await_state(agent.submit("sleep", "600", placement={"local": True}), "running")
        for _ in range(3):
            agent.submit("true", placement={"local": True})  # a queue, so that it is overloaded
        yield agent


def free(home: Agent) -> None:
    """Its slot is for others now."""
    assert home.cli("cancel", "1").returncode == 0


def empty(home: Agent) -> None:
    """Nothing runs or waits there any more."""
    free(home)
    home.wait(*home.states())
    wait_until(lambda: not home.call("nodes")["nodes"][0]["tasks_running"], what="the slot to be free")


@pytest.fixture
def ledger(home: Agent) -> Ledger:
    return Ledger(home.cluster.directory / "ledger")


def test_it_closes_the_link_after_an_accept(home: Agent, ledger: Ledger) -> None:
    with FakePeer(home.listen) as ghost:
        task = home.submit(*ledger.argv(1, 4))
        ghost.accept(ghost.expect(Offer))
    free(home)
    assert home.wait(task)[task]["node"] == "n1"
    ledger.check([task])
    assert not ledger.repeated()


@pytest.mark.long
def test_it_never_answers_the_offer(home: Agent, ledger: Ledger) -> None:
    with FakePeer(home.listen) as ghost:
        task = home.submit(*ledger.argv(1))
        ghost.expect(Offer)
        free(home)
        home.wait(task)
    ledger.check([task])
    assert home.show(task)["attempt"] == 1, "an offer without an answer burns no attempt"


@pytest.mark.long
def test_it_closes_the_link_after_the_commit(home: Agent, ledger: Ledger) -> None:
    with FakePeer(home.listen) as ghost:
        task = home.submit(*ledger.argv(1))
        _, commit = ghost.accept_and_take()
    free(home)
    assert home.wait(task)[task]["node"] == "n1"
    ledger.check([task])
    assert home.show(task)["attempt"] == 2
    assert ledger.of(task)[0].at_s >= commit.ts + commit.lease_s, "not before its lease has run out"


@pytest.mark.long
def test_it_falls_silent_after_the_commit(home: Agent, ledger: Ledger) -> None:
    with FakePeer(home.listen) as ghost:
        task = home.submit(*ledger.argv(1))
        offer, _ = ghost.accept_and_take()
        ghost.renew(offer, time.time())
        granted = ghost.expect(RenewOk).extensions[0]
        assert home.show(task)["state"] == "running"
        ghost.expect(Query)
        free(home)
        home.wait(task)
        assert ledger.of(task)[0].at_s >= granted.ts + granted.lease_s
    ledger.check([task])


@pytest.mark.parametrize("answer", ["not started", "returned", "died"])
def test_it_gives_the_task_back(home: Agent, ledger: Ledger, answer: str) -> None:
    with FakePeer(home.listen) as ghost:
        task = home.submit(*ledger.argv(1))
        offer, _ = ghost.accept_and_take()
        kind = {"not started": NotStarted, "returned": Return, "died": Died}[answer]
        ghost.send(kind(offer.task, offer.uid, offer.attempt, reason="for a test"))
        free(home)
        assert home.wait(task)[task]["state"] == "done"
    ledger.check([task])


@pytest.mark.long
def test_its_result_comes_late_but_first(home: Agent, ledger: Ledger) -> None:
    """It ended under a valid lease; home had given it up but not started it anew."""
    free(home)
    blocker = home.submit("sleep", "300", placement={"local": True})
    home.await_state(blocker, "running")
    with FakePeer(home.listen) as ghost:
        task = home.submit(*ledger.argv(1), placement={"node": "ghost"})
        offer, _ = ghost.accept_and_take()
    wait_until(lambda: home.show(task)["state"] == "queued", what="home to give it up")
    with FakePeer(home.listen) as ghost:
        ghost.send(Result(offer.task, offer.uid, offer.attempt, Exit(3, stdout_bytes=3), True, b"out", b""))
        ghost.expect(ResultAck)
        shown = home.show(task)
        assert (shown["state"], shown["exit_code"], shown["node"]) == ("failed", 3, "ghost")
        assert home.output(task)[0] == b"out"
        ghost.send(Result(offer.task, offer.uid, offer.attempt, Exit(0), True))
        ghost.expect(ResultAck)
        assert home.show(task)["exit_code"] == 3, "a recorded result never changes"


@pytest.mark.long
def test_it_is_told_to_stop_what_home_has_given_away(home: Agent, ledger: Ledger) -> None:
    with FakePeer(home.listen) as ghost:
        task = home.submit(*ledger.argv(1))
        offer, _ = ghost.accept_and_take()
    free(home)
    home.wait(task)
    with FakePeer(home.listen) as ghost:
        ghost.renew(offer, time.time())
        assert ghost.expect(Revoke).attempt == offer.attempt
    ledger.check([task])


@pytest.mark.rule("P3")
@pytest.mark.parametrize("home", [LONG_LEASE_S], indirect=True)
def test_a_stranger_cannot_end_or_take_a_task(home: Agent, ledger: Ledger) -> None:
    with FakePeer(home.listen) as ghost, FakePeer(home.listen, "thief", boot="other") as thief:
        task = home.submit(*ledger.argv(1), placement={"node": "ghost"})
        offer, commit = ghost.accept_and_take()
        thief.accept(offer)
        thief.send(NotStarted(offer.task, offer.uid, offer.attempt))
        thief.send(Died(offer.task, offer.uid, offer.attempt))
        thief.send(Renew(()))
        thief.renew(offer, time.time())
        assert thief.expect(Revoke).uid == offer.uid
        shown = home.show(task)
        assert (shown["state"], shown["node"], shown["attempt"]) == ("leased", "ghost", commit.attempt)
        ghost.send(Result(offer.task, offer.uid, offer.attempt, Exit(0), True))
        ghost.expect(ResultAck)
        assert home.show(task)["state"] == "done"


def test_as_a_home_it_vanishes_after_its_offer(home: Agent) -> None:
    """The reservation ends by itself, and the room is free again."""
    empty(home)
    offer = Offer("ghost/1", b"u" * 16, 1, TaskSpec((b"true",), b"/tmp"), 60.0)
    with FakePeer(home.listen) as ghost:
        ghost.send(offer)
        accept = ghost.expect(Accept)
        ghost.send(Commit(offer.task, offer.uid, 1, accept.nonce + 1, accept.ts, 60.0))
        assert ghost.expect(NotStarted).attempt == 1
        ghost.send(offer)
        assert ghost.expect(Decline).code == "floor"
    assert home.cli("run", "echo", "on").stdout == b"on\n"


@pytest.mark.rule("P5")
def test_a_commit_runs_once_however_often_it_is_said(home: Agent, ledger: Ledger) -> None:
    empty(home)
    argv = tuple(word.encode() for word in ledger.argv(2, 6))
    environment = home.cluster.spec("true")["environment"]
    assert isinstance(environment, bytes)
    offer = Offer("ghost/7", b"v" * 16, 1, TaskSpec(argv, b"/tmp", environment), 60.0)
    with FakePeer(home.listen) as ghost:
        ghost.send(offer)
        accept = ghost.expect(Accept)
        commit = Commit(offer.task, offer.uid, 1, accept.nonce, accept.ts, 60.0)
        for _ in range(3):
            ghost.send(commit)
        result = ghost.expect(Result)
        assert (result.exit.exit_code, result.inline, result.stdout) == (6, True, b"out ghost/7\n")
        assert ghost.expect(Result).exit == result.exit, "repeated until it is acknowledged"
        home.kill()
        home.start()
    with FakePeer(home.listen, boot="later") as ghost:
        assert ghost.expect(Result).exit == result.exit, "kept over a crash"
        ghost.send(ResultAck(offer.task, offer.uid, 1))
        ghost.send(Query(offer.task, offer.uid, 1))
        assert ghost.expect(Died).attempt == 1
        ghost.send(offer)
        assert ghost.expect(Decline).code == "floor"
    ledger.check([offer.task])
    assert not ledger.repeated()


def test_an_offer_with_an_environment_that_is_none(home: Agent) -> None:
    empty(home)
    for number, environment in enumerate((b"no map", b"\xc1", b"\x80\x80"), start=8):
        offer = Offer(f"ghost/{number}", bytes([number]) * 16, 1, TaskSpec((b"true",), b"/tmp", environment), 60.0)
        with FakePeer(home.listen) as ghost:
            ghost.send(offer)
            accept = ghost.expect(Accept)
            ghost.send(Commit(offer.task, offer.uid, 1, accept.nonce, accept.ts, 60.0))
            result = ghost.expect(Result)
            assert result.exit.exit_code == 126
            assert "environment" in result.exit.reason
            ghost.send(ResultAck(offer.task, offer.uid, 1))
    assert home.cli("run", "echo", "on").stdout == b"on\n"
