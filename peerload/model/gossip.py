"""Gossip: the messages of one datagram, and the presets `local`, `lan` and `wan`.

A datagram is small, may be lost, doubled or late, and is sealed (docs/wire.md). Its messages are arrays, told apart by
their first item. Fields are only ever added at the end, with a default; a type that is not known is skipped.
"""

from __future__ import annotations

import enum
from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec import Meta

from peerload.model.resources import (
    LOAD_MAX,
    Address,
    BootId,
    Bytes,
    Count,
    DeviceLoad,
    LoadReport,
    NodeName,
    Region,
    Share,
    Watts,
)

DATAGRAM_BYTES_MAX = 1400
"""A sealed datagram that is larger is not looked at."""
MESSAGES_BYTES_MAX = 1120
"""Bound on the bytes of all messages of one datagram. With its head and its seal it stays below 1232 bytes, which is what
fits through any network of IPv6 and any tunnel (1280 bytes) in one piece."""
ACCUSERS_MAX = 8
"""Accusers that are told of; more would change nothing."""
MESSAGES_MAX = 64
"""Messages in one datagram."""

DEVICES_GOSSIPED_MAX = 16
"""Devices of a node whose room fits in a datagram; a report over the peer link lists all."""

Number = Annotated[int, Meta(ge=0, le=1 << 62)]
CLAIM_MAX = 1 << 40
"""Numbers (incarnation, refutation) that others are believed to know of a node. Greater ones are believed from the node
itself alone, so that it always has a number left that beats whatever was claimed of it."""
OUTDO_MAX = 1 << 61
"""A node beats what is claimed of itself up to this number; so its own never comes near the greatest that can be said."""
Version = Annotated[int, Meta(ge=1, le=1000)]
Age = Annotated[float, Meta(ge=0.0, le=1e12)]


class MemberStatus(enum.IntEnum):
    """Status of a member. Of two updates about the same run that count alike, the one of greater `rank` wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3
    FORGOTTEN = 4
    ASLEEP = 5
    """Suspended, as it has said itself: weightier than DEAD."""

    @property
    def rank(self) -> int:
        """Weight of this word beside others about the same."""
        return 2 * MemberStatus.DEAD + 1 if self is MemberStatus.ASLEEP else 2 * self


class _Message(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Root of all gossip messages."""


class GossipPing(_Message, frozen=True, tag="ping"):
    """Are you there? ``to``: who is asked; anybody else at that address stays silent."""

    sequence: Number
    to: NodeName


class GossipAck(_Message, frozen=True, tag="ack"):
    """I am; or, from a helper: it is."""

    sequence: Number


class GossipPingRequest(_Message, frozen=True, tag="ask"):
    """Ping ``node`` for me: it does not answer me. Answered by an ack if it answers, and by a nack if it does not."""

    sequence: Number
    node: NodeName
    address: Address


class GossipNack(_Message, frozen=True, tag="nack"):
    """Answer of a helper whose indirect probe got no answer so far: the helper and the sender of the request are
    reachable."""

    sequence: Number


class MembershipUpdate(_Message, frozen=True, tag="rumour"):
    """Update about one run of a node's agent, by itself or by others.

    node … address: as in `Identity`; incarnation: the number of the run, which grows with every start; refutation:
    grows with every word of the node about itself within a run; by: who says that it is suspect or dead, by name;
    age_s: for how long this has been so (told in a `Sync` only).
    """

    node: NodeName
    boot: BootId
    machine_boot: BootId
    store: BootId
    incarnation: Number
    refutation: Number
    standing: MemberStatus
    address: Address = ""
    profile_version: Number = 0
    protocol_min: Version = 1
    protocol_max: Version = 1
    by: Annotated[tuple[NodeName, ...], Meta(max_length=ACCUSERS_MAX)] = ()
    age_s: Age = 0.0

    @property
    def weight(self) -> tuple[int, int, int, str]:
        """The greatest wins: a later run, within a run a later word of the node itself, of words about the same the
        graver. The boot id settles what cannot happen unless two agents share a name."""
        return self.incarnation, self.refutation, self.standing.rank, self.boot

    def is_credible(self, believed: MembershipUpdate | None) -> bool:
        """True if anybody but the node itself may say this, given what is believed of it."""
        if max(self.incarnation, self.refutation) <= CLAIM_MAX:
            return True
        numbers = self.incarnation, self.refutation
        return believed is not None and numbers <= (believed.incarnation, believed.refutation)


