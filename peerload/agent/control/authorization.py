"""Access control: the right that each verb requires, the ownership of tasks (rules L1, L2 and the FORWARD part of P3), and quotas.

In user mode an agent belongs to one person: any client that can connect has all rights, except for requests that are only allowed
at the machine itself. In system mode it serves all users in its groups. The identity comes from the operating system, or, for a
forwarded request, from the node that forwards it; never from the request. Only administrators see tasks of others. For
other users such a task does not exist, and they get the same error.

`Quotas` keep one user from starving the others (rules L3 and L4): token buckets for requests and submissions, bounds on connections
and waits. The key of a user is the owner key of its tasks: the uid, or ``node:user``. A user over the rate gets a retry time, and
its connection is not read until then. In user mode only the waits of other nodes are bounded.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import os
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from peerload.agent.accounts import SYSTEM_UIDS_BELOW, Account, Accounts, group_number
from peerload.agent.control.task_ids import REF, TaskIds, last_submission
from peerload.model import rules
from peerload.model.errors import BadRequest, DiskFull, NotAllowed, SlowDown
from peerload.model.task import owner_key
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.agent.runtime import AgentInfo
    from peerload.agent.store.reader import StoreReader
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.work import HomeTask, RemoteTask, UntouchedMembers
    from peerload.model.config import AgentConfig
    from peerload.model.messages import Forward
    from peerload.model.task import SubmitOptions, TaskSpec

HOPS_MAX = 1
"""Maximum number of forwards of a request: only the node of its client forwards it."""
USERS_KEPT_MAX = 4096
"""Maximum number of users with state; beyond it, the least recent one without a connection is forgotten."""
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
"""Tokens for requests that read all tasks or nodes. Every other request takes one."""
WAITED_MAX = 1_000_000
"""Maximum number of tasks that the requests of one user wait for, or list, in system mode."""
WAITED_BY_NODE_MAX = 2_000_000
"""Maximum number of such tasks for all users of one other node, in any mode, since a node could invent users."""
WAITED_RETRY_S = 60.0
"""Retry time for a client that waits for too many tasks; the time of the next end is unknown."""


class Principal(msgspec.Struct, frozen=True, gc=False):
    """Identity behind a request. who: the owner key of its tasks, "" = all tasks; user: displayed name; uid: on this
    machine, -1 = none; node: the node that forwarded the request, "" = this one."""

    who: str
    user: str = ""
    uid: int = -1
    is_admin: bool = False
    node: str = ""

    @property
    def counted_as(self) -> str:
        """Key of its quotas. Users of another node without an account here share one key, since a node could invent users."""
        return f"{self.node}:" if self.node and self.uid < 0 else self.who

    @property
    def sees_all(self) -> bool:
        return self.is_admin or not self.who


NOBODY = Principal("nobody:")
"""The principal of a connection before authentication; it owns nothing."""


class Right(enum.StrEnum):
    """Right that a verb requires."""

    LOOK = "everybody who may use the agent"
    SUBMIT = "everybody who may use the agent, as their user here"
    OWN = "the owner of each named or listed task; an administrator"
    ADMIN = "an administrator"
    HERE = "an administrator, at this machine"


RIGHTS: dict[type[msgspec.Struct], Right] = {
    control.Info: Right.LOOK,
    control.Nodes: Right.LOOK,
    control.Policy: Right.LOOK,
    control.Power: Right.LOOK,
    control.Energy: Right.LOOK,
    control.Stats: Right.LOOK,
    control.ReadSamples: Right.LOOK,
    control.Files: Right.SUBMIT,
    control.Settings: Right.LOOK,
    control.Checkup: Right.LOOK,
    control.Submit: Right.SUBMIT,
    control.RetryRequest: Right.OWN,
    control.TasksRequest: Right.OWN,
    control.Select: Right.OWN,
    control.History: Right.OWN,
    control.Show: Right.OWN,
    control.ReadUsage: Right.OWN,
    control.ExplainTask: Right.OWN,
    control.Events: Right.OWN,
    control.Wait: Right.OWN,
    control.ReadOutput: Right.OWN,
    control.Cancel: Right.OWN,
    control.Remote: Right.OWN,
    control.Hold: Right.OWN,
    control.Release: Right.OWN,
    control.Prio: Right.OWN,
    control.Exec: Right.OWN,
    control.SendSignal: Right.OWN,
    control.Input: Right.OWN,
    control.Resize: Right.OWN,
    control.Attend: Right.OWN,
    control.Detach: Right.OWN,
    control.Clean: Right.OWN,
    control.Groups: Right.OWN,
    control.Overview: Right.OWN,
    control.Group: Right.ADMIN,
    control.KeepPowerProfile: Right.ADMIN,
    control.Drain: Right.ADMIN,
    control.Undrain: Right.ADMIN,
    control.Forget: Right.ADMIN,
    control.Stop: Right.ADMIN,
    control.Leave: Right.ADMIN,
    control.Invite: Right.HERE,
    control.RevokeRequest: Right.HERE,
    control.Rotate: Right.HERE,
    control.CancelRemote: Right.HERE,
    control.Restart: Right.HERE,
}
"""Right of every verb. In user mode only HERE has an effect: it refuses forwarded requests."""


class Authorization:
    """Access control of one agent. ``executor`` knows the tasks of other homes that are here."""

    def __init__(self, info: AgentInfo, store: Store, executor: ExecutorHandoff, security: SecurityEvents) -> None:
        self._info = info
        self._store = store
        self._executor = executor
        self._security = security
        self._names = TaskIds(store, info.config.node)
        self._own_uid = os.getuid()
        self.is_system = info.config.mode == "system"
        self.accounts = Accounts()

    @property
    def _config(self) -> AgentConfig:
        return self._info.config

    # -- principals -----------------------------------------------------------------------------------------------------------

    def local(self, uid: int) -> Principal:
        """Principal of a client at the socket, by its uid. Raises NotAllowed if it is not served."""
        if not self.is_system:
            if uid not in (self._own_uid, 0):
                self._security.report("L1", f"uid {uid}", "is another user's client")
                raise NotAllowed("this agent serves its own user only", hint="start your own:  peerload up")
            return Principal("", uid=uid, is_admin=True)
        account = self.accounts.of(uid)
        is_admin = uid in (0, self._own_uid) or self._is_in(account, self._config.admin_group)
        if not is_admin and not self._is_in(account, self._config.group):
            self._security.report("L1", f"uid {uid}", f"is not in the group {self._config.group}")
            who = account.name or f"uid {uid}"
            why = f"{who} is not in the group {self._config.group}"
            raise NotAllowed("this agent does not serve you", why=why, hint="ask an administrator of this machine")
        return Principal(str(uid), account.name, uid, is_admin)

    def forwarded(self, node: str, message: Forward) -> Principal:
        """The principal of a forwarded request. Raises PeerloadError if it is refused.

        In user mode all members belong to one person, so that a member has all rights of that person; the user named in
        the request is only displayed. In system mode the principal is ``user@node``, which owns the tasks that it has submitted
        here and no others; or the account that `users` maps it to, but never an administrator.
        """
        if message.hops > HOPS_MAX:
            why = f"it came through {message.hops} nodes, {HOPS_MAX} is allowed; the last one was {node}"
            raise BadRequest("a forwarded request is not forwarded again", why=why)
        if not self.is_system:
            return Principal("", uid=self._own_uid, is_admin=True, node=node)
        account = self.mapped(node, message.user)
        if account is not None:
            return Principal(str(account.uid), account.name, account.uid, node=node)
        if not message.user or ":" in message.user:
            raise NotAllowed("the forwarded request names no user", why=f"it came from {node}")
        return Principal(f"{node}:{message.user}", f"{message.user}@{node}", node=node)

    def mapped(self, node: str, user: str) -> Account | None:
        """The account of this machine that `users` maps a user of another node to; None if there is none."""
        users = self._config.users
        name = user if users == "same-name" else "" if isinstance(users, str) else users.get(f"{node}:{user}", "")
        account = self.accounts.named(name) if name else None
        if account is None or account.uid < SYSTEM_UIDS_BELOW or account.uid == self._own_uid:
            return None
        if not self._config.map_administrators and self._is_in(account, self._config.admin_group):
            return None
        return account

    def _is_in(self, account: Account, group: str) -> bool:
        number = group_number(group)
        return number is not None and number in account.groups

    # -- rights ----------------------------------------------------------------------------------------------------------

    def authorize(self, caller: Principal, request: control.Request) -> control.Request:
        """Check the rights of a caller → the request with resolved `@` references. Raises PeerloadError, and NoSuchTask for
        tasks that this caller must not see."""
        right = RIGHTS[type(request)]
        if right is Right.HERE and caller.node:
            why = f"the request came from {caller.node}"
            verb = _verb(request)
            self._security.report(
                rules.ROLES_CHECKED, caller.node, f"asks for {verb}, which is for users of the machine itself"
            )
            raise BadRequest(f"peerload {verb} is for users of the machine itself", why=why, hint="type it there")
        if not self.is_system:
            return request
        if right in (Right.ADMIN, Right.HERE) and not caller.is_admin:
            verb = _verb(request)
            self._security.report(
                "L1", caller.user or f"uid {caller.uid}", f"asks for {verb}, which is for administrators"
            )
            why = f"{caller.user or 'this user'} is neither root nor in the group {self._config.admin_group}"
            raise NotAllowed(f"peerload {verb} is for administrators", why=why, hint=f"sudo peerload {verb}")
        request = self._with_last_resolved(caller, request)
        if isinstance(request, control.Submit | control.RetryRequest):
            self._check_submitter(caller)
            token = hashlib.sha256(f"{caller.who}\0{request.token}".encode()).hexdigest()  # cannot be guessed by others
            request = msgspec.structs.replace(request, token=token)
        if not caller.sees_all:
            self._check_ownership(caller, request)
        return request

    def _check_submitter(self, caller: Principal) -> None:
        if caller.node and caller.uid < 0:
            return
        if caller.uid == 0 and not self._config.allow_root_tasks:
            self._security.report("L1", "root", "submits a task")
            hint = "submit it as a user; or, in the configuration file:  allow_root_tasks = true"
            raise NotAllowed("root submits no tasks here", why="they would run as root", hint=hint)
        if 0 < caller.uid < SYSTEM_UIDS_BELOW:
            why = f"uid {caller.uid} is a system account"
            raise NotAllowed("system accounts submit no tasks", why=why, hint="submit it as a user")
        if not caller.user:
            why = f"there is no account of uid {caller.uid}"
            raise NotAllowed("the submitting user is unknown", why=why, hint="ask an administrator of this machine")
        if caller.node and (self._config.exec_allow or not self._config.accept_foreign):
            # mapped to an account of this machine, its tasks would look like those of a local user
            self._security.report("X2", f"{caller.user}, sent by {caller.node}", "submits a task here")
            setting = "exec_allow" if self._config.accept_foreign else "accept_foreign = false"
            why = f"it runs chosen tasks of other nodes, or none ({setting})"
            raise NotAllowed(
                f"{self._config.node} takes no submissions from users of other nodes", why=why, hint="submit it there"
            )

    def _with_last_resolved(self, caller: Principal, request: Any) -> Any:  # noqa: ANN401 -- of its own type again
        """Resolve `@`, the last submission of this caller, and `@~1`, the previous one."""
        if not any(ref.startswith("@") for ref in _task_refs(request)):
            return request

        def meant(ref: str) -> str:
            if not ref.startswith("@"):
                return ref
            return f"{self._config.node}/{last_submission(self._store, ref, caller.who)}"

        if isinstance(getattr(request, "task", None), str):
            return msgspec.structs.replace(request, task=meant(request.task))
        if isinstance(request, control.Submit):
            terms = request.terms
            after, after_ok = tuple(map(meant, terms.after)), tuple(map(meant, terms.after_ok))
            return msgspec.structs.replace(
                request, terms=msgspec.structs.replace(terms, after=after, after_ok=after_ok)
            )
        return msgspec.structs.replace(request, tasks=tuple(map(meant, request.tasks)))

    def _check_ownership(self, caller: Principal, request: control.Request) -> None:
        """Raises NoSuchTask for the first named task of this home that belongs to another user, or does not exist."""
        own = self._config.node
        if request.at not in ("", own):
            return  # the node that it is for checks
        counters: dict[str, int] = {}
        for ref in _task_refs(request):
            parsed = REF.fullmatch(ref)
            if parsed is None:
                continue  # the parser refuses it later
            if parsed["home"] in (None, own):
                counters[ref] = int(parsed["counter"])
            elif isinstance(request, control.Submit) and not caller.node:
                continue  # its home checks
            elif (request.at or caller.node) and not self.sees_remote_named(caller, ref):
                self._names.resolve(ref)  # raises: it is not of this home
        owners = self._store.owners_of(counters.values())
        for ref, counter in counters.items():
            if owners.get(counter) != caller.who:
                raise self._names.unknown_task(ref)

    # -- ownership ---------------------------------------------------------------------------------------------------------

    def with_owner(self, caller: Principal, spec: TaskSpec, terms: SubmitOptions) -> tuple[TaskSpec, SubmitOptions]:
        """Set the owner of a submission to its caller, whatever name the client has sent."""
        user, owner = "", -1
        if self.is_system:
            user, owner = (caller.user, caller.uid) if caller.uid >= 0 else (caller.who, -1)
        if spec.user != user:
            spec = msgspec.structs.replace(spec, user=user)
        if terms.owner != owner:
            terms = msgspec.structs.replace(terms, owner=owner)
        return spec, terms

    def sees(self, caller: Principal, task: HomeTask | UntouchedMembers) -> bool:
        """True if the caller may see this unfinished task of this home."""
        return caller.sees_all or owner_key(task.terms.owner, task.spec.user) == caller.who

    def sees_remote(self, caller: Principal, remote: RemoteTask) -> bool:
        """True if the caller may see this task of another home: its owner is mapped to the caller's account here."""
        if caller.sees_all:
            return True
        account = self.mapped(remote.home, remote.spec.user) if remote.spec.user else None
        if account is not None and str(account.uid) == caller.who:
            return True
        return caller.node == remote.home and caller.who == f"{remote.home}:{remote.spec.user}"

    def sees_remote_named(self, caller: Principal, name: str) -> bool:
        """True if a task of another home with this id is here, and the caller may see it."""
        remotes = self._executor.remote_tasks.values()
        return any(remote.task == name and self.sees_remote(caller, remote) for remote in remotes)

    def store(self, caller: Principal) -> StoreReader:
        """The store, restricted to the tasks that this caller may see."""
        return self._store if caller.sees_all else self._store.only_of(caller.who)


