"""Access control: the right that each verb requires, and the ownership of tasks (rules L1, L2 and the FORWARD part of P3).

In user mode an agent belongs to one person: whoever can connect has all rights, except for what is done at the machine
itself only. In system mode it serves all users in its groups. The identity comes from the operating system, or, for a
forwarded request, from the node that forwards it; never from the request. Only administrators see tasks of others: for
everybody else such a task does not exist, and the error is the same.
"""

from __future__ import annotations

import enum
import hashlib
import os
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.accounts.accounts import SYSTEM_UIDS_BELOW, Account, Accounts, group_number
from peerload.agent.control.task_ids import REF, TaskIds, last_submission, refs_of
from peerload.model import rules
from peerload.model.errors import BadRequest, NotAllowed
from peerload.model.task import owner_key
from peerload.wire import control

if TYPE_CHECKING:
    from peerload.agent.security_events import SecurityEvents
    from peerload.agent.store.reader import StoreReader
    from peerload.agent.store.store import Store
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.work import HomeTask, RemoteTask, UntouchedMembers
    from peerload.model.config import AgentConfig
    from peerload.model.messages import Forward
    from peerload.model.task import SubmitOptions, TaskSpec


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
        """Key of its quotas. Users of another node without an account here share one, since a node could invent users."""
        return f"{self.node}:" if self.node and self.uid < 0 else self.who

    @property
    def sees_all(self) -> bool:
        """True if it may see the tasks of others."""
        return self.is_admin or not self.who


NOBODY = Principal("nobody:")
"""The principal of a connection before authentication; it owns nothing."""


HOPS_MAX = 1
"""Requests are forwarded once, from the node of the client; never to a third node."""


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
"""Right of every verb. In user mode only HERE refuses anything: forwarded requests."""


class Authorization:
    """Access control of one agent. ``executor`` knows the tasks of other homes that are here."""

    def __init__(self, config: AgentConfig, store: Store, executor: ExecutorHandoff, security: SecurityEvents) -> None:
        self._config = config
        self._store = store
        self._executor = executor
        self._security = security
        self._names = TaskIds(store, config.node)
        self._own_uid = os.getuid()
        self.is_system = config.mode == "system"
        self.accounts = Accounts()

    # -- principals -----------------------------------------------------------------------------------------------------------

    def local(self, uid: int) -> Principal:
        """The principal of a client at the socket, by its uid. Raises NotAllowed if it is not served."""
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
        the request is only displayed. In system mode the principal is ``user@node``, which owns what it has submitted
        here and nothing else; or the account that `users` maps it to, but never an administrator.
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
        tasks that this caller may not see."""
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
            token = hashlib.sha256(f"{caller.who}\0{request.token}".encode()).hexdigest()  # nobody can guess another's
            request = msgspec.structs.replace(request, token=token)
        if not caller.sees_all:
            self._check_ownership(caller, request)
        return request

    def _check_submitter(self, caller: Principal) -> None:
        """Raises NotAllowed for callers that may not submit tasks."""
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
            # as an account of this machine its tasks could not be told from those of a local user
            self._security.report("X2", f"{caller.user}, sent by {caller.node}", "submits a task here")
            setting = "exec_allow" if self._config.accept_foreign else "accept_foreign = false"
            why = f"it runs chosen tasks of other nodes, or none ({setting})"
            raise NotAllowed(
                f"{self._config.node} takes no submissions from users of other nodes", why=why, hint="submit it there"
            )

    def _with_last_resolved(self, caller: Principal, request: Any) -> Any:  # noqa: ANN401 -- of its own type again
        """Resolve `@`, the last task of this caller, and `@~1`, the one before."""
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
        """Raises NoSuchTask for the first named task of this home that belongs to somebody else, or does not exist."""
        own = self._config.node
        if request.at not in ("", own):
            return  # that node checks
        counters: dict[str, int] = {}
        for ref in _task_refs(request):
            parsed = REF.fullmatch(ref)
            if parsed is None:
                continue  # refused where it is parsed
            if parsed["home"] in (None, own):
                counters[ref] = int(parsed["counter"])
            elif isinstance(request, control.Submit) and not caller.node:
                continue  # its home checks
            elif (request.at or caller.node) and not self.sees_guest_named(caller, ref):
                self._names.resolve(ref)  # raises: it is not of this home
        owners = self._store.owners_of(counters.values())
        for ref, counter in counters.items():
            if owners.get(counter) != caller.who:
                raise self._names.unknown_task(ref)

    # -- ownership ---------------------------------------------------------------------------------------------------------

    def with_owner(self, caller: Principal, spec: TaskSpec, terms: SubmitOptions) -> tuple[TaskSpec, SubmitOptions]:
        """Set the owner of a submission to its caller, whatever the client says."""
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

    def sees_guest(self, caller: Principal, guest: RemoteTask) -> bool:
        """True if the caller may see this task of another home: its user there is this account here."""
        if caller.sees_all:
            return True
        account = self.mapped(guest.home, guest.spec.user) if guest.spec.user else None
        if account is not None and str(account.uid) == caller.who:
            return True
        return caller.node == guest.home and caller.who == f"{guest.home}:{guest.spec.user}"

    def sees_guest_named(self, caller: Principal, name: str) -> bool:
        """True if a task of another home with this id is here, and the caller may see it."""
        guests = self._executor.guests.values()
        return any(guest.task == name and self.sees_guest(caller, guest) for guest in guests)

    def store(self, caller: Principal) -> StoreReader:
        """The store as far as this caller may see it."""
        return self._store if caller.sees_all else self._store.only_of(caller.who)


def _verb(request: control.Request) -> str:
    """The verb and flag that a user types for a request."""
    return str(type(request).__struct_config__.tag).replace("_", " --")


def _task_refs(request: control.Request) -> tuple[str, ...]:
    """The tasks that a request names, including the dependencies of a submission."""
    if isinstance(request, control.Submit):
        return (*request.terms.after, *request.terms.after_ok)
    return refs_of(request)


def display_user(spec: TaskSpec, own: str) -> str:
    """Displayed owner of a task: ``alice``, or ``alice@ws1`` if it came from there. ``own``: the owner of the agent's tasks."""
    if ":" in spec.user:
        node, _, user = spec.user.partition(":")
        return f"{user}@{node}"
    return spec.user or own
