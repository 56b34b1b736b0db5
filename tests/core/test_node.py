"""Load regions, policies that fail, and what an event may cost."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import msgspec
import pytest

from peerload.core.state import FOREVER_S
from peerload.core.work import HomePhase
from peerload.model import events, messages, metrics
from peerload.model.actions import Announce, TaskChanged
from peerload.model.config import CoreConfig
from peerload.model.resources import LoadReport, Region, TaskCost, Thresholds
from peerload.model.task import Exit, TaskRecord, TaskState
from peerload.policy.api import Keep
from peerload.policy.registry import build_preset
from tests.core.given import ACCEPTS, RECEIVER, SENDER, WALL_S, Given, identity, spec


def test_stopping_says_good_bye() -> None:
    x = Given(peers=("y", "z"))
    assert x.when(events.AgentStopping()) == ["Leaving to y", "Leaving to z"]


def test_a_region_is_told_when_it_has_held() -> None:
    x = Given(policies={**SENDER, "information": {"policy": "region-change"}})
    assert x.submit()[-1] == "timer region 0.2"
    assert x.timer("region") == ["Announce"]
    assert x.done(Announce).message.report.region is Region.OVERLOADED
    assert x.end(x.task().key)[-1] == "timer region 0.2"
    assert x.submit()[-1] == "clear region"  # back before it had held


def test_a_node_that_is_overloaded_tells_when_it_has_a_task_to_give() -> None:
    x = Given(policies={**RECEIVER, "information": {"policy": "region-change"}})
    x.submit()
    x.timer("region")
    assert (x.done(Announce).message.report.region, x.done(Announce).message.report.gives) == (Region.OVERLOADED, False)
    assert x.submit()[-1] == "timer region 0.2"  # with a threshold of 1 its region is what it was
    assert "timer region 0.2" not in x.submit()
    assert x.timer("region") == ["Announce"]
    assert (x.done(Announce).message.report.region, x.done(Announce).message.report.gives) == (Region.OVERLOADED, True)


def test_looking_at_the_load_changes_nothing() -> None:
    x = Given(policies={**SENDER, "information": {"policy": "region-change"}})
    x.submit()
    sharing = x.node.sharing
    assert sharing.shown() == sharing.shown()
    assert sharing.shown().sequence > 0
    x.hear("y", messages.Ping(1))
    first = sharing.shown().sequence
    x.hear("y", messages.Ping(1))
    assert first < x.sent(messages.Pong).report.sequence < sharing.shown().sequence


def test_what_the_driver_told_of_a_region_is_put_right() -> None:
    x = Given(policies={**SENDER, "information": {"policy": "region-change"}})
    x.submit()
    told = x.node.sharing.shown()
    assert told.region is Region.OVERLOADED
    x.end(x.task().key)
    assert x.when(events.LoadPublished(told)) == ["timer region 0.2"]
    assert x.timer("region") == ["Announce"]
    assert x.done(Announce).message.report.region is Region.UNDERLOADED


def test_an_overloaded_peer_is_asked_and_room_elsewhere_helps_the_stranded() -> None:
    x = Given(policies=RECEIVER)
    gives = LoadReport(load_tasks=3, slots=1, movable=2, gives=True, sequence=5, incarnation=1)
    assert x.hear("y", messages.Pong(1, gives)) == ["GiveRequest to y", "timer probe 0.25"]
    assert x.hear("y", messages.Pong(1, gives)) == []  # not a newer report


def test_advice_about_another_node_is_not_believed() -> None:
    x = Given()
    y = x.node.membership.get("y")
    assert y is not None
    assert x.hear("y", messages.State(identity("z"), y.profile, LoadReport())) == []
    assert x.node.membership.get("z") is None


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("kind", ["load", "transfer", "selection", "information", "sender", "receiver", "priority"])
def test_a_policy_that_fails_costs_only_performance(kind: str, error: type[BaseException]) -> None:
    x = Given(policies={**SENDER, **RECEIVER, "location": {**SENDER["location"], **RECEIVER["location"]}})
    failing = {kind: _raising(getattr(x.node.state.policies, kind), error)}
    x.node.state.policies = msgspec.structs.replace(x.node.state.policies, **failing)
    x.submit()
    x.submit()
    y = x.node.membership.get("y")
    assert y is not None
    x.hear("y", messages.GiveRequest(1, LoadReport(sequence=3), y.profile))
    x.hear("y", messages.ProbeRequest(1, messages.Need(), ACCEPTS))
    x.timer("region")
    x.submit()
    x.hear("y", messages.Offer("y/1", bytes(16), 1, spec(), 60.0, only=True))
    accept = x.sent(messages.Accept)
    x.hear("y", messages.Commit("y/1", bytes(16), 1, accept.nonce, accept.ts, 60.0))
    x.timer("offer", x.task(2).uid.hex())  # what was given has not come home
    while x.node.ledger.running:
        x.end(next(iter(x.node.ledger.running)))
    assert x.node.state.counts[metrics.POLICY_ERRORS] > 0
    assert len(x.node.queue) == 0


def test_a_policy_that_wakes_a_node_that_is_not_asleep_costs_only_performance() -> None:
    class Wakes:
        places_all = True

        def locate(self, *_: object) -> Keep:
            return Keep("another node is better", wakes="y")

    x = Given(policies=msgspec.structs.replace(build_preset("given", SENDER), sender=Wakes()))
    x.submit()
    assert x.task().phase is HomePhase.HERE
    assert x.node.state.counts[metrics.POLICY_ERRORS] == 1


@pytest.mark.parametrize("wrong", [{"joules": math.nan}, {"joules": "9"}, {"price": math.inf}, {"wake_joules": None}])
def test_a_policy_that_compares_no_numbers_costs_only_performance(wrong: dict[str, Any]) -> None:
    class Compares:
        places_all = True
        cost = TaskCost("x", 1.0)

        def locate(self, *_: object) -> Keep:
            return Keep("it costs less here", compared=(self.cost,))

    sender = Compares()
    x = Given(policies=msgspec.structs.replace(build_preset("given", SENDER), sender=sender))
    x.submit()
    assert metrics.POLICY_ERRORS not in x.node.state.counts
    sender.cost = msgspec.structs.replace(sender.cost, **wrong)
    x.submit()
    assert x.node.state.counts[metrics.POLICY_ERRORS] == 1


def test_a_priority_policy_that_prefers_neither_class_is_counted_and_the_first_goes_first() -> None:
    class Neither:
        def prefer(self, *_: object) -> str:
            return "neither"

    x = Given(peers=("h",))
    x.node.state.policies = msgspec.structs.replace(x.node.state.policies, priority=Neither())
    x.submit()
    x.submit()
    x.hear("h", messages.Offer("h/1", bytes(16), 1, spec(), 60.0, only=True))
    accept = x.sent(messages.Accept)
    x.hear("h", messages.Commit("h/1", bytes(16), 1, accept.nonce, accept.ts, 60.0))
    x.end(next(iter(x.node.ledger.running)))
    assert x.task(2).phase is HomePhase.HERE
    assert x.node.state.counts[metrics.POLICY_ERRORS] > 0


def _raising(policy: object, error: type[BaseException]) -> object:
    """The same policy; every method of it that the core calls raises."""

    def fail(*args: object) -> None:
        raise error("on purpose")

    methods = ("load", "thresholds", "select", "tells", "asks", "locate", "prefer", "partner", "moves")
    body = {name: fail for name in methods if hasattr(policy, name)}
    data = ("rate", "retry_rate", "retry_probes", "period_s", "reports_guide_probing", "watches")
    body.update({name: getattr(policy, name) for name in data if hasattr(policy, name)})
    return type("Raising", (), body)()


def test_the_cost_of_a_task_does_not_grow_with_the_queue() -> None:
    """Fifty times the queue, and hardly more lines of Python run: nothing looks at all of it."""
    few, many = _lines_for(100), _lines_for(5000)
    assert many < few * 1.5, (few, many)


def _lines_for(queued: int) -> int:
    x = Given(peers=("y",), policies=SENDER)
    x.validates = False
    x.when(events.TaskSubmitted(1, "array", b"d", spec(), tuple(range(queued))))
    x.finish(1)
    x.timer("probe", "1")
    lines = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(20):
            x.end(next(iter(x.node.ledger.running)))
    finally:
        sys.settrace(before)
    return lines


def test_an_attempt_that_came_too_late_for_its_lease_is_lost() -> None:
    x = Given(peers=())
    x.submit()
    key = x.task().key
    done = x.when(events.TaskLost(key, "its lease ran out before it could be started"))
    assert "persist queued" in done
    assert "spawn 2" in x.timer("rest", x.task().uid.hex())
    assert x.when(events.TaskLost("unknown-1", "too late")) == []


def test_the_time_limit_shows_although_another_agent_sent_the_signal() -> None:
    x = Given(peers=())
    x.submit(spec(time_limit_s=3.0))
    key = x.task().key
    x.when(events.TaskEnded(key, Exit(143, signal=15, started_at=WALL_S, ended_at=WALL_S + 3.5)))
    assert x.done(TaskChanged).record.exit.exit_code == 124


def test_a_task_whose_directory_is_missing_at_the_restart_waits_for_another_node() -> None:
    record = TaskRecord("x/1", b"u" * 16, TaskState.QUEUED, WALL_S)
    x = Given(started=events.AgentStarted(tasks=(events.TaskRow(record, spec(), directory_here=False),), counter=1))
    assert not any(shape.startswith("spawn") for shape in x.started)
    assert x.task().stranded_because


class Marking:
    """A transfer policy that counts how often it is asked."""

    def __init__(self, *, steady: bool) -> None:
        self.steady = steady
        self.asked = 0

    def thresholds(self, view: object) -> Thresholds:
        del view
        self.asked += 1
        return Thresholds(2.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("steady", [True, False])
def test_steady_marks_are_asked_for_once(steady: bool) -> None:
    x = Given(policies={**SENDER, "information": {"policy": "region-change"}})
    policy = Marking(steady=steady)
    x.node.state.policies = msgspec.structs.replace(x.node.state.policies, transfer=policy)
    for _ in range(3):
        x.submit()
    assert policy.asked == (1 if steady else 3)


def test_nothing_is_timed_that_never_comes() -> None:
    never = Given(
        config=CoreConfig(settle_s=FOREVER_S), policies={**SENDER, "information": {"policy": "region-change"}}
    )
    assert "timer region" not in " ".join(never.submit())


def test_the_tables_of_tasks_become_small_again_and_keep_their_order() -> None:
    x = Given(slots=1, peers=(), config=CoreConfig(uniform_array_min=10_000))
    x.submit(indices=tuple(range(3000)))
    x.finish(1)
    x.submit(token="the other")
    x.when(events.CancelRequested(9, ("x/1",)))
    x.finish(9)
    node = x.node
    order = [work.task for work in node.queue.oldest_first()]
    known = dict(node.home.tasks)
    size = sys.getsizeof(node.home.tasks)
    node.shrink()
    assert dict(node.home.tasks) == known
    assert [work.task for work in node.queue.oldest_first()] == order
    assert sys.getsizeof(node.home.tasks) < size / 10
