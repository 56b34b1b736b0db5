"""What a live view is told: all, then only what has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from peerload.agent.requests import overview
from peerload.agent.requests.overview import OverviewBuilder, RevisionIndex
from peerload.model import events
from peerload.model.gossip import MemberStatus
from peerload.wire import control
from tests.core.given import Given
from tests.core.test_executor import guest
from tests.core.test_home import away
from tests.core.test_staging import BUILT
from tests.wording import Says


def builder(given: Given) -> OverviewBuilder:
    agent = SimpleNamespace(info=lambda: dict.fromkeys(overview.AGENT_KEYS))
    views: Any = SimpleNamespace(
        agent=agent,
        nodes=SimpleNamespace(objects_of=lambda _: []),
        cluster=SimpleNamespace(is_peer_revoked=lambda _: False),
    )
    store: Any = SimpleNamespace(last_event=lambda: 0)
    access: Any = None
    return OverviewBuilder(given.node, access, store, views, None)


def seen(built: OverviewBuilder, since: str = "") -> tuple[str, dict[str, Any]]:
    told: Any = built.build(control.Overview(since=since))
    return told["revision"], told


def test_a_task_is_told_again_when_its_node_is_suspected_and_when_it_is_back() -> None:
    given = away()
    built = builder(given)
    revision, told = seen(built)
    assert {task["unreachable_since"] for task in told["tasks"]} == {None}
    given.rumour("y", MemberStatus.SUSPECT)
    revision, told = seen(built, revision)
    assert [(task["id"], task["unreachable_since"] > 0) for task in told["tasks"]] == [("x/2", True)]
    given.rumour("y", MemberStatus.ALIVE, refutation=1)
    _, told = seen(built, revision)
    assert [(task["id"], task["unreachable_since"]) for task in told["tasks"]] == [("x/2", None)]


def test_a_task_of_another_home_is_told_again_when_it_is_frozen_with_the_part_of_a_gpu_that_it_asks_for() -> None:
    given = guest()
    (remote,) = given.node.executor.remote_tasks.values()
    half = msgspec.structs.replace(remote.spec.request, gpus=1, gpu_fraction=0.5)
    remote.spec = msgspec.structs.replace(remote.spec, request=half)
    built = builder(given)
    revision, told = seen(built)
    assert [(task["gpus"], task["reason"]) for task in told["guests"]] == [(0.5, None)]
    given.when(events.TaskFrozen(remote.key, frozen=True))
    _, told = seen(built, revision)
    assert [task["reason"].startswith("frozen") for task in told["guests"]] == [True]


def test_a_task_with_room_here_says_that_it_waits_for_its_environment_until_it_runs() -> None:
    given = Given(peers=(), facts={"builders": ("uv",)})
    given.submit(BUILT)
    built = builder(given)
    revision, told = seen(built)
    assert [(task["state"], task["reason"]) for task in told["tasks"]] == [("leased", Says.ENVIRONMENT("uv.lock"))]
    given.when(events.TaskStarted(given.task().key, 7.0))
    _, told = seen(built, revision)
    assert [(task["state"], task["reason"]) for task in told["tasks"]] == [("running", "started on x")]


def test_of_more_tasks_than_are_listed_those_that_wait_come_before_held_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "TASKS_SHOWN_MAX", 3)
    given = Given(peers=())
    for is_held in (False, True, True, False):
        given.submit(held=is_held)
    _, told = seen(builder(given))
    assert [task["id"] for task in told["tasks"]] == ["x/1", "x/4", "x/2"]
    assert told["counts"] == {"placed": 1, "waiting": 1, "held": 2}


def look(seen: RevisionIndex, number: int, **marks: object) -> None:
    seen.update(number, dict(marks))


def test_what_is_new_or_differs_has_changed() -> None:
    seen = RevisionIndex()
    look(seen, 1, a=1, b=1)
    look(seen, 2, a=1, b=2, c=1)
    assert sorted(seen.changed(0)) == ["a", "b", "c"]
    assert sorted(seen.changed(1)) == ["b", "c"]
    assert seen.changed(2) == []


def test_what_is_gone_is_named_to_those_who_saw_it() -> None:
    seen = RevisionIndex()
    look(seen, 1, a=1, b=1)
    look(seen, 2, a=1)
    assert seen.gone(1) == ["b"]
    assert seen.gone(2) == []
    look(seen, 3, a=1, b=1)
    assert seen.gone(1) == []
    assert seen.changed(2) == ["b"]


def test_what_is_gone_is_not_kept_for_ever() -> None:
    seen = RevisionIndex()
    most = overview.GONE_KEPT_MAX
    look(seen, 1, **{str(number): 1 for number in range(most + 5)})
    assert seen.whole_from == 0
    look(seen, 2)
    assert seen.whole_from == 2
    assert len(seen.gone(0)) == most
