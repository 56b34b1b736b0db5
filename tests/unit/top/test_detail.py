"""The pane that tells of what is chosen."""

from __future__ import annotations

from peerload.top.lines import as_text
from peerload.top.panes import TAIL_BYTES, TAIL_LINES_KEPT, Tail, tail_lines
from tests.unit.top.given import ESCAPES, NOW, gpu, node, painter, pane, sample, task


def piece(stream: int, data: bytes, offset: int = 0) -> dict[str, object]:
    return {"stream": stream, "offset": offset, "data": data}


def tail(*pieces: dict[str, object]) -> Tail:
    made = Tail()
    made.clear("ws1/1")
    made.take("ws1/1", pieces, NOW)
    return made


def test_a_task_is_told_of() -> None:
    one = task(
        "ws1/1", node="ws2", migrations=2, device_names=["GPU 1 (A100)"], gpus=1, mem_bytes=8 << 30, reason="started",
        priority=3,
    )  # fmt: skip
    text = pane(
        painter(sample(nodes=[node("ws1", self=True), node("ws2", gpus=[gpu()])], tasks=[one])), "detail", 80, 30
    )
    for words in (
        "ws1/1", "running for 1m00s", "submitted @-100, started @-60", "on ws2, for us, moved 2 times", "sleep 600",
        "1 cpus, 8 GiB, 1 GPUs, priority 3", "GPU 1 (A100)", "node cpu", "node gpu",
    ):  # fmt: skip
        assert words in text, words


def test_one_that_has_failed_says_how() -> None:
    one = task("ws1/1", "failed", node="ws1", exit_code=3, started_at=NOW - 9, ended_at=NOW - 4, reason="exit code 3")
    text = pane(painter(sample(ended=[one])), "detail", 80, 20)
    assert all(fact in text for fact in ("failed", "5.0s", "exit code 3"))
    assert "ended @-4" in text


def test_a_guest_says_for_whom_it_runs() -> None:
    text = pane(painter(sample(guests=[task("lab3/7", home="lab3", node="ws1")])), "detail", 80, 20)
    assert "lab3" in text


def test_a_node_is_told_of() -> None:
    facts = node(
        "ws1", gpus=[gpu(0, 0.7), gpu(1, 0.1, health="sick")], labels=["amd"], drained=True, drain_reason="new PSU",
        trouble="disk low", cpus_foreign=1.5,
    )  # fmt: skip
    paint = painter(sample(nodes=[facts]))
    paint.look.subject = "nodes"
    text = pane(paint, "detail", 90, 30)
    for words in (
        "new PSU",
        "disk low",
        "2 of 8 busy, 1.5 by other programs",
        "16 GiB of 64 GiB",
        "GPU  0",
        " 70%",
        "sick",
        "amd",
        " 25%",
    ):
        assert words in text, words


def test_old_facts_are_said_to_be_old() -> None:
    paint = painter(sample(nodes=[node("ws1", age_s=100.0)]))
    paint.look.subject = "nodes"
    assert "old facts" in pane(paint, "detail", 90, 30)


def test_nothing_chosen() -> None:
    assert "nothing is chosen" in pane(painter(sample()), "detail", 40, 6)


def test_output_is_shown_with_stderr_marked_below() -> None:
    seen = tail(piece(1, b"one\ntwo\n"), piece(2, b"bad\n"))
    assert [as_text(line) for line in tail_lines(seen, "ws1/1", 40, 10)] == ["  one", "  two", "! bad"]


def test_neither_stream_hides_the_other() -> None:
    seen = tail(piece(1, b"out\n" * 100), piece(2, b"err\n" * 100))
    shown = [as_text(line) for line in tail_lines(seen, "ws1/1", 40, 6)]
    assert shown == ["  out"] * 3 + ["! err"] * 3


def test_output_cannot_touch_the_terminal() -> None:
    seen = tail(piece(1, ESCAPES.encode() + b"\xff\x00\n"))
    text = "".join(as_text(line) for line in tail_lines(seen, "ws1/1", 300, 10))
    assert text.isprintable()
    assert "[bold red]markup[/]" in text


def test_progress_bars_show_what_they_say_now() -> None:
    seen = tail(piece(1, b"10 %\r20 %\r30 %\n"))
    assert [as_text(line) for line in tail_lines(seen, "ws1/1", 40, 10)] == ["  30 %"]


def test_the_tail_is_bounded() -> None:
    seen = tail(*(piece(1, b"x" * 1000 + b"\n", offset) for offset in range(0, 200_000, 1001)))
    assert sum(len(text) for _, text in seen.lines) <= TAIL_BYTES
    seen = tail(piece(1, b"\n" * TAIL_BYTES))
    assert len(seen.lines) <= TAIL_LINES_KEPT


def test_the_rate_is_that_of_the_bytes() -> None:
    seen = tail(piece(1, b"x" * 100))
    seen.take("ws1/1", [piece(1, b"y" * 50, 300)], NOW + 2)
    assert list(seen.rate) == [125.0]


def test_of_another_task_nothing_is_taken() -> None:
    seen = tail()
    seen.take("ws1/2", [piece(1, b"x")], NOW)
    assert not seen.lines


def test_why_there_is_none() -> None:
    seen = tail()
    seen.why_none = "it has not started"
    assert [as_text(line) for line in tail_lines(seen, "ws1/1", 40, 3)] == [" it has not started"]


def test_where_there_is_little_room_the_output_has_it() -> None:
    paint = painter(sample(tasks=[task("ws1/1", node="ws2")]))
    paint.tail.clear("ws1/1")
    paint.tail.take("ws1/1", [piece(1, b"one\ntwo\n")], NOW)
    lines = pane(paint, "detail", 78, 6).splitlines()
    assert all(fact in lines[1] for fact in ("ws1/1", "sleep", "running", "1m00s", "ws2"))
    assert [line.strip("│ ") for line in lines[2:4]] == ["one", "two"]


def test_what_a_running_task_uses_is_drawn() -> None:
    paint = painter(sample(tasks=[task("ws1/1", cpus=4.0, mem_bytes=8 << 30)]))
    paint.tail.clear("ws1/1")
    for busy in (None, 1.0, 4.0):
        paint.tail.uses.take({"cpus_busy": busy, "memory_bytes": 4 << 30, "processes": 3})
    text = pane(paint, "detail", 80, 20)
    lines = [line.lstrip("│| ") for line in text.splitlines()]
    cpu, memory = (next(line for line in lines if line.startswith(f"{word} ")) for word in ("cpu", "memory"))
    assert "█ 4.0 cpus" in cpu
    assert "4 GiB in 3 procs" in memory
    assert "  4.0 cpus 4 GiB" in pane(paint, "detail", 80, 6)


def test_figures_that_are_none_are_not_drawn() -> None:
    """What a node says need not be what it should be."""
    paint = painter(sample(tasks=[task("ws1/1")]))
    paint.tail.clear("ws1/1")
    paint.tail.uses.take({"cpus_busy": "\x1b[31m", "memory_bytes": float("nan"), "processes": [1]})
    text = pane(paint, "detail", 80, 20)
    assert not [line for line in text.splitlines() if line.lstrip("│ ").startswith(("cpu ", "memory "))]
