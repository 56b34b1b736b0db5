"""Network between simulated machines: links that break, partitions, loss, delay, repeats.

Ownership travels over a link of two agents, which is made when first needed, breaks when an agent ends, a partition lasts or
a fault resets it, and is made again. Advice goes by the broker where both ends are on it (`broker.py`). Every message
alone may besides be lost, repeated, delayed and overtaken while the cluster is not healed: more than TCP would ever do.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from peerload.model import events
from peerload.model.messages import (
    ADVICE,
    PROTOCOL_MAX,
    Accept,
    Commit,
    Envelope,
    NotStarted,
    Offer,
    Park,
    Result,
    ResultAck,
    Return,
    Revoke,
)
from tests.chaos.broker import Broker

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.model.actions import FetchOutput, SendGossip, SendResult
    from peerload.model.messages import Broadcast, Message
    from tests.chaos.cluster import Cluster
    from tests.chaos.machine import Machine

    Codec = Callable[[Envelope, bool], Envelope]

WATCHED = (Accept, Commit, Result, ResultAck)
"""Messages whose loss is a row of the table of crash points."""
RARE = (Park, Return, NotStarted, Revoke)
RARE_LATE = 0.4
"""Where messages are late, so many of those that are rare."""
REPLAYED = (Offer, Commit)
"""Messages that may be sent to a node once more, long after."""
KEEPALIVE_S = 15.0
"""A link over which nothing comes for so long is given up."""
CONNECT_S = 2.0
"""Connecting to an address that does not answer fails after this."""
LATE_HELLO = 0.3
"""Share of new links on which the Hello of an earlier link is read once more, late."""
STALE_SHARE = 0.5
"""Of what was on its way when a link broke, so much is read all the same."""


class Link:
    """Between two agents. generation: counts how often it was made; waiting: what is sent once it is made."""

    __slots__ = ("ends", "generation", "is_dialled", "is_up", "waiting")

    def __init__(self, ends: tuple[str, str]) -> None:
        self.ends = ends
        self.is_up = False
        self.is_dialled = False
        self.generation = 0
        self.waiting: list[tuple[Machine, str, Message]] = []


class Network:
    """``checks_boots``: a message for an earlier start of its receiver is dropped there. ``codec(envelope, newer)``: what
    messages pass, newer: as a version that knows more would write them."""

    def __init__(self, cluster: Cluster, codec: Codec | None, *, checks_boots: bool) -> None:
        self._cluster = cluster
        self._evils = cluster.plan.evils
        self._healed_s = cluster.plan.healed_s
        self._rng = random.Random(f"{cluster.plan.seed} network")
        self._codec = codec
        self._checks_boots = checks_boots
        self._links: dict[tuple[str, str], Link] = {}
        self._commits_lost: dict[tuple[str, str], float] = {}
        self.park_late_s: dict[tuple[str, str], float] = {}
        """By how much more the PARKs of a home come late to a node."""
        self.next_late_s = 0.0
        """The next message over a link comes so late, but it comes."""
        self._said: dict[tuple[str, str, bytes], list[tuple[int, events.MessageReceived]]] = {}
        """What a home has said to a node about a task, with the start of the node that it was for: to be said again."""
        self._hellos: dict[tuple[str, str], tuple[int, events.PeerMet]] = {}
        self._cuts: Counter[tuple[str, str]] = Counter()
        self.broker = Broker(cluster, self._rng) if cluster.plan.has_broker else None
        self.sent = 0
        self._sequence = 0

    # -- links ---------------------------------------------------------------------------------------------------------

    def link(self, a: str, b: str) -> Link:
        """The one between these two."""
        ends = (a, b) if a < b else (b, a)
        link = self._links.get(ends)
        if link is None:
            link = self._links[ends] = Link(ends)
        return link

    def _machines(self, link: Link) -> tuple[Machine, Machine]:
        machines = self._cluster.machines
        return machines[link.ends[0]], machines[link.ends[1]]

    def is_cut(self, src: str, dst: str) -> bool:
        """True if a partition stands in this direction now."""
        return self._cuts[src, dst] > 0

    def _answers(self, link: Link) -> bool:
        """True if a connection could be made now."""
        a, b = self._machines(link)
        for machine in (a, b):
            if machine.node is None or machine.is_asleep:
                return False
        return not self._cuts[link.ends] and not self._cuts[link.ends[1], link.ends[0]]

    def dial(self, src: Machine, dst: str) -> None:
        """Make a link if there is none."""
        if dst in self._cluster.machines and dst != src.name:
            link = self.link(src.name, dst)
            if not link.is_up and not link.is_dialled:
                self._dial(link, src)

    def _dial(self, link: Link, src: Machine) -> None:
        link.is_dialled = True
        delay_s = 3 * self._evils.delay_s if self._answers(link) else CONNECT_S
        other = self._cluster.machines[link.ends[1] if link.ends[0] == src.name else link.ends[0]]
        if other.has_power and other.node is None and not self._cuts[src.name, other.name]:
            delay_s = 2 * self._evils.delay_s  # refused at once
        self._cluster.after(delay_s, self._dialled, link, src)

    def _dialled(self, link: Link, src: Machine) -> None:
        link.is_dialled = False
        if link.is_up:
            return
        if self._answers(link):
            self._make(link)
            return
        waiting, link.waiting = link.waiting, []
        for machine, dst, message in waiting:
            machine.deliver(events.SendFailed(dst, message))  # type: ignore[arg-type]
        other = link.ends[1] if link.ends[0] == src.name else link.ends[0]
        src.deliver(events.PeerUnreachable(other, "it does not answer"))

    def _make(self, link: Link) -> None:
        link.is_up = True
        link.generation += 1
        a, b = self._machines(link)
        self._meet(a, b)
        self._meet(b, a)
        waiting, link.waiting = link.waiting, []
        for machine, dst, message in waiting:
            self._carry(machine, dst, message, link)

    def _meet(self, machine: Machine, other: Machine) -> None:
        report = other.report()
        if report is None or other.node is None:
            return
        hello = other.node.membership.hello(report)
        met = events.PeerMet(hello.identity, hello.profile, report, refutation=hello.refutation)
        machine.addresses[other.name] = hello.identity
        run, earlier = self._hellos.get((machine.name, other.name), (0, None))
        if earlier is not None and self._is_evil() and self._rng.random() < LATE_HELLO:
            late_s = self._late_s()
            if run == machine.run:  # a later agent has connections of its own
                self._cluster.gauges.count("a Hello is read late")
                machine.later(late_s, machine.handle, earlier)
        self._hellos[machine.name, other.name] = (machine.run, met)
        machine.deliver(met)

    def break_link(self, link: Link, reason: str) -> None:
        """Both ends hear of it, if they are there."""
        if not link.is_up:
            return
        link.is_up = False
        link.generation += 1
        a, b = self._machines(link)
        a.deliver(events.PeerUnreachable(b.name, reason))
        b.deliver(events.PeerUnreachable(a.name, reason))

    def agent_started(self, machine: Machine) -> None:
        """Have a node look for its peers."""
        if self.broker is not None:
            self.broker.agent_started(machine)

    def agent_ended(self, machine: Machine) -> None:
        """Break the links of a node; peers that cannot be told find out later."""
        if self.broker is not None:
            self.broker.agent_ended(machine)
        for link in self._links.values():
            if machine.name in link.ends and link.is_up:
                other = link.ends[1] if link.ends[0] == machine.name else link.ends[0]
                if machine.has_power and not self.is_cut(machine.name, other):
                    self.break_link(link, "its agent ended")
                else:
                    self._cluster.after(KEEPALIVE_S, self._given_up, link, link.generation)

    def agent_woke(self, machine: Machine) -> None:
        """Have a node introduce itself again under its new boot id."""
        for link in self._links.values():
            if machine.name in link.ends:
                self.break_link(link, "its machine slept")

    def _given_up(self, link: Link, generation: int) -> None:
        if link.generation == generation:
            self.break_link(link, "nothing was heard over it")

    # -- partitions ----------------------------------------------------------------------------------------------------

    def cut(self, pairs: tuple[tuple[str, str], ...], for_s: float) -> None:
        """Cut these directions for so long."""
        for pair in pairs:
            self._cuts[pair] += 1
            link = self.link(*pair)
            if link.is_up and for_s > KEEPALIVE_S:
                self._cluster.after(KEEPALIVE_S, self._cut_lasted, link, link.generation)

    def _cut_lasted(self, link: Link, generation: int) -> None:
        if self._cuts[link.ends] or self._cuts[link.ends[1], link.ends[0]]:
            self._given_up(link, generation)

    def mend(self, pairs: tuple[tuple[str, str], ...]) -> None:
        """End a partition."""
        for pair in pairs:
            if self._cuts[pair] > 0:
                self._cuts[pair] -= 1

    def heal(self) -> None:
        """No partition, and a broker that is up and fast."""
        self._cuts.clear()
        if self.broker is not None:
            self.broker.up()
            self.broker.fast()

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, src: Machine, dst: str, message: Message) -> None:
        """Put it on its way."""
        self.sent += 1
        if dst == src.name:
            src.later(0.0, src.handle, events.MessageReceived(dst, message))  # type: ignore[arg-type]
            return
        if dst not in self._cluster.machines:
            return
        if self.broker is not None and isinstance(message, ADVICE) and self.broker.send(src, dst, message):  # type: ignore[arg-type]
            return
        link = self.link(src.name, dst)
        if link.is_up:
            self._carry(src, dst, message, link)
        else:
            link.waiting.append((src, dst, message))
            if not link.is_dialled:
                self._dial(link, src)

    def lose_commits(self, src: str, dst: str, until_s: float) -> None:
        """Every COMMIT from there to there is lost until then."""
        self._commits_lost[src, dst] = until_s

    def loses_commits(self, src: str, dst: str) -> bool:
        """True if they are lost just now."""
        return self._commits_lost.get((src, dst), 0.0) > self._cluster.now_s

    def announce(self, src: Machine, message: Broadcast) -> None:
        """To all: by the broker, and over the link to those who are not on it."""
        told = self.broker.announce(src, message) if self.broker is not None else frozenset()
        for name in self._cluster.machines:
            if name != src.name and name not in told and self.link(src.name, name).is_up:
                self._carry(src, name, message, self.link(src.name, name))

    def gossip(self, src: Machine, action: SendGossip) -> None:
        """A datagram: no link, nobody told if it is lost; for whichever start of the receiver is there."""
        self.sent += 1
        receiver = self._cluster.machines.get(action.node)
        if receiver is None:
            return
        event = events.GossipReceived(src.name, src.identity.boot, action.messages, f"{src.name}:1")
        for delay_s in self.delays(src.name, action.node):
            self._cluster.after(delay_s, receiver.deliver, event)

    def send_result(self, src: Machine, action: SendResult) -> None:
        """A RESULT, with its output unless outputs are large in this run."""
        inline = not self._evils.output_loss
        self.send(src, action.dst, Result(action.task, action.uid, action.attempt, action.exit, inline))

    def fetch_output(self, machine: Machine, action: FetchOutput) -> None:
        """Over a connection of its own, which may break."""
        link = self.link(machine.name, action.node)
        error = ""
        if action.node != machine.name and not self._answers(link):
            error = "it cannot be reached"
        elif self._is_evil() and self._rng.random() < self._evils.output_loss:
            error = "it broke off"
        seconds = self._rng.uniform(0.005, 0.05)
        machine.later(seconds, machine.handle, events.OutputArrived(action.uid, action.attempt, error))

    def _is_evil(self) -> bool:
        return self._cluster.now_s < self._healed_s

    def _carry(self, src: Machine, dst: str, message: Message, link: Link) -> None:
        receiver = self._cluster.machines[dst]
        if self._codec is not None:
            message = self.coded(src, dst, message)
        event = events.MessageReceived(src.name, message)  # type: ignore[arg-type]
        if isinstance(message, Commit) and self.loses_commits(src.name, dst):
            self._cluster.gauges.count("row Commit lost")
            return
        delays_s = self.delays(src.name, dst)
        if self.next_late_s:
            delays_s, self.next_late_s = [self.next_late_s], 0.0
        if isinstance(message, REPLAYED):
            self._said.setdefault((src.name, dst, message.uid), []).append((receiver.boot, event))
        late_s = self.park_late_s.get((src.name, dst), 0.0) if isinstance(message, Park) else 0.0
        if late_s:  # it was read from the link before that broke, and waited
            self._cluster.after(late_s, self._received, receiver, receiver.boot, event)
            return
        if isinstance(message, RARE) and self._is_evil() and self._evils.late and self._rng.random() < RARE_LATE:
            delays_s = [delay_s + self._late_s() for delay_s in delays_s]
        if not delays_s and isinstance(message, WATCHED):
            self._cluster.gauges.count(f"row {type(message).__name__} lost")
        for delay_s in delays_s:
            self._cluster.after(delay_s, self._arrive, receiver, receiver.boot, event, link, link.generation)

    def coded(self, src: Machine, dst: str, message: Message) -> Message:
        """The message as the other end reads it."""
        if self._codec is None:
            return message
        self._sequence += 1
        envelope = Envelope(PROTOCOL_MAX, "sim", src.name, src.identity.boot, self._sequence, message, dst)
        return self._codec(envelope, src.facts.newer).body

    def delays(self, src: str, dst: str) -> list[float]:
        """After how long the copies of a message sent now arrive; [] if it is lost."""
        evils, rng = self._evils, self._rng
        gauges = self._cluster.gauges
        if self._cuts and self._cuts[src, dst] > 0:
            gauges.count("messages cut")
            return []
        if not self._is_evil():
            return [evils.delay_s]
        if evils.loss and rng.random() < evils.loss:
            gauges.count("messages lost")
            return []
        delay_s = evils.delay_s
        if evils.jitter_s:
            delay_s += rng.expovariate(1.0 / evils.jitter_s)
        if evils.late and rng.random() < evils.late:
            gauges.count("messages late")
            delay_s += self._late_s()
        if evils.duplication and rng.random() < evils.duplication:
            gauges.count("messages repeated")
            return [delay_s, delay_s + self._late_s()]
        return [delay_s]

    def _late_s(self) -> float:
        """How much later: nothing is on its way for long once the cluster has healed."""
        return min(self._rng.uniform(0.0, self._evils.late_s), self._healed_s - self._cluster.now_s)

    def _arrive(self, receiver: Machine, boot: int, event: events.MessageReceived, link: Link, generation: int) -> None:
        if link.generation != generation and self._checks_boots and self._rng.random() >= STALE_SHARE:
            return
        self._received(receiver, boot, event)

    def _received(self, receiver: Machine, boot: int, event: events.MessageReceived) -> None:
        if receiver.node is None:
            return
        if self._checks_boots and receiver.boot != boot:
            self._cluster.gauges.count("messages for an earlier start")
            return
        receiver.deliver(event)

    def replay(self, src: str, dst: str, uid: bytes, kinds: tuple[type, ...] = REPLAYED) -> None:
        """What was said there of this task comes once more, in that order."""
        if not self._is_evil():
            return
        self._cluster.gauges.count("messages replayed")
        for boot, event in self._said.get((src, dst, uid), ()):
            if isinstance(event.message, kinds):
                self._received(self._cluster.machines[dst], boot, event)
