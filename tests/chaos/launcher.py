"""The launcher of one simulated machine: a process of its own that starts, freezes, stops and reaps tasks.

It outlives the agent, hears requests over a socket (so a little later, and not while it is stopped), enforces leases on
CLOCK_BOOTTIME, and keeps exit records. Tasks end with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.launcher.lanes import Lanes
from peerload.model import events
from peerload.model.task import Exit, Guarantee, Usage

if TYPE_CHECKING:
    import random

    from peerload.model.actions import SpawnTask
    from tests.chaos.cluster import Cluster
    from tests.chaos.machine import Machine

SOCKET_S = 0.0002
"""A word between agent and launcher takes so long."""
SURVIVES = 0.5
"""Of the exit records that were not synced, so many outlive a power loss."""
SHORT_AFTER = 0.5
"""A process with too little memory fails after this part of its time."""
SIGKILL = 9
GIVEN_BACK_S = 6.0
"""What was given ahead is given back after so long."""
SHORT = "no more processes can be made"
FOREVER_S = float("inf")


class Process:
    """One attempt's process. What it does is in its argv (`clients.spec_of`): how long it runs, with which exit code, and
    whether it ignores SIGTERM; how much GPU memory it needs, which may be more than it has (is_short). left_s: service still to be had; since_s: since when it has been executing, None = it is not."""

    __slots__ = (
        "deadline_s",
        "exit_code",
        "frozen",
        "frozen_s_max",
        "is_once",
        "is_short",
        "key",
        "left_s",
        "round",
        "serial",
        "signalled",
        "since_s",
        "started_s",
        "stubborn",
        "task",
        "ts",
        "uid",
    )

    def __init__(self, spawn: SpawnTask, serial: int, started_s: float) -> None:
        _, service, code, stubborn, *needed = spawn.spec.argv
        self.key = spawn.key
        self.uid = spawn.key.rpartition("-")[0]
        self.task = spawn.task
        self.serial = serial
        self.started_s = started_s
        self.deadline_s = spawn.deadline_s
        self.ts = spawn.ts
        self.frozen_s_max = spawn.frozen_s_max
        self.is_once = spawn.spec.guarantee is Guarantee.ONCE
        self.exit_code = int(code)
        self.stubborn = stubborn == b"stubborn"
        self.left_s = float(service)
        self.is_short = bool(needed) and spawn.spec.request.gpu_mem_bytes < int(needed[0])
        if self.is_short:
            self.exit_code = 1
            self.left_s *= SHORT_AFTER
        self.since_s: float | None = None
        self.frozen = False
        self.signalled = 0
        self.round = 0


class Launcher:
    """``running`` and ``ended`` by execution key; ``ended`` is a file and outlives the launcher (not always the machine)."""

    def __init__(self, cluster: Cluster, machine: Machine, rng: random.Random) -> None:
        self._cluster = cluster
        self._machine = machine
        self._rng = rng
        self.running: dict[str, Process] = {}
        self._lanes: Lanes[SpawnTask] = Lanes()
        self.ended: dict[str, Exit] = {}
        self._synced: set[str] = set()
        self.generation = 1
        self.is_up = True
        self.is_paused = False
        self._unheard: list[tuple[str, tuple[object, ...]]] = []

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(self, do: str, *given: object) -> None:
        """The agent says something; it is heard a moment later, unless this launcher is gone by then."""
        if self.is_up:
            self._cluster.after(SOCKET_S, self._hear, self.generation, do, given)

    def _hear(self, generation: int, do: str, given: tuple[object, ...]) -> None:
        if generation != self.generation or not self.is_up:
            return
        if self.is_paused or self._machine.is_suspended:
            self._unheard.append((do, given))
        else:
            getattr(self, do)(*given)

    def listing(self) -> events.LauncherReady:
        """The list for an agent that connects; messages of an earlier agent are handled first."""
        self._hear_all()
        wall_s = self._machine.clock.wall_s
        running = tuple((process.key, wall_s(process.started_s), process.ts) for process in self.running.values())
        running += tuple((key, wall_s(self._cluster.now_s), waiting.ts) for key, waiting in self._lanes.waiting.items())
        frozen = tuple(process.key for process in self.running.values() if process.frozen)
        return events.LauncherReady(running, tuple(self.ended.items()), frozen)

    def _hear_all(self) -> None:
        unheard, self._unheard = self._unheard, []
        for do, given in unheard:
            getattr(self, do)(*given)

    def spawn(self, action: SpawnTask) -> None:
        """Start a process, unless its lease has run out or it is known already."""
        key = action.key
        if key in self.ended:
            self._tell(events.TaskEnded(key, self.ended[key]))
            return
        if key in self.running:
            self._tell(events.TaskStarted(key, self._machine.clock.wall_s(self.running[key].started_s)))
            return
        if key in self._lanes.waiting:
            return
        if action.after and self._lanes.add(action, self.running):
            is_own = action.home == self._machine.name
            self._cluster.gauges.count("given ahead" if is_own else "given ahead, of another home")
            self._cluster.after(GIVEN_BACK_S, self._give_back, key, self.generation)
            return
        self._start(action)

    def _give_back(self, key: str, generation: int) -> None:
        """What has waited for long behind another is given back, unless it was started."""
        if generation != self.generation or key not in self._lanes.waiting:
            return
        if self.is_paused or self._machine.is_suspended:
            self._cluster.after(GIVEN_BACK_S, self._give_back, key, generation)
            return
        del self._lanes.waiting[key]
        self._cluster.gauges.count("given ahead and back")
        self._tell(events.TaskLost(key, "the task before it takes longer than expected", never_started=True))

    def _start_next(self, key: str) -> None:
        """Start what follows in the lane of an attempt that has ended."""
        while (action := self._lanes.next(key)) is not None:
            key = action.key
            self._start(action)
            if key in self.running:
                return

    def _start(self, action: SpawnTask) -> None:
        key, now_s = action.key, self._cluster.now_s
        if 0 < action.deadline_s <= self._machine.clock.boot_s(now_s):
            self._cluster.gauges.count("lease ended before the start" + (", in a lane" if action.after else ""))
            self._tell(events.TaskLost(key, "its lease ran out before it could be started", never_started=True))
            return
        if now_s < self._machine.short_until_s:
            self._cluster.gauges.count("attempts not started for want of a process")
            self._tell(events.TaskLost(key, SHORT, never_started=True, shortage=SHORT))
            return
        process = Process(action, self._cluster.next_serial(), now_s)
        self.running[key] = process
        self._cluster.checker.spawned(self._machine, process, action.spec)
        self._tell(events.TaskStarted(key, self._machine.clock.wall_s(now_s)))
        self._go_on(process)

    def signal(self, key: str, number: int) -> None:
        """SIGKILL ends it at once, SIGTERM when it executes next (a frozen one cannot obey), unless it ignores that."""
        if (waiting := self._lanes.waiting.pop(key, None)) is not None:
            self._cluster.gauges.count("signalled while given ahead")
            self._finish(Process(waiting, self._cluster.next_serial(), self._cluster.now_s), 128 + number, number)
            return
        process = self.running.get(key)
        if process is None or (process.stubborn and number != SIGKILL):
            return
        if process.frozen and number != SIGKILL:
            process.signalled = number
        else:
            self._end(process, 128 + number, number)

    def lease(self, key: str, deadline_s: float, ts: float) -> None:
        """Move its deadline (0: none); thaw it if the new one lies ahead. ``ts`` is kept for the next agent."""
        process = self.running.get(key)
        if process is None:
            if (waiting := self._lanes.waiting.get(key)) is not None:
                self._lanes.waiting[key] = msgspec.structs.replace(waiting, deadline_s=deadline_s, ts=ts)
            return
        process.ts = ts
        if not deadline_s:
            self._cluster.gauges.count("parked")
        process.deadline_s = deadline_s
        if process.frozen and (not deadline_s or deadline_s > self._machine.clock.boot_s(self._cluster.now_s)):
            process.frozen = False
            self._tell(events.TaskFrozen(key, frozen=False))
            if process.signalled:
                self._end(process, 128 + process.signalled, process.signalled)
            else:
                self._go_on(process)
        elif not process.frozen:
            self._watch(process)

    def evict(self, key: str, reason: str) -> None:
        """End a frozen task without a result, since its room is needed."""
        process = self.running.get(key)
        if process is not None and process.frozen:
            self._cluster.gauges.count("evicted while frozen")
            self._lose(process, reason)

    def forget(self, key: str) -> None:
        """Forget an exit record."""
        exit_ = self.ended.pop(key, None)
        if exit_ is not None:
            self._cluster.checker.forgotten(self._machine, key, exit_)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _go_on(self, process: Process) -> None:
        process.since_s = self._cluster.now_s
        self._cluster.checker.executes(self._machine, process)
        self._watch(process)

    def _rest(self, process: Process) -> None:
        """Stop executing a process; account for the time that it has had."""
        if process.since_s is not None:
            process.left_s -= self._cluster.now_s - process.since_s
            process.since_s = None
            self._cluster.checker.rests(process)
        process.round += 1

    def _watch(self, process: Process) -> None:
        """Look again when it will have ended or its lease will have run out, whichever is first."""
        if process.since_s is None:
            return
        process.round += 1
        at_s = process.since_s + process.left_s
        if process.deadline_s:
            at_s = min(at_s, self._machine.clock.at_s(process.deadline_s))
        self._cluster.at(at_s, self._due, process, process.round)

    def _due(self, process: Process, number: int) -> None:
        if process.round != number or process.since_s is None:
            return
        now_s = self._cluster.now_s
        if process.since_s + process.left_s <= now_s + 1e-9:
            self._end(process, process.exit_code, 0)
        elif self.is_paused:
            process.round += 1  # what it did not see is looked at when it goes on
            self._cluster.at(process.since_s + process.left_s, self._due, process, process.round)
        else:
            self._enforce(process)

    def _enforce(self, process: Process) -> None:
        if process.deadline_s and process.deadline_s <= self._machine.clock.boot_s(self._cluster.now_s) + 1e-9:
            self._freeze(process)
        else:
            self._watch(process)

    def _freeze(self, process: Process) -> None:
        process.frozen = True
        self._cluster.gauges.count("frozen at the end of a lease")
        self._rest(process)
        self._cluster.checker.froze(self._machine, process)
        self._tell(events.TaskFrozen(process.key, frozen=True))
        if process.frozen_s_max:
            self._cluster.after(process.frozen_s_max, self._frozen_too_long, process, process.round)

    def _frozen_too_long(self, process: Process, number: int) -> None:
        if process.frozen and process.round == number and process.key in self.running:
            self._cluster.gauges.count("frozen for too long")
            self._lose(process, "it was frozen for too long")

    def _lose(self, process: Process, reason: str) -> None:
        self._rest(process)
        del self.running[process.key]
        self._tell(events.TaskLost(process.key, reason))
        self._start_next(process.key)

    def _end(self, process: Process, exit_code: int, signal: int) -> None:
        self._rest(process)
        self.running.pop(process.key, None)
        self._finish(process, exit_code, signal)
        self._start_next(process.key)

    def _finish(self, process: Process, exit_code: int, signal: int) -> None:
        clock = self._machine.clock
        ended_at = clock.wall_s(self._cluster.now_s)
        usage = Usage(memory_bytes_max=process.serial)
        exit_ = Exit(
            exit_code,
            signal,
            started_at=clock.wall_s(process.started_s),
            ended_at=ended_at,
            usage=usage,
            out_of="gpu memory" if process.is_short and not signal else "",
        )
        self._cluster.checker.finished(process, signal)
        self.ended[process.key] = exit_
        if self._machine.node is None and process.task.partition("/")[0] != self._machine.name:
            self._cluster.gauges.count("row agent down: a task of another home ends meanwhile")
        self._synced.discard(process.key)
        if process.is_once:
            self._synced.add(process.key)
        self._tell(events.TaskEnded(process.key, exit_))

    def _tell(self, event: events.Event) -> None:
        self._machine.later(SOCKET_S, self._machine.from_launcher, event, self.generation)

    # -- what befalls it -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop the launcher: it gets no processor."""
        self.is_paused = True

    def resume(self) -> None:
        """Let the launcher run again: it handles what was sent to it, and enforces deadlines that have passed."""
        if self.is_paused and self.is_up:
            self.is_paused = False
            self._catch_up()

    def _catch_up(self) -> None:
        for process in list(self.running.values()):
            if process.since_s is not None:
                self._enforce(process)
        self._hear_all()

    def fall_asleep(self) -> None:
        """The machine is suspended: nothing executes."""
        for process in self.running.values():
            self._rest(process)

    def wake_up(self) -> None:
        """Deadlines have passed meanwhile: they are looked at before anything executes."""
        boot_s = self._machine.clock.boot_s(self._cluster.now_s)
        for process in list(self.running.values()):
            if process.frozen:
                continue
            if process.deadline_s and process.deadline_s <= boot_s:
                self._freeze(process)
            else:
                self._go_on(process)
        if not self.is_paused:
            self._hear_all()

    def crash(self) -> None:
        """Kill the launcher: its tasks end with it (the kernel sees to that) and leave no exit record."""
        self.is_up = False
        self.is_paused = False
        self.generation += 1
        self._unheard.clear()
        self.end_left_overs()

    def end_left_overs(self) -> None:
        """Whatever runs is gone, and what waits is never started."""
        self._lanes = Lanes()
        for process in list(self.running.values()):
            self._rest(process)
            del self.running[process.key]

    def start(self) -> None:
        """Another launcher, which ends what its predecessor may have left."""
        if not self.is_up:
            self.end_left_overs()
            self.is_up = True

    def power_lost(self) -> None:
        """Exit records are written, and synced only for tasks that may run once: of the others some survive, some are torn."""
        self.crash()
        self.is_up = True
        self.ended = {key: self.read(key, exit_) for key, exit_ in self.ended.items() if self._survives(key)}

    def _survives(self, key: str) -> bool:
        return key in self._synced or self._rng.random() < SURVIVES

    def read(self, key: str, exit_: Exit) -> Exit:
        """A record after a power loss; one whose checksum is wrong counts as none, so that it is complete."""
        del key
        return exit_
