"""The waterfall of `peerload trace` from histories that are hard to have: losses, staged files, a node that does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.agent.launcher.client import child_traceparent
from peerload.text.tasks import executors_of, trace_lines, trace_spans

GIVEN = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def step(at: float, state: str, node: str | None = None, attempt: int = 0) -> dict[str, Any]:
    return {"at": at, "state": state, "reason": "why\x1b", "attempt": attempt, "node": node, "what": "attempt"}


TASK: dict[str, Any] = {
    "id": "n1/1", "name": "x\x1b[2J", "home": "n1", "node": "n3", "state": "running", "attempt": 2, "started_at": 8.1,
    "history": [
        step(0.0, "queued"), step(1.0, "leased", "n2", 1), step(2.0, "running", "n2", 1), step(6.0, "queued"),
        step(7.0, "leased", "n3", 2), step(8.0, "running", "n3", 2),
    ],
    "decision": {"at": 6.5, "policy": "p", "choice": "n3", "reason": "r", "inputs": [{"node": "n3", "load": 0.5, "age_s": 0}]},
    "files": {"staging_s": 0.5}, "trace": None,
}  # fmt: skip


def test_each_attempt_has_its_spans_and_what_goes_on_has_no_end() -> None:
    assert executors_of(TASK) == ["n2", "n3"]
    events = {
        "n3": [step(7.0, "accepted", attempt=2), step(7.0, "started", attempt=2), step(8.1, "running", attempt=2)]
    }
    spans = trace_spans(TASK, events, 9.0)
    assert [(span["name"], span["node"], span["began"], span["ended"]) for span in spans if not span["own_clock"]] == [
        ("files staged", "n3", 6.5, 7.0), ("starts", "n3", 7.0, 8.1), ("runs", "n3", 8.1, None)
    ]  # fmt: skip
    assert [span["name"] for span in spans if span["own_clock"]] == [
        "waits", "handed over", "runs", "waits", "searched", "handed over", "runs"
    ]  # fmt: skip
    lines = trace_lines(TASK, spans, ["n2"], 9.0)
    assert "\x1b" not in "".join(lines)
    assert len(lines) == 1 + len(spans) + 2


@pytest.mark.parametrize(
    "given", [b"", b"01-" + GIVEN[3:], GIVEN.upper(), GIVEN[:-1], b"00-" + b"0" * 32 + GIVEN[35:], GIVEN + b"\n"]
)
def test_what_is_no_trace_context_is_left_alone(given: bytes) -> None:
    assert child_traceparent(given, "a-1") == ""


def test_each_attempt_is_a_span_of_the_same_trace() -> None:
    first, second = child_traceparent(GIVEN, "a-1"), child_traceparent(GIVEN, "a-2")
    assert first[:36] == second[:36] == GIVEN[:36].decode()
    assert first != second
    assert first.endswith("-00")


def test_a_task_without_history_has_the_spans_of_its_node() -> None:
    """One whose events were removed, or which is told by its executor."""
    task = TASK | {"history": [], "decision": None, "files": None}
    assert executors_of(task) == ["n3"]
    spans = trace_spans(task, {"n3": [step(8.1, "running", attempt=2)]}, 9.0)
    assert [(span["name"], span["node"]) for span in spans] == [("runs", "n3")]
    assert trace_spans(task, {}, 9.0) == []
