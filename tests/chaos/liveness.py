"""Liveness: a healed cluster comes to rest in bounded time, and then nothing is left over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.membership.peers import PeerState
from peerload.core.work import HomePhase
from peerload.model.errors import InvariantBroken
from peerload.model.task import TaskState
from tests.chaos.gates import STUCK, waits_in_vain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.model.task import TaskRecord
    from tests.chaos.cluster import Cluster
    from tests.chaos.machine import Machine

LEASES_MAX = 3.0
"""So many times lease and grace after the last fault has ended, everything is finished or running."""
STUCK_S = 5.0
"""A task that has not moved for so long then is stuck."""
VIEWS_S = 60.0
"""So long after that at the latest all nodes agree on who is there."""


class Rest:
    """Asked once a second after the cluster has healed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        plan = cluster.plan
        self._due_s = plan.healed_s + LEASES_MAX * (plan.lease_s_max() + plan.grace_s)
        self._views_due_s = max(self._due_s, plan.healed_s + VIEWS_S)
        work_s = sum(job.work_s() for job in plan.jobs)
        self._over_s = self._due_s + work_s
        self._stuck: dict[bytes, TaskRecord] | None = None

    def has_come(self) -> bool:
        """True if all work is over and nothing is left of it. Raises InvariantBroken if the time for that has passed."""
        cluster = self._cluster
        if self._stuck is None and cluster.now_s >= self._due_s:
            self._stuck = dict(self._at_rest())
        if self._stuck and cluster.now_s >= self._due_s + STUCK_S:
            self._everything_moves(self._stuck)
            self._stuck = {}
        if cluster.now_s >= self._views_due_s and (views := self._views()):
            raise InvariantBroken(f"liveness: {views}, {cluster.now_s - cluster.plan.healed_s:.0f} s after it healed")
        left = self._left_over()
        if left and cluster.now_s >= self._over_s:
            raise InvariantBroken(f"liveness: {left}, {cluster.now_s - cluster.plan.healed_s:.0f} s after it healed")
        return not left

    # -- the bound of 3 leases ---------------------------------------------------------------------------------------

    def _at_rest(self) -> Iterator[tuple[bytes, TaskRecord]]:
        """Every task that is neither over, nor executes, is held, or waits behind others that execute."""
        for uid, (home, task) in self._cluster.checker.acknowledged.items():
            record = self._cluster.machines[home].disk.tasks[task]
            if not (record.state.is_final or self._moves(uid, record, home)):
                yield uid, record

    def _everything_moves(self, before: dict[bytes, TaskRecord]) -> None:
        """None has been at rest all the time since: one that is on its way between two nodes is not stuck."""
        for uid, record in self._at_rest():
            if before.get(uid) == record:
                raise InvariantBroken(
                    f"liveness: {record.task} is {record.state} and nothing happens to it", story=repr(record)
                )

    def _moves(self, uid: bytes, record: TaskRecord, home: str) -> bool:
        checker = self._cluster.checker
        if checker.is_executing(uid) or record.state in (TaskState.HELD, TaskState.UNKNOWN):
            return True
        if self._is_gated(uid, home):
            return True  # that it does not wait for ever is for `_left_over`
        machines = self._cluster.machines
        if not record.node and home in self._excluded(home, record.task):
            return all(self._is_busy(machine) for machine in machines.values() if machine.name != home)
        machine = machines[record.node or home]
        return not machine.is_gone and self._is_busy(machine)

    def _excluded(self, home: str, task: str) -> tuple[str, ...]:
        """The nodes that may not run a task."""
        kept = self._cluster.machines[home].disk.submissions.get(int(task.partition("/")[2].partition(".")[0]))
        return kept.spec.placement.exclude if kept is not None else ()

    def _is_busy(self, machine: Machine) -> bool:
        """True if its slots are taken by tasks that execute, or it is gone for good."""
        if machine.is_gone:
            return True
        return len(machine.launcher.running) >= machine.facts.slots and not self._frozen(machine)

    def _is_gated(self, uid: bytes, home: str) -> bool:
        node = self._cluster.machines[home].node
        task = node.home.tasks.get(uid) if node is not None else None
        return node is not None and task is not None and task.phase is HomePhase.GATED

    def _frozen(self, machine: Machine) -> bool:
        return all(process.frozen for process in machine.launcher.running.values())

    # -- nothing left over -------------------------------------------------------------------------------------------

    def _left_over(self) -> str:
        """A difference from the state before there was any work; "" at rest."""
        cluster = self._cluster
        for home, task in cluster.checker.acknowledged.values():
            record = cluster.machines[home].disk.tasks[task]
            is_queued = record.state is TaskState.QUEUED
            if record.state.is_final or record.state in STUCK:
                continue
            if not (is_queued and waits_in_vain(cluster.machines, home, record)):
                return f"{task} is {record.state}"
        for machine in cluster.machines.values():
            left = "" if machine.is_gone else self._left_at(machine)
            if left:
                return left
        return self._views()

    def _left_at(self, machine: Machine) -> str:
        node = machine.node
        if node is None:
            return f"the agent of {machine.name} is down"
        for guest in node.executor.remote_tasks.values():
            if not self._is_orphan(guest.uid, guest.home):
                return f"{machine.name} has {guest.key} of {guest.home}, {guest.phase}"
        for key, process in machine.launcher.running.items():
            if not self._is_orphan(bytes.fromhex(process.uid), process.task.partition("/")[0]):
                return f"{key} {'is frozen' if process.frozen else 'runs'} on {machine.name}"
        return ""

    def _is_orphan(self, uid: bytes, home: str) -> bool:
        """True if its home has lost its disk or is gone: nobody can say what is to become of it."""
        return uid not in self._cluster.checker.acknowledged and (
            self._cluster.machines[home].is_gone or self._cluster.machines[home].disk.number > 1
        )

    def _views(self) -> str:
        """True if each node that is there sees each other as alive (and nobody who is gone)."""
        machines = self._cluster.machines.values()
        for machine in machines:
            if machine.node is None:
                continue
            for other in machines:
                peer = machine.node.membership.get(other.name)
                if other is machine:
                    continue
                if other.is_gone:
                    if peer is not None and peer.state is PeerState.ALIVE:
                        return f"{machine.name} believes that {other.name} is alive, which is gone"
                elif peer is None or peer.state is not PeerState.ALIVE:
                    return f"{machine.name} believes that {other.name} is {peer.state if peer else 'unknown'}"
        return ""
