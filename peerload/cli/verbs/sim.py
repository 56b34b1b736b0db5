"""`peerload sim`: effect of a preset of policies on response times, from a simulation with the agent's own code."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload import __version__
from peerload.cli.common.messages import CANNOT, INTERRUPTED, discard, report
from peerload.cli.simulate import flags as sim_flags
from peerload.cli.simulate import plot, work
from peerload.cli.simulate import report as sim_report
from peerload.model.errors import PeerloadError
from peerload.sim.outcome import alike, impossible, longer, more, outcome, warned
from peerload.text.format import counted, json_line, say

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from peerload.sim.outcome import Outcome
    from peerload.sim.replication import Sample
    from peerload.sim.scenario import Scenario

STDOUT = "-"
ROUNDS_MAX = 4
"""Maximum number of simulations of one scenario, each longer than the previous one."""

ELSEWHERE = "check the free space:  df -h        another file:  peerload sim … --csv FILE"


def main(words: list[str]) -> int:
    """Run the verb → 0 also for an unstable system, which is a valid result."""
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
    has_head = any(scenario.head_s or scenario.head_down for scenario in scenarios)
    if has_head and not any(scenario.is_central for scenario in scenarios):
        say("--head-cost and --head-down change nothing: none of these presets is central")
    played, is_complete = _played(flags, scenarios, words)
    if not is_complete:
        short = sum(len(found.means) < flags.replications for _, found in played)
        fewer = f", {short} of them with fewer replications" * bool(short)
        say(f"sim: interrupted: {len(played)} of {counted(len(scenarios), 'simulation')} can be reported{fewer}")
    failed = _reported(flags, played, words, is_one=len(scenarios) == 1 and flags.compare is None) if played else []
    for error in failed:
        report(error)
    if not is_complete:
        return INTERRUPTED
    return CANNOT if failed else 0


def _reported(
    flags: Namespace, played: list[tuple[Scenario, Outcome]], words: list[str], *, is_one: bool
) -> list[PeerloadError]:
    """Write all files that the flags name, and the report to stdout → the errors."""
    results = _told(flags, played, words)
    failed = _save(flags, results, is_final=True)
    if flags.plot and len({told["load"] for told in results}) > 1:  # an interrupted run may have only one load
        scenarios = [scenario for scenario, _ in played]
        failed += _failure(f"--plot {flags.plot}", lambda: plot.draw(flags.plot, scenarios, results))
    return failed + _failure("stdout", lambda: _print(flags, results, is_one=is_one))


def _told(flags: Namespace, played: list[tuple[Scenario, Outcome]], words: list[str]) -> list[dict[str, Any]]:
    """Rows of the results, each with the version and the command."""
    origin = {"version": __version__, "command": shlex.join(["peerload", "sim", *words])}
    return [sim_report.as_json(scenario, found, len(found.means), flags.seed) | origin for scenario, found in played]


def _save(flags: Namespace, results: list[dict[str, Any]], *, is_final: bool) -> list[PeerloadError]:
    """Write the CSV and the Parquet file → the errors. Pipes and devices are written only at the end."""
    failed = []
    for flag, name, write in (
        ("--csv", flags.csv, sim_report.write_csv),
        ("--parquet", flags.parquet, sim_report.write_parquet),
    ):
        if name and name != STDOUT and (is_final or _is_replaceable(name)):
            failed += _failure(f"{flag} {name}", functools.partial(_replace, name, results, write))
    return failed


def _is_replaceable(name: str) -> bool:
    """True unless this is a pipe or a device, or its directory is not writable."""
    path = Path(os.path.realpath(name))
    return (path.is_file() or not path.exists()) and os.access(path.parent, os.W_OK)


def _replace(name: str, results: list[dict[str, Any]], write: Callable[[str, list[dict[str, Any]]], None]) -> None:
    """Write a file of results. A replaceable file is never left with a partial row, even if this process is killed. Raises OSError."""
    if not _is_replaceable(name):
        write(name, results)
        return
    path = Path(os.path.realpath(name))  # replace the target of a link, not the link
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(str(part), results)
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


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
    lines += ["* a baseline, for comparison"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _failure(what: str, write: Callable[[], object]) -> list[PeerloadError]:
    """Report an error of writing a file, and let the other files be written."""
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as error:
        return [PeerloadError(f"sim: {what} cannot be written", why=error.strerror or str(error), hint=ELSEWHERE)]
    return []


def _played(
    flags: Namespace, scenarios: list[Scenario], words: list[str]
) -> tuple[list[tuple[Scenario, Outcome]], bool]:
    """The results of each scenario, and False if the run was interrupted: then only scenarios with results. The CSV and the Parquet
    file are updated after each result."""

    def save(played: list[tuple[Scenario, Outcome]]) -> None:
        if flags.csv or flags.parquet:  # errors are reported at the end, when the files are written again
            _save(flags, _told(flags, played, words), is_final=False)

    runs, is_complete = _Runs(flags, scenarios, save), True
    try:
        with work.interruptible():
            runs.play()
            if flags.precision is not None:
                runs.refine(flags.precision)
    except KeyboardInterrupt:
        is_complete = False
    return runs.played, is_complete


class _Runs:
    """All simulations of a command. found: the simulated scenario and its outcome, by index. changed: called with
    all results so far after each new one."""

    def __init__(
        self, flags: Namespace, scenarios: list[Scenario], changed: Callable[[list[tuple[Scenario, Outcome]]], None]
    ) -> None:
        self.found: dict[int, tuple[Scenario, Outcome]] = {}
        self._flags, self._scenarios, self._changed = flags, scenarios, changed
        self._samples: dict[int, list[Sample]] = {}
        self._progress = work.Progress()

    @property
    def played(self) -> list[tuple[Scenario, Outcome]]:
        return [self.found[index] for index in sorted(self.found)]

    def _run(self, scenarios: dict[int, Scenario], replications: int, first: int = 0) -> None:
        """Simulate scenarios and store their results. After an interruption, prefer the result of a complete shorter
        run."""
        seed, workers = self._flags.seed, sim_flags.workers(self._flags)
        indices = list(scenarios)

        def finished(place: int, samples: list[Sample]) -> None:
            self._add(indices[place], scenarios[indices[place]], samples, first)
            self._changed(self.played)

        try:
            work.run(list(scenarios.values()), replications, seed, workers, first, self._progress, finished)
        except work.Interrupted as interrupted:
            for (index, scenario), of_one in zip(scenarios.items(), interrupted.samples, strict=True):
                if of_one and (first or index not in self.found):
                    self._add(index, scenario, of_one, first)
            raise

    def _add(self, index: int, scenario: Scenario, samples: list[Sample], first: int) -> None:
        self._samples[index] = self._samples.get(index, [])[:first] + samples
        self.found[index] = scenario, outcome(scenario, self._samples[index])

    def play(self) -> None:
        """Simulate all scenarios. A run that turns out too short is repeated with more tasks, unless the user set its
        length."""
        left = dict(enumerate(self._scenarios))
        for _ in range(ROUNDS_MAX):
            self._run(left, self._flags.replications)
            if self._flags.tasks is not None or self._flags.warmup is not None:
                break
            again = {index: longer(*self.found[index]) for index in left}
            left = {index: scenario for index, scenario in again.items() if scenario is not None}
            if not left:
                break
        if equal := alike(self.found):
            self._run(equal, self._flags.replications)

    def refine(self, precision: float) -> None:
        """Add replications until the intervals are narrow enough. All scenarios get the same number, so that they stay comparable."""
        done, most = self._flags.replications, sim_flags.REPLICATIONS_MAX
        while (wanted := max(more(outcome_, precision, most) for _, outcome_ in self.found.values())) > done:
            self._run({index: scenario for index, (scenario, _) in sorted(self.found.items())}, wanted - done, done)
            done = wanted
        self.found = {index: (scenario, warned(found, precision)) for index, (scenario, found) in self.found.items()}


def _check_files(flags: Namespace) -> None:
    """Check that the output files can be written, before the simulation starts."""
    if flags.plot:
        plot.check(flags.plot, len(flags.loads or flags.load or ()))
    if flags.csv and flags.csv != STDOUT:
        plot.check_writable("--csv", flags.csv)
    if flags.parquet:
        sim_report.check_parquet()
        plot.check_writable("--parquet", flags.parquet)


def _print(flags: Namespace, results: list[dict[str, Any]], *, is_one: bool) -> None:
    """Print the results on stdout. If that fails, clears the buffer, prints the text on stderr and raises OSError."""
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
        discard(sys.stdout)
        sys.stdout.flush()
        sys.stderr.write(text)  # do not lose results of a long computation
        raise
