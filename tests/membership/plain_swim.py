"""SWIM as its paper has it (Das, Gupta, Motivala 2002), without any later refinement: the first baseline.

Each period one other member, in random round-robin order, is pinged; without an answer in time `INDIRECT` others are
asked to ping it; without an answer by the end of the period it is suspected. A suspicion lasts a fixed time, then the
member is dead. Rumours ride on pings, requests and answers alone. The timing is that of memberlist before it had
Lifeguard: period 1 s, answer within 500 ms, suspicion 5 * log10(n) periods.

Deviation: the paper's dead stay dead under their name. Here a higher incarnation is alive again, who pings somebody that
holds it for dead hears so in the answer, and a ping introduces its sender; otherwise no node could be started again.
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

PERIOD_S = 1.0
ANSWER_S = 0.5
INDIRECT = 3
SUSPICION_MULTIPLIER = 5
RETRANSMIT_MULTIPLIER = 4
RUMOURS_MAX = 12
JOIN_RETRY_S = 1.0
MESSAGE_BYTES = 80
RUMOUR_BYTES = 45
"""About what memberlist's encoding takes, with its encryption."""


class Member:
    """What is believed of one other node."""

    __slots__ = ("incarnation", "state")

    def __init__(self, incarnation: int, state: str) -> None:
        self.incarnation = incarnation
        self.state = state