GOSSIPED = tuple(name for name in LoadReport.__struct_fields__ if name != "price")
_gossiped = attrgetter(*GOSSIPED)
"""Fields of a report that are gossiped: who needs a price asks."""


class Load(_Message, frozen=True, tag="load"):
    """A node's load in few bytes; its fields are those of `LoadReport`, but for the price.

    is_news: everybody is to know, so it is passed on; else the node mentions it by the way.
    """

    node: NodeName
    incarnation: Number
    sequence: Number
    load_tasks: Count
    slots: Count
    running: Count
    waiting: Count
    movable: Count
    load: Share
    region: Region
    accepts: bool
    gives: bool
    cpus_busy: Share
    mem_used_bytes: Bytes
    gpus_free: Count = 0
    age_s: Age = 0.0
    """Age of the node's own last message (in a `Sync` only)."""
    is_news: bool = False
    cpu_pressure: Share = 0.0
    mem_pressure: Share = 0.0
    gpus: Count = 0
    gpu_tasks: Count = 0
    gpu_load: Share = 0.0
    devices: Annotated[tuple[DeviceLoad, ...], Meta(max_length=DEVICES_GOSSIPED_MAX)] = ()
    cpus_free: Share = LOAD_MAX
    cpus_foreign: Share = 0.0
    slots_foreign: Count = 0
    is_asleep: bool = False
    watts: Watts | None = None

    @classmethod
    def of(cls, node: str, report: LoadReport, age_s: float = 0.0, *, is_news: bool = False) -> Load:
        """The digest of a report."""
        fields = dict(zip(GOSSIPED, _gossiped(report), strict=True))
        fields["devices"] = report.devices[:DEVICES_GOSSIPED_MAX]
        return cls(node=node, age_s=age_s, is_news=is_news, **fields)

    def report(self) -> LoadReport:
        return LoadReport(**dict(zip(GOSSIPED, _gossiped(self), strict=True)))


GossipMessage = GossipPing | GossipAck | GossipPingRequest | GossipNack | MembershipUpdate | Load

_encoder = msgspec.msgpack.Encoder()


def size_bytes(message: GossipMessage) -> int:
    """Bytes of a message in a datagram."""
    return len(_encoder.encode(message))


def merged(one: MembershipUpdate, other: MembershipUpdate) -> MembershipUpdate:
    """The update that wins over another about the same node: the weightier; of two that weigh the same, with the accusers
    of both (the first ACCUSERS_MAX by name). In whatever order rumours come, and however often, the end is the same."""
    one, other = sorted((one, other), key=_all_but_accusers)
    if one.weight != other.weight:
        return other
    accusers = tuple(sorted({*one.by, *other.by}))[:ACCUSERS_MAX]
    return other if accusers == other.by else msgspec.structs.replace(other, by=accusers)


def _all_but_accusers(rumour: MembershipUpdate) -> tuple[tuple[int, int, int, str], tuple[str | int | float, ...]]:
    fields = (rumour.machine_boot, rumour.store, rumour.address)
    return rumour.weight, (*fields, rumour.profile_version, rumour.protocol_min, rumour.protocol_max)


Positive = Annotated[float, Meta(gt=0.0, le=1e9)]
Few = Annotated[int, Meta(ge=0, le=1000)]


