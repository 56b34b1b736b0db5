"""The request of `peerload top`: a snapshot of nodes and tasks, or the changes since an earlier revision.

No state is kept for a viewer. Each item has the revision at which it last changed, and a viewer sends its last revision.
So many viewers cost little more than one, and a viewer that returns later gets the changes since then, or everything.
"""

from __future__ import annotations

import os
import pwd
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.control.authorization import display_user
from peerload.agent.runtime import now
from peerload.agent.views import node as node_views
from peerload.agent.views import task as views
from peerload.core.work import HomePhase, RemotePhase
from peerload.model.bounded import BoundedDict

if TYPE_CHECKING:
    from peerload.agent.control.authorization import Authorization, Principal
    from peerload.agent.store.reader import StoreReader
    from peerload.agent.store.store import Store
    from peerload.agent.views.agent import AgentView, ClusterView
    from peerload.agent.views.node import NodesView
    from peerload.core.membership.peers import PeerInfo
    from peerload.core.node import Node
    from peerload.core.work import HomeTask, RemoteTask
    from peerload.wire import control

TASKS_SHOWN_MAX = 1000
"""Maximum number of unfinished tasks of this home in a snapshot: first placed, then waiting, then held ones, oldest first."""
REMOTES_SHOWN_MAX = 1000
VIEWERS_KEPT_MAX = 64
"""Maximum number of users with an own overview; beyond it, that of the least recent user is dropped."""
GONE_KEPT_MAX = 10_000
"""Maximum number of names of removed items that are kept; a viewer that missed more gets everything."""
COMMAND_CHARS_MAX = 200
AGENT_KEYS = (
    "node",
    "version",
    "listen",
    "boot",
    "policy",
    "cluster",
    "mqtt",
    "mqtt_configured",
    "started_at",
    "notices",
)

_PLACED = (HomePhase.HERE, HomePhase.AWAY, HomePhase.COLLECTING, HomePhase.UNKNOWN)
_REMOTE_STATES = {
    RemotePhase.RESERVED: "promised",
    RemotePhase.WAITING: "queued",
    RemotePhase.HERE: "running",
    RemotePhase.ENDED: "ended",
}


