"""Quotas of users (rules L3 and L4): token buckets for requests and submissions, bounds on connections and waits. They
keep one user from starving the others.

The key of a user is the owner key of its tasks: the uid, or ``node:user``. A user over the rate gets a retry time, and
its connection is not read until then. In user mode only waits of other nodes are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from peerload.model.errors import DiskFull, SlowDown
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

    from peerload.agent.control.authorization import Principal
    from peerload.agent.control.connection import Connection
    from peerload.agent.security_events import SecurityEvents
    from peerload.agent.store.reader import StoreReader
    from peerload.model.config import AgentConfig

USERS_KEPT_MAX = 4096
"""Users with state; beyond this the least recent one without a connection is forgotten."""
COUNTED_EVERY_S = 5.0
"""Minimum interval between two counts of a user's tasks or output in the database."""
WAIT_S_MIN = 0.001
REQUEST_COSTS: dict[type[msgspec.Struct], int] = {
    control.Overview: 250,
    control.ExplainTask: 250,
    control.Checkup: 100,
    control.Nodes: 100,
    control.ReadSamples: 100,
}
"""Tokens of requests that read all tasks or nodes. Every other request takes one."""
WAITED_MAX = 1_000_000
"""Bound on tasks that the requests of one user wait for, in system mode."""
WAITED_BY_NODE_MAX = 2_000_000
"""Bound for all users of one other node, in any mode, since a node could invent users."""
WAITED_RETRY_S = 60.0
"""Retry time for a client that waits for too many tasks; when one ends is not known."""


class WaitCharge:
    """Tasks that one request waits for, until its ``end``, or that of a `with` block. ``bounds``: (key, maximum) pairs that
    it counts towards."""

    def __init__(self, tasks: Counter[tuple[str, ...]], bounds: Sequence[tuple[tuple[str, ...], int]]) -> None:
        self._tasks = tasks
        self._bounds = bounds
        self._charged = 0

    def add(self, tasks: int) -> None:
        """Charge more tasks. Raises SlowDown, with nothing charged."""
        for whose, most in self._bounds:
            if self._tasks[whose] + tasks > most:
                raise SlowDown(
                    "too many tasks are waited for at once",
                    why=f"{self._tasks[whose]} are, {tasks} more were asked for; at most {most}",
                    retry_after_s=WAITED_RETRY_S,
                )
        self._charged += tasks
        self._tasks.update({whose: tasks for whose, _ in self._bounds})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Release the charge."""
        for whose, _ in self._bounds:
            self._tasks[whose] -= self._charged
            if not self._tasks[whose]:
                del self._tasks[whose]
        self._charged = 0


def waits_for(request: control.Request) -> int:
    """Number of tasks and arrays that a request names and may wait for long."""
    if isinstance(request, control.Wait) or (isinstance(request, control.Cancel) and request.wait):
        return len(request.tasks)
    return 0


class TokenBucket:
    """Token bucket: ``per_s`` tokens a second, burst of one second. One request may overdraw it; later ones wait for the
    refill."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._left = per_s
        self._at_s = now_s

    def take(self, number: float, now_s: float) -> float:
        """Take tokens → 0.0, or the seconds until they are available."""
        self._left = min(self._left + (now_s - self._at_s) * self._per_s, self._per_s)
        self._at_s = now_s
        if self._left < min(number, 1):
            return max((1 - self._left) / self._per_s, WAIT_S_MIN)
        self._left -= number
        return 0.0


class _Used:
    """State of one user."""

    def __init__(self, config: AgentConfig, now_s: float) -> None:
        self.connections = 0
        self.requests = TokenBucket(config.user_requests_per_s, now_s)
        self.submits = TokenBucket(config.user_submits_per_s, now_s)
        self.unfinished = 0
        self.unfinished_at_s = -COUNTED_EVERY_S
        self.output_bytes = 0
        self.output_at_s = -COUNTED_EVERY_S


