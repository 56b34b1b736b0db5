"""`peerload power` and `energy`: the power of a node, its sensors, and its power profile; joules of nodes, tasks and users."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common.messages import CANNOT
from peerload.cli.common.options import Options, node_name, past_instant
from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable, PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text import tasks
from peerload.text.format import duration_text, number_text, print_json, print_lines, print_result, say, table
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable


POWER_HEADINGS = ("SOURCE", "SCOPE", "QUALITY", "WATTS", "NOTE")
WINDOW_S_MIN, WINDOW_S_MAX = 2.0, 600.0
FILE_BYTES_MAX = 64 << 10


def power(words: list[str]) -> int:
    if words[:1] == ["restore"]:
        return restore(words[1:])
    reader = Options(
        "power",
        "Show what this node draws, from which sensor, and how good the figure is: measured, derived (computed from readings),\n"
        "or estimated (from the load alone). Then its power curve, which other nodes compare when they place by energy.\n"
        "profile: measure that curve: keep more and more threads busy, for up to 5 minutes. Nothing else may run meanwhile.\n"
        "restore: put back what the controls of an agent have changed (`[energy] gpu_power_w gpu_clock_mhz cpu_governor cpu_max_mhz`).",
        usage="[profile|restore] [flags]",
    )
    reader.flag("--from FILE", help="profile: use this profile, measured earlier on this machine", dest="file")
    reader.flag("--window 8s", help="profile: duration of the measurement of each level", type=duration, default=8.0)
    reader.add_argument("what", nargs="?", default="", choices=("", "profile"), metavar="profile|restore")
    reader.at()
    flags = reader.read(words)
    if flags.what and flags.at:
        raise UsageError("power profile measures this machine", hint="over there:  ssh NODE peerload power profile")
    if flags.file and not flags.what:
        raise UsageError("power: --from is for profile", hint="peerload power profile --from FILE")
    if not WINDOW_S_MIN <= flags.window <= WINDOW_S_MAX:
        raise UsageError(f"power: --window is between {WINDOW_S_MIN:g} s and {WINDOW_S_MAX:g} s")
    with AgentConnection(flags.socket) as client:
        told = _profile(client, flags) if flags.what else client.call("power", at=flags.at)
    print_result(told, _profile_lines(told) if flags.what else _power_lines(told), as_json=flags.json)
    return 0


def _power_lines(told: dict[str, Any]) -> list[str]:
    rows = [
        [
            str(one["name"]),
            str(one["scope"]),
            "-" if one["watts"] is None else str(one["quality"]),
            number_text(one["watts"], 1),
            str(one["why"] or ""),
        ]
        for one in told["sources"]
    ]
    is_known = told["watts"] is not None
    lines = [
        f"{told['node']}: {number_text(told['watts'], 1)} W {told['quality']}, by {told['source']}"
        if is_known
        else f"{told['node']}: not known yet; the first sample comes within seconds",
        "",
    ]
    lines += table(POWER_HEADINGS, rows, ("WATTS",))
    if curve := told["curve"]:
        state = "stale: measure it again:  peerload power profile" if curve.get("stale") else curve["quality"]
        lines += ["", f"power curve, {state}: {_watts(curve)} W from idle to all {curve['threads']} threads busy"]
    return list(map(printable, lines))


def _watts(curve: dict[str, Any]) -> str:
    return " ".join(number_text(one, 1) for one in curve["watts"])


def _profile_lines(told: dict[str, Any]) -> list[str]:
    curve = told["curve"]
    lines = [
        f"{level:6} threads busy  {watts:8.1f} W" for level, watts in zip(told["levels"], told["watts"], strict=True)
    ]
    return [*lines, f"power curve, measured: {_watts(curve)} W; kept, and sent to other nodes"]


def _profile(client: AgentConnection, flags: Namespace) -> dict[str, Any]:
    """Measure a power profile, or read one from a file, and store it in the agent."""
    if flags.file:
        from pathlib import Path

        try:
            with Path(flags.file).open("rb") as file:
                return dict(client.call("power-profile", document=file.read(FILE_BYTES_MAX)))
        except OSError as error:
            raise PeerloadError(f"{flags.file} cannot be read", why=str(error.strerror)) from None
    from peerload.cli.common.power_bench import Bench, Spinners, measured, threads_in_order

    told = client.call("power")
    if told["quality"] == "estimated":
        hint = "what is missing:  peerload doctor        peerload power"
        raise PeerloadError("this machine has no power sensor that can be read, so no curve can be measured", hint=hint)
    if running := next(node for node in client.call("nodes")["nodes"] if node.get("self"))["tasks_running"]:
        raise PeerloadError(f"{running} tasks run here", hint="until they have ended:  peerload drain --wait")
    cpus, cores = threads_in_order()
    levels = sorted({level for level in told["levels"] if level <= len(cpus)} | {len(cpus)})
    with Spinners(cpus) as spinners:
        bench = Bench(spinners, lambda: dict(client.call("power")))
        found = measured(bench, levels, len(cpus), say, flags.window)
    return dict(client.call("power-profile", measured=found, cores=cores, threads=len(cpus)))


def restore(words: list[str]) -> int:
    """Run `power restore` in this process, which needs permission to set power controls."""
    from pathlib import Path

    from peerload.agent.energy import FILE, PowerControls
    from peerload.cli.common.agent_process import located

    flags = Options("power restore", "Put back what the power controls of an agent have changed.").read(words)
    try:
        with AgentConnection(flags.socket) as client:
            state = client.call("info")["state"]
    except AgentUnavailable:
        state = located({})["state"]
    file = Path(state) / FILE
    was_there = file.exists()
    left = PowerControls(file).restore()
    if flags.json:
        print_json({"restored": was_there and not left, "left": left})
    elif not was_there:
        say(
            f"nothing to restore: {file} does not exist; of an agent with another --state:  PEERLOAD_STATE=DIR peerload power restore"
        )
    elif not left:
        say("restored")
    if left:
        raise PeerloadError(left[0], hint="as the user of the agent that set it, or as root:  peerload power restore")
    return 0


TASK_HEADINGS = ("JOULES", "WH", "QUALITY", "SCOPE")
HEADINGS = ("JOULES", "WH", "TASKS", "OTHERS", "IDLE", "UNKNOWN", "QUALITY", "SCOPE", "SOURCE")
JOULES_OF = {"JOULES": "joules", "TASKS": "tasks_joules", "OTHERS": "other_joules", "IDLE": "idle_joules"}
QUALITIES = ("measured", "derived", "estimated")
WH_J = 3600.0
DIGITS_MAX = 9
DAY_S = 86_400.0
HISTORY_LIMIT_MAX = 1_000_000


def energy(words: list[str]) -> int:
    reader = Options(
        "energy",
        "Print the joules of this node: of tasks, of other programs, and of idling. With --task or --user those of ended tasks\n"
        "whose home is here, wherever they ran, beyond what the machines would have drawn anyway.",
        json_says="print JSON, one object a row",
    )
    reader.flag(
        "--node, --at NODE",
        type=node_name,
        nargs="?",
        const=None,
        default="",
        help="of that node; without NODE: of each",
    )
    reader.switch("--task", help="one row for each task")
    reader.switch("--user", help="one row for each user")
    reader.flag("--since T", help="since this time: 2h (ago; default 1d), 2026-11-20, …T14:30", type=past_instant)
    flags = reader.read(words)
    if flags.task and flags.user:
        raise UsageError("energy: --task is not for --user", hint="one of them at a time")
    since = time.time() - DAY_S if flags.since is None else flags.since
    with AgentConnection(flags.socket) as client:
        if flags.task or flags.user:
            where = {"cluster": True} if flags.node is None else {"at": flags.node}
            told = client.call("history", since=since, limit=HISTORY_LIMIT_MAX, oldest_first=True, **where)
            tasks.say_missing(told)
            missing = len(told.get("missing") or ())
            rows = by_user(told["tasks"], since) if flags.user else [of_task(task) for task in told["tasks"]]
        else:
            rows, missing = of_nodes(client, flags.node, since)
    code = CANNOT if missing else 0
    if flags.json:
        for row in rows:
            print_json(row)
        return code
    first = "task" if flags.task else "user" if flags.user else "node"
    headings = HEADINGS if first == "node" else TASK_HEADINGS
    cells = [[str(row[first]), *(_cell(row, heading) for heading in headings)] for row in rows]
    print_lines(table((first.upper(), *headings), cells, HEADINGS[:6]))
    return code


def of_nodes(client: AgentConnection, node: str | None, since: float) -> tuple[list[dict[str, Any]], int]:
    """The row of a node (None: the rows of all live nodes that answer); and the number of nodes that do not answer."""
    if node is not None:
        return [client.call("energy", at=node, since=since)], 0
    rows, missing = [], 0
    for one in client.call("nodes")["nodes"]:
        if one["state"] != "alive":
            continue
        try:
            rows.append(client.call("energy", at="" if one["self"] else one["node"], since=since))
        except PeerloadError as error:
            say(f"{one['node']} is left out: {error}")
            missing += 1
    return rows, missing


def of_task(task: dict[str, Any]) -> dict[str, Any]:
    usage = task.get("usage") or {}
    joules = usage.get("joules")
    none = None if joules is None else 0.0
    return {
        "node": task.get("node"),
        "since": task.get("started_at"),
        "until": task.get("ended_at"),
        "joules": joules,
        "wh": None if joules is None else joules / WH_J,
        "tasks_joules": joules,
        "other_joules": none,
        "idle_joules": none,
        "gap_s": None,
        "quality": usage.get("energy_quality"),
        "scope": usage.get("energy_scope"),
        "source": None,
        "task": task.get("id"),
        "user": task.get("user"),
    }


def by_user(ended: Iterable[dict[str, Any]], since: float) -> list[dict[str, Any]]:
    """A row for each user: the sum of the known energy of the tasks, with the worst quality among them."""
    found: dict[str, dict[str, Any]] = {}
    for task in ended:
        row = of_task(task)
        if row["joules"] is None:
            continue
        row |= {"since": since, "until": time.time(), "task": None}
        total = found.setdefault(str(row["user"]), row)
        if total is row:
            continue
        for key in ("joules", "wh", "tasks_joules"):
            total[key] += row[key]
        total["node"] = total["node"] if total["node"] == row["node"] else None
        total["quality"] = max(total["quality"], row["quality"], key=QUALITIES.index)
        total["scope"] = "+".join(dict.fromkeys(f"{total['scope']}+{row['scope']}".split("+")))
    return list(found.values())


def _number(value: float | None, digits: int) -> str:
    """A number with this many decimals, or enough to show two significant digits."""
    if value:
        digits = min(max(digits, 1 - math.floor(math.log10(abs(value)))), DIGITS_MAX)
    return number_text(value, digits)


def _cell(row: dict[str, Any], heading: str) -> str:
    match heading:
        case "JOULES" | "TASKS" | "OTHERS" | "IDLE":
            return _number(row[JOULES_OF[heading]], 1)
        case "WH":
            return _number(row["wh"], 3)
        case "UNKNOWN":
            return "-" if row["gap_s"] is None else duration_text(row["gap_s"])
    return str(row[heading.lower()] or "-")
