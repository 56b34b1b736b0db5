"""`peerload sim`: what a preset of policies does to response times, from a simulation with the agent's own code."""

from __future__ import annotations

import sys

from peerload.cli import sim_flags, sim_work
from peerload.cli.sim_report import as_json, lines
from peerload.cli.text import print_json, say
from peerload.sim.outcome import impossible, outcome


def main(words: list[str]) -> int:
    """Run the verb: 0 also if the system turns out to be unstable, which is an answer."""
    flags = sim_flags.reader().read(words)
    scenarios = sim_flags.scenarios(flags)
    for why in dict.fromkeys(impossible(scenario) for scenario in scenarios):
        if why:
            say(why)
    samples = sim_work.run(scenarios, flags.replications, flags.seed, sim_flags.workers(flags))
    outcomes = [outcome(scenario, found) for scenario, found in zip(scenarios, samples, strict=True)]
    results = [as_json(*pair, flags.replications, flags.seed) for pair in zip(scenarios, outcomes, strict=True)]
    if flags.json:
        print_json(results[0])
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines(results[0])))
    return 0
