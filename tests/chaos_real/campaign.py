"""A campaign: five machines, a broker, clients that submit all the time, faults all the time; then peace, and a verdict."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import re
import shutil
import sqlite3
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from peerload.model.errors import PeerloadError
from tests.chaos_real.faults import COPY, Faults, plan
from tests.chaos_real.lab import Lab
from tests.chaos_real.submitter import Submitter, Work
from tests.chaos_real.verdict import FINAL, Verdict, history, recorded
from tests.integration.cluster import processes_with
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.chaos_real.faults import Fault

DISK_BYTES = 192 << 20
TICK_S = 0.05
WAITING_MAX = 1500
"""Tasks that wait for their end, from which on clients hold back."""
AHEAD = 0.05
"""Tasks and faults are spread over each other: neither gets ahead of the other by more than this share."""
HOT_S = 3.0
"""The clients of one machine after the other submit for so long: there is always one that has more than it can run."""
SETTLE_S_MAX = 240.0
LEASES_S = (2, 3, 5)
GONE_S_MAX = 30.0
STORY_S = 3.0
"""A story begins and ends so long before and after what was noted."""


class Options(NamedTuple):
    """How much is to be done. ``seconds``: faults and submits are spread over at least so long."""

    tasks: int = 20_000
    faults: int = 400
    seconds: float = 600.0
    seed: int = 1
    machines: int = 5
    slots: int = 6
    faults_at_a_time: int = 4
    guarantees: tuple[str, ...] = ("at-least-once", "once", "fast")
    long_percent: int = 25
    """So many jobs in a hundred are longer, and as many are long."""
    scale: float = 1.0
    """Faults last so much longer than planned."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults, all if empty."""


class Campaign:
    """The clients and the faults of one campaign in a lab."""

    def __init__(self, options: Options, lab: Lab) -> None:
        self.options = options
        self.lab = lab
        self.work = Work(lab.program, lab.ledger, options.tasks, options.seed, options.guarantees, options.long_percent)
        submitters = {machine.node: Submitter(machine, self.work, options.seed) for machine in lab.machines}
        self.submitters = list(submitters.values())
        self.faults = Faults(lab, submitters)
        self._active: dict[concurrent.futures.Future[None], Fault] = {}

    # -- the campaign --------------------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """All of it → what it has shown."""
        self._storm()
        self._settle()
        self._stop()
        return self._judge()

    def _storm(self) -> None:
        """Submit and do faults until both are done."""
        options = self.options
        coming = collections.deque(
            plan(options.faults, options.seed, options.kinds or self.faults.kinds(), options.scale)
        )
        began_at = time.monotonic()
        pause = threading.Event()
        for submitter in self.submitters:
            submitter.start()
        try:
            with (
                concurrent.futures.ThreadPoolExecutor(options.faults_at_a_time) as pool,
                contextlib.ExitStack() as last,
            ):
                last.callback(self.faults.over.set)
                while coming or self._active or not self.work.is_all_drawn:
                    share = (time.monotonic() - began_at) / options.seconds
                    self.lab.ledger.follow()
                    begun = 1.0 - len(coming) / options.faults
                    self.work.drawn_max = int(min(share, begun + AHEAD) * options.tasks)
                    is_crowded = self.work.waiting > WAITING_MAX
                    hot = int((time.monotonic() - began_at) / HOT_S) % len(self.submitters)
                    for number, submitter in enumerate(self.submitters):
                        (submitter.held.set if is_crowded or number != hot else submitter.held.clear)()
                    self._end_faults()
                    if coming and len(self._active) < options.faults_at_a_time:
                        due = coming[0].number / options.faults
                        if due <= share and due <= self.work.progress + AHEAD:
                            fault = coming.popleft()
                            self._active[pool.submit(self.faults.inject, fault)] = fault
                    self._mend()
                    if any(submitter.failure for submitter in self.submitters):
                        break  # `end` raises it
                    pause.wait(TICK_S)
        except BaseException:
            for submitter in self.submitters:
                submitter.abandon()
            raise
        self.faults.over.set()
        self.lab.network.heal()
        for submitter in self.submitters:
            submitter.end()

    def _end_faults(self) -> None:
        for future in [future for future in self._active if future.done()]:
            fault = self._active.pop(future)
            try:
                future.result()
            except BaseException as error:
                raise AssertionError(f"fault {fault.number}, {fault.kind}: {error}") from error

    def _mend(self) -> None:
        """Start agents again that have ended by themselves, as a service manager would."""
        for machine in self.lab.machines:
            if not machine.runs and machine.busy.acquire(blocking=False):
                try:
                    if not machine.runs:
                        machine.start()
                finally:
                    machine.busy.release()

    def _settle(self) -> None:
        """No more faults: wait until every task has come to an end."""
        for machine in self.lab.machines:
            machine.start()
        wait_until(lambda: not self._unfinished(), SETTLE_S_MAX, "every task to come to its end")

    def _unfinished(self) -> list[str]:
        """Tasks that have not come to an end, or the node that cannot be asked; held ones are released."""
        self._mend()
        left = []
        for machine in self.lab.machines:
            try:
                tasks = machine.call("tasks")["tasks"]
            except PeerloadError:
                return [machine.node]
            left += [task["id"] for task in tasks if task["state"] not in {*FINAL, "unknown"}]
            held = [task["id"] for task in tasks if task["state"] == "held"]
            if held:
                machine.call("release", tasks=held)
        return left

    def _stop(self) -> None:
        for machine in self.lab.machines:
            machine.stop(ends_tasks=True)
        self.left_over = {}
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self._work_processes(), GONE_S_MAX)
        self.left_over = self._work_processes()

    def _work_processes(self) -> dict[int, str]:
        return {pid: line for pid, line in processes_with(str(self.lab.ledger.path)).items() if line}

    def _judge(self) -> Verdict:
        tasks = []
        reasons: collections.Counter[str] = collections.Counter()
        for machine in self.lab.machines:
            database = machine.state / "peerload.db"
            tasks += recorded(machine.node, database)
            reasons.update(_reasons(database))
        verdict = Verdict(self.work.asked, tasks, self.lab.ledger.runs())
        for pid, line in self.left_over.items():
            verdict.wrong[f"process {pid}"] = f"left over: {line}"
        for machine in self.lab.machines:
            for number, end in enumerate(machine.own_ends, 1):
                verdict.wrong[f"agent {machine.node}, end {number}"] = end
        self.reasons = reasons
        return verdict


