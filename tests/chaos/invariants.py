"""The promises (I1 … I13), checked at every step, each where it could be broken; `at_rest` holds the cluster against what it
was before when all work is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.actions import DropExecution, PutExecution, PutMembers, PutTask
from peerload.model.errors import InvariantBroken
from peerload.model.messages import Commit, Park, RenewOk
from peerload.model.task import ExecutionState, Guarantee, TaskState, attempt_of, execution_key
from tests.chaos.gates import records_of, terms_of
from tests.chaos.plan import MEMORY_TRIES

if TYPE_CHECKING:
    from peerload.model.actions import Row, TaskChanged
    from peerload.model.task import Exit, SubmitOptions, TaskRecord, TaskSpec
    from tests.chaos.cluster import Cluster
    from tests.chaos.launcher import Process
    from tests.chaos.machine import Machine

FROZEN_S = 1.0
"""A launcher hears within this of what its agent was told."""


class Invariants:
    """Raises InvariantBroken, whose text begins with the number of the promise. Tasks are known by their uid."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._specs: dict[str, TaskSpec] = {}
        self._executing: dict[str, dict[str, str]] = {}
        self._started: dict[str, str] = {}
        """Machine and store on which an attempt was started."""
        self._starts: dict[str, int] = {}
        self._promised: set[tuple[str, str]] = set()
        self._finished: dict[int, str] = {}
        self._granted: dict[str, str] = {}
        self._attempts: dict[bytes, int] = {}
        self._final: dict[bytes, TaskRecord] = {}
        self._shown: dict[bytes, tuple[int, TaskState]] = {}
        self._results: dict[str, str] = {}
        self._short: set[str] = set()
        """Attempts that ran out of memory or failed, of tasks that are tried again then."""
        self._answered: dict[tuple[str, str], float] = {}
        """The newest word of its home that has come to a node for an attempt, by that node's clock."""
        self._parked: set[tuple[str, str]] = set()
        """Node and attempt: what runs there was parked with its home's newest word."""
        self.acknowledged: dict[bytes, tuple[str, str]] = {}
        """uid → home and id of every task that a client was told of, less those whose home's disk was lost."""

    def _broken(self, promise: str, what: str, story: str = "") -> InvariantBroken:
        return InvariantBroken(f"{promise}: {what}, at {self._cluster.now_s:.6f} s", story=story)

    # -- processes (I2, I4, I5, I9) ------------------------------------------------------------------------------------

    def spawned(self, machine: Machine, process: Process, spec: TaskSpec) -> None:
        """An attempt starts at most once, not where it was promised never to, and only where there is room."""
        key, uid = process.key, process.uid
        self._specs.setdefault(uid, spec)
        if key in self._started:
            raise self._broken("I4", f"{process.task} starts again as {key} on {machine.name}")
        if (machine.identity.store, key) in self._promised:
            raise self._broken("I4", f"{process.task} starts as {key} on {machine.name}, against its word")
        newest = self._attempts.get(bytes.fromhex(uid), 0)
        if attempt_of(key)[1] < newest and spec.guarantee is not Guarantee.FAST:
            raise self._broken(
                "I2", f"{process.task} starts as {key} on {machine.name} after attempt {newest} was granted"
            )
        self._started[key] = machine.identity.store
        self._starts[uid] = self._starts.get(uid, 0) + 1
        if self._starts[uid] > 1 and spec.guarantee is Guarantee.ONCE:
            raise self._broken("I5", f"{process.task}, at most once, starts as {key} on {machine.name}")
        if len(machine.launcher.running) > machine.facts.slots:
            raise self._broken("I9", f"{len(machine.launcher.running)} tasks in {machine.facts.slots} slots")

    def executes(self, machine: Machine, process: Process) -> None:
        """Note that a process executes from now on."""
        copies = self._executing.setdefault(process.uid, {})
        copies[process.key] = machine.name
        if len(copies) > 1 and self._specs[process.uid].guarantee is not Guarantee.FAST:
            raise self._broken("I2", f"{process.task} executes more than once", story=repr(copies))

    def rests(self, process: Process) -> None:
        """Note that a process does not execute (ended or frozen)."""
        copies = self._executing.get(process.uid)
        if copies is not None:
            copies.pop(process.key, None)
            if not copies:
                del self._executing[process.uid]

    def finished(self, process: Process, signal: int) -> None:
        """Note the end of a process, by this signal if not 0, and the mark of its exit record."""
        self._finished[process.serial] = process.key

    def forgotten(self, machine: Machine, key: str, exit_: Exit) -> None:
        """The exit record of an attempt is forgotten: if its task was cancelled, what it used is on its home's disk, or still
        owed to the home. (A node that has lost its store since the start knows of no home.)"""
        owed = machine.disk.executions.get(key)
        if self._started.get(key) != machine.identity.store or (owed and owed.state is ExecutionState.RESULT):
            return
        uid, attempt = attempt_of(key)
        final = self._final.get(uid)
        known = self.acknowledged.get(uid)
        if final is None or known is None or final.state is not TaskState.CANCELLED:
            return
        if (final.attempt, final.node) == (attempt, machine.name):
            home, task = known
            usage = self._cluster.machines[home].disk.tasks[task].usage
            if usage != exit_.usage:
                raise self._broken("I6", f"{task} was cancelled, and what it used is not known", story=repr(usage))
            self._cluster.gauges.count("used by a cancelled task" + (" elsewhere" if home != machine.name else ""))

    def promised(self, machine: Machine, key: str) -> None:
        """A node says that this attempt never started there and never will: it did not, and it shall not. (The word of a
        store that was lost since is another's.)"""
        if self._started.get(key) == machine.identity.store:
            raise self._broken("I4", f"{machine.name} says that {key} never started there, and it did")
        self._promised.add((machine.identity.store, key))

    # -- parking (R12) -------------------------------------------------------------------------------------------------

    def heard(self, machine: Machine, message: object) -> None:
        """A node has taken note of this."""
        if isinstance(message, Park):
            for parking in message.parkings:
                key = execution_key(parking.uid, parking.attempt)
                if key in machine.launcher.running and parking.ts >= self._answered.get((machine.name, key), 0.0):
                    self._parked.add((machine.name, key))
        elif isinstance(message, Commit | RenewOk):
            for granted in [message] if isinstance(message, Commit) else message.extensions:
                known = machine.name, execution_key(granted.uid, granted.attempt)
                self._answered[known] = max(self._answered.get(known, 0.0), granted.ts)
                self._parked.discard(known)

    def agent_ended(self, machine: Machine) -> None:
        """What it had not told its launcher yet is not known there."""
        self._parked = {known for known in self._parked if known[0] != machine.name}

    def froze(self, machine: Machine, process: Process) -> None:
        """One that was parked goes on as soon as its launcher has been told."""
        if (machine.name, process.key) in self._parked:
            self._cluster.after(FROZEN_S, self._still_frozen, machine, process)

    def _still_frozen(self, machine: Machine, process: Process) -> None:
        if not process.frozen or (machine.name, process.key) not in self._parked:
            return
        is_held_up = machine.launcher.is_paused or machine.is_asleep or machine.release.is_waiting
        if machine.is_suspended or is_held_up:  # what the launcher is told waits for the disk, as all that goes out
            self._cluster.after(FROZEN_S, self._still_frozen, machine, process)
        elif machine.launcher.running.get(process.key) is process:
            raise self._broken("R12", f"{process.task} was parked by its home and is frozen on {machine.name}")

    # -- rows (I3, I6, I7, I8) -----------------------------------------------------------------------------------------

    def durable(self, machine: Machine, row: Row) -> None:
        """A row is on disk."""
        match row:
            case PutMembers():
                for one in row.rows():
                    self.durable(machine, one)
            case PutTask():
                self._task(machine, row.record)
            case PutExecution():
                exit_ = row.record.exit
                if row.record.state is ExecutionState.RESULT and exit_ is not None and not exit_.signal:
                    key = execution_key(row.record.uid, row.record.attempt)
                    self._results[key] = machine.name
                    is_short = exit_.out_of and self._is_repeatable(row.record.uid.hex())
                    if is_short or (exit_.exit_code and self._terms(row.record.task).retries):
                        self._short.add(key)
            case DropExecution():
                self._dropped(machine, row)
            case _:
                pass

    def _task(self, machine: Machine, record: TaskRecord) -> None:
        final = self._final.get(record.uid)
        if final is not None and (final.state, final.attempt, final.exit) != (
            record.state,
            record.attempt,
            record.exit,
        ):
            raise self._broken("I3", f"{record.task} changed after its end", story=f"{final!r} → {record!r}")
        if record.attempt < self._attempts.get(record.uid, 0):
            raise self._broken("I8", f"{record.task} went back to attempt {record.attempt}")
        if record.state is TaskState.LEASED:
            key = execution_key(record.uid, record.attempt)
            holder = self._granted.setdefault(key, record.node)
            if holder != record.node:
                raise self._broken("I8", f"{key} of {record.task} was granted to {holder} and to {record.node}")
        if record.state is TaskState.LEASED and record.attempt > self._attempts.get(record.uid, 0):
            self._may_start(machine, record)
        self._attempts[record.uid] = record.attempt
        if record.state.is_final and final is None:
            self._final[record.uid] = record
            if record.exit is not None:
                self._result(record)

    # -- gates (I14, I15, I16) -----------------------------------------------------------------------------------------

    def _terms(self, task: str) -> SubmitOptions:
        return terms_of(self._cluster.machines[task.partition("/")[0]], task)

    def _may_start(self, machine: Machine, record: TaskRecord) -> None:
        """Another attempt is granted: its group has a slot for it and is not paused, what it waits for is over."""
        terms = terms_of(machine, record.task)
        settings = machine.disk.groups.get(terms.group)
        if settings is not None:
            if settings.is_paused:
                raise self._broken("I14", f"{record.task} is started, and its group {terms.group} is paused")
            taken = [
                other.task
                for other in machine.disk.tasks.values()
                if other.state in (TaskState.LEASED, TaskState.UNKNOWN)
                and terms_of(machine, other.task).group == terms.group
            ]
            if settings.slots and len(taken) > settings.slots:
                raise self._broken(
                    "I14", f"group {terms.group} has {settings.slots} slots; {', '.join(taken)} have one"
                )
            self._cluster.gauges.count("started in a group with slots" if settings.slots else "started in a group")
        for name in () if record.is_freed else (*terms.after, *terms.after_ok):
            other = self._cluster.machines[name.partition("/")[0]]
            if other.is_gone or other.disk.number > 1:
                continue
            self._cluster.gauges.count("started after another" + (" of another home" if other is not machine else ""))
            for awaited in records_of(other, name):
                is_wanted = awaited.state is TaskState.DONE or name not in terms.after_ok
                if not awaited.state.is_final or not is_wanted:
                    raise self._broken("I15", f"{record.task} is started, and {awaited.task} is {awaited.state}")

    def _result(self, record: TaskRecord) -> None:
        """The recorded result is that of a granted attempt whose process has ended so."""
        assert record.exit is not None
        tries = record.memory_retries
        if record.exit.exit_code and record.failures < self._terms(record.task).retries and not record.exit.out_of:
            raise self._broken("I16", f"{record.task} failed and was not tried again", story=repr(record))
        if record.exit.out_of and tries < MEMORY_TRIES - 1 and self._is_repeatable(record.uid.hex()):
            raise self._broken("I13", f"{record.task} ran out of memory and was not tried again", story=repr(record))
        key = self._finished.get(record.exit.usage.memory_bytes_max, "")
        if not key.startswith(record.uid.hex()):
            raise self._broken("I6", f"{record.task} has a result that no process of it had", story=repr(record))
        if (
            record.exit.signal and record.state is not TaskState.CANCELLED
        ):  # only a home's REVOKE ends one by a signal here
            raise self._broken(
                "I6", f"{record.task} was revoked, and that it was killed is its result", story=repr(record)
            )
        if key not in self._granted:
            raise self._broken("I6", f"{record.task} has the result of {key}, which was never granted")

    def _dropped(self, machine: Machine, row: DropExecution) -> None:
        """An executor forgets an attempt: its result, if there was one, is recorded at home by now."""
        key = execution_key(row.uid, row.attempt)
        if self._results.pop(key, None) is None or row.uid in self._final:
            return
        if key in self._short:
            self._tried_again(machine, row)
        elif row.uid in self.acknowledged:
            raise self._broken("I7", f"{machine.name} dropped the result of {key}, which nobody has recorded")

    def _is_repeatable(self, uid: str) -> bool:
        return self._specs[uid].guarantee is not Guarantee.ONCE

    def _tried_again(self, machine: Machine, row: DropExecution) -> None:
        """An attempt that ran out of memory, or failed, is forgotten: its home does not wait for it any more, and that is on disk."""
        self._cluster.gauges.count("out of memory, or failed, elsewhere, and tried again")
        if row.uid not in self.acknowledged:
            return
        home, task = self.acknowledged[row.uid]
        record = self._cluster.machines[home].disk.tasks[task]
        if record.state is TaskState.LEASED and (record.node, record.attempt) == (machine.name, row.attempt):
            raise self._broken(
                "I13", f"{machine.name} dropped {task}, which is to be tried again, before that was noted at home"
            )

    # -- clients (I1, I10) ---------------------------------------------------------------------------------------------

    def acknowledge(self, machine: Machine, name: str) -> None:
        """A client is told this id: the task and all members of the array are on disk."""
        records = [
            record for record in machine.disk.tasks.values() if name in (record.task, record.task.rpartition(".")[0])
        ]
        if not records:
            raise self._broken("I1", f"{name} is acknowledged and not on disk")
        for record in records:
            self.acknowledged[record.uid] = (machine.name, record.task)

    def recovered(self, machine: Machine) -> None:
        """An agent starts with what is on disk: all that was acknowledged is there."""
        for home, task in self.acknowledged.values():
            if home == machine.name and task not in machine.disk.tasks:
                raise self._broken("I1", f"{task} was acknowledged and is lost")

    def disk_lost(self, machine: Machine) -> None:
        """Excuse everything that was on a lost disk."""
        for uid in [uid for uid, (home, _) in self.acknowledged.items() if home == machine.name]:
            del self.acknowledged[uid]
        for key in [key for key, node in self._results.items() if node == machine.name]:
            del self._results[key]

    def cancelled(self, machine: Machine, name: str) -> None:
        """A client was told that this task (or array) is cancelled: that is on disk, or it had ended before."""
        for task, record in machine.disk.tasks.items():
            if name in (task, task.rpartition(".")[0]) and not record.state.is_final:
                raise self._broken("I10", f"{task} was confirmed to be cancelled and is {record.state} on disk")

    def broken_token(self, number: int, name: str) -> None:
        """A client that repeated itself was told another id."""
        raise self._broken("I1", f"token t{number} was answered with another id, {name}")

    def shown(self, machine: Machine, change: TaskChanged) -> None:
        """A user sees a task's new state: never an earlier attempt, nothing after the end."""
        del machine
        record = change.record
        attempt, state = self._shown.get(record.uid, (0, TaskState.QUEUED))
        if record.attempt < attempt or (state.is_final and record.state is not state):
            raise self._broken("I10", f"{record.task} was shown as {state} {attempt}", story=repr(record))
        self._shown[record.uid] = (record.attempt, record.state)

    # -- the end -------------------------------------------------------------------------------------------------------

    def final(self, uid: bytes) -> TaskRecord | None:
        """The record with which a task ended."""
        return self._final.get(uid)

    def is_executing(self, uid: bytes) -> bool:
        """True if a copy of it executes now."""
        return uid.hex() in self._executing
