"""Conditions that faults have met, counted: the rows of the table of crash points are true only if something was under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.work import HomePhase, RemotePhase

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster
    from tests.chaos.machine import Machine
    from tests.chaos.plan import Pairs

HOME_PHASES = {
    HomePhase.OFFERED: "home, its offer is out",
    HomePhase.AWAY: "home, its task is away",
    HomePhase.HERE: "home, its task runs there",
}
GUEST_PHASES = {
    RemotePhase.RESERVED: "after ACCEPT",
    RemotePhase.ENDED: "its RESULT is not acknowledged",
}


def met_by_agent(cluster: Cluster, machine: Machine, what: str) -> None:
    """Count the conditions that a fault of this node's agent, or of the whole machine, meets."""
    node, gauges = machine.node, cluster.gauges
    if machine.runs_guests():
        gauges.count(f"row {what}: it runs tasks of others")
    if node is None:
        return
    guests = node.executor.remote_tasks.values()
    if any(cluster.machines[guest.home].node is None for guest in guests):
        gauges.count(f"row {what}: so is the home of what it has")
    home_phases = {task.phase for task in node.home.tasks.values()}
    for phase, words in HOME_PHASES.items():
        if phase in home_phases:
            gauges.count(f"row {what}: {words}")
    guest_phases = {guest.phase for guest in guests}
    for guest_phase, words in GUEST_PHASES.items():
        if guest_phase in guest_phases:
            gauges.count(f"row {what}: {words}")


def met_by_cut(cluster: Cluster, pairs: Pairs) -> None:
    """True if a partition stands between a home and a node that runs a task of it."""
    cut = set(pairs)
    for machine in cluster.machines.values():
        for guest in machine.node.executor.remote_tasks.values() if machine.node is not None else ():
            between = ((machine.name, guest.home), (guest.home, machine.name))
            if guest.phase is RemotePhase.HERE and any(pair in cut for pair in between):
                cluster.gauges.count("row partition during a run")
                return
