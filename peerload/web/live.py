"""The agent behind the web server, and the live feed of server-sent events. While there are viewers, the agent's overview is
requested once a second for all of them; changes are encoded once and sent to all.

Each update has a number, which is its event id. A viewer that reconnects with its last id receives the updates since then, or
a snapshot of everything if these were dropped. Viewers have no queues: each reads on from its own number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from peerload.client.asynchronous import AsyncClient
from peerload.client.connection import joined
from peerload.client.operations import Call, Stream
from peerload.model.errors import NoSuchTask, PeerloadError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator


TIMEOUT_S = 10.0
TAIL_BYTES = 1 << 20
"""Maximum bytes of each output stream that are sent; earlier output is left out."""


class AgentLink:
    """Link to the agent at a socket path; each request opens its own connection."""

    def __init__(self, socket_path: str) -> None:
        self._client = AsyncClient(socket_path, timeout_s=TIMEOUT_S, reconnect_s=0.0)

    async def ask(self, verb: str, **fields: object) -> dict[str, Any]:
        return await self._client.call(Call(verb, fields, joined))

    async def one_task(self, task: str) -> dict[str, Any]:
        """The answer to `show`; for an array the first member, since an array may have a million."""
        shown = Stream("show", {"tasks": [task]}, lambda part: part["tasks"], lambda end: end["tasks"])
        answer = cast("AsyncGenerator[dict[str, Any], None]", self._client.stream(shown))
        async with contextlib.aclosing(answer) as found:
            async for one in found:
                return one
        raise NoSuchTask(f"no task {task}")

    def output(self, task: str, *, follow: bool) -> AsyncIterator[dict[str, Any]]:
        """The last pieces of a task's output so far, then new pieces, then its end as ``{"end": …}``. Raises PeerloadError."""
        fields: dict[str, object] = {"task": task, "follow": follow, "tail_bytes": TAIL_BYTES}
        return self._client.stream(Stream("output", fields, lambda piece: [piece], lambda end: [{"end": end}]))


log = logging.getLogger("peerload.web")

EVERY_S = 1.0
UPDATES_KEPT_MAX = 64
UPDATES_BYTES_MAX = 256 << 10
"""Maximum bytes of stored updates; for more, a snapshot is hardly longer."""
ENDED_MAX = 100
EVENTS_MAX = 50
FINAL = ("done", "failed", "cancelled")
KEEP_ALIVE_S = 15.0
RETRY_MS = 1000
"""Pause of a browser before it reconnects."""
NODE_KEYS = [
    "node", "state", "load", "region", "slots", "cpus", "cpus_busy", "cpus_foreign", "mem_bytes", "mem_used_bytes",
    "tasks_running", "tasks_queued", "gpus", "age_s", "drained", "drain_reason", "trouble", "self", "labels",
]  # fmt: skip
ENDED_KEYS = [
    "id", "name", "user", "state", "node", "home", "cpus", "gpus", "submitted_at", "started_at", "ended_at",
    "exit_code", "signal", "reason", "device_names", "gpu_prefer", "gpu_wait",
]  # fmt: skip
TABLES = {"nodes": "node", "tasks": "id", "guests": "id"}
"""The tables of an overview, and the key of their items."""


