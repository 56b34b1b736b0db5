"""Faults that wait for what they are for: a certain message, or a home whose task elsewhere will outlive its lease.

`driver.py` arms them here; a machine asks before it says anything and tells when it has said it. A fault drawn at a blind
time hardly ever meets the moment at which one rule alone keeps a promise: these do.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from peerload.core.work import HomePhase, RemotePhase
from peerload.model.messages import Offer, Park, Renew, RenewOk
from peerload.model.task import Guarantee
from tests.chaos import fault_encounters, plan

if TYPE_CHECKING:
    from peerload.core.work import HomeTask
    from tests.chaos.cluster import Cluster
    from tests.chaos.machine import Machine

GRANTS = ("Commit", "RenewOk")
LONGER, SEARCH_S = 1.2, 8.0
"""A task that is to run on when its lease has ended at home runs for so many leases at least (clocks drift), and for the
pause after a loss and the search for another node."""
HOSTS_DOWN_S = 0.05
REPLAY_AFTER_S = 0.2
"""An agent or machine that is back hears so much later what was said to it before."""


class Away(NamedTuple):
    """A task of a home and the node that has it."""

    uid: bytes
    node: str


class Provoked:
    """One per cluster; what is armed is disarmed when it goes off, and when everything heals."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"{cluster.plan.seed} provoked")
        self._cuts: dict[str, plan.CutAtSend] = {}
        self._crashes: dict[str, plan.CrashAtSend] = {}
        self._commits_lost: list[plan.CommitsLost] = []
        self._lost_before: set[bytes] = set()
        self._late_then_cut: list[plan.LateThenCut] = []
        self._replays: list[plan.ReplayAtReturn] = []
        self._reboots: list[plan.RebootAtAccept] = []
        self._busy_until_s = 0.0

    def is_over(self) -> bool:
        """True if what was last done to a home and a node with a task of it has ended, so that it can show its effect."""
        return self._cluster.now_s >= self._busy_until_s

    def begins(self, for_s: float) -> None:
        """Something is done to a home and a node with a task of it that lasts for so long."""
        self._busy_until_s = max(self._busy_until_s, self._cluster.now_s + for_s)

    def arm(self, fault: plan.Fault) -> None:
        """Arm a fault for the next occasion, one of a kind at a time."""
        match fault:
            case plan.CutAtSend():
                self._cuts[fault.node] = fault
            case plan.CrashAtSend():
                self._crashes[fault.node] = fault
            case plan.CommitsLost():
                self._commits_lost.append(fault)
            case plan.LateThenCut():
                self._late_then_cut.append(fault)
            case plan.ReplayAtReturn():
                self._replays.append(fault)
            case plan.RebootAtAccept():
                self._reboots.append(fault)
            case _:
                raise AssertionError(fault)

    def heal(self) -> None:
        """Disarm all faults."""
        self._cuts.clear()
        self._crashes.clear()
        self._commits_lost.clear()
        self._late_then_cut.clear()
        self._replays.clear()
        self._reboots.clear()

    # -- tasks that are worth it ---------------------------------------------------------------------------------------

    def away(self, home: Machine, more_s: float, *, waiting: bool = False) -> list[Away]:
        """The tasks of this home that run elsewhere (``waiting``: that wait there) for a lease and ``more_s`` yet, at least."""
        tasks = home.node.home.tasks.values() if home.node is not None else ()
        return [
            Away(task.uid, task.record.node)
            for task in tasks
            if task.phase is HomePhase.AWAY
            and (self._waits(task) if waiting else task.running_at)
            and self.outlives(home, task.uid, more_s)
        ]

    def _waits(self, task: HomeTask) -> bool:
        node = self._cluster.machines[task.record.node].node
        guest = node.executor.by_uid.get(task.uid) if node is not None else None
        return guest is not None and guest.phase is RemotePhase.WAITING and guest.attempt == task.record.attempt

    def outlives(self, home: Machine, uid: bytes, more_s: float) -> bool:
        """True if this task may run twice but not at once, and for a lease and ``more_s`` yet, at least."""
        task = home.node.home.tasks.get(uid) if home.node is not None else None
        if task is None or task.spec.guarantee is not Guarantee.AT_LEAST_ONCE:
            return False
        left_s = self._cluster.left_s(uid.hex()) if task.running_at else float(task.spec.argv[1])
        lease_s = max(task.spec.lease_s or self._cluster.plan.lease_s, task.record.lease_s)
        return left_s > LONGER * lease_s + self._cluster.plan.grace_s + SEARCH_S + more_s

    def one_away(self, home: Machine, more_s: float, *, waiting: bool = False) -> Away | None:
        """One of them, if there are any."""
        found = self.away(home, more_s, waiting=waiting)
        return self._rng.choice(found) if found else None

    # -- what a machine says -------------------------------------------------------------------------------------------

    def about_to_say(self, machine: Machine, kind: str, message: object, dst: str) -> None:
        """Before it is on its way: whether it is what is to be cut off, lost or late."""
        cut = self._cuts.get(machine.name)
        if cut is not None and cut.message == kind and self._meets(machine, cut, message):
            del self._cuts[machine.name]
            if not cut.uid:  # else it is part of another fault
                self._cluster.gauges.count("fault CutAtSend")
            self._cluster.driver.cut_off(machine, cut.for_s, [dst] if cut.only_there else None)
        if kind == "Commit" and self._may_lose_commits(machine, message, dst):
            self._lose_commits(machine, dst, _uids(message)[0], self._commits_lost.pop(0))
        elif kind in GRANTS and self._late_then_cut and self._late_then_cut[0].message == kind:
            if self._is_long(machine, message, 0.0):
                self._come_late(machine, dst, self._late_then_cut.pop(0))
        elif kind == "Accept" and self._reboots and self._cluster.network.link(machine.name, dst).is_up:
            uid = _uids(message)[0]
            if self.outlives(self._cluster.machines[dst], uid, 0.0):
                self._reboot(machine, dst, uid, self._reboots.pop(0))

    def has_said(self, machine: Machine, kind: str, message: object, dst: str) -> None:
        """It is on its way: whether the agent is to die with that, before anything else happens, or to hear again what led to
        it."""
        armed = self._crashes.get(machine.name)
        if armed is not None and armed.message == kind:
            del self._crashes[machine.name]
            self._cluster.at(self._cluster.now_s, self._crash, machine, armed)
        if kind == "Return" and self._replays:
            replay = self._replays.pop(0)
            self._cluster.gauges.count("fault ReplayAtReturn")
            self._cluster.after(replay.late_s, self._cluster.network.replay, dst, machine.name, _uids(message)[0])

    def _may_lose_commits(self, home: Machine, message: object, dst: str) -> bool:
        """Once for a task: in the end it has to come."""
        if not self._commits_lost or self._cluster.network.loses_commits(home.name, dst):
            return False
        return self._lost_before.isdisjoint(_uids(message)) and self._is_long(home, message, 0.0)

    def _meets(self, machine: Machine, cut: plan.CutAtSend, message: object) -> bool:
        if cut.uid:
            return cut.uid in _uids(message)
        return not (cut.only_there and cut.message in GRANTS) or self._is_long(machine, message, 0.0)

    def _is_long(self, home: Machine, message: object, more_s: float) -> bool:
        return any(self.outlives(home, uid, more_s) for uid in _uids(message))

    # -- what goes off -------------------------------------------------------------------------------------------------

    def _crash(self, machine: Machine, armed: plan.CrashAtSend) -> None:
        if machine.node is not None:
            self._cluster.gauges.count("fault CrashAtSend")
            self._cluster.gauges.count(f"crashed as soon as it has said {armed.message}")
            fault_encounters.met_by_agent(self._cluster, machine, "machine reboots" if armed.machine else "agent dies")
            self._cluster.driver.crash(machine, armed.down_s, machine_too=armed.machine)

    def _lose_commits(self, home: Machine, dst: str, uid: bytes, armed: plan.CommitsLost) -> None:
        """Lose that COMMIT, and the next ones; the node's first word after it has one does not come through."""
        self._cluster.gauges.count("fault CommitsLost")
        self._lost_before.add(uid)
        self._cluster.network.lose_commits(home.name, dst, self._cluster.now_s + armed.for_s)
        self._cuts[dst] = plan.CutAtSend(self._cluster.now_s, dst, "Renew", armed.cut_s, uid=uid)

    def _come_late(self, home: Machine, dst: str, armed: plan.LateThenCut) -> None:
        self._cluster.gauges.count("fault LateThenCut")
        self._cluster.network.next_late_s = armed.late_s
        self._cluster.at(self._cluster.now_s, self._cluster.driver.cut_off, home, armed.cut_s, [dst])

    def _reboot(self, machine: Machine, home: str, uid: bytes, armed: plan.RebootAtAccept) -> None:
        """Delay its ACCEPT; until that has come no other message of it does."""
        cluster = self._cluster
        cluster.gauges.count("fault RebootAtAccept")
        cluster.network.next_late_s = armed.late_s
        cut_s = armed.late_s + REPLAY_AFTER_S
        cluster.at(cluster.now_s, cluster.driver.part, ((machine.name, home),), cut_s)
        cluster.at(cluster.now_s, partial(cluster.driver.crash, machine, armed.down_s, machine_too=True))
        cluster.after(armed.down_s + REPLAY_AFTER_S, cluster.network.replay, home, machine.name, uid, (Offer,))

    # -- a home that goes away politely --------------------------------------------------------------------------------

    def needs_s(self, fault: plan.Fault) -> float:
        """For how much longer than a lease a task must run for this fault to show anything."""
        return fault.down_s + fault.cut_after_s if isinstance(fault, plan.PoliteStop) else 0.0

    def goes_away(self, home: Machine, fault: plan.PoliteStop) -> None:
        """Arrange what is to happen around its return to one task that it has elsewhere."""
        network = self._cluster.network
        network.park_late_s.clear()
        away = self.one_away(home, self.needs_s(fault), waiting=fault.waiting) if fault.cut_s else None
        if away is None:
            return
        self._cluster.gauges.count("provoked: a home with a task elsewhere goes away")
        self.begins(fault.down_s + fault.cut_after_s + fault.cut_s)
        network.park_late_s[home.name, away.node] = fault.park_late_s
        self._cluster.after(fault.down_s, self._is_back, home, fault, away)
        if fault.crash_after_s:
            self._cluster.after(fault.down_s + fault.crash_after_s, self._crash_host, home.name, fault, away)

    def _is_back(self, home: Machine, fault: plan.PoliteStop, away: Away) -> None:
        if fault.cut_after_s:
            self._cluster.after(fault.cut_after_s, self._cluster.driver.cut_off, home, fault.cut_s, [away.node])
        else:
            now_s = self._cluster.now_s
            self.arm(plan.CutAtSend(now_s, home.name, "RenewOk", fault.cut_s, only_there=True, uid=away.uid))

    def _crash_host(self, home: str, fault: plan.PoliteStop, away: Away) -> None:
        """The agent that has it dies, and is back at once; of a task that waited it hears again."""
        self._cluster.driver.crash(self._cluster.machines[away.node], HOSTS_DOWN_S)
        if fault.waiting:
            after_s = HOSTS_DOWN_S + REPLAY_AFTER_S
            self._cluster.after(after_s, self._cluster.network.replay, home, away.node, away.uid)


def _uids(message: object) -> list[bytes]:
    """The tasks that a message is about."""
    match message:
        case RenewOk():
            return [granted.uid for granted in message.extensions]
        case Renew():
            return [renewal.uid for renewal in message.renewals]
        case Park():
            return [parking.uid for parking in message.parkings]
        case _:
            uid = getattr(message, "uid", None)
            return [uid] if isinstance(uid, bytes) else []
