"""Invariants of a live node: what its machines know of a task agrees with what all others know of it.

`validate` checks them between two events, in time in proportion to the number of tasks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from peerload.core.work import HomePhase, HomeTask, RemotePhase, RemoteTask, story
from peerload.model.errors import InvariantBroken
from peerload.model.task import TaskState, member_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.core.coordination.runs import RunningTasks
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.node import Node
    from peerload.core.resources.admission import Ledger
    from peerload.core.tasks.eligibility import TaskGroups
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work

RECORDED: Mapping[HomePhase, tuple[TaskState, ...]] = {
    HomePhase.WAITING: (TaskState.QUEUED,),
    HomePhase.OFFERED: (TaskState.QUEUED,),
    HomePhase.RESTING: (TaskState.QUEUED,),
    HomePhase.GATED: (TaskState.QUEUED,),
    HomePhase.HELD: (TaskState.HELD,),
    HomePhase.HERE: (TaskState.LEASED,),
    HomePhase.AWAY: (TaskState.LEASED,),
    HomePhase.COLLECTING: (TaskState.QUEUED, TaskState.HELD, TaskState.LEASED, TaskState.UNKNOWN),
    HomePhase.UNKNOWN: (TaskState.UNKNOWN,),
    HomePhase.OVER: (TaskState.CANCELLED,),
}
"""The durable states that a task may be in while it is in a phase."""
CPUS_ERROR_MAX = 1e-6
"""Sums of cores differ by their rounding."""


def validate(node: Node) -> None:
    """Check the invariants of a node. Raises InvariantBroken with the facts."""
    _validate_tasks(node.home, node.runs, node.state.node)
    _validate_groups(node.eligibility.groups, node.home)
    _validate_attempts(node.executor, node.ledger, node.runs)
    _validate_room(node.ledger, node.queue, node.runs)


def _validate_tasks(home: Home, runs: RunningTasks, node: str) -> None:
    """The tasks of this home. Raises InvariantBroken, with the story of the task."""
    for uid, task in home.tasks.items():
        record = task.record
        _hold(task, uid == task.uid and home.by_id.get(task.task) is task, "it is not found by its uid and its id")
        _hold(task, record.state in RECORDED[task.phase], f"it is {task.phase}, and {record.state} on disk")
        _hold(task, (task.offering is not None) == (task.phase is HomePhase.OFFERED), "offers are of OFFERED tasks")
        is_elsewhere = record.node not in ("", node)
        is_indexed = uid in home.elsewhere.get(record.node, ())
        _hold(task, is_elsewhere == is_indexed, f"the index of tasks elsewhere is wrong about {record.node}")
        _hold(task, is_elsewhere or task.phase is not HomePhase.AWAY, "it is leased to another node, and there is none")
        _hold(task, task.lease is not None or task.phase is not HomePhase.AWAY, "nothing is known of its lease")
        _hold(task, task.collection is not None or task.phase is not HomePhase.COLLECTING, "it has no result")
        runs_here = task.phase in (HomePhase.HERE, HomePhase.OVER)
        _hold(task, runs.holds(task.key) == runs_here, "what runs here disagrees with its phase")
        waits = task.phase in (HomePhase.WAITING, HomePhase.OFFERED)
        is_queued, is_stranded = task.is_queued, uid in home.stranded
        _hold(task, waits or not (is_queued or is_stranded), "it does not wait, and is in the queue or stranded")
        _hold(task, not (is_queued and is_stranded), "it is in the queue and stranded")
        is_offered = is_queued and task.phase is HomePhase.OFFERED
        _hold(task, task.withheld or not is_offered, "an offer is out, and it may start here")
    untouched = [(array, block) for array, blocks in home.untouched.items() for block in blocks]
    for array, block in untouched:
        _hold(
            block, bool(block.members) and block.task == array, "nobody is left of it, or it is found by another name"
        )
        members = home.arrays.get(array, {})
        is_apart = not any(block.members[0] <= member_of(name) <= block.members[-1] for name in members)
        _hold(block, is_apart, "another task lies between its members")
    if home.number != len(home.tasks) + sum(block.count for _, block in untouched):
        raise InvariantBroken(f"{home.number} tasks are counted")
    for tasks in (home.by_id.values(), home.stranded.values(), *(each.values() for each in home.elsewhere.values())):
        for task in tasks:
            _hold(task, home.tasks.get(task.uid) is task, "it is over, and a table still has it")


def _validate_groups(groups: TaskGroups, home: Home) -> None:
    for group in groups:
        for task in group.members.values():
            _hold(task, home.tasks.get(task.uid) is task, "it is over, and its group still has it")
            is_gated = task.phase is HomePhase.GATED
            _hold(task, is_gated or task.uid not in group.waiting, "it waits for a slot of its group, and is not gated")
        if not (group.taken.keys() | group.waiting.keys()) <= group.members.keys():
            raise InvariantBroken(f"group {group.settings.name} knows of tasks that are no members of it")


def _validate_attempts(executor: ExecutorHandoff, ledger: Ledger, runs: RunningTasks) -> None:
    """The attempts of other homes that are on this node."""
    for key, remote in executor.remote_tasks.items():
        _hold(remote, key == remote.key and remote.uid in executor.by_uid, "it is not found by its key and its uid")
        is_newest = executor.by_uid[remote.uid] is remote
        _hold(remote, remote.is_queued == (remote.phase is RemotePhase.WAITING), "the queue disagrees with its phase")
        _hold(remote, is_newest or not remote.is_queued, "a newer attempt is here, and it waits")
        _hold(remote, runs.holds(key) == (remote.phase is RemotePhase.HERE), "what runs here disagrees with its phase")
        has_room = remote.uid in ledger.inbound or remote.phase is not RemotePhase.RESERVED
        _hold(remote, has_room, "it is accepted, and no room is reserved")
        has_started = remote.phase in (RemotePhase.HERE, RemotePhase.ENDED)
        is_fenced = executor.fences.attempt(remote.uid) >= remote.attempt
        _hold(remote, is_fenced or not has_started, "it has started, and could start again")
        _hold(remote, remote.exit is not None or remote.phase is not RemotePhase.ENDED, "it has ended without a result")
        waits_ahead = runs.holds(key) and key not in ledger.running
        counts = remote.phase is RemotePhase.RESERVED or waits_ahead
        _hold(remote, not waits_ahead or remote.uid in ledger.inbound, "it waits at the launcher, and is not counted")
        _hold(remote, counts or remote.uid not in ledger.inbound, "it is counted, and is not on its way")
    for remote in executor.by_uid.values():
        _hold(remote, executor.remote_tasks.get(remote.key) is remote, "it is gone, and is still found by its uid")


def _validate_room(ledger: Ledger, queue: WaitingQueue, runs: RunningTasks) -> None:
    """The books of what runs and waits here."""
    works = {work.key: work for work in runs.works()}
    if works.keys() != ledger.running.keys():
        raise InvariantBroken(f"{sorted(works)} run here, and {sorted(ledger.running)} hold room")
    local = sum(isinstance(work, HomeTask) for work in works.values())
    if ledger.running_local != local:
        raise InvariantBroken(f"{local} tasks of this home run here, and {ledger.running_local} are counted")
    cpus = sum(ledger.cores_of(request) for request, _ in ledger.running.values())
    if not math.isclose(cpus, ledger.cpus_running, rel_tol=CPUS_ERROR_MAX, abs_tol=CPUS_ERROR_MAX):
        raise InvariantBroken(f"tasks hold {cpus} cores here, and {ledger.cpus_running} are counted")
    if ledger.waiting != len(queue):
        raise InvariantBroken(f"{len(queue)} tasks wait here, and {ledger.waiting} are counted")
    for work in works.values():
        is_kept = work.phase in (
            (RemotePhase.HERE,) if isinstance(work, RemoteTask) else (HomePhase.HERE, HomePhase.OVER)
        )
        _hold(work, is_kept, "it holds room in another phase than it runs in")


def _hold(work: Work, is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise InvariantBroken(f"{work.task}: {otherwise}", story=story(work))
