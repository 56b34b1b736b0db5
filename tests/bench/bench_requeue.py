"""How soon a task that lost its node runs again, and what a killed agent does to 50 that run.

`sudo python tests/bench/bench_requeue.py`. Machines are namespaces (tests/chaos_real). Rebooted: the executor's machine
crashes and boots anew; counted from the start of its agent (it answers later) to the new start of the task. Gone: it crashes and stays
away; counted from the crash until home has queued its tasks again, with the default lease of 60 s. Killed: kill -9 of an agent while 50 tasks run that say
something every 50 ms. Exit code 1 if a requeue takes longer than 5 s or 65 s, or if a task is disturbed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.chaos_real.lab import Lab
from tests.chaos_real.verdict import FINAL
from tests.integration.cluster import processes_with
from tests.support import wait_until

if TYPE_CHECKING:
    from tests.chaos_real.machine import Machine

REBOOTED_S_MAX = 5.0
GONE_S_MAX = 65.0
GONE_TASKS = 4
RUNNING = 50
SILENCE_S_MAX = 0.5
"""A running task that says nothing for longer was disturbed (it says something every 0.05 s)."""
LONG_MS = 600_000


def submit(lab: Lab, home: Machine, milliseconds: int, *, count: int = 1, **placement: object) -> list[str]:
    """Submit so many tasks at home → their ids."""
    array = [[1, count, 1]] if count > 1 else []
    spec = lab.work(milliseconds, placement=placement)
    task = home.call("submit", token=secrets.token_hex(16), spec=spec, array=array)["id"]
    return [f"{task}.{number}" for number in range(1, count + 1)] if count > 1 else [task]


def starts(lab: Lab, tasks: list[str]) -> list[list[float]]:
    """When each of these tasks was started, on the monotonic clock."""
    runs = lab.ledger.runs()
    return [[run.times_ns[0] / 1e9 for run in runs.get(task, [])] for task in tasks]


def await_starts(lab: Lab, tasks: list[str], count: int, within_s: float) -> list[float]:
    """Wait until each was started so often → when each was the last time."""
    wait_until(lambda: all(len(those) >= count for those in starts(lab, tasks)), within_s, f"start {count} of {tasks}")
    return [those[count - 1] for those in starts(lab, tasks)]


def rebooted(rounds: int) -> list[float]:
    """Seconds from the start of the agent of a rebooted node to the new start of the task that it ran."""
    took = []
    with Lab(2, slots=1) as lab:
        home, executor = lab.machines
        lab.await_acquainted()
        for _ in range(rounds):
            (task,) = submit(lab, home, LONG_MS, exclude=["n1"])
            await_starts(lab, [task], 1, 30.0)
            executor.crash()
            executor.boot()
            started_at = time.monotonic()
            executor.start()
            (again_at,) = await_starts(lab, [task], 2, 90.0)
            took.append(again_at - started_at)
            home.call("cancel", tasks=[task])
            wait_until(lambda: not processes_with(str(lab.ledger.path)), 30.0, "the task to end")
        shutil.rmtree(lab.directory)
    return took


def gone(rounds: int) -> list[float]:
    """Seconds from the crash of a node that stays away until home has queued all tasks again that it ran."""
    took = []
    for _ in range(rounds):
        with Lab(2, slots=GONE_TASKS) as lab:
            home, executor = lab.machines
            lab.await_acquainted()
            tasks = submit(lab, home, LONG_MS, count=GONE_TASKS, exclude=["n1"])
            await_starts(lab, tasks, 1, 30.0)
            executor.crash()
            crashed_at = time.monotonic()
            _await_queued(home)
            took.append(time.monotonic() - crashed_at)
        shutil.rmtree(lab.directory)
    return took


def _unfinished(machine: Machine) -> set[str]:
    """The states of its tasks that have not ended."""
    return {task["state"] for task in machine.call("tasks")["tasks"]} - set(FINAL)


def _await_queued(machine: Machine) -> None:
    wait_until(lambda: _unfinished(machine) == {"queued"}, 90.0, "the lease to run out")


def killed() -> int:
    """How many of 50 running tasks are disturbed by a kill -9 of their agent and its new start."""
    with Lab(1, slots=RUNNING) as lab:
        (home,) = lab.machines
        tasks = submit(lab, home, 8000, count=RUNNING)
        await_starts(lab, tasks, 1, 30.0)
        home.kill()
        home.start()
        wait_until(lambda: not _unfinished(home), 60.0, "all to end")
        runs = lab.ledger.runs()
        ended = {task["id"]: task["state"] for task in home.call("tasks", ended_within_s=600)["tasks"]}
        shutil.rmtree(lab.directory)
    return sum(ended.get(task) != "done" or not _is_undisturbed(runs[task]) for task in tasks)


def _is_undisturbed(runs: list[Any]) -> bool:
    if len(runs) != 1 or not runs[0].is_whole:
        return False
    return all(later - earlier < SILENCE_S_MAX * 1e9 for earlier, later in itertools.pairwise(runs[0].times_ns))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="reboots (default: %(default)s)")
    parser.add_argument("--gone-rounds", type=int, default=2, help="nodes lost for good (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "rebooted_s": rebooted(options.rounds),
        "gone_s": gone(options.gone_rounds),
        "disturbed": killed(),
    }
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        for key, limit_s in (("rebooted_s", REBOOTED_S_MAX), ("gone_s", GONE_S_MAX)):
            took = figures[key]
            what = (
                "after the agent of a rebooted node is started"
                if key == "rebooted_s"
                else "after a node is gone for good"
            )
            begins = "started" if key == "rebooted_s" else "queued"
            text = f"median {statistics.median(took):.2f} s, longest {max(took):.2f} s"
            sys.stdout.write(f"{begins} again {what}: {text} of {len(took)} (at most {limit_s:g} s)\n")
        sys.stdout.write(f"disturbed by kill -9 of the agent: {figures['disturbed']} of {RUNNING} running tasks\n")
    is_good = max(figures["rebooted_s"]) <= REBOOTED_S_MAX and max(figures["gone_s"]) <= GONE_S_MAX
    return 0 if is_good and not figures["disturbed"] else 1


if __name__ == "__main__":
    sys.exit(main())
