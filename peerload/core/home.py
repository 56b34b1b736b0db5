"""The tasks of this home: their durable life-cycle, their runs on this node, and their one end.

Home is its tasks' only writer: every change of state goes through `Home.become`, which makes it durable and knows the
table of transitions. An attempt that may have run and left no result is *lost*; the task goes back to the queue, as an
arrival, until attempts_max of them were lost. What is said to a node that runs a task is `handoff_home.py`; only what a
user wants of a running task, a cancel or a signal, is passed on to it from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.work import HomePhase, HomeTask
from peerload.model.actions import ForgetTask, PutTask, SignalTask, SpawnTask, TaskChanged
from peerload.model.errors import InvariantBroken
from peerload.model.messages import Revoke, Signal
from peerload.model.task import TRANSITIONS, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.core.admission import Ledger
    from peerload.core.queue import WaitingQueue
    from peerload.core.state import CoreState
    from peerload.model.task import Exit, TaskRecord

SIGKILL = 9


class Home:
    """The unfinished tasks of this home by uid; each ends exactly once.

    ``requeued(task, reason)`` is called when a task is back in the queue (it counts as an arrival), and
    ``placed(task, node)`` when it needs no place any more: it was accepted there, starts here, is over (node = "").
    """

    def __init__(self, state: CoreState, queue: WaitingQueue, ledger: Ledger) -> None:
        self._state = state
        self._queue = queue
        self._ledger = ledger
        self.tasks: dict[bytes, HomeTask] = {}
        self.by_id: dict[str, HomeTask] = {}
        self.arrays: dict[str, dict[str, HomeTask]] = {}
        self.requeued: Callable[[HomeTask, str], None] = lambda _task, _reason: None
        self.placed: Callable[[HomeTask, str], None] = lambda _task, _node: None

    # -- the tasks -----------------------------------------------------------------------------------------------------

    def adopt(self, task: HomeTask) -> None:
        """Take charge of a task (new, or read from the store)."""
        self.tasks[task.uid] = task
        self.by_id[task.task] = task
        array = _array(task.task)
        if array:
            self.arrays.setdefault(array, {})[task.task] = task

    def named(self, name: str) -> list[HomeTask]:
        """The unfinished tasks that a user means: one, or the members of an array."""
        task = self.by_id.get(name)
        return [task] if task is not None else list(self.arrays.get(name, {}).values())

    def migrations_max(self, task: HomeTask) -> int | None:
        """How often it may be placed elsewhere by choice."""
        own = task.spec.placement.migrations_max
        return own if own is not None else self._state.policies.migration.migrations_max

    def may_migrate(self, task: HomeTask) -> bool:
        """Whether one more placement by choice is allowed."""
        limit = self.migrations_max(task)
        return limit is None or task.record.migrations < limit

    def withdraw(self, task: HomeTask) -> None:
        """No offer is out (any more); the task may start here again."""
        if task.phase is HomePhase.OFFERED:
            self._state.clear_timer("offer", task.uid.hex())
            task.phase = HomePhase.WAITING
            task.offered_to = ""
            self._queue.release(task)

    # -- durable transitions -------------------------------------------------------------------------------------------

    def become(self, task: HomeTask, reason: str, /, **changes: object) -> TaskRecord:
        """A new durable record; raises InvariantBroken for a transition that the table does not have."""
        record = task.record
        after = changes.get("state", record.state)
        if after is not record.state and after not in TRANSITIONS[record.state]:
            raise InvariantBroken(f"{record.task}: {record.state} → {after}", story=f"{record!r}; {reason}")
        task.record = msgspec.structs.replace(record, reason=reason, **changes)
        self._state.persist(PutTask(task.record, self._state.now.wall_s, reason))
        runs = bool(task.running_at) and task.record.state is TaskState.LEASED
        self._state.actions.append(TaskChanged(task.record, runs, reason))
        return task.record

    def requeue(self, task: HomeTask, reason: str, *, arrives: bool = True, may_be_back: bool = False) -> None:
        """Back to the queue, nobody has it. ``arrives``: it is decided about anew at once; ``may_be_back``: the node
        that had it was only not heard of, and may still have it (R11)."""
        self._clear_timers(task)
        task.last_node = task.record.node if may_be_back else ""
        task.phase = HomePhase.WAITING
        task.running_at = 0.0
        task.killed_because = ""
        self.become(task, reason, state=TaskState.QUEUED, node="", started_at=0.0)
        self._queue.add(task)
        if arrives:
            self.requeued(task, reason)

    def lose(self, task: HomeTask, reason: str, *, may_be_back: bool = False) -> None:
        """An attempt that may have run ended without a result."""
        task.losses += 1
        self._state.count("attempts lost")
        if task.losses >= self._state.config.attempts_max:
            self.become(
                task,
                f"given up after {task.losses} lost attempts; the last: {reason}",
                state=TaskState.FAILED,
                ended_at=self._state.now.wall_s,
            )
            self._forget(task)
            return
        self.requeue(task, reason, may_be_back=may_be_back)

    # -- runs on this node ---------------------------------------------------------------------------------------------

    def start_here(self, task: HomeTask) -> None:
        """Run it on this node: LEASED to ourselves and START in one (D2 + D3)."""
        self.placed(task, self._state.node)
        task.phase = HomePhase.HERE
        self.become(
            task,
            "room here",
            state=TaskState.LEASED,
            attempt=task.record.attempt + 1,
            node=self._state.node,
            nonce=0,
            machine_boot=self._state.identity.machine_boot,
            lease_s=0.0,
        )
        self._ledger.start(task.key, task.spec.request, is_local=True)
        self._state.actions.append(SpawnTask(task.key, task.task, task.record.attempt, self._state.node, task.spec))

    def started_here(self, task: HomeTask, started_at: float, reason: str = "started here") -> None:
        """The launcher has the process."""
        task.running_at = started_at
        self._arm_time_limit(task, started_at)
        self._state.actions.append(
            TaskChanged(msgspec.structs.replace(task.record, started_at=started_at), running=True, reason="started")
        )
        self.seen_running(task, reason)

    def seen_running(self, task: HomeTask, reason: str) -> None:
        """Its process is there: no state of the record, but one that users see."""
        record = task.record
        self._state.note("task", "running", task=record.task, attempt=record.attempt, node=record.node, reason=reason)

    def ended_here(self, task: HomeTask, exit_: Exit) -> None:
        """The process is gone; its output lies in this home's spool already."""
        if task.phase is HomePhase.OVER:
            self._forget(task)
        else:
            self.finish(task, exit_)
        self._state.actions.append(ForgetTask(task.key, output=False))

    def died_here(self, task: HomeTask, reason: str) -> None:
        """Started here, no result, and its processes are gone."""
        if task.phase is HomePhase.OVER:
            self._forget(task)
        else:
            self.lose(task, reason)

    def _arm_time_limit(self, task: HomeTask, started_at: float) -> None:
        if task.spec.time_limit_s:
            left_s = started_at + task.spec.time_limit_s - self._state.now.wall_s
            self._state.set_timer_in(max(min(left_s, task.spec.time_limit_s), 0.0), "limit", task.key)

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, task: HomeTask, exit_: Exit) -> None:
        """Record the one result (D5), and learn from it."""
        self._state.history.learn(task.spec, exit_)
        state = TaskState.DONE if exit_.exit_code == 0 else TaskState.FAILED
        self.become(
            task,
            exit_.reason or ("ended" if state is TaskState.DONE else f"exit code {exit_.exit_code}"),
            state=state,
            started_at=exit_.started_at,
            ended_at=exit_.ended_at or self._state.now.wall_s,
            exit=exit_,
        )
        self._forget(task)

    def _forget(self, task: HomeTask) -> None:
        self._clear_timers(task)
        self.tasks.pop(task.uid, None)
        self.by_id.pop(task.task, None)
        array = _array(task.task)
        members = self.arrays.get(array)
        if members is not None:
            members.pop(task.task, None)
            if not members:
                del self.arrays[array]

    def _clear_timers(self, task: HomeTask) -> None:
        name = task.uid.hex()
        if task.record.node not in ("", self._state.node):  # a task that never left has none of these
            self._state.clear_timer("lease", name)
            self._state.clear_timer("ask", name)
        if task.spec.time_limit_s:
            self._state.clear_timer("limit", task.key)

    def cancel(self, task: HomeTask, signal: int, *, force: bool) -> bool:
        """Durable before it is confirmed (D7); False if it has ended already."""
        if task.phase is HomePhase.OVER:
            if force:  # cancelled before, and its process has not obeyed yet
                self._state.actions.append(SignalTask(task.key, SIGKILL))
            return False
        was = task.phase
        key, node = task.key, task.record.node
        self.withdraw(task)
        self._queue.remove(task)
        self.placed(task, "")
        task.phase = HomePhase.OVER
        self.become(
            task,
            "cancelled",
            state=TaskState.CANCELLED,
            started_at=task.running_at,
            ended_at=self._state.now.wall_s,
        )
        first = SIGKILL if force else signal
        if was is HomePhase.HERE:
            self._state.actions.append(SignalTask(key, first))
            self._state.set_timer_in(self._state.config.kill_after_s, "kill", key)
            self._clear_timers(task)
            return True  # kept until its process is gone
        is_superseded = was is HomePhase.COLLECTING and task.collected_attempt != task.record.attempt
        if was is HomePhase.AWAY or is_superseded:
            self._state.send(node, Revoke(task.task, task.uid, task.record.attempt, first, "cancelled"))
        self._forget(task)
        return True

    def signal(self, task: HomeTask, signal: int) -> bool:
        """Pass a signal on to the running task; False if it does not run."""
        if task.phase is HomePhase.HERE:
            self._state.actions.append(SignalTask(task.key, signal))
        elif task.phase is HomePhase.AWAY and task.running_at:
            self._state.send(task.record.node, Signal(task.task, task.uid, task.record.attempt, signal))
        else:
            return False
        return True


def _array(task: str) -> str:
    """The array that a task is a member of, "" for a single one."""
    return task.rpartition(".")[0]