class PlainSwim:
    """One node's detector."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self._rng = rng
        self._incarnation = 0
        self._members: dict[str, Member] = {}
        self._order: list[str] = []
        self._place = 0
        self._sequence = 0
        self._probed: tuple[int, str] | None = None
        self._relayed: dict[int, tuple[str, int]] = {}
        self._rumours = Rumours(RETRANSMIT_MULTIPLIER)
        self._seeds: Sequence[str] = ()
        self._out: list[Output] = []

    def start(self, now_s: float, seeds: Sequence[str]) -> Sequence[Output]:
        """Begin; ask the seeds for their members, each until it has answered."""
        self._out = [Wake(("period",), self._rng.uniform(0.0, PERIOD_S))]
        self._seeds = seeds
        self._join()
        return self._out

    def handle(self, now_s: float, given: Input) -> Sequence[Output]:
        """Something happened."""
        self._out = []
        if isinstance(given, Received):
            self._received(given.src, given.message)  # type: ignore[arg-type]
        elif isinstance(given, Expired):
            self._expired(given.timer)
        return self._out

    # -- messages ------------------------------------------------------------------------------------------------------

    def _say(self, dst: str, kind: str, *words: object, extra: tuple[Rumour, ...] = ()) -> None:
        rumours = extra + self._rumours.take(len(self._members) + 1, RUMOURS_MAX)
        size = MESSAGE_BYTES + RUMOUR_BYTES * len(rumours)
        self._out.append(Say(dst, (kind, words, rumours), size))

    def _received(self, src: str, message: tuple[str, tuple, tuple[Rumour, ...]]) -> None:
        kind, words, rumours = message
        for rumour in rumours:
            self._hear(rumour)
        if kind == "ping":
            self._hear(Rumour("alive", src, words[1], src))  # it may be new here
            member = self._members.get(src)
            wrong = member is not None and member.state == "dead"
            about = (Rumour("dead", src, member.incarnation, self.name),) if member is not None and wrong else ()
            self._say(src, "ack", words[0], extra=about)
        elif kind == "ack":
            self._answered(words[0])
        elif kind == "ping-req":
            target, sequence = words
            self._sequence += 1
            self._relayed[self._sequence] = (src, sequence)
            self._out.append(Wake(("relay", self._sequence), PERIOD_S))
            self._say(target, "ping", self._sequence, self._incarnation)
        elif kind == "join":
            self._hear(Rumour("alive", src, words[0], src))
            known = [Rumour(member.state, name, member.incarnation, name) for name, member in self._members.items()]
            known.append(Rumour("alive", self.name, self._incarnation, self.name))
            size = MESSAGE_BYTES + RUMOUR_BYTES * len(known)
            self._out.append(Say(src, ("joined", (), tuple(known)), size, connected=True, dials=True))
        elif kind == "joined":
            self._seeds = [seed for seed in self._seeds if seed != src]

    def _join(self) -> None:
        if self._seeds:
            self._out.append(Wake(("join",), JOIN_RETRY_S))
            words = ("join", (self._incarnation,), ())
            self._out.extend(Say(seed, words, MESSAGE_BYTES, connected=True, dials=True) for seed in self._seeds)

    def _answered(self, sequence: int) -> None:
        relayed = self._relayed.pop(sequence, None)
        if relayed is not None:
            self._out.append(Quiet(("relay", sequence)))
            self._say(relayed[0], "ack", relayed[1])
        elif self._probed is not None and self._probed[0] == sequence:
            self._probed = None
            self._out.append(Quiet(("indirect",)))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expired(self, timer: tuple[str | int, ...]) -> None:
        match timer:
            case ("period",):
                self._period()
            case ("indirect",):
                self._ask_others()
            case ("relay", int(sequence)):
                self._relayed.pop(sequence, None)
            case ("suspicion", str(name)):
                member = self._members[name]
                self._hear(Rumour("dead", name, member.incarnation, self.name))
            case ("join",):
                self._join()

    def _period(self) -> None:
        self._out.append(Wake(("period",), PERIOD_S))
        if self._probed is not None:
            name = self._probed[1]
            self._probed = None
            self._hear(Rumour("suspect", name, self._members[name].incarnation, self.name))
        name = self._next()
        if name:
            self._sequence += 1
            self._probed = (self._sequence, name)
            self._say(name, "ping", self._sequence, self._incarnation)
            self._out.append(Wake(("indirect",), ANSWER_S))

    def _next(self) -> str:
        for _ in range(len(self._order) + 1):
            if self._place >= len(self._order):
                self._place = 0
                self._rng.shuffle(self._order)
                if not self._order:
                    return ""
            name = self._order[self._place]
            self._place += 1
            if self._members[name].state != "dead":
                return name
        return ""

    def _ask_others(self) -> None:
        if self._probed is None:
            return
        sequence, name = self._probed
        others = [other for other, member in self._members.items() if other != name and member.state == "alive"]
        for other in self._rng.sample(others, min(INDIRECT, len(others))):
            self._say(other, "ping-req", name, sequence)

    # -- rumours -------------------------------------------------------------------------------------------------------

    def _hear(self, rumour: Rumour) -> None:
        """Newer ones are believed: dead over suspect over alive, a higher incarnation over all."""
        if rumour.node == self.name:
            if rumour.state != "alive" and rumour.incarnation >= self._incarnation:
                self._incarnation = rumour.incarnation + 1
                self._rumours.add(Rumour("alive", self.name, self._incarnation, self.name))
            return
        member = self._members.get(rumour.node)
        if member is None:
            member = self._members[rumour.node] = Member(-1, "dead")
            self._order.insert(self._rng.randint(0, len(self._order)), rumour.node)
        rank = ("alive", "suspect", "dead")
        if (rumour.incarnation, rank.index(rumour.state)) <= (member.incarnation, rank.index(member.state)):
            return
        was, member.state, member.incarnation = member.state, rumour.state, rumour.incarnation
        self._rumours.add(rumour)
        if was == "suspect":
            self._out.append(Quiet(("suspicion", rumour.node)))
        if rumour.state == "suspect":
            size = max(1.0, math.log10(len(self._members) + 1))
            self._out.append(Wake(("suspicion", rumour.node), SUSPICION_MULTIPLIER * size * PERIOD_S))
        if was != member.state or member.incarnation == 0:
            self._out.append(Believe(rumour.node, rumour.state))
