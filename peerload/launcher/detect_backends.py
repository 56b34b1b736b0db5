"""Which way of holding tasks, and of limiting their memory, a launcher uses. Used by the launcher alone; the imports are few."""

from __future__ import annotations

from peerload.launcher.cgroups import ROOT_PREFIX, cgroup_units
from peerload.launcher.memory_limits import memory_limits
from peerload.launcher.orphan_cleanup import note_units

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.containment import Units
    from peerload.launcher.memory_limits import Memory


def choose(
    directory: str, run: str, units_wanted: str, memory_wanted: str, own_children: set[int]
) -> tuple[Units, Memory]:
    """The wanted kinds, or the best that work ("": any), for this run of a launcher; a note in ``directory`` tells its
    successor where they are. own_children: pids of children of the launcher that are no tasks."""
    name = ROOT_PREFIX + run
    units: Units | None = cgroup_units(units_wanted, name)
    if units is None:
        from peerload.launcher.proc_scan import ProcScan  # noqa: PLC0415 -- most launchers have no use for it

        units = ProcScan(run, own_children)
    memory = memory_limits(memory_wanted, units, name)
    note_units(directory, units.name, units.root, memory.root)
    return units, memory
