"""The routes: /metrics, /http_sd, /api/v1/ and the page. docs/web.md lists them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.client.connection import beyond
from peerload.model.errors import AgentUnavailable, BadRequest, NoSuchTask, PeerloadError
from peerload.text.tasks import executors_of, trace_spans
from peerload.web.access import ViewerRight
from peerload.web.http import Response, error_response, json_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from peerload.web.access import Access
    from peerload.web.http import Request
    from peerload.web.live import AgentLink, LiveFeed

TASK_PATH = re.compile(r"/api/v1/tasks/([a-z0-9-]{1,40}/[0-9]{1,19}(?:\.[0-9]{1,19})?)(?:/([a-z]+))?")
NODE_PATH = re.compile(r"/api/v1/nodes/([a-z0-9-]{1,40})/(drain|undrain)")
ACTIONS = {"cancel": "cancel", "hold": "hold", "release": "release"}
HISTORY_MAX = 1000
TASKS_MAX = 10_000
ALL_KEPT_S = 4.0
"""The page asks every five seconds."""
SIGN_IN = "with a token, as  Authorization: Bearer TOKEN;  a browser:  peerload web --open"
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class Routes:
    """Answers requests. ``port``: port of the web servers of all nodes, for /http_sd; 0: none."""

    def __init__(self, agent: AgentLink, access: Access, feed: LiveFeed, *, port: int, scheme: str) -> None:
        self._agent = agent
        self._access = access
        self._feed = feed
        self.port = port
        self._scheme = scheme
        self._asking_all = asyncio.Lock()
        self._all_said: tuple[dict[str, Any], float, dict[str, Any]] = ({}, 0.0, {})
        self._page = Path(__file__).with_name("page.html").read_bytes()
        sources = {b"script": "", b"style": ""}
        for kind, text in _INLINE.findall(self._page):
            sources[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
        self._policy = (
            f"default-src 'none'; script-src{sources[b'script']}; style-src{sources[b'style']}; connect-src 'self';"
            " img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
        )

    async def answer(self, request: Request) -> Response:
        if not self._access.is_addressed(request):
            hint = "peerload web --host NAME  serves under another name"
            return error_response(421, "this server is not known under that name", hint=hint)
        if request.path == "/" and request.method in ("GET", "HEAD"):
            headers = (("Content-Security-Policy", self._policy), ("Referrer-Policy", "no-referrer"))
            return Response(200, "text/html; charset=utf-8", self._page, headers)
        if request.path == "/login" and request.method == "GET":
            return self._login(self._access.take_code(request.query.get("code", "")))
        if request.path == "/api/v1/login" and request.method == "POST" and self._access.is_own_page(request):
            return self._login(self._access.right_of_token(str(_body(request).get("token", ""))))
        right = self._access.right_of(request)
        if right is ViewerRight.NOTHING:
            refused = error_response(401, "sign in", hint=SIGN_IN)
            return refused._replace(headers=(("WWW-Authenticate", "Bearer"),))
        try:
            if request.method == "POST":
                return await self._change(request, right)
            if request.method not in ("GET", "HEAD"):
                return error_response(405, "only GET and POST")
            return await self._look(request, right)
        except PeerloadError as error:
            return _refusal(error)

    def _login(self, right: ViewerRight) -> Response:
        if right is ViewerRight.NOTHING:
            return error_response(
                403, "this code or token is not valid", hint="a code is valid once; a new one:  peerload web --open"
            )
        headers = (self._access.cookie_for(right), ("Location", "/"), ("Referrer-Policy", "no-referrer"))
        return Response(303, "text/plain", b"", headers)

    # -- viewing -------------------------------------------------------------------------------------------------------

    async def _look(self, request: Request, right: ViewerRight) -> Response:
        agent, path = self._agent, request.path
        if path == "/metrics":
            from peerload.web import exposition  # noqa: PLC0415 -- only scrapes need it

            return Response(200, exposition.CONTENT_TYPE, exposition.text(await agent.ask("stats")))
        if path == "/http_sd" and not self.port:
            hint = "start a server with a port:  peerload web --listen HOST:PORT"
            return error_response(
                404, "this server listens at a Unix socket, so it cannot name a port for other nodes", hint=hint
            )
        if path == "/http_sd":
            return json_response(self._targets((await agent.ask("nodes"))["nodes"]))
        if path == "/api/v1/session":
            return json_response({"v": 1, "may_act": right is ViewerRight.ACT})
        if path == "/api/v1/events":
            pieces = self._feed.events(request.headers.get("last-event-id", request.query.get("last", "")))
            return Response(200, "text/event-stream", pieces=pieces)
        if path == "/api/v1/cluster":
            return json_response({"v": 1} | await self._feed.snapshot())
        if (asked := _asked(request)) is not None:
            return json_response({"v": 1} | await self._agent_says(*asked))
        if found := TASK_PATH.fullmatch(path):
            return await self._task(request, found[1], found[2])
        return error_response(404, "no such page", why=path)

    async def _agent_says(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer of the agent. An answer that needs all nodes is cached for a moment, for all viewers."""
        if not fields.get("cluster"):
            return await self._agent.ask(verb, **fields)
        async with self._asking_all:
            kept, at_s, told = self._all_said
            if kept != fields or time.monotonic() - at_s > ALL_KEPT_S:
                told = await self._agent.ask(verb, **fields)
                self._all_said = fields, time.monotonic(), told
            return told

    async def _task(self, request: Request, task: str, part: str | None) -> Response:
        if part is None:
            return json_response({"v": 1} | await self._agent.one_task(task))
        if part == "why":
            return json_response({"v": 1} | await self._agent.ask("why", task=task))
        if part == "trace":
            return json_response({"v": 1} | await self._trace(task))
        if part == "output":
            await self._agent.one_task(task)
            last = request.headers.get("last-event-id", "")
            seen = [int(word) for word in last.split("-")] if re.fullmatch(r"\d{1,18}-\d{1,18}", last) else [0, 0]
            return Response(200, "text/event-stream", pieces=self._output(task, {1: seen[0], 2: seen[1]}))
        return error_response(404, "no such part of a task", why=part, hint="there are  why,  trace  and  output")

    async def _trace(self, name: str) -> dict[str, Any]:
        """The spans of a task on all nodes that had it, and the nodes that do not answer."""
        task = await self._agent.one_task(name)
        events: dict[str, list[dict[str, Any]]] = {}
        missing = []
        for node in (task["home"], *executors_of(task)):
            try:
                told = await self._agent.ask("events", tasks=[task["id"]], what=["attempt", "chore"], at=node)
                events[node] = told["events"]
            except PeerloadError:
                missing.append(node)
        return {"id": task["id"], "spans": trace_spans(task, events, time.time()), "missing": missing}

    async def _output(self, task: str, seen: dict[int, int]) -> AsyncIterator[bytes]:
        """The output of a task as events. The id of each is the number of bytes sent of both streams so far."""
        try:
            async for piece in self._agent.output(task, follow=True):
                if "data" in piece:
                    if (new := beyond(piece, seen)) is None:
                        continue
                    told = {"stream": new["stream"], "data": new["data"].decode("utf-8", "backslashreplace")}
                    yield _event("output", told, f"{seen[1]}-{seen[2]}")
                elif "end" in piece:
                    yield _event("end", {"state": piece["end"].get("state")})
        except PeerloadError as error:
            yield _event("failed", {"what": error.what, "why": error.why})

    def _targets(self, nodes: list[dict[str, Any]]) -> list[dict[str, object]]:
        """The targets of Prometheus: all members, at the port of this server."""
        return [
            {
                "targets": [f"{node['address'].rpartition(':')[0]}:{self.port}"],
                "labels": {"node": node["node"], "__scheme__": self._scheme},
            }
            for node in nodes
            if node.get("address") and node["state"] in ("alive", "suspect")
        ]

    # -- acting --------------------------------------------------------------------------------------------------------

    async def _change(self, request: Request, right: ViewerRight) -> Response:
        if not self._access.is_own_page(request):
            return error_response(403, "the request comes from another web page")
        if request.path == "/api/v1/codes":
            return json_response({"v": 1, "code": self._access.new_code(right)})
        if right is not ViewerRight.ACT:
            return error_response(403, "your access is read-only", hint="sign in with the token of a user")
        if (found := TASK_PATH.fullmatch(request.path)) and found[2] in ACTIONS:
            return json_response({"v": 1} | await self._agent.ask(ACTIONS[found[2]], tasks=[found[1]]))
        if found := NODE_PATH.fullmatch(request.path):
            reason = {"reason": str(_body(request).get("reason", ""))[:256]} if found[2] == "drain" else {}
            return json_response({"v": 1} | await self._agent.ask(found[2], at=found[1], **reason))
        return error_response(404, "no such action", why=request.path)


