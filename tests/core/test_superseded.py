"""The result of an attempt that was given up comes while another one has the lease (R9): exactly one is recorded."""

from __future__ import annotations

import pytest

from peerload.core.handoff.home import granted
from peerload.core.work import HomeTask
from peerload.model import events, messages
from peerload.model.config import CoreConfig
from peerload.model.resources import Placement
from peerload.model.task import Exit
from tests.core.given import ACCEPTS, SENDER, Given, spec

RESULT = Exit(0, started_at=5.0, ended_at=6.0)


def superseded() -> tuple[Given, HomeTask, messages.Result]:
    """Attempt 1 of x/2 was given up, attempt 2 is leased to z, and y comes back with the result of attempt 1."""
    x = Given(policies=SENDER, peers=("y", "z"), config=CoreConfig(poison_nodes=9))
    x.submit()
    x.submit(spec(placement=Placement(migrations_max=9)))
    task = x.task(2)
    for attempt, chosen in ((1, "y"), (2, "z")):
        for _ in range(2):  # whichever is asked first
            for peer in ("y", "z"):
                x.hear(peer, messages.ProbeReply(attempt, accepts=peer == chosen, report=ACCEPTS))
        x.hear(chosen, messages.Accept(task.task, task.uid, attempt, 77, 6.0))
        if attempt == 1:
            x.after(65).timer("lease", task.uid.hex())
            x.after(1).timer("rest", task.uid.hex())
    assert (task.record.attempt, task.record.node) == (2, "z")
    result = messages.Result(task.task, task.uid, 1, RESULT)
    assert x.hear("y", result) == ["FetchOutput"]
    return x, task, result


def test_another_attempt_is_revoked_when_an_older_ones_result_is_recorded() -> None:
    x, task, result = superseded()
    arrived = x.when(events.OutputArrived(task.uid, 1))
    assert arrived == ["persist done", "changed done", "clear lease", "clear ask", "Revoke to z", "ResultAck to y"]
    assert x.sent(messages.Revoke).attempt == 2
    killed = messages.Result(task.task, task.uid, 2, Exit(137, 9))
    assert x.hear("z", killed) == ["ResultAck to z"]
    assert x.hear("y", result) == ["ResultAck to y"]


@pytest.mark.parametrize("then", ["fetched again", "the other one's result", "lost"])
def test_an_older_result_whose_output_cannot_be_had_costs_the_other_attempt_nothing(then: str) -> None:
    x, task, result = superseded()
    assert x.when(events.OutputArrived(task.uid, 1, "link broke")) == ["timer lease 65", "Query to z", "timer ask 1"]
    renew = messages.Renew((messages.Renewal(task.task, task.uid, 2, 9.0, 8.0),))
    assert x.hear("z", renew) == ["timer lease 65", "timer ask 30", "changed running", "RenewOk to z"]
    if then == "fetched again":
        assert x.hear("y", result) == ["FetchOutput"]
        assert "persist done" in x.when(events.OutputArrived(task.uid, 1))
    elif then == "the other one's result":
        assert x.hear("z", messages.Result(task.task, task.uid, 2, RESULT, inline=True)) == ["KeepOutput"]
        assert "persist done" in x.when(events.OutputArrived(task.uid, 2))
        assert x.hear("y", result) == ["ResultAck to y"]
    else:
        assert "persist queued" in x.hear("z", messages.Died(task.task, task.uid, 2))
        return
    assert not x.node.home.by_id.get("x/2")


def test_a_cancel_while_an_older_result_is_fetched_reaches_the_other_attempt() -> None:
    x, task, _ = superseded()
    said = ["persist cancelled", "changed cancelled", "Revoke to z", "clear lease", "clear ask", "answer"]
    assert x.when(events.CancelRequested(9, (task.task,))) == said


def test_the_other_attempt_is_renewed_while_an_older_result_is_fetched() -> None:
    x, task, _ = superseded()
    for ts in (15.0, 30.0, 45.0, 60.0, 75.0):
        renew = messages.Renew((messages.Renewal(task.task, task.uid, 2, ts, 8.0),))
        assert "RenewOk to z" in x.after(15).hear("z", renew)
        assert x.sent(messages.RenewOk).extensions[0].ts == ts
        assert granted(task).deadline_s == x.at_s + 65
    older = messages.Renew((messages.Renewal(task.task, task.uid, 1, 99.0, 8.0),))
    assert x.hear("y", older) == []  # it has ended: its result is on its way
    assert x.hear("w", messages.Renew((messages.Renewal(task.task, task.uid, 2, 99.0, 8.0),))) == []
    assert x.timer("lease", task.uid.hex()) == []
    assert "persist done" in x.when(events.OutputArrived(task.uid, 1))


@pytest.mark.parametrize("word", [messages.NotStarted, messages.Return, messages.Died])
def test_what_became_of_the_other_attempt_meanwhile_is_asked_if_the_older_result_does_not_come(word: type) -> None:
    x, task, _ = superseded()
    said = word(task.task, task.uid, 2)
    assert x.hear("z", said) == []  # the result decides
    assert "Query to z" in x.when(events.OutputArrived(task.uid, 1, "link broke"))
    assert "persist queued" in x.hear("z", said)


def test_a_parked_attempt_that_died_while_an_older_result_was_fetched_is_found_out() -> None:
    x, task, _ = superseded()
    x.when(events.MachineSleeping())
    assert task.record.parked_ts
    x.when(events.MachineWoke())
    x.timer("ask", task.uid.hex())
    assert x.when(events.OutputArrived(task.uid, 1, "link broke")) == ["Query to z", "timer ask 1"]
