"""Carries out the faults of a plan on the cluster, and heals everything in the end. What each of them met is counted by
`fault_encounters.py`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from peerload.model import events
from tests.chaos import fault_encounters, plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.cluster import Cluster
    from tests.chaos.machine import Machine

LOOK_FOR_NODE_S = 0.5
"""A fault that is to meet a certain kind of node looks for one this often."""
UNDRAIN_AGAIN_S = 1.0
"""A user whose node is not up tries again after this."""


class Driver:
    """Every fault is a line on the heap. The method of a fault says whether it has happened; what is only armed by it is
    counted when it goes off."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"{cluster.plan.seed} driver")
        self._at_a_node: dict[type, Callable[..., bool]] = {
            plan.AgentCrash: self._agent_crash,
            plan.AgentPause: self._agent_pause,
            plan.BothCrash: self._both_crash,
            plan.ClockStep: self._clock_step,
            plan.CrashAtSend: self._armed,
            plan.CutAtSend: self._armed,
            plan.CutFromHost: self._cut_from_host,
            plan.DiskFull: self._disk_full,
            plan.DiskLost: self._disk_lost,
            plan.DiskStall: self._disk_stall,
            plan.Drain: self._drain,
            plan.FsyncError: self._fsync_error,
            plan.GroupSet: self._group_set,
            plan.LauncherCrash: self._launcher_crash,
            plan.LauncherPause: self._launcher_pause,
            plan.Leave: self._leave,
            plan.MachineCrash: self._machine_crash,
            plan.MachineGone: self._machine_gone,
            plan.PoliteStop: self._polite_stop,
            plan.Shortage: self._shortage,
            plan.Suspend: self._suspend,
        }
        """Carry out a fault of one node."""
        self._anywhere: dict[type, Callable[..., bool]] = {
            plan.BrokerDown: self._broker_down,
            plan.BrokerSlow: self._broker_slow,
            plan.CommitsLost: self._armed,
            plan.CrashAtCommit: self._crash_at_commit,
            plan.Cut: self._cut,
            plan.LateThenCut: self._armed,
            plan.LinkReset: self._link_reset,
            plan.RebootAtAccept: self._armed,
            plan.ReplayAtReturn: self._armed,
            plan.Verb: self._verb,
        }
        """Carry out any other fault."""
        if cluster.plan.has_drift():
            cluster.gauges.count("row clocks drift")
        for fault in cluster.plan.faults:
            cluster.at(fault.at_s, self._carry_out, fault)
        cluster.at(cluster.plan.healed_s, self._heal)

    def _carry_out(self, fault: plan.Fault) -> None:
        cluster = self._cluster
        if cluster.now_s >= cluster.plan.healed_s:
            return
        name = getattr(fault, "node", "")
        if name in (plan.HOST, plan.HOME):
            name = self._found(fault, name)
            if not name:
                cluster.after(LOOK_FOR_NODE_S, self._carry_out, fault)
                return
        cluster.traced(name or "-", fault)
        if name:
            machine = cluster.machines[name]
            happens = machine.has_power and not machine.is_gone and self._at_a_node[type(fault)](machine, fault)
        else:
            happens = self._anywhere[type(fault)](fault)
        if happens:
            cluster.gauges.count(f"fault {kind_of(fault)}")

    def _found(self, fault: plan.Fault, kind: str) -> str:
        """Some node that runs a task of another home, or whose own is away; "" if there is none."""
        up = [m for m in self._cluster.machines.values() if m.node is not None and not m.is_asleep]
        fit = [m.name for m in up if (m.runs_guests() if kind == plan.HOST else self._has_away(m, fault))]
        return self._rng.choice(fit) if fit else ""

    def _has_away(self, machine: Machine, fault: plan.Fault) -> bool:
        provoked = self._cluster.provoked
        waiting = isinstance(fault, plan.PoliteStop) and fault.waiting
        return provoked.is_over() and bool(provoked.away(machine, provoked.needs_s(fault), waiting=waiting))

    # -- agents --------------------------------------------------------------------------------------------------------

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

    def _agent_crash(self, machine: Machine, fault: plan.AgentCrash) -> bool:
        if machine.node is None:
            return False
        fault_encounters.met_by_agent(self._cluster, machine, "agent dies")
        self.crash(machine, fault.down_s)
        return True

    def _both_crash(self, machine: Machine, fault: plan.BothCrash) -> bool:
        """Homes first, so that what the node has is met without them."""
        if machine.node is None:
            return False
        for home in sorted({guest.home for guest in machine.node.executor.remote_tasks.values()}):
            down_s = fault.down_s * self._rng.uniform(0.5, 2.0)
            self.crash(self._cluster.machines[home], down_s, machine_too=fault.machine)
        fault_encounters.met_by_agent(self._cluster, machine, "machine reboots" if fault.machine else "agent dies")
        self.crash(machine, fault.down_s, machine_too=fault.machine)
        return True

    def _crash_at_commit(self, fault: plan.CrashAtCommit) -> bool:
        self._cluster.armed.append(fault)
        return False

    def crash_at_point(self, machine: Machine, armed: plan.CrashAtCommit) -> None:
        """Its commit holds the point."""
        away = self._cluster.provoked.one_away(machine, armed.down_s)
        self.crash(machine, armed.down_s, machine_too=armed.machine)
        if armed.cut_s and away is not None:
            self.cut_off(machine, armed.down_s + armed.cut_s, [away.node])

    def _agent_pause(self, machine: Machine, fault: plan.AgentPause) -> bool:
        if machine.node is None or machine.is_asleep:
            return False
        fault_encounters.met_by_agent(self._cluster, machine, "agent paused")
        machine.pause()
        self._cluster.after(fault.for_s, machine.unpause)
        return True

    def _polite_stop(self, machine: Machine, fault: plan.PoliteStop | plan.Leave) -> bool:
        if machine.node is None or machine.is_asleep:
            return False
        fault_encounters.met_by_agent(self._cluster, machine, "polite stop")
        if isinstance(fault, plan.PoliteStop):
            self._cluster.provoked.goes_away(machine, fault)
        machine.stop_agent()
        self._cluster.after(fault.down_s, machine.start_agent)
        return True

    def _leave(self, machine: Machine, fault: plan.Leave) -> bool:
        machine.addresses.clear()
        return self._polite_stop(machine, fault)

    # -- machines ------------------------------------------------------------------------------------------------------

    def _machine_crash(self, machine: Machine, fault: plan.MachineCrash) -> bool:
        fault_encounters.met_by_agent(self._cluster, machine, "machine reboots")
        if fault.loses_disk:
            fault_encounters.met_by_agent(self._cluster, machine, "disk lost")
        self.crash(machine, fault.down_s, machine_too=True, loses_disk=fault.loses_disk)
        return True

    def _machine_gone(self, machine: Machine, fault: plan.MachineGone) -> bool:
        fault_encounters.met_by_agent(self._cluster, machine, "machine gone")
        machine.crash_machine()
        machine.is_gone = True
        self._cluster.checker.disk_lost(machine)
        if fault.forgotten_s:
            self._cluster.after(fault.forgotten_s, self._forget, machine.name)
        return True

    def _forget(self, node: str) -> None:
        """Some user knows that it will not come back."""
        up = [m for m in self._cluster.machines.values() if m.node is not None]
        if up:
            self._cluster.gauges.count("fault Forget")
            self._cluster.clients.forget(self._rng.choice(up), node)

    def _suspend(self, machine: Machine, fault: plan.Suspend) -> bool:
        if machine.is_suspended:
            return False
        fault_encounters.met_by_agent(self._cluster, machine, "machine suspended")
        if fault.polite and machine.node is not None and not machine.is_asleep:
            machine.say_sleeping()
        else:
            machine.suspend()
        self._cluster.after(fault.for_s, machine.wake)
        return True

    def _clock_step(self, machine: Machine, fault: plan.ClockStep) -> bool:
        machine.clock.step_s += fault.by_s
        self._cluster.gauges.count("row clock step")
        return True

    # -- launchers -----------------------------------------------------------------------------------------------------

    def _launcher_pause(self, machine: Machine, fault: plan.LauncherPause) -> bool:
        machine.launcher.pause()
        self._cluster.after(fault.for_s, machine.launcher.resume)
        return True

    def _launcher_crash(self, machine: Machine, fault: plan.LauncherCrash) -> bool:
        if fault.at_spawn:
            machine.launcher_dies = fault
            return False
        if machine.launcher.running:
            self._cluster.gauges.count("launcher killed with tasks")
        machine.crash_launcher(fault.down_s)
        return True

    # -- disks ---------------------------------------------------------------------------------------------------------

    def _disk_lost(self, machine: Machine, fault: plan.DiskLost) -> bool:
        fault_encounters.met_by_agent(self._cluster, machine, "disk lost")
        machine.crash_agent()
        machine.lose_disk()
        self._cluster.after(fault.down_s, machine.start_agent)
        return True

    def _fsync_error(self, machine: Machine, fault: plan.FsyncError) -> bool:
        machine.fsync_fails = fault
        return False

    def _disk_stall(self, machine: Machine, fault: plan.DiskStall) -> bool:
        machine.stalled_until_s = max(machine.stalled_until_s, self._cluster.now_s + fault.for_s)
        return True

    def _disk_full(self, machine: Machine, fault: plan.DiskFull) -> bool:
        self._disk_room(machine, has_room=False)
        self._cluster.after(fault.for_s, self._disk_room_again, machine)
        return True

    def _disk_room(self, machine: Machine, *, has_room: bool) -> None:
        machine.has_room = has_room
        machine.deliver(events.DiskRoomChanged(has_room))

    def _disk_room_again(self, machine: Machine) -> None:
        self._disk_room(machine, has_room=True)

    def _shortage(self, machine: Machine, fault: plan.Shortage) -> bool:
        machine.short_until_s = max(machine.short_until_s, self._cluster.now_s + fault.for_s)
        return True

    # -- the network ---------------------------------------------------------------------------------------------------

    def _cut(self, fault: plan.Cut) -> bool:
        fault_encounters.met_by_cut(self._cluster, fault.pairs)
        self.part(fault.pairs, fault.for_s)
        return True

    def part(self, pairs: plan.Pairs, for_s: float) -> None:
        """Cut these directions for so long."""
        self._cluster.network.cut(pairs, for_s)
        self._cluster.after(for_s, self._cluster.network.mend, pairs)

    def cut_off(self, machine: Machine, for_s: float, others: list[str] | None = None) -> None:
        """Cut the links between this node and these others (None: all)."""
        if self._cluster.now_s >= self._cluster.plan.healed_s:
            return
        if others is None:
            others = [name for name in self._cluster.machines if name != machine.name]
        self.part(tuple(pair for name in others for pair in ((machine.name, name), (name, machine.name))), for_s)

    def _cut_from_host(self, home: Machine, fault: plan.CutFromHost) -> bool:
        """Of the nodes that have a task of it, from the one whose clock is slowest."""
        machines = self._cluster.machines
        away = self._cluster.provoked.away(home, 0.0)
        if not away:
            return False
        self._cluster.provoked.begins(fault.for_s)
        self.cut_off(home, fault.for_s, [min((one.node for one in away), key=lambda name: machines[name].facts.rate)])
        return True

    def _armed(self, *given: object) -> bool:
        """Arm a fault that waits for a message."""
        self._cluster.provoked.arm(given[-1])  # type: ignore[arg-type]
        return False

    def _link_reset(self, fault: plan.LinkReset) -> bool:
        link = self._cluster.network.link(fault.a, fault.b)
        was_up = link.is_up
        self._cluster.network.break_link(link, "reset")
        return was_up

    def _broker_down(self, fault: plan.BrokerDown) -> bool:
        broker = self._cluster.network.broker
        if broker is None or not broker.is_up:
            return False
        broker.down(forgets=fault.forgets)
        self._cluster.gauges.count("row broker down")
        self._cluster.after(fault.for_s, broker.up)
        return True

    def _broker_slow(self, fault: plan.BrokerSlow) -> bool:
        broker = self._cluster.network.broker
        if broker is None:
            return False
        broker.delay_s_max = fault.delay_s_max
        self._cluster.after(fault.for_s, broker.fast)
        return True

    # -- users ---------------------------------------------------------------------------------------------------------

    def _verb(self, fault: plan.Verb) -> bool:
        return self._cluster.clients.verb(fault.verb, fault.nth)

    def _drain(self, machine: Machine, fault: plan.Drain) -> bool:
        if machine.node is None or machine.is_asleep:
            return False
        self._cluster.clients.drain(machine, begins=True)
        self._cluster.after(fault.for_s, self._undrain, machine)
        return True

    def _group_set(self, machine: Machine, fault: plan.GroupSet) -> bool:
        if machine.node is None or machine.is_asleep:
            return False
        self._cluster.clients.set_group(machine, fault.group, fault.slots, fault.paused)
        return True

    def _undrain(self, machine: Machine) -> None:
        if machine.node is not None:
            self._cluster.clients.drain(machine, begins=False)
        elif not machine.is_gone:
            self._cluster.after(UNDRAIN_AGAIN_S, self._undrain, machine)

    # -- the end of all faults -----------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """Whatever still lasts ends now; machines that are to come back are back."""
        cluster = self._cluster
        cluster.traced("-", "healed")
        cluster.armed.clear()
        cluster.provoked.heal()
        cluster.network.heal()
        for machine in cluster.machines.values():
            if machine.is_gone:
                continue
            machine.heal()
            if not machine.has_room:
                self._disk_room(machine, has_room=True)
            if machine.disk.drained is not None:
                cluster.clients.drain(machine, begins=False)
            cluster.clients.go_on(machine)
            for gone in cluster.machines.values():
                if gone.is_gone:
                    cluster.clients.forget(machine, gone.name)


def kind_of(fault: plan.Fault) -> str:
    """The name under which a fault is counted."""
    match fault:
        case plan.Cut():
            return f"Cut {fault.kind}"
        case plan.MachineCrash() if fault.loses_disk:
            return "DiskLost with its machine"
        case plan.Suspend() if fault.polite:
            return "Suspend, announced"
        case plan.Verb():
            return f"Verb {fault.verb}"
        case _:
            return type(fault).__name__
