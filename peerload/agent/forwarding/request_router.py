"""Request router: decides whether this node, the home of the named tasks, or several nodes answer a request.

A request that names tasks of several homes is split by home, and the responses are validated and merged: lists are concatenated,
numbers added. A request that another node has forwarded is answered here or refused, never forwarded again.

A member may have another version, or be broken or compromised. An invalid response becomes an error of that node alone: it does
not stop this agent, and does not reach the client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from peerload.agent.control.authorization import refs_of
from peerload.agent.control.connection import Connection, error_object
from peerload.agent.control.task_ids import REF
from peerload.agent.forwarding.tunnels import ResponseQueue
from peerload.agent.runtime import now
from peerload.agent.views.task import find_remote
from peerload.core.membership.peers import NOT_MET, PeerState
from peerload.model.errors import BadMessage, BadRequest, LinkUnavailable, NoSuchTask, PeerloadError
from peerload.wire import control
from peerload.wire.expected import validation_error_text
from peerload.wire.frame import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.forwarding.tunnels import ForwardedRequests
    from peerload.agent.store.reader import StoreReader
    from peerload.core.node import Node


Frames = AsyncGenerator[tuple[str, dict[str, Any]], None]
"""Kind and body of each response frame."""
READS = (control.Show, control.Wait, control.Events)
"""Read-only requests for several tasks: the first error may be the response to the whole request."""
KNOWN_BY_EXECUTOR = (control.Show, control.ReadOutput, control.Events)
"""Requests that the executor of a task can also answer."""
CLUSTER_SILENT_S_MAX = 3.0
"""Silence after which a node is left out of a request to all nodes, and is listed as missing."""
CLUSTER_WAITED_S_MAX = 20.0
"""Total time of waiting for the response frames of one node after which it is left out."""
CLUSTER_AT_ONCE = 32
"""Maximum number of concurrent requests to nodes."""
FRAMES_AHEAD_MAX = 8
"""Maximum number of response frames of all nodes that wait for the client."""
NUMBER_MIN = -(1 << 63)
NUMBER_MAX = (1 << 64) - 1
"""Range of integers in a frame; sums are clamped to it."""
LISTED_MAX = 1_000_000
"""Maximum number of tasks that one node may list if the request has no limit."""
_LISTS = ("tasks", "damaged")


class LocalRequests(Protocol):
    """Carries out requests on this node."""

    def work(self, connection: Connection, request: control.Request, /) -> Coroutine[Any, Any, None] | None:
        """The work that answers a request; None if it was answered, or the core will answer it."""


class RequestRouter:
    """Decides which nodes answer a request. ``local`` carries out the requests for this node."""

    def __init__(
        self,
        local: LocalRequests,
        forwards: ForwardedRequests,
        task_ids: TaskIds,
        access: Authorization,
        store: StoreReader,
        node: Node,
    ) -> None:
        self._local = local
        self._forwards = forwards
        self._task_ids = task_ids
        self._access = access
        self._store = store
        self._node = node
        self._own = node.state.node

    def work(self, connection: Connection, request: control.Request) -> Coroutine[Any, Any, None] | None:
        """The work at other nodes that answers a request; None if only this node answers it. Raises BadRequest."""
        own = self._own
        if connection.from_node:
            if request.at not in {"", own} or getattr(request, "cluster", False):
                why = f"it came from {connection.from_node} and names {request.at or 'all nodes'}"
                raise BadRequest("a forwarded request is not forwarded again", why=why)
            return None
        if request.at and request.at != own:
            return self._ask_one(connection, request.at, self._named_in_full(request))
        if getattr(request, "cluster", False):
            return self._ask_all(connection, request)
        shares = {} if request.at else self._by_home(connection, request)
        if not shares or list(shares) == [own]:
            return None
        if len(shares) == 1:
            ((home, share),) = shares.items()
            return self._ask_home(connection, home, share)
        return self._ask_homes(connection, request, shares)

    async def _carry_out(self, connection: Connection, request: control.Request) -> None:
        work = self._local.work(connection, request)
        if work is not None:
            await work

    # -- splitting -----------------------------------------------------------------------------------------------------------

    def _by_home(self, connection: Connection, request: control.Request) -> dict[str, control.Request]:
        """The request for each home of the named tasks; empty if no task is named."""
        refs: dict[str, list[str]] = {}
        for ref in refs_of(request):
            parsed = REF.fullmatch(ref)
            home = (parsed["home"] if parsed is not None else None) or self._own
            if home != self._own and isinstance(request, control.Events) and self._knows(connection, request, (ref,)):
                home = self._own  # this node has its own events, also of tasks of other homes
            refs.setdefault(home, []).append(ref)
        if len(refs) == 1:
            return dict.fromkeys(refs, request)
        return {home: msgspec.structs.replace(request, tasks=tuple(names)) for home, names in refs.items()}

    def _named_in_full(self, request: control.Request) -> control.Request:
        """Expand references: `42` and `@` are tasks of this node, even in a request to another. Raises BadRequest or NoSuchTask."""
        refs = refs_of(request)
        if isinstance(getattr(request, "task", None), str):
            return msgspec.structs.replace(request, task=self._task_ids.whole_id(refs[0]))
        if refs:
            return msgspec.structs.replace(request, tasks=tuple(self._task_ids.whole_id(ref) for ref in refs))
        return request

    async def check_dependencies(self, connection: Connection, request: control.Submit | control.RetryRequest) -> None:
        """In system mode, ask the homes of a submission's dependencies whether its user may see them. Raises PeerloadError."""
        if not isinstance(request, control.Submit) or not self._access.is_system or connection.from_node:
            return
        awaited: dict[str, list[str]] = {}
        for ref in (*request.terms.after, *request.terms.after_ok):
            parsed = REF.fullmatch(ref)
            if parsed is not None and parsed["home"] not in (None, self._own):
                awaited.setdefault(parsed["home"], []).append(ref)
        for home, refs in awaited.items():
            query = control.Events(tasks=tuple(dict.fromkeys(refs)), limit=0)
            async with contextlib.aclosing(self._answers(connection, home, query)) as frames:
                async for kind, body in frames:
                    if kind == "error":
                        raise RefusedElsewhere(body)

    # -- forwarding --------------------------------------------------------------------------------------------------------

    async def _ask_one(self, connection: Connection, node: str, request: control.Request) -> None:
        async with contextlib.aclosing(self._answers(connection, node, request)) as frames:
            async for kind, body in frames:
                if kind == "more":
                    await connection.drain()
                connection.forward_frame(request.id, kind, body)

    async def _ask_home(self, connection: Connection, home: str, request: control.Request) -> None:
        """Forward to the home of the tasks. If it is unreachable and this node runs them, answer here as far as possible."""
        is_answered = False
        try:
            async with contextlib.aclosing(self._answers(connection, home, request)) as frames:
                async for kind, body in frames:
                    is_answered = True
                    if kind == "more":
                        await connection.drain()
                    connection.forward_frame(request.id, kind, body)
        except (LinkUnavailable, NoSuchTask) as error:
            if is_answered or not self._knows(connection, request, refs_of(request)):
                raise
            if isinstance(request, control.ReadOutput):
                away = {"id": request.task, "home": home, "why": error.why or error.what}
                connection.more(request.id, {"away": away})
            await self._carry_out(connection, msgspec.structs.replace(request, at=self._own))

    async def _ask_homes(
        self, connection: Connection, request: control.Request, shares: Mapping[str, control.Request]
    ) -> None:
        """Forward to several homes, and merge the responses. A request that changes something starts when all homes are
        connected; if one refuses, the error names the homes that carried it out."""
        if not isinstance(request, READS):
            for home, share in shares.items():
                await self._reach(connection, home, share)
        done, refusal = await self._collect(connection, request, shares)
        if refusal is None:
            answer: dict[str, Any] = {}
            for body in done.values():
                answer = merged(answer, body)
            if _first_is_enough(request):
                answer["timed_out"] = all(body.get("timed_out") for body in done.values())
            connection.ok(request.id, answer)
            return
        if done and not isinstance(request, READS):
            hint = f"done on {', '.join(sorted(done))}.  {refusal.get('hint', '')}"
            refusal = refusal | {"hint": hint.strip()}
        connection.forward_frame(request.id, "error", refusal)

    async def _collect(
        self, connection: Connection, request: control.Request, shares: Mapping[str, control.Request]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
        """The final response of each home, and the first error, if any. Other frames are forwarded as they arrive."""
        done: dict[str, dict[str, Any]] = {}
        refusal: dict[str, Any] | None = None
        async with contextlib.aclosing(_merge_streams(self._answers, connection, shares)) as frames:
            async for node, kind, body in frames:
                if kind == "more":
                    await connection.drain()
                    connection.forward_frame(request.id, kind, body)
                    continue
                if kind == "error":
                    refusal = refusal or body
                else:
                    done[node] = body
                if (refusal and isinstance(request, READS)) or (
                    _first_is_enough(request) and not body.get("timed_out")
                ):
                    break
        return done, refusal

    async def _ask_all(self, connection: Connection, request: control.Request) -> None:
        """Forward to every node. Nodes that do not answer are listed as ``missing``: node state why."""
        nodes = [self._own]
        missing: list[dict[str, object]] = []
        for peer in sorted(self._node.membership, key=lambda peer: peer.identity.node):
            if peer.state is PeerState.LEFT or peer.is_shut_out:
                continue
            if peer.state is PeerState.DEAD:
                missing.append(
                    {"node": peer.identity.node, "state": peer.state.value, "why": self._state_text(peer.identity.node)}
                )
            else:
                nodes.append(peer.identity.node)
        share = msgspec.structs.replace(request, cluster=False, at="")
        answer: dict[str, Any] = {}
        together = _merge_streams(self._listings, connection, dict.fromkeys(nodes, share), CLUSTER_SILENT_S_MAX)
        async with contextlib.aclosing(together) as frames:
            async for node, kind, body in frames:
                if kind == "error":
                    missing.append({"node": node, "state": self._state(node), "why": body["why"] or body["what"]})
                    continue
                lists = {key: body[key] for key in _LISTS if body.get(key)}
                if lists:
                    await connection.stream(request.id, lists)
                if kind == "ok":
                    answer = merged(answer, {key: [] if key in lists else value for key, value in body.items()})
        connection.ok(request.id, answer | {"missing": missing})

    async def _listings(self, connection: Connection, node: str, request: control.Request) -> Frames:
        """Validated responses of a request that lists tasks. Also raises BadMessage."""
        listing = MergedListing(node, getattr(request, "limit", None))
        async with contextlib.aclosing(self._answers(connection, node, request)) as frames:
            async for kind, body in frames:
                yield kind, body if kind == "error" else listing.read(body)

    async def _answers(self, connection: Connection, node: str, request: control.Request) -> Frames:
        """The response frames of this or another node. Raises LinkUnavailable or NoSuchTask."""
        if node == self._own:
            async for frame in self._own_answers(connection, request):
                yield frame
            return
        self._check_known(node, request)
        async with contextlib.aclosing(self._forwards.ask(connection, node, request)) as frames:
            try:
                async for frame in frames:
                    yield frame
            except LinkUnavailable as error:
                raise self._unavailable(connection, node, request, error) from None

    async def _own_answers(self, connection: Connection, request: control.Request) -> Frames:
        share = _LocalShare(connection)
        try:
            share.spawn(request.id, self._carry_out(share, request))
            async for frame in share.answers:
                yield frame
        finally:
            share.lost()

    async def _reach(self, connection: Connection, node: str, request: control.Request) -> None:
        if node == self._own:
            return
        self._check_known(node, request)
        try:
            await self._forwards.ensure_open(connection, node)
        except LinkUnavailable as error:
            raise self._unavailable(connection, node, request, error) from None

    def _knows(self, connection: Connection, request: control.Request, names: tuple[str, ...]) -> bool:
        access, caller = self._access, connection.caller
        if isinstance(request, control.Events):
            return caller.sees_all and all(self._store.events(0, 1, newest=True, tasks=[name]) for name in names)
        if not isinstance(request, control.Show | control.ReadOutput):
            return False
        return all(
            find_remote(self._node, name) is not None and (caller.sees_all or access.sees_remote_named(caller, name))
            for name in names
        )

    # -- errors ------------------------------------------------------------------------------

    def _check_known(self, node: str, request: control.Request) -> None:
        """Raises NoSuchTask, or BadRequest if the request names no task, for an unknown node."""
        membership = self._node.membership
        if membership.get(node) is not None or node in membership.gossip.anti_entropy.known:
            return
        refs = refs_of(request)
        why = f"no node {node} is known here"
        if refs and not request.at:
            raise NoSuchTask(f"no such task: {refs[0]}", why=f"its home is {node}, and {why}", hint="peerload nodes")
        raise BadRequest(f"{node} cannot be reached", why=why, hint="peerload nodes")

    def _unavailable(
        self, connection: Connection, node: str, request: control.Request, error: LinkUnavailable
    ) -> LinkUnavailable:
        refs = refs_of(request)
        what = f"{refs[0]}: its home {node}" if refs and not request.at else node
        stands = self._state_text(node)
        why = f"{stands}: {error.why or error.what}" if stands else error.why or error.what
        hint = "list the nodes:  peerload nodes"
        if refs and not request.at and isinstance(request, KNOWN_BY_EXECUTOR):
            verb = "logs" if isinstance(request, control.ReadOutput) else type(request).__struct_config__.tag
            hint = f"ask the node that runs it:  peerload {verb} --at NODE {refs[0]}"
        if self._knows(connection, request, refs):
            hint = "ask again: this node then answers with what it knows"
        return LinkUnavailable(node, f"{what} cannot be reached", why=why, hint=hint)

    def _state(self, node: str) -> str | None:
        peer = self._node.membership.get(node)
        return None if peer is None else peer.state.value

    def _state_text(self, node: str) -> str:
        """Description of the state of a node; "" if it is alive."""
        peer = self._node.membership.get(node)
        if peer is None:
            is_of_earlier_start = node in self._node.membership.gossip.anti_entropy.known
            return f"it was {NOT_MET}" if is_of_earlier_start else "it is no longer known here"
        if peer.state is PeerState.ALIVE:
            return ""
        if peer.state is PeerState.LEFT:
            return "it has left the cluster"
        ago_s = max(now().boot_s - peer.heard_s, 0.0)
        return f"it was last heard of {ago_s:.0f} s ago ({peer.state.value})"


class RefusedElsewhere(PeerloadError):
    """The error that another node has sent as its answer."""

    def __init__(self, body: Mapping[str, str]) -> None:
        super().__init__(body["what"], why=body["why"], hint=body["hint"])
        self.code = body["code"]


class _LocalShare(Connection):
    """Connection for this node's own share of a split request: its frames go into the queue that is merged."""

    def __init__(self, client: Connection) -> None:
        super().__init__(client.server)
        self.uid = client.uid
        self.caller = client.caller
        self.answers = ResponseQueue()

    def _write(self, raw: bytes) -> None:
        _, kind, body = control.decode_answer(raw[HEADER_BYTES:])
        self.answers.add(kind, body)

    async def drain(self) -> None:
        await self.answers.drain()

    def lost(self) -> None:
        super().lost()
        self.answers.close()


def _first_is_enough(request: control.Request) -> bool:
    return isinstance(request, control.Wait) and request.any


def _check_total_wait(node: str, waited_s: float, silent_s_max: float | None) -> None:
    if silent_s_max is not None and waited_s > CLUSTER_WAITED_S_MAX:
        why = f"its response is not complete after {CLUSTER_WAITED_S_MAX:g} s"
        raise LinkUnavailable(node, f"{node} is too slow", why=why)


async def _merge_streams(
    ask: Callable[[Connection, str, control.Request], Frames],
    connection: Connection,
    shares: Mapping[str, control.Request],
    silent_s_max: float | None = None,
) -> AsyncGenerator[tuple[str, str, dict[str, Any]], None]:
    """(node, kind, body) of the response frames of several nodes as they arrive; the last of each node is "ok" or "error"."""
    arrived: asyncio.Queue[tuple[str, str, dict[str, Any]]] = asyncio.Queue(FRAMES_AHEAD_MAX)
    at_once = asyncio.Semaphore(CLUSTER_AT_ONCE)

    loop = asyncio.get_running_loop()
    bugs: list[Exception] = []

    async def one(node: str, share: control.Request) -> None:
        try:
            async with at_once, contextlib.aclosing(ask(connection, node, share)) as frames:
                waited_s = 0.0
                while True:
                    began_s = loop.time()
                    async with asyncio.timeout(silent_s_max):
                        kind, body = await anext(frames)
                    waited_s += loop.time() - began_s
                    _check_total_wait(node, waited_s, silent_s_max)
                    await arrived.put((node, kind, body))
                    if kind != "more":
                        return
        except TimeoutError:
            why = f"no data for {silent_s_max:g} s"
            await arrived.put((node, "error", error_object(LinkUnavailable(node, f"{node} does not answer", why=why))))
        except Exception as error:  # noqa: BLE001 -- a bug is raised below, where it is told from errors
            if not isinstance(error, PeerloadError):
                bugs.append(error)
            await arrived.put((node, "error", error_object(error)))

    work = [loop.create_task(one(node, share)) for node, share in shares.items()]
    try:
        left = len(shares)
        while left:
            frame = await arrived.get()
            if bugs:
                raise bugs[0]
            left -= frame[1] != "more"
            yield frame
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_At = Annotated[float, Meta(ge=0.0, le=1e12)] | None
_States = Annotated[dict[Annotated[str, Meta(max_length=20)], _Count], Meta(max_length=32)]


class _Task(msgspec.Struct, frozen=True):
    """The fields of a listed task that clients rely on."""

    id: str
    state: str
    submitted_at: _At = None
    started_at: _At = None
    ended_at: _At = None


class _Damaged(msgspec.Struct, frozen=True):
    id: str
    why: str


class _Listing(msgspec.Struct, frozen=True):
    """A frame of a response that lists tasks."""

    tasks: list[_Task] = []
    damaged: list[_Damaged] = []
    truncated: bool = False
    unfinished: _States | None = None


class MergedListing:
    """The response of one of several nodes that list tasks. ``limit``: maximum number of tasks that it may list."""

    def __init__(self, node: str, limit: int | None) -> None:
        self._node = node
        self._limit = LISTED_MAX if limit is None else limit
        self._count = 0

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Validate one frame → its known keys. Raises BadMessage, which names the node."""
        try:
            form = msgspec.convert(body, _Listing)
        except (msgspec.ValidationError, RecursionError) as error:
            why = f"its list of tasks is malformed: {validation_error_text(error)[:200]}"
            raise BadMessage(f"{self._node} sent an invalid response", why=why) from None
        self._count += len(form.tasks)
        if self._count > self._limit:
            raise BadMessage(
                f"{self._node} sent an invalid response",
                why=f"it lists more than the {self._limit} tasks that were requested",
            )
        return {key: body[key] for key in form.__struct_fields__ if key in body}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two responses: lists are concatenated, numbers added within the range of a frame, Booleans or-ed, tables merged
    by key; other values are taken from the first. `bounds.DEPTH_MAX` in the decoder bounds the depth."""
    together = dict(first)
    for key, value in second.items():
        there = together.get(key)
        match there, value:
            case None, _:
                together[key] = value
            case bool(), bool():
                together[key] = there or value
            case list(), list():
                together[key] = [*there, *value]
            case dict(), dict():
                together[key] = merged(there, value)
            case (int() | float(), int() | float()) if not isinstance(there, bool) and not isinstance(value, bool):
                together[key] = _sum(there, value)
    return together


def _sum(first: float, second: float) -> float:
    total = first + second
    return min(max(total, NUMBER_MIN), NUMBER_MAX) if isinstance(total, int) else total
