"""What is seen of every task in a simulated run under faults, in the words of the model."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from peerload.model.actions import PutExecution, PutTask
from peerload.model.messages import Accept, Died, NotStarted, Offer, Return
from peerload.model.task import ExecutionState, Guarantee, TaskState
from tests.chaos.invariants import Invariants
from tests.model.handoff import Handoff
from tests.model.refinement import Seen
from tests.model.state import Budget

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from peerload.model.actions import Row
    from peerload.model.messages import Message
    from peerload.model.task import TaskRecord, TaskSpec
    from tests.chaos.cluster import Cluster
    from tests.chaos.launcher import Process
    from tests.chaos.machine import Machine

STOP = "stop"
"""From here on the model has no words for what happens to the task: it runs at home, is held, cancelled or given up."""
BEFALLS = {"_agent_ends": "agent ends", "crash_machine": "power lost", "crash_launcher": "launcher crashes"}
"""Of a machine."""
SENT: dict[type, tuple[str, bool]] = {
    Offer: ("offer", True),
    Accept: ("accept", False),
    NotStarted: ("NOT_STARTED", False),
    Died: ("DIED", False),
    Return: ("RETURN", False),
}


class Noted(NamedTuple):
    """One line of a run. uid: "" if it befell a node, and so every task there."""

    uid: str
    node: str
    what: tuple[str, ...]
    attempt: int = 0
    must: bool = True


class Watching(Invariants):
    """The checker of a run that also writes down what it sees. `of` makes it the checker of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.lines: list[Noted] = []
        self._records: dict[bytes, TaskRecord] = {}
        self._homes: dict[str, str] = {}
        self._specs_of: dict[str, TaskSpec] = {}

    @classmethod
    def of(cls, cluster: Cluster) -> Watching:
        """Let it watch this cluster from now on."""
        watching = cls(cluster)
        cluster.checker = watching
        send = cluster.network.send

        def sent(src: Machine, dst: str, message: Message) -> None:
            watching.sent(src, dst, message)
            send(src, dst, message)

        cluster.network.send = sent  # type: ignore[method-assign]
        for machine in cluster.machines.values():
            for befalls, what in BEFALLS.items():
                setattr(machine, befalls, watching._also(machine, getattr(machine, befalls), what))
        forget = cluster.clients.forget

        def forgotten(machine: Machine, node: str) -> None:
            watching.lines.append(Noted("", node, (STOP,)))
            forget(machine, node)

        cluster.clients.forget = forgotten  # type: ignore[method-assign]
        return watching

    # -- what is seen --------------------------------------------------------------------------------------------------

    def sent(self, src: Machine, dst: str, message: Message) -> None:
        """A message goes out; it is one of an executor, or an offer to one."""
        known = SENT.get(type(message))
        if known is not None:
            node = dst if isinstance(message, Offer) else src.name
            what, must = known
            self.lines.append(Noted(message.uid.hex(), node, (what,), message.attempt, must))  # type: ignore[union-attr]

    def _also(self, machine: Machine, does: Callable[..., None], what: str) -> Callable[..., None]:
        def done(*given: Any, **named: Any) -> None:
            does(*given, **named)
            self.lines.append(Noted("", machine.name, (what,), must=False))

        return done

    def disk_lost(self, machine: Machine) -> None:
        super().disk_lost(machine)
        self.lines.append(Noted("", machine.name, (STOP,)))

    def spawned(self, machine: Machine, process: Process, spec: TaskSpec) -> None:
        super().spawned(machine, process, spec)
        self._specs_of[process.uid] = spec
        self._note(machine, process, "forks")

    def finished(self, process: Process, signal: int) -> None:
        super().finished(process, signal)
        what = "is killed" if signal else "runs short" if process.is_short else "process ends"
        self.lines.append(Noted(process.uid, "", (what,), int(process.key.rpartition("-")[2])))

    def _note(self, machine: Machine, process: Process, what: str) -> None:
        self.lines.append(Noted(process.uid, machine.name, (what,), int(process.key.rpartition("-")[2])))

    def durable(self, machine: Machine, row: Row) -> None:
        super().durable(machine, row)
        match row:
            case PutTask():
                self._task_row(machine, row.record)
            case PutExecution():
                what = "START" if row.record.state is ExecutionState.START else "RESULT"
                self._specs_of[row.record.uid.hex()] = row.record.spec
                self.lines.append(Noted(row.record.uid.hex(), machine.name, (what,), row.record.attempt))
            case _:
                pass

    def _task_row(self, machine: Machine, record: TaskRecord) -> None:
        before = self._records.get(record.uid)
        self._records[record.uid] = record
        self._homes[record.uid.hex()] = machine.name
        seen = _home_step(before, record, machine.name)
        if seen is not None:
            node, what, must = seen
            self.lines.append(Noted(record.uid.hex(), node, what, record.attempt if must else 0, must))

    # -- what it comes to ----------------------------------------------------------------------------------------------

    def tasks(self) -> dict[str, tuple[Handoff, list[Seen], list[Noted]]]:
        """Of each task that was offered to anybody: a model that is large enough, and what was seen of it."""
        found = {}
        by_task: dict[str, list[Noted]] = defaultdict(list)
        for uid in self._homes:
            by_task[uid] = []
        for line in self.lines:
            if line.uid:
                by_task[line.uid].append(line)
            else:
                for uid, lines in by_task.items():
                    if line.node == self._homes.get(uid) or any(line.node == known.node for known in lines):
                        lines.append(line)
        for uid, lines in by_task.items():
            spec = self._specs_of.get(uid)
            if uid in self._homes and spec is not None and spec.guarantee is not Guarantee.FAST:
                kept = _until_stop(lines)
                if any("offer" in line.what for line in kept):
                    found[uid] = (*self._modelled(uid, kept, once=spec.guarantee is Guarantee.ONCE), kept)
        return found

    def _modelled(self, uid: str, lines: list[Noted], *, once: bool) -> tuple[Handoff, list[Seen]]:
        home = self._homes[uid]
        nodes: dict[str, int] = {}
        for line in lines:
            if line.uid and line.node not in ("", home):
                nodes.setdefault(line.node, len(nodes))
        seen = [thing for line in lines for thing in _in_words(line, home, nodes)]
        parks = sum("park" in line.what for line in lines)
        attempts = max(line.attempt for line in lines) + 1
        budget = Budget(99, 99, 99, 99, 99, parks)
        model = Handoff(
            budget, at_most_once=once, attempts=attempts, nodes=max(len(nodes), 1), reinstates=True, loose=True
        )
        return model, seen


