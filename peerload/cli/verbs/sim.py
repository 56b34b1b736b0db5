"""`peerload sim`: effect of a preset of policies on response times, from a simulation with the agent's own code."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload import __version__
from peerload.cli.common.messages import CANNOT, report
from peerload.cli.simulate import flags as sim_flags
from peerload.cli.simulate import plot, work
from peerload.cli.simulate import report as sim_report
from peerload.model.errors import PeerloadError
from peerload.sim.outcome import impossible, longer, more, outcome
from peerload.text.format import json_line, say

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from peerload.sim.outcome import Outcome
    from peerload.sim.replication import Sample
    from peerload.sim.scenario import Scenario

STDOUT = "-"
ROUNDS_MAX = 4
"""Bound on the plays of a scenario, each longer than the one before."""

ELSEWHERE = "is there room?  df -h        elsewhere:  peerload sim … --csv FILE"


def main(words: list[str]) -> int:
    """Run the verb: 0 also if the system turns out to be unstable, which is an answer."""
    flags = sim_flags.reader().read(words)
    if flags.classify:
        return _classify(as_json=flags.json)
    if flags.energy:
        found = sim_report.energy_results(flags)
        sys.stdout.write(
            json_line(found) if flags.json else "".join(f"{line}\n" for line in sim_report.energy_lines(found))
        )
        return 0
    _check_files(flags)
    scenarios = sim_flags.scenarios(flags)
    for why in dict.fromkeys(impossible(scenario) for scenario in scenarios):
        if why:
            say(why)
    played = _played(flags, scenarios)
    results = [
        sim_report.as_json(scenario, found, len(found.means), flags.seed)
        | {"version": __version__, "command": shlex.join(["peerload", "sim", *words])}
        for scenario, found in played
    ]
    failed = []
    if flags.csv and flags.csv != STDOUT:
        failed += _failure(f"--csv {flags.csv}", lambda: _write(flags.csv, sim_report.as_csv(results)))
    if flags.parquet:
        failed += _failure(f"--parquet {flags.parquet}", lambda: sim_report.write_parquet(flags.parquet, results))
    if flags.plot:
        failed += _failure(f"--plot {flags.plot}", lambda: plot.draw(flags.plot, scenarios, results))
    failed += _failure("stdout", lambda: _print(flags, results))
    for error in failed:
        report(error)
    return CANNOT if failed else 0


def _classify(*, as_json: bool) -> int:
    from peerload.policy import registry
    from peerload.policy.preset import BASELINE, CLASSES

    classes = {name: registry.load_preset(name).classes for name in registry.presets()}
    if as_json:
        sys.stdout.write(json_line({"presets": classes}))
        return 0
    lines = ["task assignment: each task of a known program has its node before it starts", "  peerload assign"]
    for time, says in zip(CLASSES[0], ("decisions use no load", "decisions use loads"), strict=True):
        lines.append(f"{time}: {says}")
        for place in CLASSES[2]:
            rows: dict[str, list[str]] = {}
            for name, words in classes.items():
                if time in words and place in words:
                    kind = ", ".join(word for group in CLASSES for word in group if word in words)
                    rows.setdefault(kind.removesuffix(f", {BASELINE}"), []).append(name + "*" * (BASELINE in words))
            found = [(kind.replace(f"{time}, ", "").replace(f"{place}, ", ""), names) for kind, names in rows.items()]
            lines += [f"  {place}"] * bool(found)
            lines += [f"    {kind}: {', '.join(names)}" for kind, names in sorted(found)]
    lines += ["* a baseline, there for comparison"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _failure(what: str, write: Callable[[], object]) -> list[PeerloadError]:
    """Report that a file cannot be written; the other files are written all the same."""
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as error:
        return [PeerloadError(f"sim: {what} cannot be written", why=error.strerror or str(error), hint=ELSEWHERE)]
    return []


def _write(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


def _played(flags: Namespace, scenarios: list[Scenario]) -> list[tuple[Scenario, Outcome]]:
    """Results of each scenario. One that turns out to have been too short is played again, longer, unless its length was given:
    then the longer one is returned."""
    found: dict[int, tuple[Scenario, Outcome]] = {}
    kept: dict[int, list[Sample]] = {}
    left = dict(enumerate(scenarios))
    for _ in range(ROUNDS_MAX):
        samples = work.run(list(left.values()), flags.replications, flags.seed, sim_flags.workers(flags))
        for (index, scenario), of_one in zip(left.items(), samples, strict=True):
            found[index], kept[index] = (scenario, outcome(scenario, of_one)), of_one
        if flags.tasks is not None or flags.warmup is not None:
            break
        again = {index: longer(*found[index]) for index in left}
        left = {index: scenario for index, scenario in again.items() if scenario is not None}
        if not left:
            break
    if flags.precision is not None:
        _refine(flags, found, kept)
    return [found[index] for index in range(len(scenarios))]


def _refine(flags: Namespace, found: dict[int, tuple[Scenario, Outcome]], kept: dict[int, list[Sample]]) -> None:
    """Add replications until the intervals are narrow enough. All scenarios get as many, so that they stay comparable."""
    done, most = flags.replications, sim_flags.REPLICATIONS_MAX
    while (wanted := max(more(outcome_, flags.precision, most) for _, outcome_ in found.values())) > done:
        scenarios = [scenario for scenario, _ in found.values()]
        samples = work.run(scenarios, wanted - done, flags.seed, sim_flags.workers(flags), first=done)
        for index, of_one in zip(found, samples, strict=True):
            kept[index] += of_one
            found[index] = found[index][0], outcome(found[index][0], kept[index])
        done = wanted


def _check_files(flags: Namespace) -> None:
    """Check that the output files can be written, before time is spent."""
    if flags.plot:
        plot.check(flags.plot, len(flags.loads or flags.load or ()))
    if flags.csv and flags.csv != STDOUT:
        plot.check_writable("--csv", flags.csv)
    if flags.parquet:
        sim_report.check_parquet()
        plot.check_writable("--parquet", flags.parquet)


def _print(flags: Namespace, results: list[dict[str, Any]]) -> None:
    """On stdout. Raises OSError if it takes it not; then nothing is left in its buffer, and stderr has had the text."""
    is_one = len(results) == 1 and flags.compare is None
    if flags.csv == STDOUT:
        text = sim_report.as_csv(results)
    elif flags.json:
        text = json_line(results[0] if is_one else sim_report.comparison_json(results))
    else:
        lines = sim_report.lines(results[0]) if is_one else sim_report.comparison_lines(results)
        text = "".join(f"{line}\n" for line in lines)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.stdout.flush()
        sys.stderr.write(text)  # it took long to find out
        raise
