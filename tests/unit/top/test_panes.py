"""What the panes say, at any size, whatever the names are."""

from __future__ import annotations

from peerload.top.model import NodeModel
from peerload.top.panes import node_lines
from peerload.top.tables import chosen_columns, node_columns, task_columns
from peerload.top.view_state import PANES
from tests.each import each
from tests.unit.top.given import ESCAPES, NOW, event, gpu, node, painter, pane, sample, task

BUSY = sample(
    nodes=[
        node("ws1", self=True, region="overloaded"),
        node("ws2", gpus=[gpu(0, 0.9), gpu(1, None)], drained=True, drain_reason="new PSU"),
        node("ws3", state="suspect", age_s=4.0),
        node("ws4", state="dead", load=None, region=None),
        node("ws5", age_s=90.0),
    ],
    tasks=[task("ws1/1", node="ws2"), task("ws1/2", "queued", reason="waits for room"), task("ws1/3")],
    guests=[task("lab3/7", node="ws1", home="lab3")],
    ended=[task("ws1/4", "failed", node="ws1", exit_code=3, started_at=NOW - 9, ended_at=NOW - 4)],
    counts={"placed": 2, "waiting": 1, "held": 0},
    events=[event(1), event(2, what="node", state="dead", task=None, node="ws4", reason="")],
)
HOSTILE = sample(
    nodes=[node("ws1", self=True, state=ESCAPES, drain_reason=ESCAPES, trouble=ESCAPES, region=ESCAPES, labels=[ESCAPES], gpus=[gpu(0, model=ESCAPES, health=ESCAPES)])],
    tasks=[task(f"ws1/{ESCAPES}", name=ESCAPES, reason=ESCAPES, node=ESCAPES, home=ESCAPES, command=ESCAPES, device_names=[ESCAPES], exit_code=ESCAPES, signal=ESCAPES)],
    events=[event(1, task=ESCAPES, reason=ESCAPES, node=ESCAPES, state=ESCAPES)],
    agent={"node": "ws1", "cluster": ESCAPES, "policy": ESCAPES, "mqtt": ESCAPES},
)  # fmt: skip
SIZES = [(80, 24), (120, 40), (200, 60), (30, 6), (8, 3), (1, 1), (0, 0)]


@each("size", SIZES)
@each("name", PANES.values())
@each("ascii_only", [False, True])
@each("subject", ["nodes", "tasks"])
@each("seen", [BUSY, HOSTILE])
def test_every_pane_has_its_size_and_nothing_foreign_gets_through(
    seen: object, subject: str, ascii_only: bool, name: str, size: tuple[int, int]
) -> None:
    paint = painter(seen, ascii_only=ascii_only)  # type: ignore[arg-type]
    paint.look.subject = subject
    text = pane(paint, name, *size)
    assert "\x1b" not in text
    assert "\u202e" not in text
    if ascii_only and seen is BUSY:
        assert text.isascii()


def test_the_header_says_whence_and_what() -> None:
    paint = painter(BUSY, readonly=True)
    text = "".join(part for part, _ in paint.header(100, NOW))
    assert len(text) == 100
    for word in ("read only", "lab", "from ws1", "policy adaptive", "no broker", "@+0"):
        assert word in text


def test_an_agent_that_is_away_is_said_and_all_else_looks_old() -> None:
    paint = painter(BUSY)
    paint.look.world.lost("no agent", NOW + 2)
    header = "".join(part for part, _ in paint.header(120, NOW + 14))
    assert all(fact in header for fact in ("12s", "no agent"))
    drawn = paint.pane("nodes", 100, 8, NOW + 14)
    assert all("stale" in style for line in drawn for _, style in line)


def test_before_the_first_answer() -> None:
    paint = painter()
    paint.look.world.agent = {}
    assert "asking the agent" in "".join(part for part, _ in paint.header(80, NOW))


def test_the_cluster_is_summed_up() -> None:
    text = pane(painter(BUSY, wide=True), "cluster", 120, 5)
    assert "cpu" in text
    assert "8 / 32" in text
    assert "gpu" in text
    assert "1.8 / 2" in text
    assert "3 alive 1 suspect 1 dead" in text
    assert "1 over" in text
    assert "→ 1 of ours" in text
    assert "← 1 of others" in text


def test_without_gpus_that_is_said() -> None:
    assert "GPU" not in pane(painter(), "nodes", 120, 8)


def test_nodes_tell_their_state_in_words() -> None:
    lines = pane(painter(BUSY), "nodes", 140, 9).splitlines()
    assert lines[0].startswith("╭─ 2 nodes 5")
    rows = {line.split()[0].strip("│"): line for line in lines[2:7]}
    assert "ws1 *" in rows["ws1"]
    assert "now" in rows["ws1"]
    assert "over" not in rows["ws1"]
    assert "←" not in rows["ws1"]
    assert "drained" in rows["ws2"]
    assert "2x" in rows["ws2"]
    assert "90%" in rows["ws2"]
    assert "→1" in rows["ws2"]
    assert "suspect?" in rows["ws3"]
    assert "dead!" in rows["ws4"]
    assert "≈" in rows["ws4"]
    assert "alive" in rows["ws5"]
    assert "≈1m30s" in rows["ws5"]