def _until_stop(lines: list[Noted]) -> list[Noted]:
    kept = []
    for line in lines:
        if STOP in line.what:
            break
        kept.append(line)
    return kept


def _home_step(  # noqa: C901 -- a line a row
    before: TaskRecord | None, record: TaskRecord, home: str
) -> tuple[str, tuple[str, ...], bool] | None:
    """The node, the names of the steps and whether one must have been taken, of a row of home's. None: says nothing new."""
    was = before.state if before is not None else None
    match record.state:
        case TaskState.QUEUED if before is None:
            return "", ("submitted",), True
        case TaskState.QUEUED if before is not None and record.failures > before.failures:
            return "", (STOP,), False  # tried again after a failure: a result that the model has no word for
        case TaskState.QUEUED if was is TaskState.LEASED and before is not None and before.node != home:
            return "", ("requeued", "lease over"), True
        case TaskState.LEASED if record.node == home:
            return "", (STOP,), False
        case TaskState.LEASED if before is not None and record.attempt > before.attempt:
            return record.node, ("LEASED",), True
        case TaskState.LEASED if was is not TaskState.LEASED:
            return record.node, ("leased again",), False  # or its result is there, and will be recorded
        case TaskState.LEASED if before is not None and record.parked_ts and not before.parked_ts:
            return "", ("park",), True
        case TaskState.LEASED | TaskState.UNKNOWN if was is record.state:
            return None  # of what is unknown: its node was booted anew, so that nobody is asked any more
        case TaskState.UNKNOWN:
            return "", ("unknown", "lease over"), True
        case TaskState.DONE | TaskState.FAILED if record.exit is not None:
            return "", ("recorded",), False
        case _:
            return "", (STOP,), False


def _in_words(line: Noted, home: str, nodes: dict[str, int]) -> list[Seen]:
    """A line as what the model calls it."""
    if line.uid:
        return [Seen(line.what, line.attempt, nodes.get(line.node, -1), line.must)]
    what = line.what[0]
    if line.node == home:
        named = {"agent ends": "home agent crashes", "power lost": "home machine crashes"}.get(what)
        return [Seen((named,), must=False)] if named else []
    named = {
        "agent ends": "agent crashes",
        "power lost": "machine crashes",
        "launcher crashes": "launcher crashes",
    }.get(what)
    return [Seen((named,), 0, nodes[line.node], must=False)] if named and line.node in nodes else []
