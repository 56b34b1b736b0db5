"""Carries out the faults of a plan on the cluster, counts what each of them met, and heals everything in the end."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from peerload.core.work import GuestPhase, HomePhase
from peerload.model import events
from peerload.sim.chaos import plan

if TYPE_CHECKING:
    from peerload.sim.chaos.cluster import Cluster
    from peerload.sim.chaos.machine import Machine

LOOK_FOR_HOST_S = 0.5
"""A fault that is to meet a node with a task of another home looks for one this often."""
UNDRAIN_AGAIN_S = 1.0
"""A user whose node is not up tries again after this."""


class Driver:
    """Every fault is a line on the heap; what it was drawn as is in the plan."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"{cluster.plan.seed} driver")  # noqa: S311 -- a seeded simulation
        if cluster.plan.has_drift():
            cluster.gauges.count("row clocks drift")
        for fault in cluster.plan.faults:
            cluster.at(fault.at_s, self._carry_out, fault)
        cluster.at(cluster.plan.healed_s, self._heal)

    def _carry_out(self, fault: plan.Fault) -> None:  # noqa: C901 PLR0912 PLR0915 -- one case a fault
        cluster, gauges = self._cluster, self._cluster.gauges
        if cluster.now_s >= cluster.plan.healed_s:
            return
        name = getattr(fault, "node", "")
        if name in (plan.HOST, plan.HOME):
            name = self._found(name)
            if not name:
                cluster.after(LOOK_FOR_HOST_S, self._carry_out, fault)
                return
        cluster.traced(name or "-", fault)
        kind = f"fault {type(fault).__name__}"
        machine = cluster.machines.get(name)
        if machine is not None and (machine.is_gone or not machine.has_power):
            return
        match fault:
            case plan.AgentCrash():
                assert machine is not None
                if machine.node is None:
                    return
                self._met_by_agent(machine, "agent dies")
                self.crash(machine, fault.down_s)
            case plan.CrashAtCommit():
                cluster.armed.append(fault)
                return  # counted when it goes off
            case plan.CrashAtSend():
                assert machine is not None
                machine.armed_to_say = fault
                return  # counted when it goes off
            case plan.CutAtSend():
                assert machine is not None
                machine.cut_at_send = fault
                return  # counted when it goes off
            case plan.BothCrash():
                assert machine is not None
                self._both_crash(machine, fault)
            case plan.MachineCrash():
                assert machine is not None
                self._met_by_agent(machine, "machine reboots")
                if fault.loses_disk:
                    kind = "fault DiskLost with its machine"
                self.crash(machine, fault.down_s, machine_too=True, loses_disk=fault.loses_disk)
            case plan.DiskLost():
                assert machine is not None
                self._met_by_agent(machine, "disk lost")
                machine.crash_agent()
                machine.lose_disk()
                cluster.after(fault.down_s, machine.start_agent)
            case plan.MachineGone():
                assert machine is not None
                self._met_by_agent(machine, "machine gone")
                machine.crash_machine()
                machine.is_gone = True
                cluster.checker.disk_lost(machine)
                if fault.forgotten_s:
                    cluster.after(fault.forgotten_s, self._forget, machine.name)
            case plan.AgentPause():
                assert machine is not None
                if machine.node is None or machine.is_asleep:
                    return
                self._met_by_agent(machine, "agent paused")
                machine.pause()
                cluster.after(fault.for_s, machine.unpause)
            case plan.LauncherPause():
                assert machine is not None
                machine.launcher.pause()
                cluster.after(fault.for_s, machine.launcher.resume)
            case plan.LauncherCrash():
                assert machine is not None
                if fault.at_spawn:
                    machine.cut_at_send = None
            machine.armed_launcher = fault
                    return  # counted when it goes off
                if machine.launcher.running:
                    gauges.count("launcher killed with tasks")
                machine.crash_launcher(fault.down_s)
            case plan.Suspend():
                assert machine is not None
                if machine.is_suspended:
                    return
                self._met_by_agent(machine, "machine suspended")
                if fault.polite and machine.node is not None and not machine.is_asleep:
                    kind = "fault Suspend, announced"
                    machine.say_sleeping()
                else:
                    machine.suspend()
                cluster.after(fault.for_s, machine.wake)
            case plan.ClockStep():
                assert machine is not None
                machine.clock.step_s += fault.by_s
                gauges.count("row clock step")
            case plan.FsyncError():
                assert machine is not None
                machine.fsync_fails = fault
                return  # counted when it fires
            case plan.DiskStall():
                assert machine is not None
                machine.stalled_until_s = max(machine.stalled_until_s, cluster.now_s + fault.for_s)
            case plan.DiskFull():
                assert machine is not None
                self._disk_room(machine, has_room=False)
                cluster.after(fault.for_s, self._disk_room_again, machine)
            case plan.Cut():
                kind = f"fault Cut {fault.kind}"
                self._met_by_cut(fault)
                cluster.network.cut(fault.pairs, fault.for_s)
                cluster.after(fault.for_s, cluster.network.mend, fault.pairs)
            case plan.LinkReset():
                link = cluster.network.link(fault.a, fault.b)
                if not link.is_up:
                    return
                cluster.network.break_link(link, "reset")
            case plan.BrokerDown():
                broker = cluster.network.broker
                if broker is None or not broker.is_up:
                    return
                broker.down(forgets=fault.forgets)
                gauges.count("row broker down")
                cluster.after(fault.for_s, broker.up)
            case plan.BrokerSlow():
                broker = cluster.network.broker
                if broker is None:
                    return
                broker.delay_s_max = fault.delay_s_max
                cluster.after(fault.for_s, broker.fast)
            case plan.PoliteStop():
                assert machine is not None
                if machine.node is None or machine.is_asleep:
                    return
                self._met_by_agent(machine, "polite stop")
                machine.stop_agent()
                cluster.after(fault.down_s, machine.start_agent)
            case plan.Verb():
                cluster.clients.verb(fault.verb, fault.nth)
                return  # counted there
            case plan.Drain():
                assert machine is not None
                if machine.node is None or machine.is_asleep:
                    return
                cluster.clients.drain(machine, begins=True)
                cluster.after(fault.for_s, self._undrain, machine)
            case plan.Leave():
                assert machine is not None
                if machine.node is None or machine.is_asleep:
                    return
                machine.stop_agent()
                machine.addresses.clear()
                cluster.after(fault.down_s, machine.start_agent)
            case _:
                raise AssertionError(kind)
        gauges.count(kind)

    def _disk_room(self, machine: Machine, *, has_room: bool) -> None:
        machine.has_room = has_room
        machine.deliver(events.DiskRoomChanged(has_room))

    def _disk_room_again(self, machine: Machine) -> None:
        self._disk_room(machine, has_room=True)

    def _undrain(self, machine: Machine) -> None:
        if machine.node is not None:
            self._cluster.clients.drain(machine, begins=False)
        else:
            self._cluster.after(UNDRAIN_AGAIN_S, self._undrain, machine)

    def _found(self, kind: str) -> str:
        """Some node that runs a task of another home, or whose own is away; "" if there is none."""
        up = [m for m in self._cluster.machines.values() if m.node is not None and not m.is_asleep]
        fit = [m.name for m in up if (m.runs_guests() if kind == plan.HOST else m.has_tasks_away())]
        return self._rng.choice(fit) if fit else ""

    def _forget(self, node: str) -> None:
        """Some user knows that it will not come back."""
        up = [m for m in self._cluster.machines.values() if m.node is not None]
        if up:
            self._cluster.gauges.count("fault Forget")
            self._cluster.clients.forget(self._rng.choice(up), node)

    def _both_crash(self, machine: Machine, fault: plan.BothCrash) -> None:
        """Homes first, so that what the node has is met without them."""
        if machine.node is None:
            return
        homes = sorted({guest.home for guest in machine.node.executor.guests.values()})
        for home in homes:
            self.crash(
                self._cluster.machines[home], fault.down_s * self._rng.uniform(0.5, 2.0), machine_too=fault.machine
            )
        self._met_by_agent(machine, "machine reboots" if fault.machine else "agent dies")
        self.crash(machine, fault.down_s, machine_too=fault.machine)

    def cut_off(self, machine: Machine, for_s: float) -> None:
        """Nothing passes between this node and the others."""
        others = [name for name in self._cluster.machines if name != machine.name]
        pairs = tuple(pair for name in others for pair in ((machine.name, name), (name, machine.name)))
        self._cluster.gauges.count("fault CutAtSend")
        self._cluster.network.cut(pairs, for_s)
        self._cluster.after(for_s, self._cluster.network.mend, pairs)

    def crash_as_armed(self, machine: Machine, armed: plan.CrashAtSend) -> None:
        """It has said what it was to say."""
        if machine.node is not None:
            self._met_by_agent(machine, "machine reboots" if armed.machine else "agent dies")
            self.crash(machine, armed.down_s, machine_too=armed.machine)

    def crash(self, machine: Machine, down_s: float, *, machine_too: bool = False, loses_disk: bool = False) -> None:
        """The agent, or the whole machine, dies now and is back ``down_s`` later."""
        if machine.is_gone or not machine.has_power:
            return
        self._cluster.traced(machine.name, "machine dies" if machine_too else "agent dies")
        if machine_too:
            machine.crash_machine(loses_disk=loses_disk)
            self._cluster.after(down_s, machine.power_on)
        else:
            machine.crash_agent()
            self._cluster.after(down_s, machine.start_agent)

    # -- what a fault has met ------------------------------------------------------------------------------------------

    def _met_by_agent(self, machine: Machine, what: str) -> None:
        """Count the rows of the table of crash points that this fault makes true."""
        gauges, node = self._cluster.gauges, machine.node
        if machine.runs_guests():
            gauges.count(f"row {what}: it runs tasks of others")
        if node is None:
            return
        if any(self._cluster.machines[guest.home].node is None for guest in node.executor.guests.values()):
            gauges.count(f"row {what}: so is the home of what it has")
        phases = {task.phase for task in node.home.tasks.values()}
        if HomePhase.OFFERED in phases:
            gauges.count(f"row {what}: home, its offer is out")
        if HomePhase.AWAY in phases:
            gauges.count(f"row {what}: home, its task is away")
        if HomePhase.HERE in phases:
            gauges.count(f"row {what}: home, its task runs there")
        if any(guest.phase is GuestPhase.RESERVED for guest in node.executor.guests.values()):
            gauges.count(f"row {what}: after ACCEPT")
        if any(guest.phase is GuestPhase.ENDED for guest in node.executor.guests.values()):
            gauges.count(f"row {what}: its RESULT is not acknowledged")

    def _met_by_cut(self, cut: plan.Cut) -> None:
        """Whether the partition stands between a home and a node that runs a task of it."""
        pairs = set(cut.pairs)
        for machine in self._cluster.machines.values():
            if machine.node is None:
                continue
            for guest in machine.node.executor.guests.values():
                if guest.phase is GuestPhase.HERE and (
                    (machine.name, guest.home) in pairs or (guest.home, machine.name) in pairs
                ):
                    self._cluster.gauges.count("row partition during a run")
                    return

    # -- the end of all faults -----------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """Whatever still lasts ends now; machines that are to come back are back."""
        cluster = self._cluster
        cluster.traced("-", "healed")
        cluster.network.heal()
        cluster.armed.clear()
        for machine in cluster.machines.values():
            if machine.is_gone:
                continue
            machine.armed_launcher = machine.armed_to_say = machine.fsync_fails = None
            machine.stalled_until_s = 0.0
            machine.wake()
            machine.unpause()
            machine.launcher.resume()
            machine.power_on()
            machine.start_agent()
            if not machine.has_room:
                self._disk_room(machine, has_room=True)
            if machine.disk.drained is not None:
                cluster.clients.drain(machine, begins=False)
            for gone in cluster.machines.values():
                if gone.is_gone:
                    cluster.clients.forget(machine, gone.name)
