"""A cluster that is not there, for the web server: NODES nodes that all change each second, and TASKS tasks, some of which do."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.web.access import Access, ViewerRight
from peerload.web.http import HttpServer
from peerload.web.live import LiveFeed
from peerload.web.routes import Routes

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN_MAX = 1000
"""Tasks in an overview (`peerload.agent.requests.overview`)."""


class ChangingCluster:
    """Answers of an agent of this cluster."""

    def __init__(self, nodes: int, tasks: int) -> None:
        self._nodes = nodes
        self._tasks = tasks
        self._number = 0

    @property
    def looks(self) -> int:
        """How often it was asked for its overview."""
        return self._number

    async def ask(self, verb: str, **fields: object) -> dict[str, Any]:
        """The answer to one request."""
        if verb == "overview":
            return self._overview(is_complete=not fields["since"])
        if verb == "history":
            return {"tasks": [self._task(self._number + n, "done") for n in range(100)]}
        if verb == "samples":
            return self._samples(float(str(fields["since"])))
        return {}

    def _overview(self, *, is_complete: bool) -> dict[str, Any]:
        self._number += 1
        first, shown = self._number * 20, min(self._tasks, SHOWN_MAX)
        tasks = range(first, first + shown) if is_complete else range(first + shown - 20, first + shown)
        return {
            "nodes": [self._node(n) for n in range(self._nodes)],
            "nodes_gone": [],
            "tasks": [self._task(n, "running" if n % 3 else "queued") for n in tasks],
            "tasks_gone": [f"node0/{n}" for n in range(first - 20, first)],
            "guests": [],
            "guests_gone": [],
            "events": [],
            "revision": str(self._number),
            "complete": is_complete,
            "agent": {"node": "node0", "cluster": "large"},
            "counts": {"placed": shown, "waiting": self._tasks - shown, "held": 0},
        }

    def _node(self, number: int) -> dict[str, Any]:
        busy = 4 + 4 * math.sin(self._number / 3 + number)
        region = "overloaded" if busy > 7 else "normal" if busy > 3 else "underloaded"
        gpu = {
            "id": "g",
            "index": 0,
            "model": "A10",
            "mem_bytes": 24 << 30,
            "util": busy / 8,
            "mem_used_bytes": 1 << 33,
        }
        more = {"mem_ours_bytes": 1 << 33, "mem_foreign_bytes": 0, "temperature_c": 50, "tasks": 1, "health": "ok"}
        return {
            "node": f"node{number}", "state": "alive", "self": number == 0, "slots": 8, "cpus": 8, "cpus_busy": busy,
            "cpus_foreign": 1.0, "mem_bytes": 64 << 30, "mem_used_bytes": 16 << 30, "tasks_running": 5, "tasks_queued": 1,
            "load": busy / 8, "region": region, "age_s": 0.2, "gpus": [gpu | more] if number % 4 == 0 else [],
        }  # fmt: skip

    def _task(self, number: int, state: str) -> dict[str, Any]:
        return {
            "id": f"node0/{number}", "name": f"train-{number}", "state": state, "node": f"node{number % self._nodes}",
            "home": "node0", "submitted_at": 1e9, "started_at": 1e9, "ended_at": 1e9 + 5, "cpus": 1, "reason": "room there",
        }  # fmt: skip

    def _samples(self, since: float) -> dict[str, Any]:
        keys = (
            "at",
            "nodes",
            "cpus",
            "cpus_busy",
            "cpus_foreign",
            "running",
            "waiting",
            "gpus",
            "gpus_busy",
            "gpu_mem_share",
        )
        now = time.time()
        ring = [[now - (1440 - n), 300, 2400, 900 + 9 * (n % 50), 300, n, 1440 - n, 75, 30, 0.4] for n in range(1440)]
        return {"every_s": 1.0, "keys": keys, "samples": [sample for sample in ring if sample[0] > since]}


@contextlib.contextmanager
def served(agent: Any, directory: Path) -> Iterator[str]:
    """A web server for this agent in a thread of its own → the URL of one visit."""
    loop, stop, ready, where = asyncio.new_event_loop(), asyncio.Event(), threading.Event(), [""]

    async def serve() -> None:
        feed = LiveFeed(agent)
        access = Access(directory / "web", (), "c", is_secure=False)
        server = HttpServer(Routes(agent, access, feed, port=0, scheme="http").answer)
        listener = await asyncio.start_server(server.serve(is_local=False), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        where[0] = f"http://127.0.0.1:{port}/login?code={access.new_code(ViewerRight.ACT)}"
        ready.set()
        await stop.wait()
        listener.close()
        await server.close()
        await feed.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield where[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
