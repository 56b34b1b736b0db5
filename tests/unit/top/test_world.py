"""What is made of samples."""

from __future__ import annotations

from peerload.top.model import EVENTS_KEPT, HISTORY_KEPT, STALE_S
from tests.unit.top.given import GIB, NOW, event, gpu, node, sample, task, world


def test_a_complete_answer_replaces_what_was_known() -> None:
    seen = world(sample(nodes=[node("ws1"), node("old")], tasks=[task("ws1/1")]), sample(NOW + 1, nodes=[node("ws1")]))
    assert set(seen.nodes) == {"ws1"}
    assert not seen.tasks


def test_news_are_added_and_what_is_gone_goes() -> None:
    seen = world(
        sample(tasks=[task("ws1/1"), task("ws1/2")]),
        sample(
            NOW + 1, complete=False, nodes=[node("ws2", load=3.0)], nodes_gone=["ws3"], tasks=[task("ws1/3")],
            tasks_gone=["ws1/1"],
        ),
    )  # fmt: skip
    assert set(seen.nodes) == {"ws1", "ws2"}
    assert seen.nodes["ws2"].facts["load"] == 3.0
    assert set(seen.tasks) == {"ws1/2", "ws1/3"}


def test_a_task_on_a_node_that_does_not_answer_does_not_run_and_its_last_usage_is_not_shown() -> None:
    told = task("ws1/1", node="ws2", unreachable_since=None)
    seen = world(sample(tasks=[told]))
    seen.take_usage([{"id": "ws1/1", "cpus_busy": 1.0, "memory_bytes": GIB}])
    assert seen.usage(["ws1/1"]) == (1.0, GIB)
    seen.take(sample(NOW + 9, complete=False, nodes=[], tasks=[told | {"unreachable_since": NOW + 2}]))
    assert seen.tasks["ws1/1"]["state"] == "unreachable"
    assert seen.usage(["ws1/1"]) == (None, None)
    assert seen.ours_by_node() == {"ws2": 1}


def test_events_of_a_new_database_replace_those_of_the_old_one() -> None:
    seen = world(sample(events=[event(500), event(501)]), sample(NOW + 9, events=[event(1), event(2)]))
    assert [one["number"] for one in seen.events] == [1, 2]
    seen.take(sample(NOW + 10, events=[event(1), event(2)]))  # told again after a connection was lost
    assert [one["number"] for one in seen.events] == [1, 2]


def test_age_goes_on_while_nothing_is_heard() -> None:
    seen = world(sample(), sample(NOW + 10, complete=False, nodes=[node("ws1")]))
    assert seen.nodes["ws2"].age_s(NOW + 10) == 11.0
    assert not seen.nodes["ws2"].is_stale(NOW + 10)
    assert seen.nodes["ws2"].is_stale(NOW + STALE_S + 1)


def test_a_dead_node_is_stale_at_once() -> None:
    assert world(sample(nodes=[node("ws1", state="dead", age_s=0.0)])).nodes["ws1"].is_stale(NOW)
    assert not world(sample(nodes=[node("ws1", state="suspect", age_s=0.0)])).nodes["ws1"].is_stale(NOW)


def test_sums_are_of_the_nodes_that_are_there() -> None:
    nodes = [node("ws1", gpus=[gpu(0, 0.2), gpu(1, 0.6)]), node("ws2"), node("ws3", state="dead", cpus=1000.0)]
    seen = world(sample(nodes=nodes))
    assert seen.sums["cpus"] == 16.0
    assert seen.sums["gpus"] == 2
    assert seen.cluster["cpu"].now == 0.25
    assert seen.cluster["gpu"].now == 0.4
    assert seen.cluster["gpu_mem"].now == 40 * GIB / (160 * GIB)


def test_what_is_not_known_is_no_number() -> None:
    seen = world(sample(nodes=[node("ws1", cpus_busy=None, mem_bytes=None, load=None, gpus=None)]))
    here = seen.nodes["ws1"]
    assert (here.cpu, here.mem, here.gpu, here.series["load"].now) == (None, None, None, None)


def test_numbers_that_are_none_do_no_harm() -> None:
    odd = node("ws1", cpus_busy=float("nan"), cpus=float("inf"), load="much", gpus=[{"util": None}, {"util": "x"}])
    assert world(sample(nodes=[odd])).nodes["ws1"].cpu is None


def test_series_are_bounded() -> None:
    seen = world(*(sample(NOW + turn) for turn in range(HISTORY_KEPT + 5)))
    assert len(seen.cluster["cpu"]) == len(seen.nodes["ws1"].series["cpu"]) == HISTORY_KEPT


def test_events_are_bounded_and_taken_once() -> None:
    seen = world(sample(events=[event(1), event(2)]), sample(complete=False, events=[event(2), event(9)]))
    assert [one["number"] for one in seen.events] == [1, 2, 9]
    for turn in range(EVENTS_KEPT + 10):
        seen.take(sample(complete=False, events=[event(10 + turn)]))
    assert len(seen.events) == EVENTS_KEPT


def test_an_agent_that_is_away_leaves_what_was_known() -> None:
    seen = world()
    seen.lost("nobody listens", NOW + 3)
    seen.lost("nobody listens", NOW + 4)
    assert (seen.lost_because, seen.lost_at) == ("nobody listens", NOW + 3)
    assert set(seen.nodes) == {"ws1", "ws2", "ws3"}
    seen.take(sample(NOW + 9))
    assert seen.lost_because == ""


def test_another_agent_begins_anew() -> None:
    seen = world(sample(events=[event(100)]), sample(agent={"node": "ws2"}, events=[event(3)]))
    assert [one["number"] for one in seen.events] == [3]
    assert len(seen.cluster["cpu"]) == 1


def test_who_runs_for_whom() -> None:
    seen = world(
        sample(
            tasks=[task("ws1/1", node="ws2"), task("ws1/2", node="ws2"), task("ws1/3", "queued")],
            guests=[task("ws3/9", node="ws1"), task("ws2/1", node="ws1"), task("ws2/2", node="ws1")],
        )
    )
    assert seen.ours_by_node() == {"ws2": 2}
    assert seen.theirs_by_home() == {"ws3": 1, "ws2": 2}
    assert seen.is_guest(seen.guests["ws3/9"])
    assert not seen.is_guest(seen.tasks["ws1/1"])


def test_what_tasks_use_is_summed_and_forgotten_when_they_end() -> None:
    seen = world(sample(tasks=[task("ws1/5.1"), task("ws1/5.2"), task("ws1/6", "queued")]))
    told = [{"id": f"ws1/5.{at}", "cpus_busy": 0.5, "memory_bytes": 100} for at in (1, 2)]
    seen.take_usage([*told, {"id": "ws1/6", "cpus_busy": 9.0}, {"id": "ws1/9", "memory_bytes": 1}])
    assert set(seen.used) == {"ws1/5.1", "ws1/5.2"}
    assert seen.usage(["ws1/5.1", "ws1/5.2", "ws1/6"]) == (1.0, 200)
    assert seen.usage(["ws1/6"]) == (None, None)
    seen.take(sample(NOW + 1, complete=False, tasks_gone=["ws1/5.1"]))
    assert seen.usage(["ws1/5.1", "ws1/5.2"]) == (0.5, 100)
    seen.take_usage([])
    assert set(seen.used) == {"ws1/5.2"}
