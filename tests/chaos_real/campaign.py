"""A campaign: five machines, a broker, clients that submit all the time, faults all the time; then peace, and a verdict."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from peerload.model.errors import PeerloadError
from tests.chaos_real.broker import Broker
from tests.chaos_real.faults import Faults, plan
from tests.chaos_real.ledger import Ledger, build_work
from tests.chaos_real.machine import MARK, Machine, listen_words, remove_abandoned_disks
from tests.chaos_real.network import Network
from tests.chaos_real.submitter import Submitter, Work
from tests.chaos_real.verdict import FINAL, Verdict, recorded
from tests.integration.cluster import processes_with
from tests.support import wait_until

if TYPE_CHECKING:
    from tests.chaos_real.faults import Fault

DISK_BYTES = 192 << 20
TICK_S = 0.05
FAULTS_AT_A_TIME_MAX = 5
WAITING_MAX = 1500
"""Tasks that wait for their end, from which on clients hold back."""
SETTLE_S_MAX = 240.0
LEASES_S = (2, 3, 5)
GONE_S_MAX = 30.0


class Options(NamedTuple):
    """How much is to be done. ``seconds``: faults and submits are spread over at least so long."""

    tasks: int = 20_000
    faults: int = 400
    seconds: float = 600.0
    seed: int = 1
    machines: int = 5
    slots: int = 4
    guarantees: tuple[str, ...] = ("at-least-once",)


class Campaign:
    """Everything that is up while a campaign runs; what its processes leave behind is removed, whatever happens."""

    def __init__(self, options: Options, mosquitto: Path | None) -> None:
        self.options = options
        self.directory = Path(tempfile.mkdtemp(prefix=f"{MARK}-{os.getpid()}-", dir="/tmp"))
        self.machines: list[Machine] = []
        self._stack = contextlib.ExitStack()
        self._mosquitto = mosquitto
        self._active: dict[concurrent.futures.Future[None], Fault] = {}

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Switch everything off."""
        self._stack.close()

    def _set_up(self) -> None:
        remove_abandoned_disks()
        options = self.options
        nodes = [f"n{number}" for number in range(1, options.machines + 1)]
        self.network = self._stack.enter_context(Network([*nodes, "broker"]))
        self.broker = None
        if self._mosquitto is not None:
            namespace = self.network.namespace("broker")
            self.broker = Broker(self._mosquitto, self.directory, namespace, self.network.address("broker"))
            self._stack.callback(self.broker.kill)
            self.broker.start()
        self.ledger = Ledger(self.directory / "ledger")
        self.work = Work(build_work(self.directory), self.ledger, options.tasks, options.seed, options.guarantees)
        for number, node in enumerate(nodes):
            machine = Machine(
                self.directory,
                node,
                self.network.namespace(node),
                self._words(number, node),
                disk_bytes=DISK_BYTES if number % 2 else 0,
            )
            self._stack.callback(machine.close)
            self.machines.append(machine)
            machine.boot()
            machine.spawn()
        for machine in self.machines:
            machine.start()
        submitters = {machine.node: Submitter(machine, self.work, options.seed) for machine in self.machines}
        self.submitters = list(submitters.values())
        self.faults = Faults(self.machines, self.network, self.broker, submitters)

    def _words(self, number: int, node: str) -> list[str]:
        """What an agent's command line says besides its name and its place."""
        config = self.directory / f"{node}.toml"
        config.write_text(f"lease_s = {LEASES_S[number % len(LEASES_S)]}\n", encoding="ascii")
        first = [] if number == 0 else [self.network.address("n1")]
        words = [*listen_words(self.network.address(node), first), "--slots", str(self.options.slots)]
        return [*words, "--config", str(config), *(["--mqtt", self.broker.url] if self.broker else [])]

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
        coming = collections.deque(plan(options.faults, options.seed, self.faults.kinds()))
        began_at = time.monotonic()
        pause = threading.Event()
        for submitter in self.submitters:
            submitter.start()
        try:
            with concurrent.futures.ThreadPoolExecutor(FAULTS_AT_A_TIME_MAX) as pool:
                while coming or self._active or not self.work.is_all_drawn:
                    share = (time.monotonic() - began_at) / options.seconds
                    self.ledger.follow()
                    for submitter in self.submitters:
                        is_early = self.work.progress > share or self.work.waiting > WAITING_MAX
                        (submitter.held.set if is_early else submitter.held.clear)()
                    self._end_faults()
                    if coming and len(self._active) < FAULTS_AT_A_TIME_MAX:
                        due = coming[0].number / options.faults
                        if due <= share and due <= self.work.progress + 0.05:
                            fault = coming.popleft()
                            self._active[pool.submit(self.faults.inject, fault)] = fault
                    self._mend()
                    pause.wait(TICK_S)
        finally:
            self.faults.over.set()
            self.network.heal()
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
        for machine in self.machines:
            if not machine.runs and machine.busy.acquire(blocking=False):
                try:
                    if not machine.runs:
                        machine.start()
                finally:
                    machine.busy.release()

    def _settle(self) -> None:
        """No more faults: wait until every task has come to an end."""
        for machine in self.machines:
            machine.start()
        wait_until(lambda: not self._unfinished(), SETTLE_S_MAX, "every task to come to its end")

    def _unfinished(self) -> list[str]:
        """Tasks that have not come to an end, or the node that cannot be asked; held ones are released."""
        self._mend()
        left = []
        for machine in self.machines:
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
        for machine in self.machines:
            machine.stop(ends_tasks=True)
        self.left_over = {}
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self._work_processes(), GONE_S_MAX)
        self.left_over = self._work_processes()

    def _work_processes(self) -> dict[int, str]:
        return {pid: line for pid, line in processes_with(str(self.ledger.path)).items() if line}

    def _judge(self) -> Verdict:
        tasks = []
        reasons: collections.Counter[str] = collections.Counter()
        for machine in self.machines:
            database = machine.state / "peerload.db"
            tasks += recorded(machine.node, database)
            reasons.update(_reasons(database))
        verdict = Verdict(self.work.asked, tasks, self.ledger.runs())
        for pid, line in self.left_over.items():
            verdict.wrong[f"process {pid}"] = f"left over: {line}"
        for machine in self.machines:
            for number, end in enumerate(machine.own_ends, 1):
                verdict.wrong[f"agent {machine.node}, end {number}"] = end
        self.reasons = reasons
        return verdict


