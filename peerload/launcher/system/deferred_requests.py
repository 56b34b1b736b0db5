"""Deferred requests wait for the account database, in a launcher that serves all users. Each is carried out from its
beginning once there is an answer; later requests about the same attempt follow it.

An agent that asks for the list has started anew: it takes what is not in the list for never started, so deferred
requests are dropped then. Used by such a launcher alone.
"""

from __future__ import annotations

from peerload.launcher.protocol import (
    REQUEST_FAILURES,
    DirectoryCheck,
    FileAppend,
    FileCheck,
    FilesJob,
    LauncherProtocolError,
    LeaseRequest,
    ListenRequest,
    ListRequest,
    PingRequest,
    SignalRequest,
    SpawnRequest,
    StopRequest,
    UsageRequest,
)
from peerload.launcher.record_log import log_line
from peerload.launcher.system.account_resolver import AccountPending, Question

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.launcher.protocol import Request

    Key = tuple[str, str | int]
    """An attempt, or a user request by its number."""

WAITING_MAX = 4096
"""Bound on deferred attempts and user requests; one more costs the agent its connection."""


class _Waiting:
    __slots__ = ("later", "question", "request")

    def __init__(self, request: Request, question: Question) -> None:
        self.request = request
        self.question = question
        self.later: dict[tuple[type, int], Request] = {}


class DeferredRequests:
    """``carry_out`` carries out requests, and raises AccountPending before it has done anything."""

    def __init__(self, carry_out: Callable[[Request], None]) -> None:
        self._carry_out = carry_out
        self._waiting: dict[Key, _Waiting] = {}

    def __call__(self, request: Request) -> None:
        """Carry it out, now or later. Raises what ``carry_out`` does."""
        key = _key(request)
        waiting = self._waiting.get(key) if key is not None else None
        match request:
            case ListRequest():
                self._waiting.clear()
                self._try(request)
            case _ if waiting is None:
                self._try(request)
            case LeaseRequest(_, deadline_s, ts) if isinstance(waiting.request, SpawnRequest):
                waiting.request = waiting.request.replace(deadline_s=deadline_s, ts=ts)
            case SpawnRequest():  # it waits already
                pass
            case _:  # of each kind the newest, of signals each
                which = type(request), request.signal if isinstance(request, SignalRequest) else 0
                waiting.later.pop(which, None)
                waiting.later[which] = request

    def _try(self, request: Request) -> None:
        try:
            self._carry_out(request)
        except AccountPending as wait:
            key = _key(request)
            if key is None or len(self._waiting) >= WAITING_MAX:
                raise LauncherProtocolError("too many requests wait for the account database") from None
            self._waiting[key] = _Waiting(request, wait.question)

    def resume(self, answered: set[Question]) -> None:
        """Carry out what has waited for these questions."""
        if not answered:
            return
        for key in [key for key, waiting in self._waiting.items() if waiting.question in answered]:
            waiting = self._waiting.pop(key)
            for request in (waiting.request, *waiting.later.values()):
                try:
                    self(request)
                except REQUEST_FAILURES as error:
                    log_line(f"deferred request failed: key={key[1]} error={error}")


def _key(request: Request) -> Key | None:
    """Requests with the same key wait together; None for requests that never wait."""
    match request:
        case DirectoryCheck() | FileCheck() | FileAppend() | FilesJob():
            return "user", request.id
        case ListRequest() | PingRequest() | UsageRequest() | ListenRequest() | StopRequest():
            return None
        case _:
            return "attempt", request.key
