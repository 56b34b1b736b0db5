"""The protocol with one rule left out: the tests must find out each of these, or they prove nothing.

Every variant is the smallest change that drops its rule; docs/wire.md has the rules.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peerload.core.handoff.executor import ExecutorHandoff
from peerload.core.handoff.home import HomeHandoff, HomeLeases, granted
from peerload.core.membership.peers import PeerState
from peerload.core.node import Node
from peerload.core.work import HomePhase, HomeTask, RemotePhase
from peerload.model import events, messages, timers
from tests.chaos.engine.launcher import SimLauncher, SimProcess
from tests.chaos.engine.store import SimStore


def renew_no_extend(patch: pytest.MonkeyPatch) -> None:
    """R2: home renews leases without moving its own deadline."""
    extend = HomeLeases.extend

    def extend_once(self: HomeLeases, task: HomeTask, lease_s: float) -> None:
        if not granted(task).commits or not granted(task).deadline_s:
            extend(self, task, lease_s)

    patch.setattr(HomeLeases, "extend", extend_once)


def reboot_deadline(patch: pytest.MonkeyPatch) -> None:
    """R4: a restarted home trusts the deadline that it kept with the lease, from before the renewals."""
    kept: dict[str, float] = {}
    commit, restored = HomeHandoff._commit, HomeLeases.restored

    def commit_and_keep(self: HomeHandoff, task: HomeTask, ts: float) -> None:
        commit(self, task, ts)
        kept[task.key] = granted(task).deadline_s

    def restored_as_kept(self: HomeLeases, task: HomeTask) -> None:
        restored(self, task)
        granted(task).deadline_s = kept.get(task.key, granted(task).deadline_s)
        left_s = max(granted(task).deadline_s - self._state.now.boot_s, 0.0)
        self._state.set_timer_in(left_s, timers.Lease(task.uid.hex()))

    patch.setattr(HomeHandoff, "_commit", commit_and_keep)
    patch.setattr(HomeLeases, "restored", restored_as_kept)


def suspicion_requeues(patch: pytest.MonkeyPatch) -> None:
    """R6: home takes a task back from a node that it suspects."""
    timer = Node._timer

    def ping_and_take_back(self: Node, name: timers.Timer) -> None:
        timer(self, name)
        for task in list(self.home.tasks.values()) if isinstance(name, timers.GossipDue) else ():
            peer = self.membership.get(task.record.node)
            if task.phase is HomePhase.AWAY and (peer is None or peer.state is not PeerState.ALIVE):
                self.handoff.lost_attempts.died(task, "suspected")

    patch.setattr(Node, "_timer", ping_and_take_back)


def nobody_freezes(patch: pytest.MonkeyPatch) -> None:
    """R5: the launcher does not stop a task whose lease has run out."""
    init = SimProcess.__init__

    def unbounded(self: SimProcess, *given: Any) -> None:
        init(self, *given)
        self.deadline_s = 0.0

    patch.setattr(SimProcess, "__init__", unbounded)
    patch.setattr(SimLauncher, "lease", lambda self, process, deadline_s, at_s: None)


def floor_volatile(patch: pytest.MonkeyPatch) -> None:
    """D3, D6: the floors are gone after a restart of the agent."""
    started = SimStore.started

    def forgetful(self: SimStore, running: events.Running, ended: dict[str, Any]) -> events.AgentStarted:
        return msgspec.structs.replace(started(self, running, ended), floors=())

    patch.setattr(SimStore, "started", forgetful)


def promise_not_kept(patch: pytest.MonkeyPatch) -> None:
    """D6: a refusal leaves the reservation, so that a late COMMIT still starts the attempt."""
    query_received = ExecutorHandoff.query_received

    def refuse_and_keep(self: ExecutorHandoff, src: str, query: messages.Query) -> None:
        guest = self.by_uid.get(query.uid)
        if guest is not None and guest.phase is RemotePhase.RESERVED and guest.attempt == query.attempt:
            self._refuse(src, query.task, query.uid, query.attempt, "not yet")
        else:
            query_received(self, src, query)

    patch.setattr(ExecutorHandoff, "query_received", refuse_and_keep)


def renewal_of_any_attempt(patch: pytest.MonkeyPatch) -> None:
    """Fencing: home renews whatever attempt is still there, also one that it has replaced."""

    def renew(self: HomeLeases, src: str, message: messages.Renew) -> None:
        extensions = []
        for renewal in message.renewals:
            task = self._home.tasks.get(renewal.uid)
            if task is not None and task.phase is HomePhase.AWAY:
                self.extend(task, task.record.lease_s)
            if task is not None:
                lease_s = self._state.config.lease_s
                extensions.append(messages.LeaseExtension(renewal.uid, renewal.attempt, renewal.ts, lease_s))
        self._state.send(src, messages.RenewOk(tuple(extensions)))

    patch.setattr(HomeLeases, "renew_received", renew)
