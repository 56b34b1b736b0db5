"""What goes wrong: each kind of fault begins, lasts for a time, and is healed again."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
import shutil
import signal
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos_real.machine import send
from tests.chaos_real.network import Trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.chaos_real.lab import Lab
    from tests.chaos_real.machine import Machine
    from tests.chaos_real.submitter import Submitter

FREE_S_MAX = 120.0
LAUNCHER_PAUSE_S_MAX = 1.5
"""The promise holds as long as a launcher gets to run within a second or so; the grace of a lease is 5 s."""
BOOT_OFFSETS_S = (0, 0, 100, 86_400, 30_000_000)
WALL_OFFSETS_S = (-3600, -60, 60, 3600)
BURST = 25
CUT = 100
COPY = "copy"
"""The member of the network where the second agent of a node id is started."""


class Kind(NamedTuple):
    """One kind of fault: how often beside the others, how long in seconds, what it is about, and what is done."""

    weight: int
    lasts_s: tuple[float, float]
    about: str
    act: Callable[[Faults, random.Random, float], None]


class Fault(NamedTuple):
    """One fault of a plan."""

    number: int
    kind: str
    lasts_s: float
    seed: int


def plan(count: int, seed: int, kinds: Sequence[str], scale: float = 1.0) -> list[Fault]:
    """Which faults, in which order: each kind at least once if there is room for it, the others by their weights;
    ``scale`` times as long as usual."""
    chance = random.Random(seed)
    drawn = list(kinds)[:count]
    drawn += chance.choices(kinds, [KINDS[kind].weight for kind in kinds], k=count - len(drawn))
    chance.shuffle(drawn)
    return [
        Fault(number, kind, chance.uniform(*KINDS[kind].lasts_s) * scale, chance.getrandbits(32))
        for number, kind in enumerate(drawn, 1)
    ]


class Faults:
    """Does faults to machines, network and broker; never two at a time to one machine, or to the broker."""

    def __init__(self, lab: Lab, submitters: Mapping[str, Submitter]) -> None:
        self.lab = lab
        self.machines = lab.machines
        self.network = lab.network
        self.broker = lab.broker
        self.submitters = submitters
        self.over = threading.Event()
        self.done: collections.Counter[str] = collections.Counter()
        self.begun: list[tuple[float, str, str]] = []
        """When (Unix time), of which kind and to which machine: the faults of machines."""
        self._kind = threading.local()
        self.copy: Machine | None = None
        self._copy_busy = threading.Lock()
        self._broker_busy = threading.Lock()
        self._lock = threading.Lock()

    def kinds(self) -> list[str]:
        """The kinds that can be done here."""
        without = set()
        if self.broker is None:
            without.add("broker")
        if not any(machine.disk_bytes for machine in self.machines):
            without.add("disk")
        return [name for name, kind in KINDS.items() if kind.about not in without]

    def inject(self, fault: Fault) -> None:
        """Do one fault, from its beginning to its healing."""
        self._kind.name = fault.kind
        KINDS[fault.kind].act(self, random.Random(fault.seed), fault.lasts_s)
        with self._lock:
            self.done[fault.kind] += 1

    def _last(self, lasts_s: float) -> None:
        """Let it last, unless the campaign ends."""
        self.over.wait(lasts_s)

    @contextlib.contextmanager
    def _machine(self, chance: random.Random, *, with_disk: bool = False) -> Iterator[Machine]:
        """A machine that is up and under no other fault; it is up again afterwards."""
        chosen = [machine for machine in self.machines if machine.disk_bytes or not with_disk]
        chance.shuffle(chosen)
        for machine in itertools.chain.from_iterable(itertools.repeat(chosen)):
            if machine.busy.acquire(timeout=FREE_S_MAX if len(chosen) == 1 else 0.05):
                break
        self.begun.append((time.time(), self._kind.name, machine.node))
        try:
            yield machine
            if not machine.is_on:
                machine.boot(chance.choice(BOOT_OFFSETS_S))
            machine.start()
        finally:
            machine.busy.release()

    # -- processes -----------------------------------------------------------------------------------------------------

    def agent_killed(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            machine.kill()
            self._last(lasts_s)

    def killed_when_acknowledged(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            last = chance.randint(1, BURST)
            for count in self.submitters[machine.node].burst(BURST):
                if count == last:
                    break
            machine.kill()
            self._last(lasts_s)

    def agent_paused(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            machine.pause()
            self._last(lasts_s)
            machine.resume()

    def launcher_killed(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            send(machine.launcher_pid, signal.SIGKILL)
            self._last(lasts_s)

    def launcher_paused(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            launcher = machine.launcher_pid
            send(launcher, signal.SIGSTOP)
            self._last(min(lasts_s, LAUNCHER_PAUSE_S_MAX))
            send(launcher, signal.SIGCONT)

    def agent_and_launcher_killed(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            launcher = machine.launcher_pid
            machine.kill()
            send(launcher, signal.SIGKILL)
            self._last(lasts_s)

    def machine_crashed(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            machine.crash()
            self._last(lasts_s)

    def stopped_politely(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            machine.stop()
            self._last(lasts_s)

    def drained(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            machine.call("drain", reason="chaos")
            self._last(lasts_s)
            machine.call("undrain")

    def wall_clock_wrong(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance) as machine:
            machine.kill()
            machine.wall_offset_s = 0 if machine.wall_offset_s else chance.choice(WALL_OFFSETS_S)
            self._last(lasts_s)

    def disk_full(self, chance: random.Random, lasts_s: float) -> None:
        with self._machine(chance, with_disk=True) as machine:
            machine.may_end = True
            machine.fill_disk()
            self._last(lasts_s)
            machine.free_disk()
            machine.start()
            machine.may_end = False

    def same_node_id(self, chance: random.Random, lasts_s: float) -> None:
        """Somebody starts a second agent under the name of one that is there, on a machine of its own, with nothing."""
        if self.copy is None:
            self.copy = self.lab.machine(COPY)
        with self._copy_busy:
            self.copy.node = chance.choice(self.machines).node
            self.copy.may_end = True
            self.copy.boot()
            self.copy.spawn()
            self._last(lasts_s)
            self.copy.crash()
            for path in self.copy.state.iterdir():
                (shutil.rmtree if path.is_dir() else os.unlink)(path)

    # -- network -------------------------------------------------------------------------------------------------------

    def _links(self, chance: random.Random) -> list[tuple[str, str]]:
        """Some links between nodes, in one direction or both."""
        nodes = [machine.node for machine in self.machines]
        links = list(itertools.permutations(nodes, 2))
        return chance.sample(links, chance.randint(1, len(links) // 2))

    def partition(self, chance: random.Random, lasts_s: float) -> None:
        nodes = [machine.node for machine in self.machines]
        side = chance.sample(nodes, chance.randint(1, len(nodes) // 2))
        links = [(one, other) for one, other in itertools.permutations(nodes, 2) if (one in side) != (other in side)]
        self._lossy(links, CUT, lasts_s)

    def one_way_cut(self, chance: random.Random, lasts_s: float) -> None:
        self._lossy(self._links(chance), CUT, lasts_s)

    def loss(self, chance: random.Random, lasts_s: float) -> None:
        self._lossy(self._links(chance), chance.choice((5, 10, 20, 40)), lasts_s)

    def _lossy(self, links: Sequence[tuple[str, str]], percent: int, lasts_s: float) -> None:
        self.network.lose(links, percent)
        self._last(lasts_s)
        self.network.lose(links, 0)

    def delay_reorder_repeat(self, chance: random.Random, lasts_s: float) -> None:
        links = self._links(chance)[:6]
        trouble = Trouble(chance.choice((0.005, 0.05, 0.5)), chance.choice((0.0, 0.05, 1.0)), chance.choice((0, 20)))
        self.network.trouble(links, trouble)
        self._last(lasts_s)
        self.network.trouble(links, None)

    # -- broker --------------------------------------------------------------------------------------------------------

    def broker_killed(self, chance: random.Random, lasts_s: float) -> None:
        assert self.broker is not None
        with self._broker_busy:
            self.broker.kill()
            self._last(lasts_s)
            self.broker.start()

    def broker_paused(self, chance: random.Random, lasts_s: float) -> None:
        assert self.broker is not None
        with self._broker_busy:
            self.broker.pause()
            self._last(lasts_s)
            self.broker.resume()

    def broker_cut(self, chance: random.Random, lasts_s: float) -> None:
        nodes = [machine.node for machine in self.machines]
        self._lossy([(node, "broker") for node in chance.sample(nodes, chance.randint(1, len(nodes)))], CUT, lasts_s)


KINDS = {
    "agent killed": Kind(14, (0.0, 4.0), "process", Faults.agent_killed),
    "killed when acknowledged": Kind(6, (0.0, 1.0), "process", Faults.killed_when_acknowledged),
    "agent paused": Kind(10, (0.3, 16.0), "process", Faults.agent_paused),
    "launcher killed": Kind(8, (0.0, 0.5), "process", Faults.launcher_killed),
    "launcher paused": Kind(6, (0.1, LAUNCHER_PAUSE_S_MAX), "process", Faults.launcher_paused),
    "agent and launcher killed": Kind(6, (0.0, 12.0), "process", Faults.agent_and_launcher_killed),
    "machine crashed": Kind(10, (0.2, 15.0), "process", Faults.machine_crashed),
    "stopped politely": Kind(6, (0.0, 12.0), "process", Faults.stopped_politely),
    "drained": Kind(3, (0.5, 5.0), "process", Faults.drained),
    "wall clock wrong": Kind(3, (0.0, 1.0), "process", Faults.wall_clock_wrong),
    "same node id": Kind(2, (1.0, 6.0), "copy", Faults.same_node_id),
    "disk full": Kind(4, (0.5, 5.0), "disk", Faults.disk_full),
    "partition": Kind(8, (1.0, 16.0), "network", Faults.partition),
    "one-way cut": Kind(6, (1.0, 15.0), "network", Faults.one_way_cut),
    "loss": Kind(6, (2.0, 12.0), "network", Faults.loss),
    "delay, reorder, repeat": Kind(5, (2.0, 12.0), "network", Faults.delay_reorder_repeat),
    "broker killed": Kind(3, (0.0, 6.0), "broker", Faults.broker_killed),
    "broker paused": Kind(3, (0.5, 8.0), "broker", Faults.broker_paused),
    "broker cut": Kind(2, (0.5, 8.0), "broker", Faults.broker_cut),
}