class GossipPreset(msgspec.Struct, frozen=True, kw_only=True):
    """Preset: how fast losses are noticed, and the cost of it. n: members that are alive, this node too; h: this node's local
    health, 0 (well) … health_max, which stretches every time below that says so.

    Sources: [SWIM02] for probing, suspicion and piggy-backing, [LIFEGUARD17] for local health, dynamic suspicion and
    nacks; defaults are set by measurement (docs/membership.md). A loss is known to all after about
    ``first probe + probe_timeout_s + indirect_timeout_s + suspicion_s(n) + 3·spread_s``; the first probe comes after
    0 … 2·probe_s, since each node probes its neighbour on the ring of names at every second turn.
    """

    probe_s: Positive = 1.0
    """One member is probed each probe_s·(h + 1). Less finds losses sooner; each probe is two datagrams, so a node that
    idles handles 3 / probe_s events a second, whatever the number of members."""
    probe_timeout_s: Positive = 0.4
    """A ping without an ack after probe_timeout_s·(h + 1) is given up, and helpers are asked. It should be above the
    99th percentile of the round trip with a busy agent at the other end; less finds losses sooner and asks helpers
    more often."""
    indirect_timeout_s: Positive = 0.5
    """Helpers, and the ping over the peer link, have indirect_timeout_s·(h + 1) more. Then the member is suspected."""
    helpers: Few = 3
    """Members asked to ping one that does not answer ([SWIM02] k). Each costs up to 4 datagrams per failed ping; 0
    leaves the ping over the peer link alone. With a share p of datagrams lost and no peer link, a healthy member is
    suspected with about (1 - (1-p)²)·(1 - (1-p)⁴)^helpers."""
    suspicion_mult: Positive = 1.8
    """A suspect has at least suspicion_s(n) = suspicion_mult · max(1, log10 n) · probe_s to refute it. More is
    proof against slow refutations; all of it is added to the time until a loss is known."""
    suspicion_max_mult: Positive = 4.0
    """… and at most suspicion_max_mult times that, if nobody else confirms the suspicion. With c confirmations of the
    wanted k it is max - ln(c + 1) / ln(k + 1) · (max - min). 1 makes confirmations meaningless."""
    confirmations: Few = 3
    """k: independent suspicions that bring the time down to its minimum; fewer where there are not so many others. 0:
    the minimum at once, a single confused node may then call others dead."""
    corroborators: Few = 8
    """Nodes that, on average, probe a suspect out of turn when they first hear of the suspicion, and so confirm it or
    bring it the word to refute. Each costs 2 datagrams per suspicion (12 if it is dead); 0 leaves confirmation to the
    turns of probing, n·probe_s/k later."""
    spread_s: Positive = 0.1
    """While there is news, a datagram of it goes to `fanout` members each spread_s; without news there are none. Less
    spreads it sooner: it reaches all after about log_fanout(n) rounds."""
    load_s: Positive = 1.0
    """Loads ride on datagrams that are sent anyway, at most loads_max on each. While there are some to be passed on, one
    datagram goes to one member for their sake each load_s: whatever loads do, that is one datagram and two events more
    per node and load_s. Less spreads them sooner, which is the broker's and the peer links' part where there are any."""
    loads_max: Few = 6
    """Loads on one datagram, at about 60 bytes each; the newest that was sent least goes first. 0: no datagram has one."""
    fanout: Annotated[int, Meta(ge=1, le=100)] = 3
    """Members told in each round."""
    retransmit_mult: Annotated[int, Meta(ge=1, le=100)] = 4
    """Each piece of news is sent retransmit_mult · max(2, ceil(log10(n + 1))) times by each node. More survives more loss, at
    that many datagrams' worth of bytes per node and news."""
    health_max: Few = 7
    """The worst local health: a node that cannot trust its own probes waits up to health_max + 1 times longer. 0 turns
    local health off."""
    lag_s: Positive = 0.25
    """A timer or the agent's own loop that is later than this: the node was not running. It abandons its probes, worsens
    its health, and calls nobody dead before a fresh probe has had its answer, or its lack of one."""
    sync_s: Positive = 30.0
    """All that is known is exchanged with one member, over the peer link, each sync_s · s(n), s = ceil(log2 n - 5) + 1
    above 32 members, else 1: about 150 bytes per member each way. It mends what datagrams have missed."""
    reconnect_s: Positive = 30.0
    """A lost member or seed is tried again each reconnect_s / (share of members that are lost), for ever; so the
    cluster as a whole tries about once in reconnect_s for one lost member, and two halves find one another fast."""
    join_s: Positive = 1.0
    """A node that knows nobody alive tries its contacts and seeds after this, doubling up to reconnect_s."""
    join_contacts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Members tried at a time then."""
    tombstone_s: Positive = 86_400.0
    """Time that a member that left or was forgotten is remembered, so that late news does not bring it back."""


LAN = GossipPreset()
"""Machines on one network: round trips below 10 ms, stalls of a second now and then."""
LOCAL = GossipPreset(
    probe_s=0.5,
    probe_timeout_s=0.15,
    indirect_timeout_s=0.2,
    suspicion_mult=1.2,
    spread_s=0.05,
    lag_s=0.1,
    sync_s=15.0,
    reconnect_s=10.0,
    join_s=0.25,
)
"""Agents on one machine, or machines that never stall: a loss is known after about 2 s, a stall of 2 s counts as one."""
WAN = GossipPreset(
    probe_s=3.0,
    probe_timeout_s=1.5,
    indirect_timeout_s=1.5,
    suspicion_mult=3.0,
    suspicion_max_mult=6.0,
    spread_s=0.5,
    load_s=3.0,
    fanout=4,
    lag_s=1.0,
    sync_s=60.0,
    join_s=2.0,
)
"""Machines far apart: round trips up to 300 ms, paths that are lossy for seconds."""

PRESETS = {"local": LOCAL, "lan": LAN, "wan": WAN}