def _asked(request: Request) -> tuple[str, dict[str, Any]] | None:
    """The verb and the fields of the request to the agent for this route; None for other routes. Raises BadRequest."""
    match request.path:
        case "/api/v1/nodes":
            return "nodes", {}
        case "/api/v1/tasks":
            limit = min(max(_whole(request, "limit", TASKS_MAX), 1), TASKS_MAX)
            return "tasks", {"cluster": "cluster" in request.query, "limit": limit}
        case "/api/v1/samples":
            return "samples", {"since": float(_whole(request, "since", 0))}
        case "/api/v1/history":
            limit = min(_whole(request, "limit", 100), HISTORY_MAX)
            return "history", {"limit": limit, "since": _whole(request, "since", 0)}
    return None


def _event(kind: str, data: dict[str, Any], id_: str = "") -> bytes:
    number = f"id: {id_}\n" if id_ else ""
    return f"{number}event: {kind}\ndata: {json.dumps(data)}\n\n".encode("utf-8", "replace")


def _body(request: Request) -> dict[str, Any]:
    """The JSON object in the body; empty if there is none."""
    try:
        found = json.loads(request.body or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole(request: Request, key: str, default: int) -> int:
    """A number in the query. Raises BadRequest."""
    word = request.query.get(key, str(default))
    if not re.fullmatch(r"[0-9]{1,12}", word):
        raise BadRequest(f"{key} is not a whole number", why=repr(word[:40]))
    return int(word)


def _status_of(error: PeerloadError) -> int:
    if isinstance(error, AgentUnavailable):
        return 503
    if isinstance(error, NoSuchTask):
        return 404
    return 403 if error.code == "not-allowed" else 429 if error.code == "slow-down" else 400


def _refusal(error: PeerloadError) -> Response:
    return error_response(_status_of(error), error.what, error.why, error.hint)