def _reasons(database: Path) -> collections.Counter[str]:
    """Why tasks were queued again, with what is particular to one taken out."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "SELECT reason FROM events WHERE what = 'task' AND state = 'queued' AND attempt > 0"
        ).fetchall()
    return collections.Counter(re.sub(r"\bn\d+\b|\d+", "…", reason) for (reason,) in rows)


def report(campaign: Campaign, verdict: Verdict, took_s: float) -> str:
    """The story of a campaign in a few lines; the last one is the result."""
    done = campaign.faults.done
    kinds = ", ".join(f"{kind} {count}" for kind, count in done.most_common())
    again = "; ".join(f"{reason or 'no reason'} {count}" for reason, count in campaign.reasons.most_common(8))
    lines = [
        f"faults: {kinds}; clients that hung up {campaign.work.clients_gone}",
        f"queued again: {again}",
        f"runs {verdict.runs}, away from home {verdict.away}",
        f"tasks that ran again {verdict.again}, given up after too many losses {verdict.gave_up}, unknown {verdict.unknown}",
        f"{took_s:.0f} s, seed {campaign.options.seed}",
        *verdict.complaints(),
        *stories(campaign, verdict),
        f"tasks {verdict.tasks}, faults {done.total()}, {verdict}",
    ]
    return "\n".join(lines)


def stories(campaign: Campaign, verdict: Verdict) -> list[str]:
    """What all nodes noted about the tasks that something is wrong with, among the faults of those seconds."""
    lines = []
    for task in verdict.concerned():
        told = [
            (at, f"{machine.node} noted: {words}")
            for machine in campaign.lab.machines
            for at, words in history(task, machine.state / "peerload.db")
        ]
        first, last = min(told, default=(0.0, ""))[0], max(told, default=(0.0, ""))[0]
        told += [
            (at, f"fault of {node}: {kind}")
            for at, kind, node in campaign.faults.begun
            if first - STORY_S <= at <= last + STORY_S
        ]
        lines.append(f"story of {task}:")
        lines += [f"  {at - first:8.3f} s {words}" for at, words in sorted(told)]
    return lines


def hold(options: Options, mosquitto: Path | None, start: Sequence[str] = ()) -> Verdict:
    """Run one campaign, with peerload started like that, and print its story → what it has shown. The directory is kept
    unless all is well."""
    began_at = time.monotonic()
    lab = Lab(
        options.machines,
        slots=options.slots,
        mosquitto=mosquitto,
        leases_s=LEASES_S,
        disks_bytes=(0, DISK_BYTES),
        spare=[COPY],
        start=start,
    )
    is_good = False
    try:
        with lab:
            campaign = Campaign(options, lab)
            verdict = campaign.run()
            text = report(campaign, verdict, time.monotonic() - began_at)
            verdict.directory = lab.directory
        is_good = verdict.is_good
        sys.stdout.write(text + "\n")
    finally:
        if is_good:
            shutil.rmtree(lab.directory)
        else:
            sys.stdout.write(f"kept for study: {lab.directory}\n")
    return verdict
