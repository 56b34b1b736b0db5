"""Nodes that only watch one another, on a heap: one failure detector a node, the same faults for each kind of it.

A detector (`Detector`) has no clock, no socket and no chance of its own: it is started, handed what happens, and says
what it wants. So different ones can be driven through one trace of loss, pauses, crashes and joins, drawn from one seed
that is independent of what the detectors do. Nothing here decides who is dead.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEADERS_BYTES = 28
"""IPv4 and UDP, counted with every datagram."""
BUFFERED_MAX = 256
"""Datagrams that the kernel keeps for a process that does not read: 212,992 bytes of buffer hold about so many."""
DELAY_S = (0.0001, 0.001)
"""One way, uniform: a local network."""
SEGMENT_RETRY_S = 0.2
HANDSHAKE_RETRY_S = 1.0
"""TCP waits so long for a lost segment and for a lost handshake, then twice as long, and so on."""
HANDLING_S = 0.00002
"""From one late input to the next when a node that was paused goes on."""


class Received(msgspec.Struct, frozen=True, gc=False):
    """A datagram came, or something over a connection."""

    src: str
    message: object


class Expired(msgspec.Struct, frozen=True, gc=False):
    """A timer ran out."""

    timer: tuple[str | int, ...]


class Lagged(msgspec.Struct, frozen=True, gc=False):
    """This node's process has just not run for so long."""

    lag_s: float


class Say(msgspec.Struct, frozen=True, gc=False):
    """Send a datagram, or, with ``connected``, over TCP: on a standing connection, or on a new one if ``dials``."""

    dst: str
    message: object
    size_bytes: int
    connected: bool = False
    dials: bool = False


class Wake(msgspec.Struct, frozen=True, gc=False):
    """Set a timer; one of the same name is replaced."""

    timer: tuple[str | int, ...]
    after_s: float


class Quiet(msgspec.Struct, frozen=True, gc=False):
    """Clear a timer."""

    timer: tuple[str | int, ...]


class Believe(msgspec.Struct, frozen=True, gc=False):
    """From now on this node holds that node for ``alive``, ``suspect``, ``dead`` or ``left``."""

    node: str
    state: str


Input = Received | Expired | Lagged
Output = Say | Wake | Quiet | Believe


class Detector(Protocol):
    """One node's machine. ``start`` is called once; with no seeds it is the first of its cluster."""

    def start(self, now_s: float, seeds: Sequence[str]) -> Sequence[Output]:
        """Begin."""

    def handle(self, now_s: float, given: Input) -> Sequence[Output]:
        """Something happened."""


class Faults(msgspec.Struct, frozen=True):
    """loss: share of datagrams and segments lost; blocked: no datagram arrives at all; pausing: share of the nodes that stop at times, for 0 … ``pause_s_max``
    s, and run for 0 … ``run_s_max`` s in between (both uniform)."""

    loss: float = 0.0
    blocked: bool = False
    pausing: float = 0.0
    pause_s_max: float = 10.0
    run_s_max: float = 20.0


class Host:
    """A node of the arena: its detector while it is up, what waits for it while it is paused, what it believes."""

    __slots__ = ("beliefs", "detector", "late", "name", "paused_at_s", "pauses", "run", "timers")

    def __init__(self, name: str, *, pauses: bool) -> None:
        self.name = name
        self.pauses = pauses
        self.detector: Detector | None = None
        self.run = 0
        self.paused_at_s: float | None = None
        self.late: deque[Received] = deque()
        self.timers: dict[tuple[str | int, ...], tuple[float, int]] = {}
        self.beliefs: dict[str, str] = {}