class LiveFeed:
    """The state that viewers see and its last changes."""

    def __init__(self, agent: AgentLink) -> None:
        self._agent = agent
        self._epoch = secrets.token_hex(4)
        self._number = 0
        self._updates: deque[tuple[int, bytes]] = deque()
        self._updates_bytes = 0
        self._revision = ""
        self._tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
        self._told_s: dict[str, float] = {}
        self._rest: dict[str, Any] = {"ended": [], "counts": {}, "agent": {}, "away": None}
        self._last_event = 0
        self._changed = asyncio.Condition()
        self._looking = asyncio.Lock()
        self._viewers = 0
        self._poll: asyncio.Task[None] | None = None
        self._snapshot: tuple[int, float, bytes] = (-1, 0.0, b"")
        self._looked_at = -math.inf

    async def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)

    async def snapshot(self) -> dict[str, Any]:
        """The whole state, not older than a second. Raises PeerloadError if the agent is unavailable."""
        await self._look()
        if self._rest["away"]:
            raise PeerloadError(self._rest["away"]["what"], why=self._rest["away"]["why"])
        return self._everything()

    async def events(self, last_id: str) -> AsyncIterator[bytes]:
        self._viewers += 1
        try:
            if self._poll is None:
                self._poll = asyncio.get_running_loop().create_task(self._keep_looking())
            yield f"retry: {RETRY_MS}\n\n".encode()
            await self._look()  # the stored state may be from the time of the last viewer
            async with self._changed:
                await self._changed.wait_for(lambda: self._number > 0)
            epoch, _, number = last_id.partition("-")
            seen = int(number) if epoch == self._epoch and re.fullmatch(r"[0-9]{1,18}", number) else -1
            while True:
                if not self._has_all_since(seen):
                    seen = self._number  # of the snapshot; more updates may follow while a slow viewer reads it
                    yield self._encoded_snapshot()
                for sent, update in list(self._updates):
                    if sent > seen:
                        yield update
                        seen = sent
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S), self._changed:
                        await self._changed.wait_for(lambda seen=seen: self._number > seen)  # type: ignore[misc]
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._viewers -= 1

    def _has_all_since(self, seen: int) -> bool:
        oldest = self._updates[0][0] if self._updates else self._number + 1
        return oldest - 1 <= seen <= self._number

    async def _keep_looking(self) -> None:
        try:
            while self._viewers:
                await self._look()
                await asyncio.sleep(EVERY_S)
        finally:
            self._poll = None

    async def _look(self) -> None:
        """Request changes from the agent and notify the viewers, unless another viewer just did. One request at a
        time: each answer builds on the previous one."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= EVERY_S / 2:
                try:
                    await self._ask()
                except Exception:
                    log.exception("cannot process the answer of the agent")

    async def _ask(self) -> None:
        try:
            told = await self._agent.ask(
                "overview", since=self._revision, events_after=self._last_event, events_max=EVENTS_MAX
            )
            ended = await self._ended(told)
            changes = self._merge(told, ended)
        except PeerloadError as error:
            away = {"what": error.what, "why": error.why}
            changes = {"away": away} if self._rest["away"] != away else {}
            self._rest["away"] = away
        self._looked_at = time.monotonic()
        if not changes:
            return
        self._number += 1
        if "snapshot" in changes:
            self._updates.clear()
            self._updates_bytes = 0
        else:
            update = self._event("update", changes | {"now": time.time()})
            self._updates.append((self._number, update))
            self._updates_bytes += len(update)
            while len(self._updates) > UPDATES_KEPT_MAX or self._updates_bytes > UPDATES_BYTES_MAX:
                self._updates_bytes -= len(self._updates.popleft()[1])
        async with self._changed:
            self._changed.notify_all()

    async def _ended(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        """The ended tasks after this answer, requested only if some may have ended. Raises PeerloadError."""
        has_ended = any(event["what"] == "task" and event["state"] in FINAL for event in told["events"])
        if not (told["complete"] or has_ended or told["tasks_gone"]):  # tasks may start and end between two requests
            return list(self._rest["ended"])
        found = await self._agent.ask("history", limit=ENDED_MAX)
        return [{key: task.get(key) for key in ENDED_KEYS} for task in found["tasks"]]

    def _merge(self, told: dict[str, Any], ended: list[dict[str, Any]]) -> dict[str, Any]:
        """Apply an answer → the changes to send to the viewers; with `snapshot`, everything."""
        changes: dict[str, Any] = {}
        told["nodes"] = [_brief_node(node) for node in told["nodes"]]
        told_s = self._told_s | dict.fromkeys((node["node"] for node in told["nodes"]), time.monotonic())
        for name, key in TABLES.items():
            table = self._tables[name]
            if told["complete"]:
                table.clear()
            new = [item for item in told[name] if table.get(item[key]) != item]  # every answer includes this node
            gone = [item for item in told[f"{name}_gone"] if table.pop(item, None) is not None]
            table.update({item[key]: item for item in new})
            changes |= {name: new} if new else {}
            changes |= {f"{name}_gone": gone} if gone else {}
        self._told_s = {node: told_s[node] for node in self._tables["nodes"]}
        rest = {"ended": ended, "counts": told["counts"], "agent": told["agent"], "away": None}
        changes |= {key: value for key, value in rest.items() if self._rest[key] != value}
        self._rest = rest
        if told["events"]:
            self._last_event = told["events"][-1]["number"]
            changes["events"] = told["events"]
        self._revision = told["revision"]
        return changes | ({"snapshot": True} if told["complete"] else {})

    def _everything(self) -> dict[str, Any]:
        now_s, tables = time.monotonic(), {name: list(table.values()) for name, table in self._tables.items()}
        tables["nodes"] = [  # the age of unchanged entries has grown
            node | {"age_s": round((node["age_s"] or 0.0) + now_s - self._told_s[node["node"]], 2)}
            for node in tables["nodes"]
        ]
        return tables | self._rest | {"now": time.time()}

    def _encoded_snapshot(self) -> bytes:
        number, made_s, _ = self._snapshot
        if number != self._number or time.monotonic() - made_s > EVERY_S:
            self._snapshot = self._number, time.monotonic(), self._event("snapshot", self._everything())
        return self._snapshot[2]

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        raw = json.dumps(data, separators=(",", ":"))  # the data of an event must be one line
        return f"id: {self._epoch}-{self._number}\nevent: {kind}\ndata: {raw}\n\n".encode("utf-8", "replace")


def _brief_node(node: dict[str, Any]) -> dict[str, Any]:
    brief = {key: node.get(key) for key in NODE_KEYS}
    for key in ("load", "cpus_busy", "cpus_foreign", "age_s"):
        if isinstance(value := brief[key], float):
            brief[key] = round(value, 2)
    return brief