def _verb(request: control.Request) -> str:
    """The verb and flag that a user types for a request."""
    return str(type(request).__struct_config__.tag).replace("_", " --")


def refs_of(request: control.Request) -> tuple[str, ...]:
    task = getattr(request, "task", None)
    if isinstance(task, str):
        return (task,)
    tasks = getattr(request, "tasks", ())
    return tasks if isinstance(tasks, tuple) else ()


def _task_refs(request: control.Request) -> tuple[str, ...]:
    if isinstance(request, control.Submit):
        return (*request.terms.after, *request.terms.after_ok)
    return refs_of(request)


def display_user(spec: TaskSpec, own: str) -> str:
    """Displayed owner of a task: ``alice``, or ``alice@ws1`` if it came from ws1. ``own``: the owner of the agent's tasks."""
    if ":" in spec.user:
        node, _, user = spec.user.partition(":")
        return f"{user}@{node}"
    return spec.user or own


# -- quotas ------------------------------------------------------------------------------------------------------------


class WaitCharge:
    """Tasks that one request waits for, until its ``end`` or that of a `with` block. ``bounds``: (key, maximum) pairs of the
    counts that include them."""

    def __init__(self, tasks: Counter[tuple[str, ...]], bounds: Sequence[tuple[tuple[str, ...], int]]) -> None:
        self._tasks = tasks
        self._bounds = bounds
        self._charged = 0

    def add(self, tasks: int) -> None:
        """Charge more tasks. Raises SlowDown, with nothing charged."""
        for payer, most in self._bounds:
            if self._tasks[payer] + tasks > most:
                raise SlowDown(
                    "your requests wait for, or list, too many tasks",
                    why=f"{self._tasks[payer]} now and {tasks} more; at most {most} at a time",
                    retry_after_s=WAITED_RETRY_S,
                )
        self._charged += tasks
        self._tasks.update({payer: tasks for payer, _ in self._bounds})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        for payer, _ in self._bounds:
            self._tasks[payer] -= self._charged
            if not self._tasks[payer]:
                del self._tasks[payer]
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
    """Quota state of one user."""

    def __init__(self, config: AgentConfig, now_s: float) -> None:
        self.connections = 0
        self.requests = TokenBucket(config.user_requests_per_s, now_s)
        self.submits = TokenBucket(config.user_submits_per_s, now_s)
        self.unfinished = 0
        self.unfinished_at_s = -COUNTED_EVERY_S
        self.output_bytes = 0
        self.output_at_s = -COUNTED_EVERY_S


