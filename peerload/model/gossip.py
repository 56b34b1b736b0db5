"""Gossip: the messages of one datagram, and the presets `local`, `lan` and `wan`.

A datagram is small, may be lost, duplicated or late, and is sealed (docs/wire.md). Its messages are arrays, identified
by their first item. Fields are only ever added at the end, with a default; unknown types are skipped.
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
"""Bound on a sealed datagram; a larger one is dropped."""
MESSAGES_BYTES_MAX = 1120
"""Limit on the bytes of all messages of one datagram. With its header and seal it stays below 1232 bytes, which pass
any IPv6 network and any tunnel (MTU 1280 bytes) unfragmented."""
ACCUSERS_MAX = 8
"""Bound on the accusers in an update; more would change nothing."""
MESSAGES_MAX = 64
"""Messages in one datagram."""

DEVICES_GOSSIPED_MAX = 16
"""Limit on the devices of a node whose room fits in a datagram; a report over the peer link lists all."""

Number = Annotated[int, Meta(ge=0, le=1 << 62)]
CLAIM_MAX = 1 << 40
"""Bound on numbers (incarnation, refutation) in claims about other nodes. Only the node itself may use greater ones, so
that it can always outdo a claim."""
OUTDO_MAX = 1 << 61
"""Limit up to which a node outdoes claims about itself, so that its number stays far from the greatest possible one."""
Version = Annotated[int, Meta(ge=1, le=1000)]
Age = Annotated[float, Meta(ge=0.0, le=1e12)]


class MemberStatus(enum.IntEnum):
    """Status of a member. Of two updates about the same run with equal numbers, the one of greater `rank` wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3
    FORGOTTEN = 4
    ASLEEP = 5
    """Suspended, by its own announcement: outweighs DEAD."""

    @property
    def rank(self) -> int:
        """Weight of this status against others about the same run."""
        return 2 * MemberStatus.DEAD + 1 if self is MemberStatus.ASLEEP else 2 * self


