"""What failure detectors are measured by: how soon a crash is known to all, whom they call dead wrongly, what they say.

Every function plays one kind of detector (`KINDS`) on the faults of one seed and returns plain figures.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from tests.membership.arena import Arena, Believe, Faults, Host
from tests.membership.memberlist import Memberlist
from tests.membership.ours import Peerload
from tests.membership.plain_swim import PlainSwim

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.membership.arena import Detector, Say

KINDS: dict[str, Callable[[str, int, random.Random], Detector]] = {
    "plain SWIM": lambda name, _run, rng: PlainSwim(name, rng),
    "memberlist": lambda name, _run, rng: Memberlist(name, rng),
    "peerload": Peerload,
}

MEET_S_MAX = 120.0
KNOWN_S_MAX = 180.0
HEAL_S_MAX = 600.0
REST_S = (1.0, 5.0)
"""Between two crashes: uniform, so that they fall anywhere in the rounds of the others."""
POLL_S = 0.1
"""How often is looked whether all know."""
HARSH = Faults(loss=0.05, pausing=0.25)
MILD = Faults(loss=0.02)


class Crashes(msgspec.Struct, frozen=True):
    """detection_s: per crash, from it until the last running node held it for dead; wrong: other nodes called dead."""

    detection_s: tuple[float, ...]
    suspected_s: tuple[float, ...]
    wrong: int


def crashes(kind: str, count: int, most: int, seed: int, faults: Faults | None = None) -> Crashes:
    """Crash one random node after another out of ``count``, starting each again when all knew; ``most`` in all."""
    chance = random.Random(f"crashes {seed}")
    down: set[str] = set()
    unaware: set[str] = set()
    wrong = 0
    first_s: list[float] = []

    def watch(now_s: float, host: Host, belief: Believe) -> None:
        nonlocal wrong
        if belief.node in down:
            if belief.state == "suspect" and not first_s:
                first_s.append(now_s)
            if belief.state in {"dead", "left"}:
                unaware.discard(host.name)
        elif belief.state == "dead":
            wrong += 1

    arena = Arena(count, KINDS[kind], faults or Faults(), seed, watch)
    _begin(arena)
    took_s: list[float] = []
    suspected_s: list[float] = []
    names = list(arena.hosts)
    while len(took_s) < most:
        arena.run(arena.now_s + chance.uniform(*REST_S))
        name = chance.choice(names)
        down.add(name)
        unaware.update(other for other in names if other != name)
        first_s.clear()
        arena.crash(name)
        began_s = arena.now_s
        arena.run(began_s + KNOWN_S_MAX, lambda: not unaware)
        if unaware:
            raise AssertionError(f"{kind}: {name} crashed at {began_s:.1f}, unknown to {sorted(unaware)}, seed {seed}")
        took_s.append(arena.now_s - began_s)
        suspected_s.append(first_s[0] - began_s if first_s else 0.0)
        down.clear()
        arena.start(name, [other for other in names if other != name][:3])
        _settle(arena)
    return Crashes(tuple(took_s), tuple(suspected_s), wrong)


class Falsehoods(msgspec.Struct, frozen=True):
    """node_hours: that healthy nodes were up, all together; deaths: how often one of them was called dead by another of
    them (once, however many believed it, until all held it for alive again); views: by how many, summed up; suspected:
    the same for suspicion; deaths_of_pausing: how often one of those that pause was; cost: see `Cost`."""

    node_hours: float
    deaths: int
    views: int
    suspected: int
    deaths_of_pausing: int
    cost: Cost


class Cost(msgspec.Struct, frozen=True):
    """Sent per running node and second; bytes of datagrams with their headers, of TCP without."""

    datagrams: float
    bytes: float
    stream_messages: float
    stream_bytes: float


def falsehoods(kind: str, count: int, hours: float, seed: int, faults: Faults) -> Falsehoods:
    """Let ``count`` nodes run for so long with nobody crashing, and count whom they call dead."""
    counts: Counter[str] = Counter()
    blamed: dict[tuple[str, str], set[str]] = {}

    def watch(_now_s: float, host: Host, belief: Believe) -> None:
        if host.pauses:
            return
        pausing = arena.hosts[belief.node].pauses
        for state in ("suspect", "dead"):
            who = blamed.setdefault((state, belief.node), set())
            if belief.state == state:
                if not who:
                    counts[f"{state} pausing" if pausing else state] += 1
                who.add(host.name)
                counts[f"{state} views"] += not pausing
            elif belief.state == "alive":
                who.discard(host.name)

    arena = Arena(count, KINDS[kind], faults, seed, watch)
    _begin(arena, agree=not faults.pausing)
    counts.clear()
    arena.counts.clear()
    began_s = arena.now_s
    arena.run(began_s + hours * 3600.0)
    healthy = sum(not host.pauses for host in arena.hosts.values())
    return Falsehoods(
        healthy * hours,
        counts["dead"],
        counts["dead views"],
        counts["suspect"],
        counts["dead pausing"],
        _cost(arena, began_s),
    )


def idle(kind: str, count: int, seconds: float, seed: int) -> Cost:
    """What ``count`` nodes say while nothing happens."""
    arena = Arena(count, KINDS[kind], Faults(), seed)
    _begin(arena)
    arena.run(arena.now_s + 30.0)
    arena.counts.clear()
    began_s = arena.now_s
    arena.run(began_s + seconds)
    return _cost(arena, began_s)


def restarted_at_once(kind: str, count: int, seed: int, faults: Faults | None = None) -> float:
    """All ``count`` nodes crash and start again within a second, each knowing three others → until all agree, in s."""
    arena = Arena(count, KINDS[kind], faults or Faults(), seed)
    _begin(arena, agree=faults is None or not faults.pausing)
    chance = random.Random(f"restarts {seed}")
    arena.run(arena.now_s + 30.0)
    names = list(arena.hosts)
    for name in names:
        arena.crash(name)
    began_s = arena.now_s
    for name in names:
        others = [other for other in names if other != name]
        arena.at(began_s + chance.uniform(0.0, 1.0), arena.start, name, chance.sample(others, 3))
    arena.run(began_s + 1.0)
    arena.run(began_s + MEET_S_MAX, arena.agreed)
    return arena.now_s - began_s


def healed(kind: str, count: int, parted_s: float, seed: int) -> float | None:
    """Two halves that heard nothing of one another for so long → when all agree again, in s after the network was whole;
    None if not within `HEAL_S_MAX`."""
    arena = Arena(count, KINDS[kind], Faults(), seed)
    _begin(arena)
    names = list(arena.hosts)
    arena.divide(names[: count // 2], names[count // 2 :])
    arena.run(arena.now_s + parted_s)
    assert not arena.agreed()
    arena.divide()
    began_s = arena.now_s
    arena.run(began_s + HEAL_S_MAX, arena.agreed)
    return arena.now_s - began_s if arena.agreed() else None


class PartlyConnected(msgspec.Struct, frozen=True):
    """drained_s: per node that drained, until all others knew, each at most `KNOWN_S_MAX`; suspected: how often one node
    suspected another, though all were up; lost: messages and datagrams to a node that cannot be reached."""

    drained_s: tuple[float, ...]
    suspected: int
    lost: int


class _Families(Arena):
    """Nodes whose addresses are of these families, "4", "6" or "46": nothing passes between two that share none."""

    def __init__(self, families: Sequence[str], faults: Faults, seed: int) -> None:
        self.suspected = 0
        self.nodes: dict[str, Peerload] = {}
        super().__init__(len(families), self._made, faults, seed, self._saw)
        self._families = dict(zip(self.hosts, families, strict=True))

    def _made(self, name: str, run: int, rng: random.Random) -> Peerload:
        self.nodes[name] = Peerload(name, run, rng)
        return self.nodes[name]

    def _saw(self, _now_s: float, _host: Host, belief: Believe) -> None:
        self.suspected += belief.state == "suspect"

    def _send(self, host: Host, said: Say) -> None:
        if set(self._families[host.name]).isdisjoint(self._families[said.dst]):
            self.counts["lost"] += 1
        else:
            super()._send(host, said)


def partly_connected(families: Sequence[str], drains: int, seed: int, faults: Faults | None = None) -> PartlyConnected:
    """Nodes some of which cannot reach one another: the first reaches all; from time to time another one drains."""
    arena = _Families(families, faults or Faults(), seed)
    chance = random.Random(f"drains {seed}")
    _begin(arena)
    arena.run(arena.now_s + 60.0)
    took_s: list[float] = []
    for name in chance.sample(list(arena.hosts)[1:], drains):
        arena.run(arena.now_s + chance.uniform(0.0, 30.0))
        began_s = arena.now_s
        arena.carry_out(arena.hosts[name], arena.nodes[name].drain(began_s))
        unaware = {other: node for other, node in arena.nodes.items() if other != name}
        while unaware and arena.now_s < began_s + KNOWN_S_MAX:
            arena.run(arena.now_s + POLL_S)
            unaware = {other: node for other, node in unaware.items() if not node.knows_drained(name)}
        took_s.append(arena.now_s - began_s)
    return PartlyConnected(tuple(took_s), arena.suspected, arena.counts["lost"])


def _begin(arena: Arena, *, agree: bool = True) -> None:
    """Start all, one after another, each knowing the first."""
    names = list(arena.hosts)
    for number, name in enumerate(names):
        arena.at(arena.now_s + 0.05 * number, arena.start, name, names[:1] if number else ())
    arena.run(arena.now_s + 0.05 * len(names))
    if agree:
        _settle(arena)
    else:
        arena.run(arena.now_s + MEET_S_MAX)


def _settle(arena: Arena) -> None:
    arena.run(arena.now_s + MEET_S_MAX, arena.agreed)
    if not arena.agreed():
        views = {host.name: [name for name, state in host.beliefs.items() if state != "alive"] for host in arena.up()}
        raise AssertionError(f"not all agree at {arena.now_s:.1f} s: {views}")


def _cost(arena: Arena, began_s: float) -> Cost:
    node_seconds = (arena.now_s - began_s) * len(arena.up())
    counts = arena.counts
    return Cost(
        counts["datagrams"] / node_seconds,
        counts["datagram bytes"] / node_seconds,
        counts["stream messages"] / node_seconds,
        counts["stream bytes"] / node_seconds,
    )
