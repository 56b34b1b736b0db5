"""The tasks of this home, in one file because they have one writer: their durable states, their runs here, their end.

Home is its tasks' only writer: every change of state goes through `Home.become`, which makes it durable and checks the
table of transitions. Messages to a node that runs a task are sent by `handoff/home.py`, lost attempts are handled by
`retries.py`; only a user's cancel or signal goes to a running task from here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.core.work import GrantedLease, HomePhase, HomeTask
from peerload.model import actions, metrics, timers
from peerload.model.bounded import BoundedDict
from peerload.model.errors import InvariantBroken
from peerload.model.messages import Revoke, Signal
from peerload.model.task import TRANSITIONS, TaskState, Usage, execution_key, how_it_ended, submission_of, task_home

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peerload.core.state import CoreState, Mediator
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import UntouchedMembers
    from peerload.model.task import Exit, TaskRecord

SIGKILL = 9
PLACED_HERE = metrics.labelled(metrics.PLACEMENTS, kind="here")
OBEYING_MAX = 10_000
"""Cancelled remote attempts whose time to end is remembered."""
NOTHING_USED = Usage()
NOBODY: dict[str, object] = {"node": "", "started_at": 0.0, "parked_ts": 0.0, "devices": ()}
"""The node fields of a record when no node has the task."""


class TasksById(Mapping[str, HomeTask]):
    """The unfinished tasks of a home by id, looked up among single tasks and arrays, without a table of its own.
    Iteration yields only tasks that are separate objects; looking up another task by its id makes it one."""

    __slots__ = ("_home",)

    def __init__(self, home: Home) -> None:
        self._home = home

    def __getitem__(self, task: str) -> HomeTask:
        array = _array(task)
        if not array:
            return self._home.singles[task]
        found = self._home.arrays.get(array, {}).get(task) or self._home.member(task)
        if found is None:
            raise KeyError(task)
        return found

    def __iter__(self) -> Iterator[str]:
        return chain(self._home.singles, *self._home.arrays.values())

    def __len__(self) -> int:
        return len(self._home.tasks)


class Home:
    """The unfinished tasks of this home by uid; each ends exactly once. ``elsewhere``: by node, the tasks that another
    node has or had at its last message; ``stranded``: by uid, those that cannot run here and have no other place. Its
    timer is ``rest``."""

    def __init__(self, state: CoreState, queue: WaitingQueue, mediator: Mediator) -> None:
        self._state = state
        self._queue = queue
        limit = state.policies.migration.migrations_max
        self._migrations_max = limit if limit is not None else state.config.migrations_max
        self.tasks: dict[bytes, HomeTask] = {}
        self.states = dict.fromkeys(TaskState, 0)
        """Number of `tasks` in each state."""
        self.arrays: dict[str, dict[str, HomeTask]] = {}
        self.singles: dict[str, HomeTask] = {}
        """The tasks that are in no array, by their ids."""
        self.untouched: dict[str, list[UntouchedMembers]] = {}
        """Members of uniform arrays that are not yet separate tasks, in order, by the name of the array."""
        self._untouched_number = 0
        self.by_id = TasksById(self)
        self.stranded: dict[bytes, HomeTask] = {}
        self._being_made: dict[str, None] = {}
        self.elsewhere: dict[str, dict[bytes, HomeTask]] = {}
        self._obeying: BoundedDict[str, float] = BoundedDict(OBEYING_MAX)
        self.mediator = mediator

    # -- the tasks -----------------------------------------------------------------------------------------------------

    def adopt(self, task: HomeTask) -> None:
        self.states[task.record.state] += 1
        self._index(task)

    def _index(self, task: HomeTask) -> None:
        self.tasks[task.uid] = task
        array = _array(task.task)
        if not array:
            self.singles[task.task] = task
        elif (members := self.arrays.get(array)) is not None:
            members[task.task] = task
        else:
            self.arrays[array] = {task.task: task}
        self._moved(task, "")

    @property
    def number(self) -> int:
        return len(self.tasks) + self._untouched_number

    def adopt_members(self, block: UntouchedMembers) -> None:
        """Add members of a uniform array behind its present ones."""
        self.untouched.setdefault(block.task, []).append(block)
        self.arrays.setdefault(block.task, {})
        self._untouched_number += block.count
        self.states[TaskState.QUEUED] += block.count

    def member(self, name: str) -> HomeTask | None:
        """Make the untouched member of this name a task of its own; None if there is none."""
        array, _, number = name.rpartition(".")
        blocks = self.untouched.get(array)
        if blocks is None:
            return None
        member = int(number)
        at = bisect_right(blocks, member, key=_first_member) - 1
        return self.touch(blocks[at], member) if at >= 0 and member in blocks[at].members else None

    def touch(self, block: UntouchedMembers, member: int) -> HomeTask:
        """Make this member a task of its own, in the same place of the queue."""
        task = block.member(member)
        self._index(task)
        self._divided(block, self._queue.split(block, task, member), member)
        self._untouched_number -= 1
        return task

    def touched(self, array: str, at_most: int) -> None:
        """Make the next members of a uniform array tasks of their own, at most ``at_most``."""
        while at_most > 0 and (blocks := self.untouched.get(array)):
            self.touch(blocks[0], blocks[0].members[0])
            at_most -= 1

    def some(self, at_most: int) -> list[HomeTask]:
        """Return ``at_most`` unfinished tasks, or all if there are fewer."""
        for array in list(self.untouched):
            self.touched(array, at_most - len(self.tasks))
        return list(islice(self.tasks.values(), at_most))

    def untouched_run(self, names: Sequence[str], at: int) -> tuple[UntouchedMembers, range] | None:
        """Next gapless run of untouched members of one array in ``names`` from ``at`` on, named one by one or by their
        array; its length is bounded. Ending them ends no other task. None if there is no such run."""
        name, at_most = names[at], self._state.config.uniform_at_a_time
        array = name if name in self.untouched else name.rpartition(".")[0]
        blocks = self.untouched.get(array)
        if not blocks or blocks[0].terms.completion_jobs() or self.mediator.is_awaited(array):
            return None
        if array == name:
            return blocks[0], blocks[0].members[:at_most]
        member = int(name[len(array) + 1 :])
        block = blocks[max(bisect_right(blocks, member, key=_first_member) - 1, 0)]
        if member not in block.members:
            return None
        first = block.members.index(member)
        same = takewhile(
            lambda pair: pair[0] == f"{array}.{pair[1]}",
            zip(islice(names, at, at + at_most), block.members[first:], strict=False),
        )
        return block, block.members[first : first + sum(1 for _ in same)]

    def cancel_untouched(self, block: UntouchedMembers, members: range, reason: str) -> None:
        """Cancel untouched members of an array, as one row."""
        rest = self._queue.drop(block, members)
        self._divided(block, rest, members[0])
        self._untouched_number -= len(members)
        self.states[TaskState.QUEUED] -= len(members)
        ended_at = self._state.now.wall_s
        record = msgspec.structs.replace(block.record, state=TaskState.CANCELLED, reason=reason, ended_at=ended_at)
        kept = actions.PutMembers(record, block.uid_key, members[0], members[-1], members.step, ended_at, reason)
        self._state.persist(kept)
        self._state.actions.append(actions.MembersCancelled(kept))

    def _divided(self, block: UntouchedMembers, rest: UntouchedMembers | None, member: int) -> None:
        """Keep the blocks of an array in order after one lost members from this one on; ``rest``: those behind."""
        blocks = self.untouched[block.task]
        if rest is not None:
            blocks.insert(bisect_right(blocks, member, key=_first_member), rest)
        elif not block.members:
            blocks.remove(block)
            if not blocks:
                del self.untouched[block.task]
                if not self.arrays[block.task]:
                    del self.arrays[block.task]

    def unfinished_in(self, name: str) -> int:
        """The number of unfinished tasks that a user's name selects: one task, or the members of an array."""
        if name not in self.untouched:
            return sum(not task.record.state.is_final for task in self.named(name))
        members = self.arrays.get(name, {}).values()
        return sum(not task.record.state.is_final for task in members) + sum(one.count for one in self.untouched[name])

    def tables(self) -> tuple[dict[Any, Any], ...]:
        """The tables that grow with the number of tasks."""
        return self.tasks, self.singles, self.arrays, *self.arrays.values(), *self.elsewhere.values()

    def begin_making(self, array: str) -> None:
        """Start to adopt the members of this array one by one. Until all are durable, no user request can select one of
        them, because becoming durable would undo a confirmed change."""
        self._being_made[array] = None

    def mark_durable(self, array: str) -> None:
        self._being_made.pop(array, None)

    def is_being_made(self, name: str) -> bool:
        """True for an array whose members are not durable yet, and for its members."""
        return (_array(name) or name) in self._being_made

    def unfinished(self) -> dict[str, int]:
        """The number of unfinished tasks by state, without zeros and without arrays that are being made."""
        numbers = {state: number for state, number in self.states.items() if not state.is_final}
        for members in (self.arrays.get(array, {}) for array in self._being_made):
            for first in islice(members.values(), 1):  # all are in the same state
                numbers[first.record.state] -= len(members)
        return {state.value: number for state, number in numbers.items() if number}

    def named(self, name: str) -> list[HomeTask]:
        """The unfinished tasks that a user's name selects: one task, or the members of an array."""
        if self.is_being_made(name):
            return []
        task = self.by_id.get(name)
        if task is not None:
            return [task]
        self.touched(name, self._untouched_number)
        return list(self.arrays.get(name, {}).values())

    def migrations_max(self, task: HomeTask | UntouchedMembers) -> int:
        """Limit on its placements elsewhere by choice: its own, else the policy's, else `CoreConfig.migrations_max`."""
        own = task.spec.placement.migrations_max
        return own if own is not None else self._migrations_max

    def may_migrate(self, task: HomeTask | UntouchedMembers) -> bool:
        """True if one more placement by choice is allowed. None is allowed while the disk lacks room for its
        records."""
        return self._state.has_disk_room and task.record.migrations < self.migrations_max(task)

    def withdraw(self, task: HomeTask) -> None:
        """Withdraw the pending offer of a task, if any; the task may start here again."""
        if task.phase is HomePhase.OFFERED:
            self._state.clear_timer(timers.OfferTimeout(task.uid.hex()))
            task.enter(HomePhase.WAITING)
            self._queue.release(task)

    # -- durable transitions -------------------------------------------------------------------------------------------

    def become(self, task: HomeTask, reason: str, /, **changes: object) -> TaskRecord:
        """Store a new durable record; raises InvariantBroken for a transition that is not in the table."""
        record, state = task.record, self._state
        before, after = record.state, changes.get("state", record.state)
        if after is not before and after not in TRANSITIONS[before]:
            raise InvariantBroken(f"{record.task}: {before} → {after}", story=f"{record!r}; {reason}")
        task.record = now = msgspec.structs.replace(record, reason=reason, **changes)
        if after is not before and task.uid in self.tasks:
            self.states[before] -= 1
            self.states[now.state] += 1
        if now.node != record.node:
            self._moved(task, record.node)
        ends = after is not before and now.state.is_final
        kept = actions.PutTask(now, state.now.wall_s, reason)
        if ends:
            owed = task.terms.completion_jobs()
            chores = (actions.PutChores(record.task, owed),) if owed else ()
            state.persist(kept, *self.mediator.rows_at_end(now), *chores)
        else:
            state.persist(kept)
        runs = bool(task.running_at) and after is TaskState.LEASED
        state.actions.append(actions.TaskChanged(now, runs, reason))
        if ends:
            self.mediator.task_ended(now)
        return now

    def _moved(self, task: HomeTask, before: str) -> None:
        """Update the index of tasks elsewhere after the node of a record has changed."""
        here, node = self._state.node, task.record.node
        if before not in ("", here):
            tasks = self.elsewhere.get(before)
            if tasks is not None and tasks.pop(task.uid, None) is not None and not tasks:
                del self.elsewhere[before]
        if node not in ("", here):
            self.elsewhere.setdefault(node, {})[task.uid] = task

    def at(self, node: str) -> list[HomeTask]:
        """Tasks that another node has, as far as known."""
        return list(self.elsewhere.get(node, {}).values())

    def requeue(
        self, task: HomeTask, reason: str, *, arrives: bool = True, rests_s: float = 0.0, **changes: object
    ) -> None:
        """Return a task that no node has to the queue. arrives: dispatch it immediately; rests_s: only after this
        pause; last_node among the changes: that node is only silent and may still have it (R11)."""
        if self._cannot_repeat(task, reason):
            return
        self._clear_timers(task)
        self._nobody_has(task)
        self.become(task, reason, **(NOBODY | {"state": TaskState.QUEUED, "last_node": ""} | changes))
        rests_s = max(rests_s, self._state.unsure_until_s - self._state.now.boot_s)
        if rests_s > 0.0:
            self.rest(task, rests_s)
            return
        task.enter(HomePhase.WAITING)
        if arrives:
            self.mediator.task_arrives(task)
        else:
            self._queue.add(task)

    def _cannot_repeat(self, task: HomeTask, reason: str) -> bool:
        """Fail the task if its input was read and is not kept whole: it must not run on half of it. → True if so."""
        if not task.record.input_is_cut:
            return False
        self.fail(task, f"{reason}; it cannot be repeated, since its standard input is not kept whole")
        return True

    def rest(self, task: HomeTask, seconds: float) -> None:
        """Keep the task queued, but do not consider it for this time."""
        task.enter(HomePhase.RESTING)
        self._state.set_timer_in(seconds, timers.Rest(task.uid.hex()))

    def rests_until_sure(self, task: HomeTask) -> bool:
        """Pause it while another node may have it under a lease that is missing in the database. → True if so."""
        unsure_s = self._state.unsure_until_s - self._state.now.boot_s
        if unsure_s <= 0.0 or not self._is_older_than_loss(task):
            return False
        self.rest(task, unsure_s)
        return True

    def rested(self, task: HomeTask) -> None:
        """End the pause of a task: it arrives."""
        if task.phase is HomePhase.RESTING:
            task.enter(HomePhase.WAITING)
            self.mediator.task_arrives(task)

    def prioritize(self, task: HomeTask, priority: int) -> None:
        """Change the priority of a task: it goes before tasks of lower priority, behind those of the same priority."""
        if task.spec.priority == priority:
            return
        self._queue.prioritize(task, priority)
        self.become(task, f"its priority is {priority} now", priority=priority)

    def take_out(self, task: HomeTask, node: str = "") -> None:
        """End the waiting of a task here: it is at that node, held or over."""
        self.withdraw(task)
        self._queue.remove(task)
        if task.phase is HomePhase.GATED:
            self.mediator.task_left_gate(task)
        elif task.phase is HomePhase.RESTING:
            self._state.clear_timer(timers.Rest(task.uid.hex()))
        self.mediator.task_placed(task, node)

    def take_back(self, task: HomeTask, node: str, reason: str, lease_s: float) -> None:
        """Lease the same attempt again to a node that was given up as lost and still has it (R11)."""
        self.take_out(task, node)
        if task.record.state is TaskState.HELD:
            self.become(task, f"{node} is back", state=TaskState.QUEUED)
        task.enter(HomePhase.AWAY)
        task.lease = task.lease or GrantedLease()
        record = task.record
        if record.last_node == node:  # it was not lost
            others = tuple(name for name in record.lost_on if name != node)
            self.become(
                task,
                reason,
                state=TaskState.LEASED,
                node=node,
                lease_s=lease_s,
                losses=max(record.losses - 1, 0),
                lost_on=others,
                last_node="",
            )
        else:
            self.become(task, reason, state=TaskState.LEASED, node=node, lease_s=lease_s)

    def resume(self, task: HomeTask) -> None:
        """Continue with a task whose result could not be fetched, from the state in its record."""
        match task.record.state:
            case TaskState.LEASED:
                task.enter(HomePhase.AWAY)
            case TaskState.UNKNOWN:
                task.enter(HomePhase.UNKNOWN)
            case TaskState.HELD:
                task.enter(HomePhase.HELD)
            case _:
                task.enter(HomePhase.WAITING)
                self.mediator.task_arrives(task)

    def hold(self, task: HomeTask, reason: str, **changes: object) -> None:
        """Hold a task that waits or that another node had."""
        if self._cannot_repeat(task, reason):
            return
        self.take_out(task)
        self._clear_timers(task)
        self._nobody_has(task)
        task.enter(HomePhase.HELD)
        self.mediator.task_kept_back(task)
        self.become(task, reason, **(NOBODY | {"state": TaskState.HELD} | changes))

    def _nobody_has(self, task: HomeTask) -> None:
        task.running_at = 0.0
        if task.lease is not None:
            task.lease.heard_ts = 0.0
            task.lease.deadline_s = 0.0
        task.killed_because = task.output_waits_because = ""
        task.devices = ()

    def fail(self, task: HomeTask, reason: str) -> None:
        """End a task without a result."""
        self.take_out(task)
        self.become(task, reason, state=TaskState.FAILED, ended_at=self._state.now.wall_s)
        self.forget(task)

    # -- runs on this node ---------------------------------------------------------------------------------------------

    def next_attempt(self, task: HomeTask) -> int:
        """The number of the next attempt. It was never used before, not even by attempts that are missing in the
        database: launchers, executors and the spool identify an attempt by its number."""
        after = task.record.attempt + 1
        return max(after, self._state.attempts_from) if self._is_older_than_loss(task) else after

    def may_be_lost(self, task: HomeTask, attempt: int) -> bool:
        """True if this attempt may have been granted, to any node, by commits that are missing in the database."""
        return attempt < self._state.attempts_from and self._is_older_than_loss(task)

    def _is_older_than_loss(self, task: HomeTask) -> bool:
        return self._state.attempts_up_to > 0 and submission_of(task.task) <= self._state.attempts_up_to

    def start_here(self, task: HomeTask, after: str = "") -> None:
        """Run it on this node: LEASED to itself and START in one (D2 + D3). after: the attempt whose slot it takes."""
        self.mediator.task_placed(task, self._state.node)
        task.enter(HomePhase.HERE)
        self.become(
            task,
            "room here",
            state=TaskState.LEASED,
            attempt=self.next_attempt(task),
            node=self._state.node,
            nonce=0,
            machine_boot=self._state.identity.machine_boot,
            store=self._state.identity.store,
            lease_s=0.0,
            last_node="",
            devices=task.devices,
        )
        self._state.count(PLACED_HERE)
        record, node = task.record, self._state.node
        spawn = actions.SpawnTask(
            task.key, task.task, record.attempt, node, task.spec, devices=record.devices, after=after
        )
        self._state.actions.append(spawn)

    def started_here(self, task: HomeTask, started_at: float, reason: str = "started here") -> None:
        task.running_at = started_at
        self._state.set_time_limit(task.key, task.spec.time_limit_s, started_at)
        self._state.actions.append(
            actions.TaskChanged(
                msgspec.structs.replace(task.record, started_at=started_at), running=True, reason="started"
            )
        )
        self.seen_running(task, reason)

    def started_elsewhere(self, task: HomeTask, node: str, started_at: float) -> None:
        """Record that the process of a task exists, or existed, on another node; started_at by that node's clock, 0: it
        did not start. Only the first report counts."""
        if started_at and not task.running_at:
            task.running_at = self.by_own_clock(task, started_at)
            record = msgspec.structs.replace(task.record, started_at=task.running_at)
            self._state.actions.append(actions.TaskChanged(record, running=True, reason=f"started on {node}"))
            self.seen_running(task, f"started on {node}")

    def seen_running(self, task: HomeTask, reason: str) -> None:
        """Record that the process of a task exists. Users see it as a state, which the durable record does not have."""
        record = task.record
        self._state.note("task", "running", task=record.task, attempt=record.attempt, node=record.node, reason=reason)

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, task: HomeTask, exit_: Exit, *, why: str = "", **changes: object) -> None:
        """Record the one result (D5), and learn from it. ``why``: an addition to the reason."""
        self._state.history.learn(task.spec, exit_)
        state = TaskState.DONE if exit_.exit_code == 0 else TaskState.FAILED
        reason = exit_.reason or "ended" if state is TaskState.DONE else how_it_ended(exit_)
        collection = task.collection if task.phase is HomePhase.COLLECTING else None
        if collection is not None and collection.attempt == task.record.attempt:
            changes["devices"] = task.devices
        started_at, ended_at = exit_.started_at, exit_.ended_at or self._state.now.wall_s
        if task.record.node != self._state.node:
            ended_at = self.by_own_clock(task, ended_at, ran_s=ended_at - started_at if started_at else 0.0)
            started_at = started_at and ended_at - (exit_.ended_at - started_at)
        self.become(
            task,
            f"{reason}; {why}" if why.strip() else reason,
            state=state,
            started_at=started_at,
            ended_at=ended_at,
            exit=exit_,
            **changes,
        )
        self.forget(task)

    def used(self, task: str, uid: bytes, attempt: int, node: str, usage: Usage) -> None:
        """Record the usage of an attempt that ended at this node after its task was over. A cancelled task's
        record gets it; other records do not change. task: "" = not known."""
        if usage != NOTHING_USED and task_home(task) in ("", self._state.node):
            self._state.persist(actions.PutUsage(task, uid, attempt, node, usage))

    def by_own_clock(self, task: HomeTask, at: float, *, ran_s: float = 0.0) -> float:
        """Clamp an instant (Unix s) by another node's clock, which may be wrong: not in the future, and not before the
        submission plus ran_s."""
        return min(max(at, task.record.submitted_at + ran_s), self._state.now.wall_s)

    def forget(self, task: HomeTask) -> None:
        """Remove a task that is over from memory."""
        self._clear_timers(task)
        self.mediator.task_left(task)
        if self.tasks.pop(task.uid, None) is not None:
            self.states[task.record.state] -= 1
        self.singles.pop(task.task, None)
        tasks = self.elsewhere.get(task.record.node)
        if tasks is not None and tasks.pop(task.uid, None) is not None and not tasks:
            del self.elsewhere[task.record.node]
        array = _array(task.task)
        members = self.arrays.get(array)
        if members is not None:
            members.pop(task.task, None)
            if not members and array not in self.untouched:
                del self.arrays[array]

    def _clear_timers(self, task: HomeTask) -> None:
        if task.record.node not in ("", self._state.node):  # a task that never left has none of these
            self._state.clear_timer(timers.Lease(task.uid.hex()))
            self._state.clear_timer(timers.QueryDue(task.uid.hex()))
        if task.spec.time_limit_s:
            self._state.clear_timer(timers.TimeLimit(task.key))

    def cancel(self, task: HomeTask, signal: int, *, force: bool, reason: str = "cancelled") -> bool:
        """Cancel a task, durably before the confirmation (D7); False if it has ended already."""
        if task.phase is HomePhase.OVER:
            if force:  # cancelled before, and its process has not ended yet
                self._state.actions.append(actions.SignalTask(task.key, SIGKILL))
            return False
        was = task.phase
        key, node = task.key, task.record.node
        self.take_out(task)
        task.enter(HomePhase.OVER)
        self.become(
            task,
            reason,
            state=TaskState.CANCELLED,
            started_at=task.running_at,
            ended_at=self._state.now.wall_s,
        )
        first = SIGKILL if force else signal
        if was is HomePhase.HERE:
            self._state.actions.append(actions.SignalTask(key, first))
            self._state.set_timer_in(self._state.config.kill_after_s, timers.Kill(key))
            self._clear_timers(task)
            return True  # kept until its process is gone
        collected = task.collection.attempt if task.collection is not None else 0
        is_superseded = was is HomePhase.COLLECTING and collected != task.record.attempt and node
        is_elsewhere = was in (HomePhase.AWAY, HomePhase.UNKNOWN) and node
        if is_elsewhere or is_superseded:
            self._state.send(node, Revoke(task.task, task.uid, task.record.attempt, first, reason))
            if first != SIGKILL:
                self._obeying[key] = self._state.now.boot_s + self._state.config.kill_after_s
        self.forget(task)
        return True

    def may_obey(self, uid: bytes, attempt: int) -> bool:
        """True if the processes of this cancelled remote attempt still have time to end: if a node renews it meanwhile,
        it is not told to kill them."""
        key = execution_key(uid, attempt)
        until_s = self._obeying.get(key)
        if until_s is None or until_s > self._state.now.boot_s:
            return until_s is not None
        del self._obeying[key]
        return False

    def signal(self, task: HomeTask, signal: int) -> bool:
        """Pass a user's signal to the running task; False if it does not run, or has ended elsewhere and its output
        waits. If the signal ends it, that is its result."""
        if task.phase is HomePhase.HERE:
            self._state.actions.append(actions.SignalTask(task.key, signal))
        elif task.phase is HomePhase.AWAY and task.running_at and not task.has_ended_elsewhere:
            self._state.send(task.record.node, Signal(task.task, task.uid, task.record.attempt, signal))
        else:
            return False
        attempt, signals = task.signalled
        if attempt != task.record.attempt:
            signals = ()
        task.signalled = task.record.attempt, tuple(dict.fromkeys((*signals, signal)))
        return True


def _first_member(block: UntouchedMembers) -> int:
    return block.members.start


def _array(task: str) -> str:
    """The array that a task is a member of, "" for a single task."""
    return task.rpartition(".")[0]
