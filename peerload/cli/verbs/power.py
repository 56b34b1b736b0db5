"""`peerload power`: what a node draws, and how that is known."""

from __future__ import annotations

import sys

from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.text.format import number_text, print_json, table

HEADINGS = ("SOURCE", "SCOPE", "QUALITY", "WATTS", "NOTE")


def main(words: list[str]) -> int:
    """Run the verb."""
    if words[:1] == ["restore"]:
        from peerload.cli.common.power_restore import restore

        return restore(words[1:])
    reader = Options(
        "power",
        "Show what this node draws, from which sensor, and how good the figure is: measured, derived (computed from readings),\n"
        "or estimated (from the load alone). Then its power curve, which other nodes compare when they place by energy.\n"
        "power restore: put back what the controls of an agent have changed (`[energy] gpu_power_w gpu_clock_mhz cpu_governor cpu_max_mhz`).",
    )
    reader.at()
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        told = client.call("power", at=flags.at)
    if flags.json:
        print_json(told)
        return 0
    rows = [
        [
            str(one["name"]),
            str(one["scope"]),
            str(one["quality"] or "-"),
            number_text(one["watts"], 1),
            str(one["why"] or ""),
        ]
        for one in told["sources"]
    ]
    lines = [f"{told['node']}: {number_text(told['watts'], 1)} W {told['quality']}, by {told['source']}", ""]
    lines += table(HEADINGS, rows, ("WATTS",))
    if curve := told["curve"]:
        watts = " ".join(number_text(one, 1) for one in curve["watts"])
        lines += [
            "",
            f"power curve, {curve.get('quality', 'estimated')}: {watts} W from idle to all {curve['threads']} threads busy",
        ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
