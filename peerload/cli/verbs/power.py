"""`peerload power`: what a node draws, how that is known, and its power profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError, UsageError
from peerload.text.format import number_text, print_json, say, table
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace

HEADINGS = ("SOURCE", "SCOPE", "QUALITY", "WATTS", "NOTE")
WINDOW_S_MIN, WINDOW_S_MAX = 2.0, 600.0
FILE_BYTES_MAX = 64 << 10


def main(words: list[str]) -> int:
    """Run the verb."""
    if words[:1] == ["restore"]:
        from peerload.cli.common.power_restore import restore

        return restore(words[1:])
    reader = Options(
        "power",
        "Show what this node draws, from which sensor, and how good the figure is: measured, derived (computed from readings),\n"
        "or estimated (from the load alone). Then its power curve, which other nodes compare when they place by energy.\n"
        "profile: measure that curve: keep more and more threads busy, for up to 5 minutes. Nothing else may run meanwhile.\n"
        "restore: put back what the controls of an agent have changed (`[energy] gpu_power_w gpu_clock_mhz cpu_governor cpu_max_mhz`).",
        usage="[profile|restore] [flags]",
    )
    reader.flag(
        "--from FILE", help="profile: use this one, which another start of this machine has measured", dest="file"
    )
    reader.flag("--window 8s", help="profile: measure each level for so long", type=duration, default=8.0)
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
    if flags.json:
        print_json(told)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in (_profile_lines(told) if flags.what else _lines(told))))
    return 0


def _lines(told: dict[str, Any]) -> list[str]:
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
    lines += table(HEADINGS, rows, ("WATTS",))
    if curve := told["curve"]:
        state = "stale: measure it again:  peerload power profile" if curve.get("stale") else curve["quality"]
        lines += ["", f"power curve, {state}: {_watts(curve)} W from idle to all {curve['threads']} threads busy"]
    return lines


def _watts(curve: dict[str, Any]) -> str:
    return " ".join(number_text(one, 1) for one in curve["watts"])


def _profile_lines(told: dict[str, Any]) -> list[str]:
    curve = told["curve"]
    lines = [
        f"{level:6} threads busy  {watts:8.1f} W" for level, watts in zip(told["levels"], told["watts"], strict=True)
    ]
    return [*lines, f"power curve, measured: {_watts(curve)} W; kept, and sent to other nodes"]


def _profile(client: AgentConnection, flags: Namespace) -> dict[str, Any]:
    """Measure, or read a file; have the agent keep it."""
    if flags.file:
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