class _Message(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Root of all gossip messages."""


class GossipPing(_Message, frozen=True, tag="ping"):
    """Liveness probe. to: the probed node; another one at that address does not answer."""

    sequence: Number
    to: NodeName


class GossipAck(_Message, frozen=True, tag="ack"):
    """Answer to a probe, or from a helper whose indirect probe was answered."""

    sequence: Number


class GossipPingRequest(_Message, frozen=True, tag="ask"):
    """Request for an indirect probe of ``node``, which has not answered the sender. The helper answers with an ack if the node
    answers, else with a nack."""

    sequence: Number
    node: NodeName
    address: Address


class GossipNack(_Message, frozen=True, tag="nack"):
    """Answer of a helper whose indirect probe got no answer yet: the helper and the sender of the request are
    reachable."""

    sequence: Number


class MembershipUpdate(_Message, frozen=True, tag="rumour"):
    """Update about one run of a node's agent, by itself or by others.

    node … address: as in `Identity`; incarnation: the number of the run, which grows with every start; refutation:
    grows with every announcement of the node about itself within a run; by: names of the nodes that declare it suspect
    or dead; age_s: age of the status (in a `Sync` only).
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
        """Precedence, the greatest wins: a later run, then a later announcement of the node itself, then the graver
        status. The boot id breaks ties of two agents with one name."""
        return self.incarnation, self.refutation, self.standing.rank, self.boot

    def is_credible(self, believed: MembershipUpdate | None) -> bool:
        """True if a node other than the subject may claim this, given the known update."""
        if max(self.incarnation, self.refutation) <= CLAIM_MAX:
            return True
        numbers = self.incarnation, self.refutation
        return believed is not None and numbers <= (believed.incarnation, believed.refutation)


GOSSIPED = tuple(name for name in LoadReport.__struct_fields__ if name != "price")
_gossiped = attrgetter(*GOSSIPED)
"""Fields of a report that are gossiped; prices are requested when needed."""


class Load(_Message, frozen=True, tag="load"):
    """A node's load in few bytes, with the fields of `LoadReport` except the price.

    is_news: it is passed on to all nodes; else it only fills free space in a datagram.
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
    mem_requested_bytes: Bytes = 0

    @classmethod
    def of(cls, node: str, report: LoadReport, age_s: float = 0, *, is_news: bool = False) -> Load:
        """The digest of a report. No age is an integer: that takes one byte of a datagram instead of nine."""
        fields = dict(zip(GOSSIPED, _gossiped(report), strict=True))
        fields["devices"] = report.devices[:DEVICES_GOSSIPED_MAX]
        return cls(node=node, age_s=age_s, is_news=is_news, **fields)

    def report(self) -> LoadReport:
        return LoadReport(**dict(zip(GOSSIPED, _gossiped(self), strict=True)))


GossipMessage = GossipPing | GossipAck | GossipPingRequest | GossipNack | MembershipUpdate | Load

_encoder = msgspec.msgpack.Encoder()


def size_bytes(message: GossipMessage) -> int:
    return len(_encoder.encode(message))


def merged(one: MembershipUpdate, other: MembershipUpdate) -> MembershipUpdate:
    """Merge two updates about the same node: the one with more weight wins; equal ones unite their accusers (the first
    ACCUSERS_MAX by name). The result depends neither on the order of updates nor on repetitions."""
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
    """Preset for the speed of failure detection, and its cost. n: live members, with this node; h: local health of this
    node, 0 (healthy) … health_max, which stretches the times below that mention it.

    Sources: [SWIM02] for probing, suspicion and piggy-backing, [LIFEGUARD17] for local health, dynamic suspicion and
    nacks; defaults are set by measurement (docs/membership.md). A loss is known to all after about
    ``first probe + probe_timeout_s + indirect_timeout_s + suspicion_s(n) + 3·spread_s``; the first probe comes after
    0 … 2·probe_s, since each node probes its neighbour on the ring of names at every second turn.
    """

    probe_s: Positive = 1.0
    """Interval of probes: one member each probe_s·(h + 1). Less finds losses sooner; each probe is two datagrams, so an idle node
    handles 3 / probe_s events a second, with any number of members."""
    probe_timeout_s: Positive = 0.4
    """Timeout of a ping, probe_timeout_s·(h + 1); then helpers are asked. It should be above the
    99th percentile of the round trip with a busy agent at the other end; less finds losses sooner and asks helpers
    more often."""
    indirect_timeout_s: Positive = 0.5
    """Further timeout of helpers and of the ping over the peer link, indirect_timeout_s·(h + 1). Then the member is suspected."""
    helpers: Few = 3
    """Members asked to ping one that does not answer ([SWIM02] k). Each costs up to 4 datagrams per failed ping; 0
    leaves the ping over the peer link alone. With a share p of datagrams lost and no peer link, a healthy member is
    suspected with about (1 - (1-p)²)·(1 - (1-p)⁴)^helpers."""
    suspicion_mult: Positive = 1.8
    """Time for a suspect to refute, at least suspicion_s(n) = suspicion_mult · max(1, log10 n) · probe_s. More tolerates slow
    refutations; all of it is added to the time until a loss is known."""
    suspicion_max_mult: Positive = 4.0
    """Longest such time, as a multiple of that: for a suspicion that no other node confirms. With c confirmations of the
    wanted k it is max - ln(c + 1) / ln(k + 1) · (max - min). 1 makes confirmations meaningless."""
    confirmations: Few = 3
    """k: independent suspicions that reduce the time to its minimum; fewer in small clusters. 0: the minimum at once, so that a single
    confused node may call others dead."""
    corroborators: Few = 8
    """Nodes that, on average, probe a suspect out of turn when they first receive the suspicion, and so confirm it or
    inform the suspect. Each costs 2 datagrams per suspicion (12 if it is dead); 0 leaves confirmation to the turns of
    probing, n·probe_s/k later."""
    spread_s: Positive = 0.1
    """Interval of datagrams with membership updates, to `fanout` members; without updates none are sent. Less spreads
    updates sooner: they reach all after about log_fanout(n) rounds."""
    load_s: Positive = 1.0
    """Interval of datagrams to one member only for loads, while there are some to pass on. Otherwise loads are added to
    other datagrams, at most loads_max to each. Less spreads them sooner, without a broker or peer links."""
    loads_max: Few = 6
    """Loads in one datagram, at about 60 bytes each; the newest of the least sent go first. 0: none."""
    fanout: Annotated[int, Meta(ge=1, le=100)] = 3
    """Members that get the updates in each round."""
    retransmit_mult: Annotated[int, Meta(ge=1, le=100)] = 4
    """Repetitions of each update by each node: retransmit_mult · max(2, ceil(log10(n + 1))). More tolerates more loss, for that many
    times the bytes."""
    health_max: Few = 7
    """The worst local health: a node that cannot trust its own probes waits up to health_max + 1 times longer. 0 turns
    local health off."""
    lag_s: Positive = 0.25
    """Event-loop lag from which a node counts as not running: it abandons its probes, worsens its health, and calls no member dead
    before a fresh probe has ended."""
    sync_s: Positive = 30.0
    """Interval of anti-entropy with one member over the peer link: sync_s · s(n), s = ceil(log2 n - 5) + 1 above 32 members, else 1;
    about 150 bytes per member each way. It repairs lost datagrams."""
    reconnect_s: Positive = 30.0
    """A lost member or seed is tried again each reconnect_s / (share of members that are lost), without end; so the
    cluster as a whole tries about once in reconnect_s for one lost member, and two halves find each other fast."""
    join_s: Positive = 1.0
    """First pause before a node without live members tries its contacts and seeds; it doubles up to reconnect_s."""
    join_contacts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Members that it tries at a time."""
    left_s: Positive = 86_400.0
    """Time that a member that left is listed; then it counts as forgotten."""
    tombstone_s: Positive = 30 * 86_400.0
    """Time that a forgotten member is remembered, so that late updates do not revive it, such as from a machine that
    was asleep or cut off. An older update of a dead member is ignored by a node that does not know it."""


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