class Arena:
    """``count`` nodes n0, n1 …; ``make(name, run, rng)`` gives a node's detector for its start number ``run``.

    watch: told (now_s, host, belief) of everything that any node comes to believe.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[str, int, random.Random], Detector],
        faults: Faults,
        seed: int,
        watch: Callable[[float, Host, Believe], None] | None = None,
    ) -> None:
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        self._make = make
        self._faults = faults
        self._watch = watch
        self._seed = seed
        self._network = random.Random(f"network {seed}")
        self._chance = random.Random(f"resume {seed}")
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._sequence = 0
        self._sides: dict[str, int] = {}
        self._last_s: dict[tuple[str, str], float] = {}
        pausing = round(faults.pausing * count)
        self.hosts = {f"n{number}": Host(f"n{number}", pauses=number < pausing) for number in range(count)}
        for host in self.hosts.values():
            if host.pauses:
                self._plan_pauses(host, random.Random(f"pauses {seed} {host.name}"))

    # -- what a measurement does ---------------------------------------------------------------------------------------

    def start(self, name: str, seeds: Sequence[str]) -> None:
        """Start this node's agent (again)."""
        host = self.hosts[name]
        host.run += 1
        host.beliefs.clear()
        rng = random.Random(f"node {self._seed} {name} {host.run}")
        host.detector = self._make(name, host.run, rng)
        self.carry_out(host, host.detector.start(self.now_s, seeds))

    def crash(self, name: str) -> None:
        """The machine is gone, at once: nothing answers any more."""
        host = self.hosts[name]
        host.detector = None
        host.timers.clear()
        host.late.clear()

    def divide(self, *sides: Sequence[str]) -> None:
        """From now on nothing gets from one side to another; with no sides everything gets everywhere again."""
        self._sides = {name: number for number, side in enumerate(sides) for name in side}

    def at(self, at_s: float, call: Callable[..., None], *arguments: object) -> None:
        """Call something at this instant."""
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, call, arguments))

    def run(self, until_s: float, stop: Callable[[], bool] | None = None) -> None:
        """Go on to this instant, or until ``stop()`` is true after an event."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
            if stop is not None and stop():
                return
        self.now_s = until_s

    def up(self) -> list[Host]:
        """The nodes that run, also those that are paused just now."""
        return [host for host in self.hosts.values() if host.detector is not None]

    def agreed(self) -> bool:
        """Every running node holds every other running one for alive."""
        up = self.up()
        return all(host.beliefs.get(other.name) == "alive" for host in up for other in up if other is not host)

    # -- carrying out --------------------------------------------------------------------------------------------------

    def carry_out(self, host: Host, wanted: Sequence[Output]) -> None:
        """Do what a detector wants."""
        for output in wanted:
            if isinstance(output, Say):
                self._send(host, output)
            elif isinstance(output, Wake):
                self._sequence += 1
                at_s = self.now_s + output.after_s
                host.timers[output.timer] = (at_s, self._sequence)
                heapq.heappush(
                    self._heap, (at_s, self._sequence, self._expire, (host, host.run, output.timer, self._sequence))
                )
            elif isinstance(output, Quiet):
                host.timers.pop(output.timer, None)
            else:
                host.beliefs[output.node] = output.state
                if self._watch is not None:
                    self._watch(self.now_s, host, output)

    def _send(self, host: Host, said: Say) -> None:
        chance = self._network
        delay_s = chance.uniform(*DELAY_S)
        if said.connected:
            self.counts["stream messages"] += 1
            self.counts["stream bytes"] += said.size_bytes
            if said.dials:
                delay_s += self._handshake_s()
            delay_s += self._lost_s(SEGMENT_RETRY_S)
            # What is said over a connection arrives in order.
            at_s = max(self.now_s + delay_s, self._last_s.get((host.name, said.dst), 0.0))
            self._last_s[(host.name, said.dst)] = at_s
            delay_s = at_s - self.now_s
        else:
            self.counts["datagrams"] += 1
            self.counts["datagram bytes"] += said.size_bytes + HEADERS_BYTES
            if self._faults.blocked or chance.random() < self._faults.loss:
                return
        if self._sides and self._sides.get(said.dst) != self._sides.get(host.name):
            return
        self.at(self.now_s + delay_s, self._arrive, said.dst, Received(host.name, said.message))

    def _handshake_s(self) -> float:
        """There and back, once more for each of the two that is lost."""
        chance = self._network
        lost_s = self._lost_s(HANDSHAKE_RETRY_S) + self._lost_s(HANDSHAKE_RETRY_S)
        return chance.uniform(*DELAY_S) + chance.uniform(*DELAY_S) + lost_s

    def _lost_s(self, retry_s: float) -> float:
        waited_s = 0.0
        while self._network.random() < self._faults.loss:
            waited_s += retry_s
            retry_s *= 2
        return waited_s

    def _arrive(self, dst: str, received: Received) -> None:
        host = self.hosts.get(dst)
        if host is None or host.detector is None:
            return
        if host.paused_at_s is None:
            self.carry_out(host, host.detector.handle(self.now_s, received))
        elif len(host.late) < BUFFERED_MAX:
            host.late.append(received)

    def _expire(self, host: Host, run: int, timer: tuple[str | int, ...], number: int) -> None:
        if host.run != run or host.detector is None or host.timers.get(timer, (0.0, 0))[1] != number:
            return
        if host.paused_at_s is None:
            del host.timers[timer]
            self.carry_out(host, host.detector.handle(self.now_s, Expired(timer)))

    # -- pauses --------------------------------------------------------------------------------------------------------

    def _plan_pauses(self, host: Host, chance: random.Random) -> None:
        begins_s = self.now_s + chance.uniform(0.0, self._faults.run_s_max)
        ends_s = begins_s + chance.uniform(0.0, self._faults.pause_s_max)
        self.at(begins_s, self._pause, host)
        self.at(ends_s, self._resume, host, chance)

    def _pause(self, host: Host) -> None:
        host.paused_at_s = self.now_s

    def _resume(self, host: Host, chance: random.Random) -> None:
        """What came and what ran out meanwhile is handled now, in any order of the two."""
        assert host.paused_at_s is not None
        lag_s, host.paused_at_s = self.now_s - host.paused_at_s, None
        self._plan_pauses(host, chance)
        if host.detector is None:
            return
        self.carry_out(host, host.detector.handle(self.now_s, Lagged(lag_s)))
        due = sorted((at, timer) for timer, at in host.timers.items() if at[0] <= self.now_s)
        at_s = self.now_s
        while due or host.late:
            at_s += HANDLING_S
            if due and (not host.late or self._chance.random() < len(due) / (len(due) + len(host.late))):
                (_, number), timer = due.pop(0)
                self.at(at_s, self._expire, host, host.run, timer, number)
            else:
                self.at(at_s, self._arrive, host.name, host.late.popleft())
