"""Account resolver: queries the account database of the machine for a launcher that runs as root. The database may be on
the network and hang, so the launcher never waits for it.

An unprivileged child makes each query, and is killed if it takes too long. Requests that need the answer wait in
`DeferredRequests`, while leases, exits and everything else go on.
"""

from __future__ import annotations

import os
import pwd
import time

import msgpack

from peerload.launcher import protocol
from peerload.launcher.process import RequestPending, SpawnRefused
from peerload.launcher.record_log import log_line
from peerload.launcher.system.accounts import Entry, LauncherAccount, is_unassigned, look_up
from peerload.launcher.system.settings_rules import UID_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from peerload.launcher.system.fork_server import UserHelpers


ANSWER_S_MAX = 10.0
"""Timeout of a query; well within the time of a lease."""
AT_A_TIME_MAX = 8
"""Maximum number of children; one that cannot be killed still counts."""
OF_ONE_MAX = 4
"""Maximum number of children for one home, so that a node with slow lookups delays only its own tasks."""
QUEUED_MAX = 1024
KEPT_S = 1.0
"""Time for which an answer about an account is cached, so that a burst of tasks needs one query."""
UNASSIGNED_KEPT_S = 60.0
UNASSIGNED_AT_ONCE = 64
ANSWERS_KEPT_MAX = 8192
ANSWER_BYTES_MAX = 1 << 15
"""Half the capacity of a pipe, so that the child does not wait for a reader."""
_UNPRIVILEGED = LauncherAccount("nobody", 65_534, 65_534, (65_534,), "/")
_UNANSWERED = object()
Question = tuple[str, ...]


class AccountPending(RequestPending):
    """The query is pending; the request has to wait for its answer."""

    def __init__(self, question: Question) -> None:
        super().__init__(*question)
        self.question = question


class AccountUnanswered(SpawnRefused):
    """The account database has not answered, so it is unknown whether the request is allowed."""


class _PendingQuestion:
    """A query without an answer. until_s: its timeout. reading: descriptor of the answer, -1 while it waits for a
    child."""

    __slots__ = ("home", "is_overdue", "reading", "until_s")

    def __init__(self, home: str, until_s: float) -> None:
        self.home = home
        self.until_s = until_s
        self.reading = -1
        self.is_overdue = False


class AccountResolver:
    """Lookups by child processes."""

    def __init__(self, helpers: UserHelpers) -> None:
        self._helpers = helpers
        self._pending: dict[Question, _PendingQuestion] = {}
        self._answers: dict[Question, tuple[float, Any]] = {}
        self._answered: set[Question] = set()

    # -- questions -----------------------------------------------------------------------------------------------------

    def entry(self, name: str, group: str, admin_group: str, home: str) -> Entry | None:
        """The account of this name, see `look_up`. home: the node that needs it. Raises AccountPending,
        AccountUnanswered."""
        found: Entry | None = self._answer(("account", name, group, admin_group), home)
        return found

    def is_unassigned(self, uid: int) -> bool:
        """True if a guest may have this uid. Raises AccountPending, AccountUnanswered."""
        first = uid - uid % UNASSIGNED_AT_ONCE
        found = self._answer(("unassigned", str(first)), "")
        return uid in found and is_unassigned(uid, asks=False)

    def _answer(self, question: Question, home: str) -> Any:  # noqa: ANN401 -- of its question's own kind
        now_s = time.monotonic()
        kept = self._answers.get(question)
        if kept is not None and now_s < kept[0]:
            if kept[1] is _UNANSWERED:
                raise AccountUnanswered(
                    f"the account database of this machine has not answered within {ANSWER_S_MAX:g} s"
                )
            return kept[1]
        pending = self._pending.get(question)
        if pending is not None and pending.is_overdue:
            raise AccountUnanswered("the account database of this machine does not answer")
        if pending is None:
            if len(self._pending) >= QUEUED_MAX:
                raise AccountUnanswered("too many questions wait for the account database of this machine")
            self._pending[question] = _PendingQuestion(home, now_s + ANSWER_S_MAX)
            self._begin_some()
        raise AccountPending(question)

    # -- children ------------------------------------------------------------------------------------------------------

    def _begin_some(self) -> None:
        """Start children for waiting queries, within the limits."""
        under_way = [pending.home for pending in self._pending.values() if pending.reading >= 0]
        for question, pending in list(self._pending.items()):
            if len(under_way) >= AT_A_TIME_MAX:
                return
            if pending.reading < 0 and not pending.is_overdue and under_way.count(pending.home) < OF_ONE_MAX:
                under_way.append(pending.home)
                self._begin(question, pending)

    def _begin(self, question: Question, pending: _PendingQuestion) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

        def work() -> None:
            raw = msgpack.packb(_answer_in_child(question))
            if len(raw) <= ANSWER_BYTES_MAX:
                os.write(writing, raw)

        pending.reading = reading
        self._helpers.run(_UNPRIVILEGED, work, lambda: self._done(question), ANSWER_S_MAX, (writing,))
        os.close(writing)

    def _done(self, question: Question) -> None:
        """Read the answer of a child that has ended, or could not be started."""
        pending = self._pending.pop(question)
        try:
            raw = os.read(pending.reading, ANSWER_BYTES_MAX)
        except BlockingIOError:  # another child still has the end for writing open
            raw = b""
        os.close(pending.reading)
        if not pending.is_overdue:
            self._keep(question, _validated(question, raw))
        self._begin_some()

    def _keep(self, question: Question, answer: Any) -> None:  # noqa: ANN401 -- as above
        if answer is _UNANSWERED:
            log_line(f"account database does not answer: question={' '.join(question)}")
        if len(self._answers) >= ANSWERS_KEPT_MAX:
            self._answers.clear()
        kept_s = UNASSIGNED_KEPT_S if question[0] == "unassigned" and answer is not _UNANSWERED else KEPT_S
        self._answers[question] = time.monotonic() + kept_s, answer
        self._answered.add(question)

    # -- time ----------------------------------------------------------------------------------------------------------

    def answered(self) -> set[Question]:
        """Queries that were answered or timed out since the last call."""
        now_s = time.monotonic()
        for question, pending in list(self._pending.items()):
            if not pending.is_overdue and now_s >= pending.until_s:
                self._keep(question, _UNANSWERED)
                if pending.reading < 0:
                    del self._pending[question]
                else:
                    pending.is_overdue = True  # it counts until the child has ended
        answered, self._answered = self._answered, set()
        return answered

    def due_s(self) -> float | None:
        """Time by the monotonic clock at which `answered` has to be called; None: no query is pending."""
        if self._answered:
            return 0.0
        return min((pending.until_s for pending in self._pending.values() if not pending.is_overdue), default=None)


