"""Eligibility of tasks of this home: a task that waits for other tasks, or for a slot of its group, is not offered,
started or queued, and no search for a place begins.

A task passes once its dependencies are met (`dependencies.py`) and its group has a slot for it: by priority, then in
the order of arrival. It keeps its slot until it is over, held, or has failed and will be retried. So the leased tasks
of a group never exceed its slots, even while one of them is on a lost node.

A group exists as soon as a task names it or a user sets it; only settings are durable. A paused group starts no task.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from typing import TYPE_CHECKING

from peerload.core.tasks.dependencies import DOOMED, LOST, OPEN, Dependencies, RemoteStatusQueries
from peerload.core.work import HomePhase
from peerload.model import timers
from peerload.model.actions import Answer, DropGroup, PutGroup
from peerload.model.errors import BadRequest, SlowDown
from peerload.model.task import GroupSettings, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from peerload.core.membership.membership import Membership
    from peerload.core.state import BatchedRequests, CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.work import HomeTask
    from peerload.model.events import GroupRequested
    from peerload.model.task import TaskOutcome


PASSED_AT_A_TIME = 250
"""Tasks that pass, or are given up, before other events have their turn."""
SIGTERM = 15


class Eligibility:
    """Eligibility of queued tasks, one object per node; its timer is ``gates``."""

    def __init__(self, state: CoreState, home: Home, membership: Membership, batches: BatchedRequests) -> None:
        self._state = state
        self._home = home
        self.dependencies = Dependencies(state, home, membership)
        self.remote_status = RemoteStatusQueries(state, home, membership, self.dependencies)
        self.groups = TaskGroups(state, home, batches)
        self.is_needed = False
        """True once there was a task with a dependency or a group."""
        self._due: deque[HomeTask] = deque()
        """Tasks whose gate may have changed."""

    def restore(self, fates: Iterable[TaskOutcome], groups: Iterable[GroupSettings]) -> None:
        """Restore the state after a restart, before the tasks are adopted."""
        self.dependencies.restore(fates)
        self.groups.restore(groups)

    def adopt(self, task: HomeTask) -> None:
        """Add a conditional task of this home, new or from the store."""
        self.is_needed = True
        if task.terms.awaits:
            self.dependencies.adopt(task)
        if task.terms.group:
            self.groups.adopt(task)

    def left(self, task: HomeTask) -> None:
        if task.terms.is_conditional:
            if task.terms.awaits:
                self.dependencies.left(task)
            self.groups.left(task)

    def is_awaited(self, array: str) -> bool:
        """True if other tasks or other homes wait for the ends of this array's members."""
        return self.dependencies.is_awaited(array) or self.remote_status.is_any_watched(array)

    # -- the gate ------------------------------------------------------------------------------------------------------

    def admits(self, task: HomeTask) -> bool:
        """Let this conditional task, which is in no queue, pass if it may → True if it passes; else it is GATED."""
        if not self._waits_for(task):
            if not task.terms.group or self.groups.admits(task):
                return True
        else:
            verdict, _ = self.dependencies.verdict(task.terms)
            if verdict in (DOOMED, LOST):
                self._due.append(task)
        task.enter(HomePhase.GATED)
        return False

    def _waits_for(self, task: HomeTask) -> bool:
        if not task.terms.awaits or task.record.is_freed:
            return False
        return self.dependencies.verdict(task.terms)[0] != OPEN

    def is_lost(self, task: HomeTask) -> bool:
        """True if the outcome of a task that it waits for can no longer be known."""
        return task.terms.awaits and self.dependencies.verdict(task.terms)[0] == LOST

    def settle(self) -> None:
        """Admit eligible tasks and give up those that can never become eligible; called after every event."""
        left = PASSED_AT_A_TIME
        while left > 0:
            if self._due:
                self._look_at(self._due.popleft())
                left -= 1
            elif self.dependencies.news:
                self._due.extend(self.dependencies.news.popleft().tasks.values())
            elif (task := self.groups.next_that_passes()) is not None:
                self._passes(task)
                left -= 1
            else:
                return
        self._state.set_timer_in(0.0, timers.EligibilityDue())

    def _look_at(self, task: HomeTask) -> None:
        if task.phase is not HomePhase.GATED or self._home.tasks.get(task.uid) is not task:
            return
        verdict, why = (OPEN, "") if task.record.is_freed else self.dependencies.verdict(task.terms)
        if verdict == OPEN:
            self._passes(task)
        elif verdict == DOOMED:
            self._home.cancel(task, SIGTERM, force=False, reason=why)
        elif verdict == LOST:
            self._home.hold(task, why)

    def _passes(self, task: HomeTask) -> None:
        task.enter(HomePhase.WAITING)
        self._home.mediator.task_arrives(task)

    # -- for users -----------------------------------------------------------------------------------------------------

    def reason(self, task: HomeTask) -> str:
        """The reason why a task is GATED, in one line; "" if it is not."""
        if task.phase is not HomePhase.GATED or task.record.state is not TaskState.QUEUED:
            return ""
        if self._waits_for(task):
            verdict, why = self.dependencies.verdict(task.terms)
            return why if verdict in (DOOMED, LOST) else self.dependencies.reason(task.terms)
        return self.groups.reason(task.terms.group)

    def opened_by(self, task: HomeTask) -> str:
        """The command that would let this task pass now; "" if there is none."""
        if task.phase is not HomePhase.GATED or self._waits_for(task):
            return ""
        return self.groups.opened_by(task)


