"""Sorting, filtering and choosing."""

from __future__ import annotations

from peerload.top.view_state import MEASURED_MAX, NODE_ORDERS, TASK_ORDERS, ViewState
from peerload.wire.control import USAGE_TASKS_MAX
from tests.each import each
from tests.unit.top.given import NOW, gpu, look, node, sample, task


def names(seen: ViewState, pane: str = "tasks") -> list[str]:
    return [row.name if pane == "nodes" else row["id"] for row in seen.rows(pane)]


def many() -> ViewState:
    return look(
        sample(
            nodes=[node("ws1", self=True, load=2.0, cpus_busy=1.0), node("ws2", load=9.0, gpus=[gpu()]), node("ws10", cpus_busy=8.0)],
            tasks=[task("ws1/10"), task("ws1/9"), task("ws1/2", "queued", name="train", priority=5), task("ws1/3", "held")],
            guests=[task("ws2/1", node="ws1", name="render")],
            ended=[task("ws1/1", "failed", exit_code=3, ended_at=NOW - 3)],
        )
    )  # fmt: skip


def test_running_ones_first_by_number_then_what_waits_then_what_ended() -> None:
    assert names(many()) == ["ws1/9", "ws1/10", "ws2/1", "ws1/2", "ws1/3", "ws1/1"]


@each("letter", NODE_ORDERS)
def test_each_letter_sorts_nodes_and_turns_them_round(letter: str) -> None:
    seen = many()
    seen.orders["nodes"] = "?"
    assert seen.sort("nodes", letter)
    first = names(seen, "nodes")
    assert seen.sort("nodes", letter)
    assert sorted(names(seen, "nodes")) == sorted(first)
    assert seen.backwards["nodes"]


@each("letter", TASK_ORDERS)
def test_each_letter_sorts_tasks(letter: str) -> None:
    seen = many()
    assert seen.sort("tasks", letter)
    assert len(names(seen)) == 6


def test_a_letter_that_is_none_changes_nothing() -> None:
    seen = many()
    assert not seen.sort("tasks", "%")
    assert not seen.sort("events", "n")
    assert seen.orders["tasks"] == "s"


def test_the_greatest_first() -> None:
    seen = many()
    seen.sort("nodes", "l")
    assert names(seen, "nodes")[0] == "ws2"
    seen.sort("nodes", "c")
    assert names(seen, "nodes")[0] == "ws10"
    seen.sort("tasks", "p")
    assert names(seen)[0] == "ws1/2"


@each(
    ("words", "expected"),
    [
        ("train", ["ws1/2"]),
        ("TRAIN queued", ["ws1/2"]),
        ("state:running", ["ws1/9", "ws1/10", "ws2/1"]),
        ("home:ws2", ["ws2/1"]),
        ("remote", ["ws2/1"]),
        ("!sleep", ["ws2/1", "ws1/2"]),
        ("!state:running !held", ["ws1/2", "ws1/1"]),
        ("nothing:like", []),
        (" ", ["ws1/9", "ws1/10", "ws2/1", "ws1/2", "ws1/3", "ws1/1"]),
    ],
)
def test_a_filter_is_words_that_a_row_has(words: str, expected: list[str]) -> None:
    seen = many()
    for one in seen.world.tasks.values():
        one["command"] = one["name"]
    seen.world.guests["ws2/1"]["command"] = "render"
    seen.filter("tasks", words)
    assert names(seen) == expected


def test_nodes_are_filtered_by_what_they_are() -> None:
    seen = many()
    seen.filter("nodes", "gpu:gpu")
    assert names(seen, "nodes") == ["ws2"]
    seen.filter("nodes", "drained")
    assert names(seen, "nodes") == []


def test_a_filter_is_bounded() -> None:
    seen = many()
    seen.filter("tasks", "x" * 10_000)
    assert len(seen.filters["tasks"]) == 200


