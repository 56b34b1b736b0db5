"""Events that a campaign has to cover: a fault that never fires, or never meets what it is for, tests nothing.

Numbers are for 500 seeds and scale with the seeds that were run.
"""

from __future__ import annotations

from collections import Counter

from tests.chaos.disk import POINTS

SEEDS = 500
POINTS_MIN = 100
"""Each durability point is crashed just before, and just after, at least so often."""
ROWS_MIN = 50
"""Each row of the table of crash points is hit at least so often."""
FAULTS_MIN = 50
"""Each kind of fault happens at least so often."""

ROWS: dict[str, tuple[str, ...]] = {
    "client dies before SUBMITTED": ("row client dies before SUBMITTED",),
    "client repeats a submit": ("submits repeated",),
    "home dies before D1": ("D1 crashed before",),
    "home dies after OFFER, before D2": (
        "row agent dies: home, its offer is out",
        "row machine reboots: home, its offer is out",
        "D2 crashed before",
    ),
    "home dies after D2": (
        "D2 crashed after",
        "row agent dies: home, its task is away",
        "row machine reboots: home, its task is away",
    ),
    "ACCEPT lost": ("row Accept lost",),
    "COMMIT lost": ("row Commit lost",),
    "x's agent dies after ACCEPT": ("row agent dies: after ACCEPT",),
    "x's agent dies while a task runs": ("row agent dies: it runs tasks of others",),
    "x's agent dies, a task ends meanwhile": ("row agent down: a task of another home ends meanwhile",),
    "x's machine reboots": ("row machine reboots: it runs tasks of others",),
    "x's machine is gone for ever": ("row machine gone: it runs tasks of others",),
    "RESULT lost": ("row Result lost",),
    "RESULT_ACK lost": ("row ResultAck lost",),
    "both die": (
        "row agent dies: so is the home of what it has",
        "row machine reboots: so is the home of what it has",
    ),
    "partition during a run": ("row partition during a run",),
    "x's agent is stopped": ("row agent paused: it runs tasks of others",),
    "x's machine is suspended": ("row machine suspended: it runs tasks of others",),
    "home goes away politely": (
        "row polite stop: home, its task is away",
        "row machine suspended: home, its task is away",
    ),
    "a task is parked": ("parked",),
    "a home goes away for a moment, and what follows goes wrong": ("provoked: a home with a task elsewhere goes away",),
    "a task is frozen at the end of its lease": ("frozen at the end of a lease",),
    "clock step": ("row clock step",),
    "clocks that drift": ("row clocks drift",),
    "repeated frames": ("messages repeated",),
    "reordered frames": ("messages late",),
    "frames for an earlier start": ("messages for an earlier start",),
    "broker down": ("row broker down",),
    "home's disk lost": ("row disk lost: home, its task is away", "row disk lost: home, its task runs there"),
    "executor's disk lost": ("row disk lost: it runs tasks of others",),
    "launcher dies with its tasks": ("launcher killed with tasks",),
    "launcher dies between START and fork": ("launcher killed between START and fork",),
}
"""Row → the gauges of which at least one counts for it; their sum is held against ROWS_MIN."""

FAULTS = (
    "AgentCrash",
    "AgentPause",
    "BothCrash",
    "BrokerDown",
    "BrokerSlow",
    "ClockStep",
    "CommitsLost",
    "CrashAtSend",
    "CutAtSend",
    "CutFromHost",
    "Cut one-way",
    "Cut partial",
    "Cut split",
    "DiskFull",
    "DiskLost",
    "DiskLost with its machine",
    "DiskStall",
    "Drain",
    "Forget",
    "FsyncError",
    "GroupSet",
    "LateThenCut",
    "LauncherCrash",
    "LauncherPause",
    "Leave",
    "LinkReset",
    "MachineCrash",
    "MachineGone",
    "PoliteStop",
    "RebootAtAccept",
    "ReplayAtReturn",
    "Shortage",
    "Suspend",
    "Suspend, announced",
    "Verb cancel",
    "Verb hold",
    "Verb prio",
    "Verb release",
)


def too_rare(gauges: Counter[str], seeds: int) -> list[str]:
    """Events that happened less often than they must, as lines; [] if there are none."""
    share = seeds / SEEDS
    wanted: list[tuple[str, int, tuple[str, ...]]] = [
        (f"{point} crashed {when}", POINTS_MIN, (f"{point} crashed {when}",))
        for point in POINTS
        for when in ("before", "after")
    ]
    wanted += [(f"row: {row}", ROWS_MIN, names) for row, names in ROWS.items()]
    wanted += [(f"fault {kind}", FAULTS_MIN, (f"fault {kind}",)) for kind in FAULTS]
    found = [(name, sum(gauges[gauge] for gauge in names), max(least * share, 1.0)) for name, least, names in wanted]
    return [f"{name}: {count}, at least {least:.0f} are wanted" for name, count, least in found if count < least]
