"""`peerload sim`: what a preset of policies does to response times, from a simulation with the agent's own code."""

from __future__ import annotations

import sys
from pathlib import Path

from peerload.cli import sim_compare, sim_flags, sim_plot, sim_report, sim_work
from peerload.cli.text import print_json, say
from peerload.sim.outcome import impossible, longer, outcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

    from peerload.sim.outcome import Outcome
    from peerload.sim.scenario import Scenario

STDOUT = "-"
ROUNDS_MAX = 4
"""How often a scenario is played, each time longer than before."""


def main(words: list[str]) -> int:
    """Run the verb: 0 also if the system turns out to be unstable, which is an answer."""
    flags = sim_flags.reader().read(words)
    _check_files(flags)
    scenarios = sim_flags.scenarios(flags)
    for why in dict.fromkeys(impossible(scenario) for scenario in scenarios):
        if why:
            say(why)
    played = _played(flags, scenarios)
    results = [sim_report.as_json(scenario, found, flags.replications, flags.seed) for scenario, found in played]
    if flags.csv and flags.csv != STDOUT:
        Path(flags.csv).write_text(sim_compare.as_csv(results), encoding="utf-8")
    if flags.plot:
        sim_plot.draw(flags.plot, scenarios, results)
    _print(flags, results)
    return 0


def _played(flags: Namespace, scenarios: list[Scenario]) -> list[tuple[Scenario, Outcome]]:
    """What came of each. One that turns out to have been too short is played again, longer, unless its length was given:
    then the longer one is returned."""
    found: dict[int, tuple[Scenario, Outcome]] = {}
    left = dict(enumerate(scenarios))
    for _ in range(ROUNDS_MAX):
        samples = sim_work.run(list(left.values()), flags.replications, flags.seed, sim_flags.workers(flags))
        for (index, scenario), of_one in zip(left.items(), samples, strict=True):
            found[index] = (scenario, outcome(scenario, of_one))
        if flags.tasks is not None or flags.warmup is not None:
            break
        again = {index: longer(*found[index]) for index in left}
        left = {index: scenario for index, scenario in again.items() if scenario is not None}
        if not left:
            break
    return [found[index] for index in range(len(scenarios))]


def _check_files(flags: Namespace) -> None:
    """What is to be written can be, before time is spent."""
    if flags.plot:
        sim_plot.check(flags.plot, len(flags.load or ()))
    if flags.csv and flags.csv != STDOUT:
        sim_plot.check_writable("--csv", flags.csv)


def _print(flags: Namespace, results: list[dict[str, Any]]) -> None:
    is_one = flags.compare is None and len(results) == 1
    if flags.csv == STDOUT:
        sys.stdout.write(sim_compare.as_csv(results))
    elif flags.json:
        print_json(results[0] if is_one else sim_compare.as_json(results))
    else:
        lines = sim_report.lines(results[0]) if is_one else sim_compare.lines(results)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