def test_what_is_chosen_stays_chosen_when_the_order_changes() -> None:
    seen = many()
    seen.choose("tasks", 1)
    assert seen.chosen["tasks"] == "ws1/10"
    seen.sort("tasks", "i")
    assert seen.chosen["tasks"] == "ws1/10"
    assert names(seen)[seen.place("tasks")] == "ws1/10"


def test_when_it_is_gone_its_neighbour_is_chosen() -> None:
    seen = many()
    seen.choose("tasks", 3)
    assert seen.chosen["tasks"] == "ws1/2"
    seen.world.take(sample(NOW + 1, complete=False, tasks_gone=["ws1/2"]))
    seen.rows("tasks")
    assert seen.chosen["tasks"] == "ws1/3"


def test_moving_stops_at_both_ends() -> None:
    seen = many()
    seen.focus = "tasks"
    seen.move(-5)
    assert seen.place("tasks") == 0
    seen.move(1000)
    assert seen.place("tasks") == 5


def test_with_nothing_there_nothing_is_chosen() -> None:
    seen = look(sample(nodes=[]))
    seen.focus = "tasks"
    seen.move(1)
    assert seen.task() is None
    assert seen.node() is None
    assert seen.window("tasks", 5) == (0, [])


def test_the_chosen_row_is_always_in_sight() -> None:
    seen = look(sample(tasks=[task(f"ws1/{number}") for number in range(100)]))
    seen.focus = "tasks"
    for by in (0, 5, 20, 70, -3, -50, 1000, -1000):
        seen.move(by)
        _, rows = seen.window("tasks", 10)
        assert seen.chosen["tasks"] in [row["id"] for row in rows]
        assert len(rows) == 10


def test_a_pane_that_was_hidden_comes_first_when_it_is_asked_for() -> None:
    seen = many()
    seen.toggle("events", is_visible=False)
    assert seen.wanted_first == ["events"]
    seen.toggle("events", is_visible=True)
    assert seen.hidden == {"events"}
    assert seen.wanted_first == []


def test_focus_goes_round_the_panes_that_can_be_seen() -> None:
    seen = many()
    visible = ["nodes", "tasks", "detail", "events"]
    found = []
    for _ in range(4):
        seen.refocus(visible, 1)
        found.append(seen.focus)
    assert found == ["events", "nodes", "tasks", "events"]
    seen.refocus(["nodes"])
    assert seen.focus == "nodes"
    seen.refocus(["cluster"])
    assert seen.focus == "nodes"


def test_events_scroll_and_follow_again() -> None:
    seen = look(sample(events=[{"number": number} for number in range(1, 51)]))
    seen.focus = "events"
    seen.move(-10)
    assert seen.events_up == 10
    seen.move(-1000)
    assert seen.events_up == 49
    seen.move(1000)
    assert seen.events_up == 0


def array(*, running: int = 4, waiting: int = 180, done: int = 0) -> list[dict[str, object]]:
    states = ["done"] * done + ["running"] * running + ["queued"] * waiting
    return [task(f"ws1/5.{at}", state, name="sweep") for at, state in enumerate(states, 1) if state != "done"]


def ended_members(done: int) -> dict[str, object]:
    members = {"spans": [[1, done]], "count": done, "nodes": 1}
    return task("ws1/5.1", "done", name="sweep", ended_at=NOW, exit_code=0, members=members)


def test_the_cursor_does_not_go_with_a_task_to_those_that_ended() -> None:
    seen = look(sample(tasks=[task(f"ws1/{number}") for number in (1, 2, 3)]))
    seen.choose("tasks", 1)
    over = [task("ws1/2", "done", ended_at=NOW)]
    seen.world.take(sample(NOW + 1, ended=over, complete=False, tasks_gone=["ws1/2"]))
    assert names(seen) == ["ws1/1", "ws1/3", "ws1/2"]
    assert seen.chosen["tasks"] == "ws1/3"
    seen.choose("tasks", 2)
    newer = [task("ws1/1", "done", ended_at=NOW + 2), *over]
    seen.world.take(sample(NOW + 2, ended=newer, complete=False, tasks_gone=["ws1/1"]))
    assert names(seen) == ["ws1/3", "ws1/1", "ws1/2"]
    assert seen.chosen["tasks"] == "ws1/2"