STALE_MAX = 1000
"""A line with more stale entries than this, and with more stale entries than tasks, is rebuilt."""
IN_QUEUE = (HomePhase.WAITING, HomePhase.OFFERED)

Place = tuple[int, int, int]
"""Sort key of a task in the line of its group: the higher priority first, then the order of submission."""


class TaskGroup:
    """A group of tasks. ``settings``; ``members``: its unfinished tasks; ``taken``: members with a slot;
    ``waiting``: members that wait for a slot, in the ``line``."""

    __slots__ = ("line", "members", "settings", "taken", "waiting")

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.members: dict[bytes, HomeTask] = {}
        self.taken: dict[bytes, HomeTask] = {}
        self.waiting: dict[bytes, Place] = {}
        self.line: list[tuple[Place, bytes]] = []

    def may_pass(self, uid: bytes) -> bool:
        """True if slots allow this task to pass: it has a slot within the limit, or one is free."""
        slots = self.settings.slots
        return not slots or (len(self.taken) <= slots if uid in self.taken else len(self.taken) < slots)

    def first(self) -> HomeTask | None:
        """The next task that may pass, None if there is none."""
        if self.settings.is_paused:
            return None
        while self.line:
            place, uid = self.line[0]
            if self.waiting.get(uid) != place:
                heapq.heappop(self.line)
            elif self.may_pass(uid):
                return self.members[uid]
            else:
                return None
        return None

    def is_next(self, task: HomeTask) -> bool:
        """True if the task is first in line."""
        while self.line and self.waiting.get(self.line[0][1]) != self.line[0][0]:
            heapq.heappop(self.line)
        return bool(self.line) and self.line[0][1] == task.uid

    def wait(self, task: HomeTask) -> None:
        """Put a task into the line, or move it within the line."""
        number, _, member = task.task.partition("/")[2].partition(".")
        place = -task.spec.priority, int(number), int(member or 0)
        if self.waiting.get(task.uid) == place:
            return
        self.waiting[task.uid] = place
        heapq.heappush(self.line, (place, task.uid))
        if len(self.line) > 2 * len(self.waiting) + STALE_MAX:
            self.line = [(place, uid) for uid, place in self.waiting.items()]
            heapq.heapify(self.line)