def _reasons(database: Path) -> collections.Counter[str]:
    """Why tasks were queued again, with what is particular to one taken out."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT reason FROM history WHERE state = 'queued' AND attempt > 0").fetchall()
    return collections.Counter(re.sub(r"\bn\d+\b|\d+", "…", reason) for (reason,) in rows)


def report(campaign: Campaign, verdict: Verdict, took_s: float) -> str:
    """The story of a campaign in a few lines; the last one is the result."""
    done = campaign.faults.done
    kinds = ", ".join(f"{kind} {count}" for kind, count in done.most_common())
    again = "; ".join(f"{reason or 'no reason'} {count}" for reason, count in campaign.reasons.most_common(8))
    lines = [
        f"faults: {kinds}; clients that hung up {campaign.work.clients_gone}",
        f"queued again: {again}",
        f"{verdict.runs} runs, {verdict.gave_up} tasks given up after too many losses, {verdict.unknown} unknown",
        f"{took_s:.0f} s, seed {campaign.options.seed}",
        *verdict.complaints(),
        f"tasks {verdict.tasks}, faults {done.total()}, {verdict}",
    ]
    return "\n".join(lines)


def hold(options: Options, mosquitto: Path | None) -> bool:
    """Run one campaign and print its story → whether all went well. The directory is kept if not."""
    began_at = time.monotonic()
    campaign = Campaign(options, mosquitto)
    is_good = False
    try:
        with campaign:
            verdict = campaign.run()
            text = report(campaign, verdict, time.monotonic() - began_at)
        is_good = verdict.is_good
        sys.stdout.write(text + "\n")
    finally:
        if is_good:
            shutil.rmtree(campaign.directory)
        else:
            sys.stdout.write(f"kept for study: {campaign.directory}\n")
    return is_good
