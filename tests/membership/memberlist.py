"""HashiCorp memberlist's algorithm with the defaults of its `DefaultLANConfig`: SWIM with all of Lifeguard, a gossip
tick of its own, a TCP ping beside the indirect ones, push-pull every 30 s. The second baseline.

Written anew from the algorithm as its source describes it (`state.go`, `suspicion.go`, `awareness.go`); only what can
change who is held for dead, and what it costs, is here: no meta data, no keys, no compression.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.membership.arena import Believe, Expired, Quiet, Received, Say, Wake
from tests.membership.rumours import Rumour, Rumours

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.membership.arena import Input, Output

PROBE_S = 1.0
ANSWER_S = 0.5
INDIRECT = 3
SUSPICION_MULTIPLIER = 4
SUSPICION_MAX_MULTIPLIER = 6
RETRANSMIT_MULTIPLIER = 4
GOSSIP_S = 0.2
GOSSIP_NODES = 3
GOSSIP_TO_THE_DEAD_S = 30.0
PUSH_PULL_S = 30.0
PUSH_PULL_SCALES_ABOVE = 32
AWARENESS_MAX = 8
JOIN_RETRY_S = 1.0

SEALED_BYTES = 30
PING_BYTES, ACK_BYTES, NACK_BYTES, ASK_BYTES = 75, 25, 15, 85
RUMOUR_BYTES, RECORD_BYTES = 45, 90
RUMOURS_MAX = 28
"""As many as fit 1,400 bytes."""


class Member:
    """What is believed of one other node; ``accusers`` are those who say so while it is suspected."""

    __slots__ = ("accusers", "changed_s", "confirmations_max", "incarnation", "state")

    def __init__(self) -> None:
        self.incarnation = 0
        self.state = "dead"
        self.changed_s = -math.inf
        self.accusers: set[str] = set()
        self.confirmations_max = 0


class Probe:
    """The one that is under way."""

    __slots__ = ("ends_s", "expected_nacks", "nacks", "name", "sequence")

    def __init__(self, sequence: int, name: str, ends_s: float) -> None:
        self.sequence = sequence
        self.name = name
        self.ends_s = ends_s
        self.nacks = 0
        self.expected_nacks = 0


class Memberlist:
    """One node's detector."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self._rng = rng
        self._now_s = 0.0
        self._incarnation = 1
        self._members: dict[str, Member] = {}
        self._order: list[str] = []
        self._place = 0
        self._sequence = rng.randrange(1 << 20)
        self._probe: Probe | None = None
        self._tick_waits = False
        self._relayed: dict[int, tuple[str, int]] = {}
        self._rumours = Rumours(RETRANSMIT_MULTIPLIER)
        self._health = 0
        self._gossips = False
        self._seeds: Sequence[str] = ()
        self._out: list[Output] = []

    def start(self, now_s: float, seeds: Sequence[str]) -> Sequence[Output]:
        """Begin; push-pull with the seeds, each until it has answered."""
        self._now_s = now_s
        self._out = [
            Wake(("probe",), self._rng.uniform(0.0, PROBE_S)),
            Wake(("push-pull",), self._rng.uniform(0.0, PUSH_PULL_S)),
        ]
        self._seeds = seeds
        self._spread(Rumour("alive", self.name, self._incarnation, self.name))
        self._join()
        return self._out

    def handle(self, now_s: float, given: Input) -> Sequence[Output]:
        """Something happened."""
        self._now_s = now_s
        self._out = []
        if isinstance(given, Received):
            self._received(given.src, given.message)  # type: ignore[arg-type]
        elif isinstance(given, Expired):
            self._expired(given.timer)
        return self._out

    # -- messages ------------------------------------------------------------------------------------------------------

    def _say(
        self, dst: str, kind: str, *words: object, size_bytes: int, told: tuple[Rumour, ...] | None = None
    ) -> None:
        rumours = self._rumours.take(len(self._members) + 1, RUMOURS_MAX) if told is None else told
        size = SEALED_BYTES + size_bytes + RUMOUR_BYTES * len(rumours)
        self._out.append(Say(dst, (kind, words, rumours), size))

    def _received(  # noqa: C901 -- one branch a message
        self, src: str, message: tuple[str, tuple, tuple[Rumour, ...]]
    ) -> None:
        kind, words, rumours = message
        for rumour in rumours:
            self._hear(rumour)
        match kind:
            case "ping":
                self._say(src, "ack", words[0], size_bytes=ACK_BYTES)
            case "ack":
                self._answered(words[0])
            case "nack":
                if self._probe is not None and self._probe.sequence == words[0]:
                    self._probe.nacks += 1
            case "ask":
                self._sequence += 1
                self._relayed[self._sequence] = (src, words[1])
                self._out.append(Wake(("relay", self._sequence), ANSWER_S))
                self._say(words[0], "ping", self._sequence, size_bytes=PING_BYTES)
            case "tcp-ping":
                size = ACK_BYTES + SEALED_BYTES
                self._out.append(Say(src, ("tcp-ack", words, ()), size, connected=True))
            case "tcp-ack":
                self._answered(words[0])
            case "push":
                self._merge(words[0])
                self._push(src, "pull")
            case "pull":
                self._merge(words[0])
                self._seeds = [seed for seed in self._seeds if seed != src]
            case _:
                pass  # "gossip" has nothing but rumours

    def _push(self, dst: str, kind: str) -> None:
        known = [Rumour(member.state, name, member.incarnation, name) for name, member in self._members.items()]
        known.append(Rumour("alive", self.name, self._incarnation, self.name))
        size = SEALED_BYTES + RECORD_BYTES * len(known)
        self._out.append(Say(dst, (kind, (tuple(known),), ()), size, connected=True, dials=kind == "push"))

    def _merge(self, known: tuple[Rumour, ...]) -> None:
        """Another's dead are only suspected here."""
        for rumour in known:
            state = "suspect" if rumour.state == "dead" else rumour.state
            accuser = rumour.node if rumour.state == "left" else self.name
            self._hear(Rumour(state, rumour.node, rumour.incarnation, accuser))

    def _join(self) -> None:
        if self._seeds:
            self._out.append(Wake(("join",), JOIN_RETRY_S))
            for seed in self._seeds:
                self._push(seed, "push")

    # -- probing -------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._out.append(Wake(("probe",), PROBE_S))
        if self._probe is not None:
            self._tick_waits = True
            return
        name = self._next()
        if not name:
            return
        self._sequence += 1
        self._probe = Probe(self._sequence, name, self._now_s + PROBE_S * (self._health + 1))
        member = self._members[name]
        told = (Rumour("suspect", name, member.incarnation, self.name),) if member.state == "suspect" else None
        self._say(name, "ping", self._sequence, size_bytes=PING_BYTES, told=told)
        self._out.append(Wake(("direct",), ANSWER_S))

    def _next(self) -> str:
        for _ in range(len(self._order) + 1):
            if self._place >= len(self._order):
                self._place = 0
                self._rng.shuffle(self._order)
                if not self._order:
                    return ""
            name = self._order[self._place]
            self._place += 1
            if self._members[name].state in {"alive", "suspect"}:
                return name
        return ""

    def _answered(self, sequence: int) -> None:
        relayed = self._relayed.pop(sequence, None)
        if relayed is not None:
            self._out.append(Quiet(("relay", sequence)))
            self._say(relayed[0], "ack", relayed[1], size_bytes=ACK_BYTES)
        elif self._probe is not None and self._probe.sequence == sequence:
            self._aware(-1)
            self._end_probe()

    def _end_probe(self) -> None:
        self._probe = None
        self._out.extend((Quiet(("direct",)), Quiet(("end",))))
        if self._tick_waits:
            self._tick_waits = False
            self._tick()

    def _ask_others(self) -> None:
        probe = self._probe
        if probe is None:
            return
        others = [name for name, member in self._members.items() if name != probe.name and member.state == "alive"]
        chosen = self._rng.sample(others, min(INDIRECT, len(others)))
        for other in chosen:
            self._say(other, "ask", probe.name, probe.sequence, size_bytes=ASK_BYTES)
        probe.expected_nacks = len(chosen)
        size = PING_BYTES + SEALED_BYTES
        self._out.append(Say(probe.name, ("tcp-ping", (probe.sequence,), ()), size, connected=True, dials=True))
        self._out.append(Wake(("end",), probe.ends_s - self._now_s if probe.ends_s > self._now_s else 0.0))

    def _probe_failed(self) -> None:
        probe = self._probe
        assert probe is not None
        if probe.expected_nacks:
            self._aware(max(0, probe.expected_nacks - probe.nacks))
        else:
            self._aware(1)
        self._hear(Rumour("suspect", probe.name, self._members[probe.name].incarnation, self.name))
        self._end_probe()

    def _aware(self, delta: int) -> None:
        self._health = min(AWARENESS_MAX - 1, max(0, self._health + delta))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expired(self, timer: tuple[str | int, ...]) -> None:
        match timer:
            case ("probe",):
                self._tick()
            case ("direct",):
                self._ask_others()
            case ("end",):
                self._probe_failed()
            case ("relay", int(sequence)):
                src, theirs = self._relayed.pop(sequence)
                self._say(src, "nack", theirs, size_bytes=NACK_BYTES)
            case ("suspicion", str(name)):
                self._hear(Rumour("dead", name, self._members[name].incarnation, self.name))
            case ("gossip",):
                self._gossip()
            case ("push-pull",):
                self._push_pull()
            case ("join",):
                self._join()

    def _gossip(self) -> None:
        self._gossips = len(self._rumours) > 0
        if not self._gossips:
            return
        self._out.append(Wake(("gossip",), GOSSIP_S))
        whom = [
            name
            for name, member in self._members.items()
            if member.state in {"alive", "suspect"} or self._now_s - member.changed_s < GOSSIP_TO_THE_DEAD_S
        ]
        for name in self._rng.sample(whom, min(GOSSIP_NODES, len(whom))):
            rumours = self._rumours.take(len(self._members) + 1, RUMOURS_MAX)
            if not rumours:
                return
            self._say(name, "gossip", size_bytes=0, told=rumours)

    def _push_pull(self) -> None:
        n = len(self._members) + 1
        scale = 1 if n <= PUSH_PULL_SCALES_ABOVE else math.ceil(math.log2(n) - math.log2(PUSH_PULL_SCALES_ABOVE)) + 1
        self._out.append(Wake(("push-pull",), PUSH_PULL_S * scale))
        alive = [name for name, member in self._members.items() if member.state == "alive"]
        if alive:
            self._push(self._rng.choice(alive), "push")

    # -- rumours -------------------------------------------------------------------------------------------------------

    def _spread(self, rumour: Rumour) -> None:
        self._rumours.add(rumour)
        if not self._gossips:
            self._gossips = True
            self._out.append(Wake(("gossip",), self._rng.uniform(0.0, GOSSIP_S)))

    def _hear(self, rumour: Rumour) -> None:
        if rumour.node == self.name:
            if rumour.state != "alive" and rumour.incarnation >= self._incarnation:
                self._incarnation = rumour.incarnation + 1
                self._aware(1)
                self._spread(Rumour("alive", self.name, self._incarnation, self.name))
            return
        member = self._members.get(rumour.node)
        if rumour.state == "alive":
            self._hear_alive(member, rumour)
        elif member is None or rumour.incarnation < member.incarnation:
            return
        elif rumour.state == "suspect":
            self._hear_suspect(member, rumour)
        elif member.state in {"alive", "suspect"}:
            self._become(member, rumour)

    def _hear_alive(self, member: Member | None, rumour: Rumour) -> None:
        if member is None:
            member = self._members[rumour.node] = Member()
            self._order.insert(self._rng.randint(0, len(self._order)), rumour.node)
        if rumour.incarnation > member.incarnation:
            self._become(member, rumour)

    def _hear_suspect(self, member: Member, rumour: Rumour) -> None:
        if member.state == "suspect":
            if rumour.accuser not in member.accusers and len(member.accusers) - 1 < member.confirmations_max:
                member.accusers.add(rumour.accuser)
                self._spread(rumour)
                self._set_suspicion(rumour.node, member)
        elif member.state == "alive":
            self._become(member, rumour)
            member.accusers = {rumour.accuser}
            n = len(self._members) + 1
            k = SUSPICION_MULTIPLIER - 2
            member.confirmations_max = k if n - 2 >= k else 0
            self._set_suspicion(rumour.node, member)

    def _set_suspicion(self, name: str, member: Member) -> None:
        """Set the time-out anew: the more accusers, the sooner."""
        n, k = len(self._members) + 1, member.confirmations_max
        least_s = SUSPICION_MULTIPLIER * max(1.0, math.log10(n)) * PROBE_S
        most_s = SUSPICION_MAX_MULTIPLIER * least_s
        share = math.log(len(member.accusers)) / math.log(k + 1) if k else 1.0
        lasts_s = max(least_s, most_s - share * (most_s - least_s))
        self._out.append(Wake(("suspicion", name), max(0.0, lasts_s - (self._now_s - member.changed_s))))

    def _become(self, member: Member, rumour: Rumour) -> None:
        was, member.state, member.incarnation = member.state, rumour.state, rumour.incarnation
        member.changed_s = self._now_s
        self._spread(rumour)
        if was == "suspect":
            self._out.append(Quiet(("suspicion", rumour.node)))
        if was != rumour.state:
            self._out.append(Believe(rumour.node, rumour.state))