class Quotas:
    """Quotas of all users of one agent."""

    def __init__(
        self,
        config: AgentConfig,
        store: StoreReader,
        security: SecurityEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._store = store
        self._security = security
        self._clock = clock
        self._is_system = config.mode == "system"
        self._used: OrderedDict[str, _Used] = OrderedDict()
        self._waited: Counter[tuple[str, ...]] = Counter()

    def connected(self, caller: Principal) -> SlowDown | None:
        """Count a new connection of this user → None, or the refusal."""
        if not self._is_system:
            return None
        used = self._of(caller.counted_as)
        most = self._config.user_connections_max
        if used.connections >= most:
            self._security.report("L3", f"uid {caller.uid}", "too many connections of one user")
            return SlowDown("too many connections of one user", why=f"at most {most} at a time")
        used.connections += 1
        return None

    def disconnected(self, caller: Principal) -> None:
        """Count a closed connection."""
        used = self._used.get(caller.counted_as)
        if used is not None:
            used.connections = max(used.connections - 1, 0)

    def take_tokens(self, caller: Principal, tokens: int = 1) -> float:
        """Take tokens for a request or a part of its response → 0.0, or the seconds to wait. At most the tokens of one second
        are taken."""
        if not self._is_system:
            return 0.0
        tokens_max = self._config.user_requests_per_s
        return self._of(caller.counted_as).requests.take(min(tokens, tokens_max), self._clock())

    def check_rate(self, connection: Connection, request: control.Request) -> None:
        """Take the tokens of a request. Raises SlowDown if there are none, and stops reading this client until there are."""
        caller = connection.caller
        wait_s = self.take_tokens(caller, REQUEST_COSTS.get(type(request), 1))
        if wait_s:
            connection.rest(wait_s)
            self._security.report("L3", caller.user or f"uid {caller.uid}", "asks too often")
            why = f"at most {self._config.user_requests_per_s:g} a second; a long list counts as several"
            raise SlowDown("too many requests of one user", why=why, retry_after_s=round(wait_s, 3))

    async def pace(self, caller: Principal, tokens: int) -> None:
        """Wait until there are tokens for a part of a response, and take them. Yields to other requests in any case."""
        await asyncio.sleep(0)
        while wait_s := self.take_tokens(caller, tokens):  # noqa: ASYNC110 -- it waits for time
            await asyncio.sleep(wait_s)

    def check_submission(self, caller: Principal, tasks: int) -> None:
        """Count new tasks of this user. Raises SlowDown or DiskFull beyond the quota."""
        if not self._is_system:
            return
        try:
            self._take_tasks(caller.counted_as, tasks)
        except (SlowDown, DiskFull) as error:
            self._security.report("L4", caller.user, error.what)
            raise

    def _take_tasks(self, who: str, tasks: int) -> None:
        used, config, now_s = self._of(who), self._config, self._clock()
        if used.unfinished + tasks > config.user_tasks_max:
            if now_s - used.unfinished_at_s >= COUNTED_EVERY_S:
                used.unfinished, used.unfinished_at_s = self._store.unfinished_of(who), now_s
            if used.unfinished + tasks > config.user_tasks_max:
                why = f"{used.unfinished} are queued or running, {tasks} more were asked for; at most {config.user_tasks_max}"
                raise SlowDown("too many tasks of one user", why=why, retry_after_s=COUNTED_EVERY_S)
        if now_s - used.output_at_s >= COUNTED_EVERY_S:
            used.output_bytes, used.output_at_s = self._store.output_bytes_of_owner(who), now_s
        if used.output_bytes > config.user_output_bytes_max:
            why = f"{used.output_bytes} bytes are kept of your tasks; at most {config.user_output_bytes_max}"
            raise DiskFull("your output exceeds its limit", why=why, hint="peerload clean --outputs")
        wait_s = used.submits.take(tasks, now_s)
        if wait_s:
            why = f"at most {config.user_submits_per_s:g} a second"
            raise SlowDown("too many tasks at once", why=why, retry_after_s=round(wait_s, 3))
        used.unfinished += tasks

    def charge(self, connection: Connection, tasks: int = 0) -> WaitCharge:
        """Begin the charge of a request that waits for tasks; a wait may last for days, and holds some 200 bytes a task.
        Raises SlowDown."""
        bounds: list[tuple[tuple[str, ...], int]] = []
        if self._is_system:
            bounds.append(((connection.from_node, connection.caller.counted_as), WAITED_MAX))
        if connection.from_node:
            bounds.append(((connection.from_node,), WAITED_BY_NODE_MAX))
        charge = WaitCharge(self._waited, bounds)
        charge.add(tasks)
        return charge

    def _of(self, who: str) -> _Used:
        used = self._used.get(who)
        if used is None:
            used = self._used[who] = _Used(self._config, self._clock())
            used.unfinished, used.unfinished_at_s = self._store.unfinished_of(who), self._clock()
            if len(self._used) > USERS_KEPT_MAX:
                idle = next((name for name, one in self._used.items() if not one.connections and name != who), None)
                if idle is not None:
                    del self._used[idle]
        self._used.move_to_end(who)
        return used