def _answer_in_child(question: Question) -> Any:  # noqa: ANN401 -- as above
    """Answer a query; runs in the child."""
    if question[0] == "account":
        return look_up(question[1], question[2], question[3])
    first = int(question[1])
    return [uid for uid in range(first, min(first + UNASSIGNED_AT_ONCE, UID_MAX)) if is_unassigned(uid)]


def _validated(question: Question, raw: bytes) -> Any:  # noqa: ANN401 -- as above
    """The answer of a child; _UNANSWERED if there is none or it is malformed: libraries that the child has loaded may
    have written to the pipe."""
    try:
        found = msgpack.unpackb(raw)
        if question[0] == "unassigned":
            return frozenset(map(int, found))
        if found is None:
            return None
        name, uid, gid, groups, *rest = found
        home, shell, is_served, is_administrator = rest
        if name != question[1]:
            return _UNANSWERED
        ids = int(uid), int(gid), tuple(map(int, groups))
        return name, *ids, str(home), str(shell), bool(is_served), bool(is_administrator)
    except (ValueError, TypeError, RecursionError, OverflowError):
        return _UNANSWERED


def agent_ids(user: str) -> tuple[int, int]:
    """Uid and gid of the agent's account; queried at the start, when blocking delays nothing. Raises
    ProcessLookupError."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise ProcessLookupError(f"the user of the agent, {user}, does not exist") from None
    return entry.pw_uid, entry.pw_gid


Key = tuple[str, str | int]
"""An attempt, or a user request by its number."""
WAITING_MAX = 4096
"""Bound on deferred attempts and user requests; one more costs the agent its connection."""


class _Waiting:
    __slots__ = ("later", "question", "request")

    def __init__(self, request: protocol.Request, question: Question) -> None:
        self.request = request
        self.question = question
        self.later: dict[tuple[type, int], protocol.Request] = {}


class DeferredRequests:
    """Requests that wait for the account database. Each is carried out from its beginning when there is an answer; later
    requests about the same attempt follow it. ``carry_out`` raises AccountPending before it has done anything.

    An agent that asks for the list has restarted: it considers attempts that are not in the list as never started, so deferred
    requests are dropped then.
    """

    def __init__(self, carry_out: Callable[[protocol.Request], None]) -> None:
        self._carry_out = carry_out
        self._waiting: dict[Key, _Waiting] = {}

    def __call__(self, request: protocol.Request) -> None:
        """Carry out the request, now or later. Raises the same as ``carry_out``."""
        key = _key(request)
        waiting = self._waiting.get(key) if key is not None else None
        match request:
            case protocol.ListRequest():
                self._waiting.clear()
                self._try(request)
            case _ if waiting is None:
                self._try(request)
            case protocol.LeaseRequest(_, deadline_s, ts) if isinstance(waiting.request, protocol.SpawnRequest):
                waiting.request = waiting.request.replace(deadline_s=deadline_s, ts=ts)
            case protocol.SpawnRequest():  # it is waiting already
                pass
            case _:  # keep the newest of each kind, and all signals
                which = type(request), request.signal if isinstance(request, protocol.SignalRequest) else 0
                waiting.later.pop(which, None)
                waiting.later[which] = request

    def _try(self, request: protocol.Request) -> None:
        try:
            self._carry_out(request)
        except AccountPending as wait:
            key = _key(request)
            if key is None or len(self._waiting) >= WAITING_MAX:
                raise protocol.LauncherProtocolError("too many requests wait for the account database") from None
            self._waiting[key] = _Waiting(request, wait.question)

    def resume(self, answered: set[Question]) -> None:
        """Carry out the requests that have waited for these queries."""
        if not answered:
            return
        for key in [key for key, waiting in self._waiting.items() if waiting.question in answered]:
            waiting = self._waiting.pop(key)
            for request in (waiting.request, *waiting.later.values()):
                try:
                    self(request)
                except protocol.REQUEST_FAILURES as error:
                    log_line(f"deferred request failed: key={key[1]} error={error}")


def _key(request: protocol.Request) -> Key | None:
    """Key of the requests that wait together; None for requests that never wait."""
    match request:
        case protocol.DirectoryCheck() | protocol.FileCheck() | protocol.FileAppend() | protocol.FilesJob():
            return "user", request.id
        case (
            protocol.ListRequest()
            | protocol.PingRequest()
            | protocol.UsageRequest()
            | protocol.ListenRequest()
            | protocol.StopRequest()
            | protocol.RetireRequest()
        ):
            return None
        case _:
            return "attempt", request.key
