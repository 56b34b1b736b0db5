"""The first event of a node: from what was durable, and from what the launcher still knows, to where it had been."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.tasks.work import HomePhase, HomeTask, RemotePhase
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from peerload.core.node import Node
    from peerload.model.events import AgentStarted, TaskRow
    from peerload.model.task import TaskRecord


def restart(node: Node, event: AgentStarted) -> None:
    """Take up every unfinished task and every attempt that is here for another home."""
    node.submissions.restore(event.counter)
    node.executor.fences.restore(event.floors)
    node.state.attempts_from, node.state.attempts_up_to = event.attempts_from, event.attempts_up_to
    if event.drained is not None:
        node.drain.restore(event.drained)
    for run in event.past:
        node.state.history.learn(run.spec, run.exit)
    node.eligibility.restore(event.fates, event.groups)
    queued = [task for row in event.tasks if (task := _task(node, row)).record.state is TaskState.QUEUED]
    for record in event.executions:
        guest = node.executor.adopt(record)
        if guest.phase is not RemotePhase.ENDED:
            node.runs.restore(guest)
    node.runs.reconcile(event.running, dict(event.ended), event.frozen)
    for home, at in event.revoked:  # whoever has that name anew has started its tasks after that
        node.executor.home_revoked(home, at)
    node.eligibility.restored()
    if event.commits_lost:
        node.handoff.leases.commits_lost(queued)
    for task in queued:
        if task.phase is HomePhase.HELD or task.phase is HomePhase.OVER:
            continue
        if not node.handoff.lost_attempts.rest_after_restart(task):
            node.intake.arrives(task)
    node.client_binding.restored()
    node.membership.start(event.known, event.seeds)
    node.state.set_timer_in(node.state.config.floor_kept_s, "floors")


def _task(node: Node, row: TaskRow) -> HomeTask:
    """One task of this home, in the phase that goes with its durable state; a queued one is for the caller."""
    phase = _phase(row.record, node.state.node)
    task = HomeTask(row.record, node.submissions.shared(row.spec), node.state.now.boot_s, row.terms, phase)
    node.intake.adopt(task, directory_here=row.directory_here)
    if phase is HomePhase.HERE:
        node.runs.restore(task)
    elif phase in (HomePhase.AWAY, HomePhase.UNKNOWN):
        node.handoff.leases.restored(task)
    return task


def _phase(record: TaskRecord, here: str) -> HomePhase:
    match record.state:
        case TaskState.HELD:
            return HomePhase.HELD
        case TaskState.LEASED:
            return HomePhase.HERE if record.node == here else HomePhase.AWAY
        case TaskState.UNKNOWN:
            return HomePhase.UNKNOWN
        case _:
            return HomePhase.WAITING