class PausableClient(Protocol):
    """A client that can be kept from sending requests."""

    caller: Principal

    def pause_requests(self, seconds: float) -> None:
        """Stop reading its requests for this time."""


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
        used = self._used.get(caller.counted_as)
        if used is not None:
            used.connections = max(used.connections - 1, 0)

    def take_tokens(self, caller: Principal, tokens: int = 1) -> float:
        """Take tokens for a request or a part of its response → 0.0, or the seconds to wait. Takes at most the tokens of one
        second."""
        if not self._is_system:
            return 0.0
        tokens_max = self._config.user_requests_per_s
        return self._of(caller.counted_as).requests.take(min(tokens, tokens_max), self._clock())

    def check_rate(self, client: PausableClient, request: control.Request) -> None:
        """Take the tokens for a request. Raises SlowDown if there are none, and stops reading the client for a while."""
        caller = client.caller
        wait_s = self.take_tokens(caller, REQUEST_COSTS.get(type(request), 1))
        if wait_s:
            client.pause_requests(wait_s)
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
                why = f"{used.unfinished} are queued or running, {tasks} more are submitted; at most {config.user_tasks_max}"
                if tasks > config.user_tasks_max:
                    why += ": it has to be split"
                raise SlowDown("too many tasks of one user", why=why, retry_after_s=COUNTED_EVERY_S)
        if now_s - used.output_at_s >= COUNTED_EVERY_S:
            used.output_bytes, used.output_at_s = self._store.output_bytes_of_owner(who), now_s
        if used.output_bytes > config.user_output_bytes_max:
            why = f"{used.output_bytes} bytes are kept of your tasks; at most {config.user_output_bytes_max}"
            raise DiskFull("your output exceeds its limit", why=why, hint="peerload clean --outputs --all")
        wait_s = used.submits.take(tasks, now_s)
        if wait_s:
            why = f"at most {config.user_submits_per_s:g} a second"
            raise SlowDown("too many tasks at once", why=why, retry_after_s=round(wait_s, 3))
        used.unfinished += tasks

    def charge(self, caller: Principal, tasks: int = 0) -> WaitCharge:
        """Begin the charge of a request that waits for tasks. A wait may last for days, and takes about 200 bytes a task.
        Raises SlowDown."""
        bounds: list[tuple[tuple[str, ...], int]] = []
        if self._is_system:
            bounds.append(((caller.node, caller.counted_as), WAITED_MAX))
        if caller.node:
            bounds.append(((caller.node,), WAITED_BY_NODE_MAX))
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
