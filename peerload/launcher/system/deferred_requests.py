"""Deferred requests wait for the account database, in a launcher that serves all users: each is carried out from its
beginning once there is an answer, and what the agent has said of the same attempt meanwhile is carried out after it.

The agent that asks for the list is one that has begun anew: what waited then is not carried out any more, since such an agent
takes what is not in the list for never started. Used by such a launcher alone.
"""

from __future__ import annotations

from peerload.launcher.control_socket import MALFORMED
from peerload.launcher.record_log import say
from peerload.launcher.system.account_resolver import AccountPending, Question

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WAITING_MAX = 4096
"""Attempts and errands; the next one is taken for no request, which costs the agent its connection, and then its list."""


class _Waiting:
    __slots__ = ("later", "question", "request")

    def __init__(self, request: dict[str, Any], question: Question) -> None:
        self.request = request
        self.question = question
        self.later: dict[tuple[str, int], dict[str, Any]] = {}


class DeferredRequests:
    """``carry_out`` is what does the requests, and raises NotKnownYet before it has done anything."""

    def __init__(self, carry_out: Callable[[dict[str, Any]], None]) -> None:
        self._carry_out = carry_out
        self._waiting: dict[str, _Waiting] = {}

    def __call__(self, request: dict[str, Any]) -> None:
        """Carry it out, now or later. Raises what ``carry_out`` does."""
        do = request["do"]
        if do == "list":
            self._waiting.clear()
        key = f"errand {request['id']}" if "id" in request else request.get("key")
        waiting = self._waiting.get(key) if isinstance(key, str) else None
        if waiting is None:
            self._try(request)
        elif do == "lease":
            waiting.request |= {"deadline_s": float(request["deadline_s"]), "ts": float(request.get("ts", 0.0))}
        elif do != "spawn":  # of each kind the newest, of signals each
            which = do, int(request.get("signal", 0))
            waiting.later.pop(which, None)
            waiting.later[which] = request

    def _try(self, request: dict[str, Any]) -> None:
        try:
            self._carry_out(request)
        except AccountPending as wait:
            if len(self._waiting) >= WAITING_MAX:
                raise ValueError("too much waits for the account database") from None
            key = f"errand {request['id']}" if "id" in request else str(request["key"])
            self._waiting[key] = _Waiting(request, wait.question)

    def resume(self, answered: set[Question]) -> None:
        """These questions have been answered."""
        if not answered:
            return
        for key in [key for key, waiting in self._waiting.items() if waiting.question in answered]:
            waiting = self._waiting.pop(key)
            for request in (waiting.request, *waiting.later.values()):
                try:
                    self(request)
                except MALFORMED as error:
                    say(f"{key}: no request: {error}")