def test_load_index_and_region_are_shown_where_they_are_asked_for() -> None:
    wide = pane(painter(BUSY, wide=True), "nodes", 140, 9).splitlines()
    assert all(heading in wide[1] for heading in ("LOAD", "REGION"))
    assert "● over" in next(line for line in wide if "ws1" in line)
    narrow = pane(painter(BUSY), "nodes", 140, 9).splitlines()[1]
    assert not any(heading in narrow for heading in ("LOAD", "REGION"))


def test_a_node_without_the_directory_of_a_task_says_so() -> None:
    lines = pane(painter(sample(nodes=[node("ws1"), node("ws2", declines=["no directory /data"])])), "nodes", 140, 9)
    assert "no directory" in next(line for line in lines.splitlines() if "ws2" in line)


def test_the_power_of_a_node_is_told_with_how_it_is_known() -> None:
    guessed = NodeModel(node("ws1", watts=81.25, watts_quality="estimated"), NOW)
    lines = ["".join(part for part, _ in line) for line in node_lines(guessed, 120, NOW)]
    assert any("81.2 W estimated" in line for line in lines)
    silent = NodeModel(node("ws1", watts=None, watts_quality=None), NOW)
    assert not any("power" in part for line in node_lines(silent, 120, NOW) for part, _ in line)


def test_stale_rows_look_stale() -> None:
    paint = painter(BUSY)
    drawn = paint.pane("nodes", 140, 9, NOW)
    stale = ["stale" in " ".join(style for _, style in line) for line in drawn[2:7]]
    assert stale == [False, False, False, True, True]


def test_tasks_tell_who_runs_for_whom() -> None:
    text = pane(painter(BUSY), "tasks", 130, 9)
    assert "5  2 placed  1 waiting  1 of others" in text
    row = {line.strip("│").split()[0]: line for line in text.splitlines()[2:7]}
    assert "→ ws2" in row["ws1/1"]
    assert "here" in row["ws1/3"]
    assert "← lab3" in row["lab3/7"]
    assert "waits for room" in row["ws1/2"]
    assert "failed!" in row["ws1/4"]
    assert " 3 " in row["ws1/4"]
    assert "5.0s" in row["ws1/4"]


def test_without_tasks_there_is_a_hint() -> None:
    assert "peerload submit CMD" in pane(painter(), "tasks", 80, 8)


def test_a_filter_is_said_with_how_many_it_leaves() -> None:
    paint = painter(BUSY)
    paint.look.filter("tasks", "state:running")
    assert "3 tasks 3 of 5  /state:running" in pane(paint, "tasks", 100, 9)


def test_events_with_the_newest_at_the_bottom() -> None:
    paint = painter(BUSY)
    lines = pane(paint, "events", 90, 6).splitlines()
    assert "ws1/1" in lines[1]
    assert "running" in lines[1]
    assert "started on ws2" in lines[1]
    assert "ws4" in lines[2]
    assert "dead" in lines[2]
    paint.look.events_up = 1
    text = pane(paint, "events", 90, 6)
    assert "1 newer below" in text
    assert "ws4" not in text


@each("width", range(0, 200, 7))
def test_columns_never_need_more_than_there_is(width: int) -> None:
    look = painter(BUSY).look
    for columns in (node_columns(look, NOW, wide=True), task_columns(look, NOW)):
        kept = chosen_columns(columns, width)
        used = sum(size for _, size in kept) + len(kept) - 1
        assert used == width or len(kept) == 1 or used < width


def test_the_row_that_is_chosen_can_be_seen_without_colours() -> None:
    paint = painter(BUSY)
    paint.look.focus = "tasks"
    drawn = paint.pane("tasks", 100, 9, NOW)
    assert [line for line in drawn if any("chosen" in style for _, style in line)]


def test_who_was_shut_out_is_called_so_whatever_else_it_is() -> None:
    nodes = [node("ws1", self=True), node("ws2", revoked=True), node("ws3", state="dead", revoked=True)]
    paint = painter(sample(nodes=nodes))
    assert "1 alive 2 revoked" in pane(paint, "cluster", 120, 5)
    rows = pane(paint, "nodes", 140, 9).splitlines()[2:5]
    assert ["revoked" in row for row in rows] == [False, True, True]


def test_the_cluster_counts_nodes_that_are_asleep() -> None:
    text = pane(painter(sample(nodes=[node("ws1", self=True), node("ws2", state="asleep")])), "cluster", 100, 5)
    assert "1 alive 1 asleep" in text
