"""A cluster as an agent tells of it, made up for the view."""

from __future__ import annotations

from typing import Any

from peerload.top import lines as draw
from peerload.top.model import TopModel, TopSample
from peerload.top.panes import Painter, Tail
from peerload.top.view_state import ViewState

NOW = 1_700_000_000.0
GIB = 1 << 30
ESCAPES = "\x1b[31mred\x1b]0;title\x07 [bold red]markup[/] \r\n\u202egnp.exe\u200b\u2066 \u0301\u0301\u0301\u0301"


def node(name: str, **more: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "node": name, "state": "alive", "self": False, "load": 0.5, "region": "normal", "cpus": 8.0, "cpus_busy": 2.0,
        "mem_bytes": 64 * GIB, "mem_used_bytes": 16 * GIB, "tasks_running": 1, "tasks_queued": 0, "gpus": [],
        "age_s": 1.0, "incarnation": 1, "address": "10.0.0.1:7000", "drained": False, "drain_reason": "", "slots": 8,
        "labels": [], "speed": 1.0, "trouble": None,
    }  # fmt: skip
    return facts | more


def gpu(index: int = 0, util: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "id": f"GPU-{index}", "index": index, "model": "A100", "mem_bytes": 80 * GIB, "util": util,
        "mem_used_bytes": 20 * GIB, "tasks": 1, "mode": "time", "health": "ok", **more,
    }  # fmt: skip


def task(id: str, state: str = "running", **more: Any) -> dict[str, Any]:  # noqa: A002 -- as the key is called
    facts: dict[str, Any] = {
        "id": id, "name": "sleep", "user": "me", "state": state, "node": "ws1" if state == "running" else None,
        "home": id.partition("/")[0], "cpus": 1.0, "mem_bytes": 0, "gpus": 0, "attempt": 1, "migrations": 0,
        "submitted_at": NOW - 100, "started_at": NOW - 60 if state == "running" else None, "ended_at": None,
        "exit_code": None, "signal": None, "reason": "", "command": "sleep 600", "device_names": [],
    }  # fmt: skip
    return facts | more


def event(number: int, **more: Any) -> dict[str, Any]:
    return {
        "number": number, "at": NOW - 5, "what": "task", "state": "running", "task": f"ws1/{number}", "attempt": 1,
        "node": "ws2", "reason": "started on ws2", **more,
    }  # fmt: skip


def answer(**more: Any) -> dict[str, Any]:
    return {
        "revision": "boot.1", "complete": True,
        "agent": {"node": "ws1", "cluster": "lab", "policy": "adaptive", "mqtt": None, "mqtt_configured": False},
        "nodes": [node("ws1", self=True), node("ws2"), node("ws3")], "nodes_gone": [], "tasks": [], "tasks_gone": [],
        "guests": [], "guests_gone": [], "counts": {"placed": 0, "waiting": 0, "held": 0}, "events": [], **more,
    }  # fmt: skip


def sample(at: float = NOW, ended: list[dict[str, Any]] | None = None, **more: Any) -> TopSample:
    return TopSample(at, answer(**more), ended)


def world(*samples: TopSample) -> TopModel:
    made = TopModel()
    for one in samples or (sample(),):
        made.take(one)
    return made


def look(*samples: TopSample) -> ViewState:
    return ViewState(world(*samples))


def painter(*samples: TopSample, **options: bool) -> Painter:
    return Painter(look(*samples), Tail(), clock_text, **options)


def clock_text(at: float) -> str:
    return f"@{at - NOW:+.0f}"


def pane(paint: Painter, name: str, width: int = 100, height: int = 12, now: float = NOW) -> str:
    """A pane as text, each line held to be as wide as the pane."""
    drawn = paint.pane(name, width, height, now)
    assert len(drawn) == height
    for line in drawn:
        assert draw.width_of(line) == width, draw.as_text(line)
    return "\n".join(map(draw.as_text, drawn))