class TaskGroups:
    """All groups of tasks of one node."""

    def __init__(self, state: CoreState, home: Home, batches: BatchedRequests) -> None:
        self._state = state
        self._home = home
        self._batches = batches
        self._groups: dict[str, TaskGroup] = {}
        self._changed: dict[str, None] = {}
        """Groups that may have a task to let through."""

    def __iter__(self) -> Iterator[TaskGroup]:
        return iter([self._groups[name] for name in sorted(self._groups)])

    def restore(self, settings: Iterable[GroupSettings]) -> None:
        for one in settings:
            self._groups[one.name] = TaskGroup(one)

    def adopt(self, task: HomeTask) -> None:
        """Add a task of this home. If a node has it, or may still have it, it takes a slot."""
        name = task.terms.group
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = TaskGroup(GroupSettings(name))
        group.members[task.uid] = task
        record = task.record
        may_be_elsewhere = record.state is TaskState.QUEUED and record.last_node
        if record.state in (TaskState.LEASED, TaskState.UNKNOWN) or may_be_elsewhere:
            group.taken[task.uid] = task

    def admits(self, task: HomeTask) -> bool:
        """Give this task a slot if one is free → True if it has one; else it joins the line of its group."""
        group = self._of(task)
        if group is None:
            return True
        if not group.settings.is_paused:
            is_next = len(group.waiting) == (task.uid in group.waiting)  # no other task waits
            if group.may_pass(task.uid) and (is_next or task.uid in group.taken):
                group.waiting.pop(task.uid, None)
                group.taken[task.uid] = task
                return True
        if not task.record.last_node:  # else a node may return with it
            group.taken.pop(task.uid, None)
        group.wait(task)
        self._changed[group.settings.name] = None
        return False

    def moved(self, task: HomeTask) -> None:
        """Move a task in the line after its priority has changed."""
        group = self._of(task)
        if group is not None and task.uid in group.waiting:
            group.wait(task)

    def next_that_passes(self) -> HomeTask | None:
        """The next task of any group that may pass; it now has its slot."""
        while self._changed:
            name = next(iter(self._changed))
            group = self._groups.get(name)
            task = group.first() if group is not None else None
            if group is not None and task is not None:
                del group.waiting[task.uid]
                group.taken[task.uid] = task
                return task
            del self._changed[name]
        return None

    def waits_no_more(self, task: HomeTask) -> None:
        """Take a task out of the line: a node has returned with it or with its result, or it is over or held."""
        group = self._of(task)
        if group is not None:
            group.waiting.pop(task.uid, None)

    def release(self, task: HomeTask) -> None:
        """Free the slot of a task, and take it out of the line."""
        group = self._of(task)
        if group is not None:
            group.waiting.pop(task.uid, None)
            if group.taken.pop(task.uid, None) is not None:
                self._changed[group.settings.name] = None

    def left(self, task: HomeTask) -> None:
        """Forget a task that is over and no longer runs here."""
        group = self._of(task)
        if group is None:
            return
        self.release(task)
        group.members.pop(task.uid, None)
        name = group.settings.name
        if not group.members and group.settings == GroupSettings(name):
            del self._groups[name]

    def regains(self, task: HomeTask) -> bool:
        """Give a slot of its group back to a held task that a node still has. → False if none is free."""
        group = self._of(task)
        if group is None:
            return True
        slots = group.settings.slots
        if task.uid not in group.taken and slots and len(group.taken) >= slots:
            return False
        group.taken[task.uid] = task
        return True

    def _of(self, task: HomeTask) -> TaskGroup | None:
        return self._groups.get(task.terms.group) if task.terms.group else None

    # -- for users -----------------------------------------------------------------------------------------------------

    def asked(self, event: GroupRequested) -> None:
        """Set, pause, resume or remove a group. Before the answer, the change is durable, and the queue has no task of
        the group that may not run."""
        self._batches.carry_out(event.request, self._asked(event))

    def _asked(self, event: GroupRequested) -> Iterator[None]:
        try:
            if event.removed:
                group = self._remove(event.name)
            else:
                group = self._set(event)
                yield from self._take_back(group)
        except BadRequest as error:
            self._state.actions.append(Answer(event.request, error=error))
            return
        self._state.actions.append(Answer(event.request, {"group": group_dict(group)}))

    def _remove(self, name: str) -> TaskGroup:
        group = self._groups.get(name)
        if group is None:
            raise BadRequest(f"there is no group {name}", hint="peerload group")
        if group.members:
            raise BadRequest(
                f"group {name} is not empty",
                why=f"{len(group.members)} of its tasks are unfinished, and would go on without a limit",
                hint=f"that is wanted:  peerload group set {name} --slots none",
            )
        del self._groups[name]
        self._state.persist(DropGroup(name))
        return group

    def _set(self, event: GroupRequested) -> TaskGroup:
        group = self._groups.get(event.name)
        if group is None:
            if event.slots is None:
                raise BadRequest(
                    f"there is no group {event.name}",
                    why="no unfinished task is in it, and it has no settings",
                    hint=f"peerload group        make it:  peerload group set {event.name} --slots N",
                )
            group = TaskGroup(GroupSettings(event.name))
        before = group.settings
        wanted = GroupSettings(
            event.name,
            before.slots if event.slots is None else event.slots,
            before.is_paused if event.paused is None else event.paused,
        )
        if before == GroupSettings(event.name) != wanted:
            set_by_user = sum(one.settings != GroupSettings(name) for name, one in self._groups.items())
            if set_by_user >= self._state.config.groups_max:
                raise SlowDown("too many groups are set", why=f"the limit is {self._state.config.groups_max}")
        self._groups[event.name] = group
        group.settings = wanted
        if group.settings == GroupSettings(event.name):
            self._state.persist(DropGroup(event.name))
            if not group.members:
                del self._groups[event.name]
        else:
            self._state.persist(PutGroup(group.settings))
        self._changed[event.name] = None
        return group

    def _take_back(self, group: TaskGroup) -> Iterator[None]:
        """Gate tasks again that were let through, are at no node, and may not pass now: all of a paused group, else the
        last ones beyond its slots."""
        waiting = [task for task in group.taken.values() if task.phase in IN_QUEUE]
        if not group.settings.is_paused:
            beyond = len(group.taken) - group.settings.slots if group.settings.slots else 0
            waiting = [task for task in waiting if not task.record.last_node]
            waiting = waiting[-beyond:] if beyond > 0 else []
        settings = group.settings
        for task in waiting:
            yield
            if group.settings is not settings:
                return  # a later request has changed the group
            if group.taken.get(task.uid) is not task or task.phase not in IN_QUEUE:
                continue
            self._home.take_out(task)
            task.enter(HomePhase.GATED)
            if not task.record.last_node:  # else a node may return with it
                del group.taken[task.uid]
            group.wait(task)
            self._changed[settings.name] = None

    def opened_by(self, task: HomeTask) -> str:
        """The command that would let this task pass now, if it is next in its group."""
        group = self._of(task)
        if group is None:
            return ""
        name = group.settings.name
        if group.settings.is_paused:
            return f"peerload group resume {name}"
        return f"peerload group set {name} --slots {len(group.taken) + 1}" if group.is_next(task) else ""

    def reason(self, name: str) -> str:
        """The reason why tasks of this group are GATED."""
        group = self._groups.get(name)
        if group is None:
            return ""
        if group.settings.is_paused:
            return f"group {name} is paused"
        slots = group.settings.slots
        return f"group {name}: {len(group.taken)} of {slots} slot{'' if slots == 1 else 's'} taken"


def group_dict(group: TaskGroup, members: Collection[HomeTask] | None = None) -> dict[str, object]:
    """A group as sent to clients, with these of its tasks; None: all. slots: null = unlimited; waiting: for a slot or
    for other tasks; queued: in all."""
    members = group.members.values() if members is None else members
    states = Counter(task.record.state for task in members)
    return {
        "name": group.settings.name,
        "slots": group.settings.slots or None,
        "paused": group.settings.is_paused,
        "taken": len(group.taken),
        "running": sum(task.running_at > 0 for task in members),
        "waiting": states[TaskState.QUEUED],
        "held": states[TaskState.HELD],
    }


def own_part(group: TaskGroup, sees: Callable[[HomeTask], bool]) -> dict[str, object] | None:
    """Group as shown to a user who may see only some of its tasks; None if it has none of these and was never
    configured. With a limit, the slots taken count all its tasks."""
    members = [task for task in group.members.values() if sees(task)]
    is_set = group.settings != GroupSettings(group.settings.name)
    if not members and not is_set:
        return None
    now = group_dict(group, members)
    return now if is_set else now | {"taken": sum(1 for task in members if task.uid in group.taken)}
