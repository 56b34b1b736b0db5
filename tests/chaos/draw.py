"""Draws a plan from a seed: which faults a run has, how often, when, and where. Every draw is from one generator, so that a
seed is a run."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.chaos import plan
from tests.chaos.disk import POINTS
from tests.chaos.gates import gated
from tests.chaos.plan import Evils, Job, Machine, Plan
from tests.chaos.shortage import short_of_memory, short_of_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.plan import CrashAtCommit, Fault

LEASE_S, GRACE_S = 60.0, 5.0
"""As an agent has them unless it is told otherwise."""
SHORT_LEASES_S = (4.0, 8.0, 15.0, 30.0)
SLACK_S = 1.6
"""What of the grace is not for drift: a launcher that is stopped for up to a second, and a little."""
DRIFT_MAX = 0.05
CUTS_MAX = 10
SERVICE_S_MEAN = 11.0
JOBS_MAX = 160
RESERVATION_S = 9.5
FOCUSED, FOCUSED_PART, FOCUSED_FAULTS = 0.5, 0.35, 10
"""So many runs are about one kind of provoked fault: all others are so much rarer in them, and that is drawn so often."""
HOSTS_UP_S = 0.5
CUT_MORE_S = 12.0
"""A cut that is to outlast a lease lasts for so much longer: the grace, and the search for another node."""
AWAY_COURSES = (
    "away",
    "cut off before it is confirmed that it is back",
    "confirmed, then PARK comes late",
    "cut off, then PARK comes late",
    "confirmed, then a restart, then PARK comes late",
    "confirmed, then a restart while it is waiting there, then PARK comes late",
)
"""Events around the return of a home: each stands against another rule of parking."""
QUIET_S = 4.0
"""No fault comes before this: agents meet first."""


def draw(seed: int, presets: Sequence[str], *, nodes_min: int = 3, nodes_max: int = 7, minutes: float = 5.0) -> Plan:
    """The plan of a seed; ``presets``: the names to choose from, in the first half of them those which look for a place for a
    task as soon as it has none."""
    return short_of_processes(gated(short_of_memory(_Draw(seed, minutes * 60.0).plan(presets, nodes_min, nodes_max))))


class _Draw:
    """One generator, and what the draws have in common."""

    def __init__(self, seed: int, healed_s: float) -> None:
        self._seed = seed
        self._healed_s = healed_s
        self._rng = random.Random(f"{seed} plan")
        self._names: list[str] = []
        self._lease_s = LEASE_S
        self._busy = ""
        self._focus: Callable[[float], Fault] | None = None
        """The subject of most of this run; None: everything at once."""

    def plan(self, presets: Sequence[str], nodes_min: int, nodes_max: int) -> Plan:
        """The whole of it."""
        rng = self._rng
        count = rng.randint(nodes_min, nodes_max)
        self._names = [f"n{number}" for number in range(1, count + 1)]
        if self._chance(FOCUSED):
            kinds = [self._away, self._commits_lost, self._late_then_cut, self._cut_from_host]
            self._focus = rng.choice([*kinds, self._away, self._replay_at_return, self._reboot_at_accept])
        self._busy = rng.choice(self._names)
        drift, grace_s = self._leases()
        versions = self._chance(0.2)
        machines = tuple(self._machine(name, drift, versions=versions) for name in self._names)
        has_broker = self._chance(0.4)
        faults = self._faults(has_broker=has_broker)
        return Plan(
            self._seed,
            rng.choice(list(presets[: max(len(presets) // 2, 1)] if self._focus else presets)),
            self._lease_s,
            grace_s,
            self._healed_s,
            rng.choice([5, 1000]),
            rng.choice([2, 1000]),
            rng.choice([86_400.0, 86_400.0, 120.0]),
            has_broker,
            versions or self._chance(0.1),
            machines,
            self._evils(),
            tuple(sorted(self._jobs(machines), key=lambda job: job.at_s)),
            tuple(sorted(faults, key=lambda fault: fault.at_s)),  # type: ignore[arg-type]
        )

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _leases(self) -> tuple[float, float]:
        """The lease of this run; → the drift of its clocks and the grace that allows for it (R2)."""
        rng = self._rng
        drift = DRIFT_MAX if self._focus == self._cut_from_host else rng.choice([0.0, 0.001, 0.02, DRIFT_MAX])
        if self._focus != self._cut_from_host and self._chance(0.6):  # in a long lease clocks drift furthest apart
            self._lease_s = rng.choice(SHORT_LEASES_S)
        needed_s = self._lease_s * ((1 + drift) / (1 - drift) - 1) + SLACK_S
        return drift, max(needed_s, GRACE_S if self._lease_s == LEASE_S else 0.0)

    def _machine(self, name: str, drift: float, *, versions: bool) -> Machine:
        rng = self._rng
        slots = rng.choice([1, 2, 2, 3])
        rate = 1.0 + rng.choice([-drift, drift, rng.uniform(-drift, drift)])
        if self._focus == self._cut_from_host:
            rate = 1.0 + (drift if name == self._busy else -drift)  # as far apart as the grace allows for
        disk_s = rng.choice([0.0005, 0.004, 0.03])
        return Machine(name, slots, rate, rng.uniform(10.0, 1e6), disk_s, newer=versions and self._chance(0.5))

    def _evils(self) -> Evils:
        rng = self._rng
        return Evils(
            delay_s=rng.choice([0.0003, 0.0003, 0.002, 0.03]),
            jitter_s=rng.choice([0.0, 0.0, 0.005, 0.1]),
            loss=rng.choice([0.0, 0.0, 0.02, 0.1, 0.3, 0.5][: 3 if self._focus else 6]),
            duplication=rng.choice([0.0, 0.0, 0.05, 0.2]),
            late=rng.choice([0.0, 0.0, 0.02, 0.1, 0.3]),
            late_s=30.0,
            output_loss=rng.choice([0.0, 0.0, 0.3]),
        )

    # -- work ----------------------------------------------------------------------------------------------------------

    def _jobs(self, machines: Sequence[Machine]) -> list[Job]:
        """Some short, some that outlive leases; most at one home, so that others are asked to help."""
        rng = self._rng
        slots = sum(machine.slots for machine in machines)
        long_s = (self._lease_s, max(min(5.0 * self._lease_s, 130.0), 40.0))
        kinds, load, mean_s = [50, 30, 20], rng.uniform(0.15, 0.45), SERVICE_S_MEAN
        if self._focus is not None:  # there has to be room for what is lost elsewhere
            kinds, load, mean_s = [35, 20, 45], rng.uniform(0.15, 0.35), 0.45 * sum(long_s) / 2 + 3.0
        count = int(min(load * slots * self._healed_s / mean_s, JOBS_MAX))
        busy = self._busy
        bursts_s = [rng.uniform(1.0, self._healed_s * 0.75) for _ in range(rng.randint(1, 6))]
        last_s = self._healed_s * rng.choice([0.4, 0.6, 0.8])
        shares = rng.choice([(1, 0, 0), (8, 2, 0), (6, 3, 1), (3, 7, 0)][: 2 if self._focus else 4])
        is_slow = self._focus == self._cut_from_host
        jobs = []
        for _ in range(count):
            service_s = rng.uniform(*rng.choices([(0.05, 3.0), (3.0, 20.0), long_s], kinds)[0])
            in_burst = self._chance(0.6)
            home = busy if in_burst or self._chance(0.5) else rng.choice(self._names)
            # A task that cannot run at home looks for another node again and again, whatever the limit of migrations.
            never_here = self._focus is not None and service_s > self._lease_s and self._chance(0.9 if is_slow else 0.6)
            jobs.append(
                Job(
                    rng.choice(bursts_s) + rng.uniform(0.0, 0.5) if in_burst else rng.uniform(1.0, last_s),
                    home,
                    round(service_s, 3),
                    members=rng.choice([2, 4]) if self._chance(0.05) else 0,
                    exit_code=rng.choice([0, 0, 0, 1]),
                    guarantee=rng.choices(["at-least-once", "once", "fast"], shares)[0],
                    lease_s=rng.choice([0.0, 0.0, 0.0, 0.0 if is_slow else 20.0]),
                    lease_auto=self._chance(0.05),
                    held=self._chance(0.03),
                    stubborn=self._chance(0.2),
                    client=rng.choices(["waits", "repeats", "dies"], [16, 2, 1])[0],
                    exclude=home if never_here else "",
                )
            )
        return jobs

    # -- faults --------------------------------------------------------------------------------------------------------

    def _faults(self, *, has_broker: bool) -> list[Fault]:
        """A random subset of the menu; each kind in it at a rate of its own. Where a run is about one of them, that happens
        again and again, and little else."""
        rng = self._rng
        part = FOCUSED_PART if self._focus else 1.0
        menu: list[tuple[float, int, Callable[[float], Fault]]] = [
            (0.5, 6, self._agent_crash),
            (0.35, 3, self._machine_crash),
            (0.3, 2, self._both_crash),
            (0.4, 2, self._disk_lost),
            (0.5, 1, self._machine_gone),
            (0.35, 4, self._agent_pause),
            (0.4, 8, self._launcher_pause),
            (0.35, 3, self._launcher_crash),
            (0.3, 3, self._suspend),
            (0.4, 4, self._clock_step),
            (0.25, 2, self._fsync_error),
            (0.25, 3, self._disk_stall),
            (0.2, 2, self._disk_full),
            (0.6, CUTS_MAX, self._cut),
            (0.4, 6, self._link_reset),
            (0.4, 4, self._polite_stop),
            (0.7, 4, self._away),
            (0.6, 12, self._verb),
            (0.25, 2, self._drain),
            (0.3, 2, self._leave),
        ]
        if has_broker:
            menu += [(0.6, 3, self._broker_down), (0.5, 2, self._broker_slow)]
        menu += [
            (0.8, 4, self._crash_at_send),
            (0.5, 3, self._commits_lost),
            (0.7, 4, self._late_then_cut),
            (0.6, 5, self._cut_at_send),
            (0.6, 3, self._cut_from_host),
            (0.4, 4, self._replay_at_return),
            (0.3, 3, self._reboot_at_accept),
        ]
        faults: list[Fault] = []
        for share, most, make in menu:
            if rng.random() < share * part:
                faults += [make(self._time()) for _ in range(rng.randint(1, most))]
        if self._focus is not None:
            faults += [self._focus(self._time()) for _ in range(FOCUSED_FAULTS)]
        for point in POINTS:
            share = 0.7 if point == "PARKED" and self._focus in (None, self._away) else 0.5 * part
            faults += [self._crash_at(point, after=after) for after in (False, True) if self._chance(share)]
        for fault in [fault for fault in faults if isinstance(fault, plan.CrashAtCommit)]:
            faults += self._provoked(fault)
        return faults

    def _time(self) -> float:
        return self._rng.uniform(QUIET_S, self._healed_s)

    def _node(self) -> str:
        """Any, or one that runs a task of another home then."""
        return plan.HOST if self._chance(0.4) else self._rng.choice(self._names)

    def _down_s(self) -> float:
        return self._rng.choice([0.05, 1.0, self._rng.uniform(1.0, 20.0), self._rng.uniform(0.5, 1.6) * self._lease_s])

    def _agent_crash(self, at_s: float) -> Fault:
        return plan.AgentCrash(at_s, self._node(), self._down_s())

    def _crash_at(self, point: str, *, after: bool) -> Fault:
        machine = self._chance(0.4)
        is_cut = point == "PARKED" or self._chance(0.3)
        cut_s = min(self._rng.uniform(1.3, 2.0) * self._lease_s + CUT_MORE_S, 150.0) if is_cut else 0.0
        return plan.CrashAtCommit(self._time() * 0.7, point, after, machine, self._down_s(), cut_s)

    def _commits_lost(self, at_s: float) -> Fault:
        for_s, cut_s = self._rng.uniform(3.0, 14.0), self._rng.uniform(1.3, 2.0) * self._lease_s + CUT_MORE_S
        return plan.CommitsLost(at_s * 0.7, for_s, min(cut_s, 150.0))

    def _late_then_cut(self, at_s: float) -> Fault:
        """A COMMIT may be late by what a reservation lasts, an answer to a renewal by the whole lease."""
        message = self._rng.choice(["Commit", "RenewOk"])
        late_s = self._rng.uniform(0.3, 1.0) * (RESERVATION_S if message == "Commit" else self._lease_s)
        cut_s = min(self._rng.uniform(1.5, 3.0) * self._lease_s, 150.0)
        return plan.LateThenCut(at_s * 0.8, message, late_s, cut_s)

    def _away(self, at_s: float) -> Fault:
        """A home that goes away politely. Hardly back it is cut off from a node that has a task of it, which hears the PARK
        late, or whose agent restarts: every course of events in which one rule of parking alone keeps the promise."""
        rng, lease_s = self._rng, self._lease_s
        course = rng.choice(AWAY_COURSES)
        down_s = rng.uniform(0.05, 3.0)
        cut_s = min(rng.uniform(1.3, 2.0) * lease_s + CUT_MORE_S, 150.0)
        cut_after_s = rng.uniform(0.3, 0.5) * lease_s + 0.5 if "confirmed" in course else 0.0
        crash_after_s = cut_after_s + rng.uniform(0.2, 1.0) if "restart" in course else 0.0
        last_s = max(cut_after_s, crash_after_s + HOSTS_UP_S if crash_after_s else 0.5)
        park_late_s = down_s + last_s + rng.uniform(0.1, 2.0) if "late" in course else 0.0
        return plan.PoliteStop(
            at_s, plan.HOME, down_s, cut_s, cut_after_s, crash_after_s, park_late_s, waiting="waiting" in course
        )

    def _cut_from_host(self, at_s: float) -> Fault:
        for_s = min(self._rng.uniform(1.3, 2.0) * self._lease_s + CUT_MORE_S, 150.0)
        return plan.CutFromHost(at_s * 0.8, plan.HOME, for_s)

    def _replay_at_return(self, at_s: float) -> Fault:
        return plan.ReplayAtReturn(at_s * 0.8, self._rng.uniform(0.2, 5.0))

    def _reboot_at_accept(self, at_s: float) -> Fault:
        return plan.RebootAtAccept(at_s * 0.8, self._rng.uniform(0.05, 0.8), self._rng.uniform(1.2, 4.5))

    def _cut_at_send(self, at_s: float) -> Fault:
        message = self._rng.choice(
            ["Accept", "Commit", "Renew", "Renew", "RenewOk", "Result", "ResultAck", "Return", "Park"]
        )
        for_s = self._rng.uniform(0.3, 2.5) * self._lease_s
        only_there = self._chance(0.5)
        return plan.CutAtSend(at_s * 0.8, self._rng.choice(self._names), message, min(for_s, 150.0), only_there)

    def _provoked(self, fault: CrashAtCommit) -> list[Fault]:
        """What has to happen for that to happen."""
        times = [fault.at_s + self._rng.uniform(0.0, 40.0) for _ in range(3)]
        if fault.point == "D7":
            return [plan.Verb(at_s, "cancel", self._rng.randrange(1000)) for at_s in times]
        if fault.point == "PARKED":
            return [self._away(at_s) for at_s in times]
        return []

    def _crash_at_send(self, at_s: float) -> Fault:
        message = self._rng.choice(
            ["Offer", "Accept", "Commit", "Result", "ResultAck", "Renew", "RenewOk", "SpawnTask"]
        )
        machine = self._chance(0.3)
        return plan.CrashAtSend(at_s * 0.8, self._rng.choice(self._names), message, machine, self._down_s())

    def _machine_crash(self, at_s: float) -> Fault:
        return plan.MachineCrash(at_s, self._node(), self._down_s(), loses_disk=self._chance(0.3))

    def _both_crash(self, at_s: float) -> Fault:
        return plan.BothCrash(at_s, plan.HOST, self._chance(0.4), self._down_s())

    def _disk_lost(self, at_s: float) -> Fault:
        return plan.DiskLost(at_s, self._node(), self._down_s())

    def _machine_gone(self, at_s: float) -> Fault:
        return plan.MachineGone(at_s, self._node(), self._rng.choice([0.0, *[self._rng.uniform(1.0, 60.0)] * 2]))

    def _agent_pause(self, at_s: float) -> Fault:
        return plan.AgentPause(at_s, self._node(), self._rng.choice([0.5, 5.0, self._rng.uniform(0.0, 300.0)]))

    def _launcher_pause(self, at_s: float) -> Fault:
        return plan.LauncherPause(at_s, self._node(), self._rng.uniform(0.0, 1.0))

    def _launcher_crash(self, at_s: float) -> Fault:
        return plan.LauncherCrash(at_s, self._node(), self._rng.uniform(0.05, 1.0), at_spawn=self._chance(0.4))

    def _suspend(self, at_s: float) -> Fault:
        for_s = self._rng.choice([2.0, self._rng.uniform(5.0, 150.0)])
        node = plan.HOME if self._chance(0.3) else self._node()
        return plan.Suspend(at_s, node, for_s, polite=self._chance(0.5))

    def _clock_step(self, at_s: float) -> Fault:
        return plan.ClockStep(at_s, self._node(), self._rng.uniform(-3600.0, 3600.0))

    def _fsync_error(self, at_s: float) -> Fault:
        return plan.FsyncError(at_s, self._node(), self._rng.uniform(0.1, 5.0))

    def _disk_stall(self, at_s: float) -> Fault:
        return plan.DiskStall(at_s, self._node(), self._rng.uniform(0.0, 30.0))

    def _disk_full(self, at_s: float) -> Fault:
        return plan.DiskFull(at_s, self._node(), self._rng.uniform(1.0, 60.0))

    def _cut(self, at_s: float) -> Fault:
        rng, names = self._rng, self._names
        kind = rng.choice(["split", "one-way", "partial"])
        group = rng.sample(names, rng.randint(1, len(names) - 1))
        rest = [name for name in names if name not in group]
        out = [(a, b) for a in group for b in rest]
        if kind == "partial":
            out = rng.sample(out, rng.randint(1, len(out)))
        pairs = out if kind == "one-way" else [*out, *((b, a) for a, b in out)]
        for_s = rng.choice([rng.uniform(0.5, 10.0), rng.uniform(0.5, 2.5) * self._lease_s])
        return plan.Cut(at_s, kind, tuple(pairs), min(for_s, 150.0))

    def _link_reset(self, at_s: float) -> Fault:
        return plan.LinkReset(at_s, *self._rng.sample(self._names, 2))

    def _polite_stop(self, at_s: float) -> Fault:
        node = plan.HOME if self._chance(0.3) else self._node()
        return plan.PoliteStop(at_s, node, self._down_s())

    def _verb(self, at_s: float) -> Fault:
        verb = self._rng.choice(["cancel", "hold", "release"])
        return plan.Verb(at_s, verb, self._rng.randrange(1000))

    def _drain(self, at_s: float) -> Fault:
        return plan.Drain(at_s, self._node(), self._rng.uniform(5.0, 60.0))

    def _leave(self, at_s: float) -> Fault:
        return plan.Leave(at_s, self._node(), self._down_s())

    def _broker_down(self, at_s: float) -> Fault:
        return plan.BrokerDown(at_s, self._rng.uniform(0.5, 60.0), forgets=self._chance(0.5))

    def _broker_slow(self, at_s: float) -> Fault:
        return plan.BrokerSlow(at_s, self._rng.uniform(5.0, 60.0), self._rng.choice([0.1, 2.0, 20.0]))