class RevisionIndex:
    """Revisions of named items. ``whole_from``: the first revision from which changes are known."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[object, int]] = {}
        self._gone: dict[str, int] = {}
        self.whole_from = 0

    def update(self, number: int, marks: dict[str, object]) -> None:
        """Store the current items; an item with an equal mark has not changed."""
        known = self._marks
        for name, mark in marks.items():
            before = known.get(name)
            if before is None or before[0] != mark:
                known[name] = mark, number
                self._gone.pop(name, None)
        if len(known) > len(marks):
            for name in [name for name in known if name not in marks]:
                del known[name]
                self._gone[name] = number
            while len(self._gone) > GONE_KEPT_MAX:
                oldest = next(iter(self._gone))
                self.whole_from = max(self.whole_from, self._gone.pop(oldest))

    def changed(self, since: int) -> list[str]:
        """Items that are new or different since that revision."""
        return [name for name, (_, number) in self._marks.items() if number > since]

    def gone(self, since: int) -> list[str]:
        """Items that were removed since that revision."""
        return [name for name, number in self._gone.items() if number > since]


class OverviewViews(NamedTuple):
    """The views of nodes from which an overview is built."""

    agent: AgentView
    nodes: NodesView
    cluster: ClusterView


class OverviewCache:
    """The overviews of one agent: one for all callers who see all tasks, and one for each other user."""

    def __init__(self, node: Node, access: Authorization, store: Store, views: OverviewViews) -> None:
        self._node = node
        self._access = access
        self._views = views
        self._all = OverviewBuilder(node, access, store, self._views, None)
        self._each: BoundedDict[str, OverviewBuilder] = BoundedDict(VIEWERS_KEPT_MAX)

    def of(self, caller: Principal) -> OverviewBuilder:
        if caller.sees_all:
            return self._all
        found = self._each.get(caller.who)
        if found is None:
            store = self._access.store(caller)
            found = OverviewBuilder(self._node, self._access, store, self._views, caller)
        self._each[caller.who] = found
        return found


class OverviewBuilder:
    """Builds the answers to `control.Overview`. caller: only its tasks; None: all tasks."""

    def __init__(
        self,
        node: Node,
        access: Authorization,
        store: StoreReader,
        views: OverviewViews,
        caller: Principal | None,
    ) -> None:
        self._node = node
        self._access = access
        self._store = store
        self._views = views
        self._caller = caller
        self._name = secrets.token_hex(4)
        self._user = own_user()
        self._number = 0
        self._nodes = RevisionIndex()
        self._tasks = RevisionIndex()
        self._remotes = RevisionIndex()

    def build(self, request: control.Overview) -> dict[str, object]:
        """The changes since ``request.since``. If that revision is unknown: everything, with ``complete`` set."""
        began_s = time.thread_time()
        self._number += 1
        boot = f"{self._node.state.identity.boot}-{self._name}"
        since = self._since(request.since, boot)
        peers = {peer.identity.node: peer for peer in self._node.membership}
        tasks, counts = self._select_tasks()
        remotes = self._remotes_here()
        self._nodes.update(self._number, {name: self._node_mark(peer) for name, peer in peers.items()})
        self._tasks.update(self._number, {name: self._task_mark(task) for name, task in tasks.items()})
        self._remotes.update(self._number, {name: self._remote_mark(remote) for name, remote in remotes.items()})
        tables = (self._nodes, self._tasks, self._remotes)
        is_complete = since == 0 or any(since < table.whole_from for table in tables)
        if is_complete:
            since = 0
        agent = self._views.agent.info()
        snapshot: dict[str, object] = {
            "revision": f"{boot}.{self._number}",
            "complete": is_complete,
            "agent": {key: agent[key] for key in AGENT_KEYS},
            "nodes": self._views.nodes.objects_of([peers[name] for name in sorted(self._nodes.changed(since))]),
            "nodes_gone": [] if is_complete else self._nodes.gone(since),
            "tasks": [self._task_object(tasks[name]) for name in self._tasks.changed(since)],
            "tasks_gone": [] if is_complete else self._tasks.gone(since),
            "guests": [self._remote_object(remotes[name]) for name in self._remotes.changed(since)],
            "guests_gone": [] if is_complete else self._remotes.gone(since),
            "counts": counts,
            "events": self._events(request),
        }
        return snapshot | {"took_s": time.thread_time() - began_s}

    def _since(self, revision: str, boot: str) -> int:
        """The last revision of a viewer; 0 if it is from another start of the agent."""
        start, _, number = revision.rpartition(".")
        known = start == boot and number.isascii() and number.isdigit()
        return int(number) if known and int(number) < self._number else 0

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _node_mark(self, peer: PeerInfo) -> object:
        last = self._node.membership.last_report(peer.identity.node)
        last_s = peer.heard_s if last is None else last.at_s
        is_revoked = self._views.cluster.is_peer_revoked(peer)
        declines = node_views.declines(self._node, peer)
        return peer.state, peer.identity, peer.profile, last_s, is_revoked, declines

    # -- the tasks of this home ----------------------------------------------------------------------------------------

    def _select_tasks(self) -> tuple[dict[str, HomeTask], dict[str, int]]:
        """The tasks in the snapshot, and the total numbers of placed, waiting and held tasks."""
        placed: dict[str, HomeTask] = {}
        waiting: list[HomeTask] = []
        held: list[HomeTask] = []
        waits = others = 0
        access, caller = self._access, self._caller
        for task in self._node.home.tasks.values():
            if caller is not None and not access.sees(caller, task):
                continue
            phase = task.phase
            if phase in _PLACED:
                others += 1
                if len(placed) < TASKS_SHOWN_MAX:
                    placed[task.task] = task
                continue
            if phase is HomePhase.OVER:
                continue
            if phase is HomePhase.HELD:
                held.append(task)
                continue
            waits += 1
            if len(waiting) < TASKS_SHOWN_MAX:
                waiting.append(task)
        waits += self._add_untouched(waiting)
        for task in [*waiting, *held[:TASKS_SHOWN_MAX]][: TASKS_SHOWN_MAX - len(placed)]:
            placed[task.task] = task
        return placed, {"placed": others, "waiting": waits, "held": len(held)}

    def _add_untouched(self, waiting: list[HomeTask]) -> int:
        """Add untouched members of arrays up to TASKS_SHOWN_MAX waiting tasks → number of all untouched members."""
        home, caller, number = self._node.home, self._caller, 0
        for untouched in list(home.untouched.values()):
            if caller is None or self._access.sees(caller, untouched[0]):
                number += sum(block.count for block in untouched)
                while untouched and len(waiting) < TASKS_SHOWN_MAX:
                    waiting.append(home.touch(untouched[0], untouched[0].members[0]))
        return number

    def _task_mark(self, task: HomeTask) -> object:
        if not task.record.node:  # the reason why it waits may change while the task does not
            return task.record, task.phase, views.why_waiting(self._node, task, task.record)
        is_unreachable = views.is_unreachable(self._node, task.record)
        return task.record, task.running_at, task.phase, task.devices, is_unreachable

    def _task_object(self, task: HomeTask) -> dict[str, object]:
        user = display_user(task.spec, self._user)
        fields = views.task_here(self._node, task.record, task.spec, user)
        if fields["state"] == "queued":
            fields["reason"] = views.why_waiting(self._node, task, task.record)
        fields["unreachable_since"] = views.unreachable_since(self._node, task.record, now())
        del fields["argv"]  # it may be a megabyte
        return (
            fields | {"command": _command(task.spec.argv), "priority": task.spec.priority} | views.gpu_wishes(task.spec)
        )

    # -- tasks of other homes -------------------------------------------------------------------------------------

    def _remotes_here(self) -> dict[str, RemoteTask]:
        found: dict[str, RemoteTask] = {}
        for remote in self._node.executor.remote_tasks.values():
            if len(found) >= REMOTES_SHOWN_MAX:
                break
            if self._caller is not None and not self._access.sees_remote(self._caller, remote):
                continue
            found[remote.task] = remote
        return found

    def _remote_mark(self, remote: RemoteTask) -> object:
        reason = views.remote_reason(self._node, remote)
        return remote.attempt, remote.phase, remote.running_at, remote.devices, remote.is_parked, reason

    def _remote_object(self, remote: RemoteTask) -> dict[str, object]:
        node, moment = self._node, now()
        spec = remote.spec
        names = views.device_names(node, node.state.node, remote.devices)
        return {
            "id": remote.task,
            "name": spec.name or views.text(spec.argv[0]).rpartition("/")[2],
            "user": display_user(spec, self._user),
            "home": remote.home,
            "node": node.state.node,
            "state": _REMOTE_STATES[remote.phase],
            "cpus": spec.request.cpus,
            "mem_bytes": spec.request.mem_bytes,
            "gpus": views.gpus_asked(spec.request),
            "attempt": remote.attempt,
            "submitted_at": moment.wall_s - (moment.boot_s - remote.arrived_s),
            "started_at": remote.running_at or None,
            "device_names": names,
            "command": _command(spec.argv),
            "parked": remote.is_parked,
            "reason": views.remote_reason(node, remote) or None,
            **views.gpu_wishes(spec),
        }

    # -- events --------------------------------------------------------------------------------------------------------

    def _events(self, request: control.Overview) -> list[dict[str, object]]:
        store = self._store
        if not request.events_max or store.last_event() <= request.events_after:
            return []
        found = store.events(request.events_after, request.events_max, newest=True)
        return [views.event_object(event) for event in found]


def _command(argv: tuple[bytes, ...]) -> str:
    text = ""
    for word in argv:
        text = f"{text} {views.text(word[:COMMAND_CHARS_MAX])}" if text else views.text(word[:COMMAND_CHARS_MAX])
        if len(text) > COMMAND_CHARS_MAX:
            return text[: COMMAND_CHARS_MAX - 1] + "…"
    return text


def own_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