def test_what_runs_and_waits_stays_in_sight_while_an_array_goes_on() -> None:
    seen = look(sample(tasks=array(), ended=None))
    seen.opened.add("ws1/5")
    seen.choose("tasks", 1)
    for done in range(1, 60):
        seen.world.take(sample(NOW + done, ended=[ended_members(done)], tasks=array(done=done, waiting=180 - done)))
        _, rows = seen.window("tasks", 10)
        assert [row["state"] for row in rows[:5]] == ["running"] * 5
        assert seen.place("tasks") == 1


def test_an_array_is_one_row_that_opens() -> None:
    seen = look(sample(ended=[ended_members(20)], tasks=[*array(done=20), task("ws1/7")]))
    assert names(seen) == ["ws1/5", "ws1/7"]
    assert seen.rows("tasks")[0]["array"] == {"running": 4, "queued": 180, "done": 20}
    assert seen.numbers["tasks"] == 205
    assert seen.open()
    assert len(names(seen)) == 1 + 4 + 180 + 1 + 1
    assert names(seen)[1] == "ws1/5.21"
    assert names(seen)[-2] == "ws1/5.1-20"
    seen.choose("tasks", 3)
    assert seen.open()
    assert names(seen) == ["ws1/5", "ws1/7"]
    assert seen.chosen["tasks"] == "ws1/5"
    seen.choose("tasks", 1)
    assert not seen.open()


def test_an_array_of_another_home_is_named_by_the_members_that_are_here() -> None:
    seen = look(sample(tasks=array(), guests=[task("ws2/3.7", node="ws1"), task("ws2/3.9", node="ws1")]))
    refs = {row["id"]: row["refs"] for row in seen.rows("tasks")}
    assert refs == {"ws1/5": ("ws1/5",), "ws2/3": ("ws2/3.7", "ws2/3.9")}


def test_a_filter_counts_the_members_that_match() -> None:
    seen = look(sample(tasks=array()))
    seen.filter("tasks", "state:queued")
    assert seen.rows("tasks")[0]["array"] == {"queued": 180}


def test_what_is_not_shown_is_not_marked() -> None:
    seen = look(sample(tasks=[task("ws1/1"), task("ws1/2", "queued"), task("ws1/3")]))
    seen.choose("tasks", 0)
    seen.mark()
    seen.mark()
    assert seen.marked == {"ws1/1", "ws1/3"}
    seen.mark()
    seen.mark()
    assert seen.marked == {"ws1/1", "ws1/3"}
    seen.filter("tasks", "ws1/3")
    seen.rows("tasks")
    assert seen.marked == {"ws1/3"}
    seen.filter("tasks", "")
    assert [row["id"] for row in seen.acted_on()] == ["ws1/3"]


def test_what_is_in_sight_and_runs_is_measured_where_it_runs() -> None:
    tasks = [
        task("ws1/5.1", node="ws2"),
        task("ws1/5.2"),
        task("ws1/5.3", "queued"),
        *(task(f"ws1/{n}") for n in range(10, 90)),
    ]
    seen = look(sample(tasks=tasks))
    seen.window("tasks", 3)
    assert seen.measured() == {"ws2": ["ws1/5.1"], "ws1": ["ws1/5.2", "ws1/10", "ws1/11"]}
    seen.window("tasks", 100)
    assert sum(map(len, seen.measured().values())) == MEASURED_MAX == USAGE_TASKS_MAX


def test_mine_are_those_of_who_looks_and_none_of_other_homes() -> None:
    seen = look(sample(tasks=[task("ws1/1"), task("ws1/2", user="you")], guests=[task("ws2/1", node="ws1", user=None)]))
    seen.own = ("me", "1000")
    seen.is_mine = True
    assert names(seen) == ["ws1/1"]
    seen.is_mine = False
    assert names(seen) == ["ws1/1", "ws1/2", "ws2/1"]
