"""Membership: the peers this node knows, their profiles and newest reports, for the rest of the core.

Gossip (`gossip.py`) detects which nodes are alive. Its results are advice: probes and offers to suspected or dead nodes
stop; no task is ever taken back because of them.

Peers become known one by one (`meet`, and by gossip), or all together through a shared `Directory` (`meet_all`): then
there is no gossip, and a peer is stored here only once its own messages arrive.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, filterfalse, islice
from typing import TYPE_CHECKING, overload

import msgspec

from peerload.core.estimates import command_keys
from peerload.core.membership.gossip import Gossip, identity_of, rumour_of
from peerload.core.membership.peers import STATE_OF_STATUS, PeerInfo, PeerState, Profiles, Waking
from peerload.core.resources.admission import why_never
from peerload.model import metrics, rules
from peerload.model.actions import ForgetPeer
from peerload.model.bounded import BoundedDict
from peerload.model.gossip import Load, MemberStatus
from peerload.model.messages import (
    DECLINES_LASTING,
    Hello,
    Leaving,
    Need,
    Pong,
    decline_subject,
)
from peerload.model.resources import GPU, LoadReport, Placement, PowerCurve, Profile
from peerload.model.timers import GossipTimerKind as Kind
from peerload.policy.api import KnownReport

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState, Mediator
    from peerload.model.gossip import MembershipUpdate
    from peerload.model.messages import DirectoryTold, Identity, Ping
    from peerload.model.resources import Device
    from peerload.model.task import Exit, TaskSpec
    from peerload.policy.api import Reported, Said


AHEAD_MAX = 1000
"""Bound on how far reports about a node by others may be ahead of its own report; beyond it, its own replaces them."""


class ReceivedReport(msgspec.Struct, frozen=True, gc=False):
    """A report and the boot time of its arrival; by_itself: sent by the node that it is about."""

    report: LoadReport
    at_s: float
    by_itself: bool = True

    def is_superseded_by(self, other: ReceivedReport, incarnation: int) -> bool:
        """True if ``other`` replaces this report: the newest (incarnation, sequence) wins, but reports by others never
        block the node's own for long. incarnation: of the node's current run."""
        mine, its = self.report, other.report
        if its.incarnation == mine.incarnation:
            if its.sequence > mine.sequence:
                return True
        elif its.incarnation > mine.incarnation:
            return True
        if self.by_itself or not other.by_itself or its.incarnation != incarnation:
            return False
        return mine.incarnation > its.incarnation or mine.sequence > its.sequence + AHEAD_MAX


ELIGIBLE_KEPT_MAX = 1024
"""Distinct needs whose eligible nodes are cached."""


class NamesWithout(Sequence[str]):
    """Names in order without one of them, as a view; membership is found by bisection."""

    __slots__ = ("_all", "_count", "_skipped")

    def __init__(self, names: tuple[str, ...], without: str = "") -> None:
        self._all = names
        place = bisect_left(names, without)
        self._skipped = place if place < len(names) and names[place] == without else len(names)
        self._count = len(names) - (self._skipped < len(names))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        if index < 0:
            index += self._count
            if index < 0:
                raise IndexError(index)
        return self._all[index if index < self._skipped else index + 1]

    def __iter__(self) -> Iterator[str]:
        return chain(self._all[: self._skipped], self._all[self._skipped + 1 :])

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        place = bisect_left(self._all, name)
        return place < len(self._all) and self._all[place] == name and place != self._skipped


CHANGES_KEPT_MAX = 1024
"""Changes of a table of reports that are remembered, for caches that follow it."""


class NamesThat(Sequence[str]):
    """Lazily filtered names: the test runs only for the names that are accessed. A name without a report passes."""

    __slots__ = ("_found", "_passes", "all")

    def __init__(self, names: Sequence[str], passes: Callable[[str], bool]) -> None:
        self.all = names
        self._passes = passes
        self._found: tuple[str, ...] | None = None

    def _names(self) -> tuple[str, ...]:
        if self._found is None:
            self._found = tuple(filter(self._passes, self.all))
        return self._found

    def __len__(self) -> int:
        return len(self._names())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self._names()[index]

    def __contains__(self, name: object) -> bool:
        return name in self.all and self._passes(str(name))

    def among(self, names: Container[str]) -> Iterator[str]:
        """Nodes of this set that are also among ``names``."""
        return filter(self._passes, filter(names.__contains__, self.all))


def _among(nodes: Sequence[str], names: Container[str]) -> Iterator[str]:
    """Intersection of ``nodes`` and ``names``, in the order of ``nodes``."""
    return nodes.among(names) if isinstance(nodes, NamesThat) else filter(names.__contains__, nodes)


def _besides(nodes: Iterable[str], *names: Container[str]) -> Iterator[str]:
    """``nodes`` without ``names``, in the order of ``nodes``."""
    for others in names:
        nodes = filterfalse(others.__contains__, nodes)
    return iter(nodes)


class ReportTable:
    """The newest report of each peer, in the order of arrival, and the names of peers that accept tasks and that give
    tasks. oldest_s: lower bound on their arrival; changed: names of the last changed reports; changes: count of all."""

    __slots__ = ("accepting", "by_name", "changed", "changes", "giving", "oldest_s")

    def __init__(self) -> None:
        self.by_name: dict[str, ReceivedReport] = {}
        self.accepting: set[str] = set()
        self.giving: set[str] = set()
        self.oldest_s = math.inf
        self.changed: deque[str] = deque(maxlen=CHANGES_KEPT_MAX)
        self.changes = 0

    def put(self, node: str, received: ReceivedReport) -> None:
        self.by_name.pop(node, None)  # so that the oldest arrival stays first
        self.by_name[node] = received
        self.oldest_s = min(self.oldest_s, received.at_s)
        report = received.report
        (self.accepting.add if report.accepts else self.accepting.discard)(node)
        (self.giving.add if report.gives else self.giving.discard)(node)
        self.changed.append(node)
        self.changes += 1

    def drop(self, node: str) -> None:
        self.by_name.pop(node, None)
        self.accepting.discard(node)
        self.giving.discard(node)
        self.changed.append(node)
        self.changes += 1

    def changed_since(self, changes: int) -> Iterator[str] | None:
        """The names whose reports have changed since ``changes``; None if that is too long ago."""
        number = self.changes - changes
        if not number:
            return iter(())
        return islice(reversed(self.changed), number) if number <= len(self.changed) else None


LOADS_KEPT = 1024
"""Load indexes whose parts are cached: usually small numbers of tasks per slot."""
FINEST = 1 << 1074
"""Every load index is a whole multiple of 1 / FINEST."""


class LoadTotal:
    """Exact sum of the load indexes that a node's peers have reported, updated by the changed reports.

    It counts in multiples of 1 / FINEST, so that neither the order of reports nor replaced reports affect it.
    """

    __slots__ = ("_counted", "_oldest_s", "_parts", "_peers", "_seen", "_total")

    def __init__(self) -> None:
        self._peers: Sequence[str] | None = None
        self._seen = 0, 0
        self._parts: dict[str, int | None] = {}
        """Load index of each peer in multiples of 1 / FINEST; None: the peer has no valid report."""
        self._total = self._counted = 0
        self._oldest_s = math.inf

    def mean(
        self, own_load: float, peers: Sequence[str], membership: Membership, tables: tuple[ReportTable, ReportTable]
    ) -> float:
        """Mean load index over this node and the peers that have reported theirs."""
        own, announced = tables
        heard, told = own.changed_since(self._seen[0]), announced.changed_since(self._seen[1])
        if self._peers is not peers or heard is None or told is None or membership.is_older(self._oldest_s):
            self._peers, self._total, self._counted, self._oldest_s = peers, 0, 0, math.inf
            self._parts = dict.fromkeys(peers)
            names: Iterable[str] = peers
        else:
            names = filter(self._parts.__contains__, chain(heard, told))
        self._seen = own.changes, announced.changes
        for name in names:
            before, newest = self._parts[name], membership.believed(name)
            now = None if newest is None else _parts(newest.report.load)
            if now != before:
                self._parts[name] = now
                self._total += (now or 0) - (before or 0)
                self._counted += (now is not None) - (before is not None)
            if newest is not None and newest.at_s < self._oldest_s:
                self._oldest_s = newest.at_s
        return (self._total + _parts(own_load)) / FINEST / (self._counted + 1)


@lru_cache(LOADS_KEPT)
def _parts(load: float) -> int:
    numerator, denominator = load.as_integer_ratio()  # a power of 2
    return numerator << (FINEST.bit_length() - denominator.bit_length())


class Directory:
    """All nodes by name, which never change. announced: the report that each has announced last.

    Real nodes meet one by one, and each stores all others: N² entries in all. N nodes in one process that were
    introduced at the start share one directory instead, and each stores only what it has received since. A member's
    announcement is in the directory once; only the nodes that act on it have to be notified (`Sharing.acts_on`).
    """

    __slots__ = ("_eligible", "announced", "members", "names")

    def __init__(self, members: Iterable[tuple[Identity, Profile]]) -> None:
        self.members: Mapping[str, tuple[Identity, Profile]] = {
            identity.node: (identity, profile) for identity, profile in members
        }
        self.names = tuple(sorted(self.members))
        self.announced = ReportTable()
        self._eligible: dict[tuple[Need, str], tuple[str, ...]] = {}

    def eligible(self, need: Need, home: str) -> tuple[str, ...]:
        """The members that could ever run this, by name."""
        key = (need, home if need.placement.local else "")
        found = self._eligible.get(key)
        if found is None:
            profiles = ((name, profile) for name, (_, profile) in self.members.items() if not profile.drained)
            fits = {name for name, profile in profiles if not why_never(profile, need.request, need.placement, home)}
            found = tuple(name for name in self.names if name in fits)
            if len(self._eligible) >= ELIGIBLE_KEPT_MAX:
                self._eligible.clear()
            self._eligible[key] = found
        return found


NOBODY = Directory(())
"""The directory of a node that meets its peers one by one."""


COMMANDS_MAX = 1024
"""Bound on remembered commands that have failed fast; the oldest are forgotten first."""
NODES_MAX = 1024
"""Bound on nodes with counters; the oldest are forgotten first."""
TRANSIENT = ("room", "busy", "cannot")
"""Codes of declines that the circuit breaker counts; the others follow from facts that are, or will soon be, in the
node's profile."""
FAILED_ON_MANY = ""
"""Placeholder for the node of a command that has failed fast on several nodes."""


class CircuitBreaker:
    """Circuit breaker of one home for peers that attract tasks without running them: they refuse what they said they
    would take, or fail every task (P4).

    A node that leaves refusals_max offers of this home in a row unanswered, or refuses them though it advertises that
    it takes such tasks, is skipped for skip_s. (One that refuses because it is full is only late: others were faster.)
    The same holds for a node on which fast_failures_max tasks in a row have failed within fast_failure_s. The cause may
    be the command: if it fails fast on a second node as well, its failures on the first no longer count. A node is not
    skipped if no other could run the task.

    eligible: the cached eligible nodes, cleared whenever a node is skipped or no longer skipped.
    """

    def __init__(self, state: CoreState, eligible: dict[Need, NamesWithout]) -> None:
        self._state = state
        self._refusals: BoundedDict[str, int] = BoundedDict(NODES_MAX)
        self._failures: BoundedDict[str, dict[bytes, int]] = BoundedDict(NODES_MAX)
        self._failed_on: BoundedDict[bytes, str] = BoundedDict(COMMANDS_MAX)
        self._skipped: dict[str, tuple[float, str]] = {}
        self._eligible = eligible

    def is_any(self) -> bool:
        """True if any node is skipped now (the common case is no)."""
        if not self._skipped:
            return False
        now_s = self._state.now.boot_s
        over = [node for node, (until_s, _) in self._skipped.items() if until_s <= now_s]
        for node in over:
            del self._skipped[node]
        if over:
            self._eligible.clear()
        return bool(self._skipped)

    def why(self, node: str) -> str:
        """The reason why this node is skipped now; "" if it is not."""
        return self._skipped[node][1] if self._skipped and self.is_any() and node in self._skipped else ""

    def accepted(self, node: str) -> None:
        self._refusals.pop(node, None)

    def started_anew(self, node: str) -> None:
        """Handle another start of the node: forget the failures of the last run."""
        self._refusals.pop(node, None)
        self._failures.pop(node, None)
        if self._skipped.pop(node, None) is not None:
            self._eligible.clear()

    def declined(self, node: str, code: str, *, accepts: bool) -> None:
        """Record a declined offer. ``accepts``: the node advertises that it takes such tasks."""
        if accepts and code in TRANSIENT:
            self.unanswered(node)

    def unanswered(self, node: str) -> None:
        count = self._refusals[node] = self._refusals.get(node, 0) + 1
        if count >= self._state.config.refusals_max:
            self._refusals[node] = count - 1  # after the pause, one more is enough
            self._skip(node, f"it refused {count} offers in a row, or did not answer them")

    def ended(self, node: str, spec: TaskSpec, exit_: Exit) -> None:
        """Record the end of a task that ran on that node."""
        if exit_.exit_code == 0 or exit_.ended_at - exit_.started_at >= self._state.config.fast_failure_s:
            self._failures.pop(node, None)
            return
        command = command_keys(spec.argv, spec.directory)[0]
        if not self._is_on_this_alone(command, node):
            return
        failures = self._failures[node] = self._failures.get(node) or {}
        failures[command] = failures.get(command, 0) + 1
        count = sum(failures.values())
        if count >= self._state.config.fast_failures_max:
            failures[command] -= 1  # as above
            limit_s = self._state.config.fast_failure_s
            self._skip(node, f"{count} tasks in a row failed there within {limit_s:g} s each")

    def _is_on_this_alone(self, command: bytes, node: str) -> bool:
        """Remember where a command failed fast. False if it also did on another node: the node is not the cause."""
        first = self._failed_on[command] = self._failed_on.get(command, node)
        if first == node:
            return True
        self._failed_on[command] = FAILED_ON_MANY
        for failures in self._failures.values():
            failures.pop(command, None)
        return False

    def _skip(self, node: str, because: str) -> None:
        if node == self._state.node:
            return
        is_new = node not in self._skipped
        skip_s = self._state.config.skip_s
        self._skipped[node] = self._state.now.boot_s + skip_s, f"skipped for {skip_s:g} s: {because}"
        if is_new:
            self._state.note("node", "skipped", node=node, reason=because)
            self._state.broken(rules.CLAIMS_HARMLESS, node, because)
            self._eligible.clear()


class OwnProfile:
    """Profile of this node. Each change makes another version, which peers fetch after the next report, or immediately
    if the caller announces it."""

    def __init__(self, state: CoreState, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self._troubles: dict[str, str] = {}

    def change(self, **changes: object) -> None:
        profile = self._state.profile
        if isinstance(power := changes.get("power"), PowerCurve):
            changes["power"] = self._state.config.limited(power)
        profile = msgspec.structs.replace(profile, version=profile.version + 1, **changes)
        self._state.profile = profile
        self._ledger.set_profile(profile)

    def set_devices(self, devices: tuple[Device, ...]) -> None:
        self._ledger.devices.set_devices(devices)
        self.change(devices=self._ledger.devices.advertised(), gpus=sum(device.kind == GPU for device in devices))

    def trouble(self, what: str, words: str) -> None:
        """Set the problem (``words``) that this node has with ``what``; "" clears it."""
        troubles = {name: said for name, said in self._troubles.items() if name != what} | (
            {what: words} if words else {}
        )
        if troubles != self._troubles:
            self._troubles = troubles
            self.change(trouble=", ".join(troubles.values()))


NEWS_S = 3600.0
"""Age above which a death or departure is no event: each new or restarted node learns of all of them."""
LEAVING_SAID_MAX = 16
"""Members that are notified over the peer link that this node stops, besides gossip: without datagrams the others
declare it dead until they exchange everything with one of these."""

STALLED_MEMORY_S = 3.0
"""A decline because a file system did not answer is remembered only this long: it may answer again at any moment."""


class Membership:
    """The peers by name: ``_peers`` has those with messages to this node, ``_directory`` the rest.

    has_bus: a broker is connected."""

    def __init__(self, state: CoreState, mediator: Mediator) -> None:
        self._state = state
        believed_s = getattr(state.policies.information, "believed_s", state.config.report_age_s_max)
        self._believed_s = min(believed_s, state.config.report_age_s_max)
        self._peers: dict[str, PeerInfo] = {}
        self._directory = NOBODY
        self._announced = NOBODY.announced
        self._met_s = 0.0
        self._names: Sequence[str] = ()
        self._reports = ReportTable()
        self._load_total = LoadTotal()
        self._eligible: dict[Need, NamesWithout] = {}
        self._declined: dict[tuple[str, str, bytes], float] = {}
        self._devices_freed_s: BoundedDict[str, float] = BoundedDict(NODES_MAX)
        self._back: list[str] = []
        self.has_bus = False
        self._told_itself = state.profile.version, state.identity.boot
        self._mediator = mediator
        self.gossip = Gossip(state, self)
        self.circuit_breaker = CircuitBreaker(state, self._eligible)
        self.waking = Waking(state, self._peers)
        self.profiles = Profiles(self.gossip.shared, self._peers, self._eligible)

    def __iter__(self) -> Iterator[PeerInfo]:
        yield from self._peers.values()
        for name in NamesWithout(self._directory.names, without=self._state.node):
            if name not in self._peers:
                yield self._listed(name)

    def get(self, node: str) -> PeerInfo | None:
        """Peer of this name in any state; read-only."""
        peer = self._peers.get(node)
        return self._listed(node) if peer is None and self._is_listed(node) else peer

    def profile(self, node: str) -> Profile | None:
        """Profile of a peer, as far as known; None if there is no such peer."""
        peer = self._peers.get(node)
        if peer is not None:
            return peer.profile
        return self._directory.members[node][1] if self._is_listed(node) else None

    def has_any(self) -> bool:
        """True if any peer was ever met."""
        return bool(self._names)

    def is_usable(self, node: str) -> bool:
        """True if probes and offers may go there."""
        peer = self._peers.get(node)
        if peer is None:
            return self._is_listed(node) and not self._directory.members[node][1].drained
        return peer.state is PeerState.ALIVE and not peer.profile.drained

    def report(self, node: str) -> KnownReport | None:
        """The newest report of a peer, unless it has expired."""
        received = self.believed(node)
        return KnownReport(received.report, self._state.now.boot_s - received.at_s) if received is not None else None

    def believed(self, node: str) -> ReceivedReport | None:
        """Newest valid report of a node, as `report`, with the time of its arrival."""
        received, announced = self._reports.by_name.get(node), self._announced.by_name.get(node)
        if received is None:
            received = announced
            if received is None:
                return None
        elif announced is not None and received.report.sequence < announced.report.sequence:
            received = announced  # all members of a directory are in their first run
        return received if self._state.now.boot_s - received.at_s <= self._believed_s else None

    def is_older(self, at_s: float) -> bool:
        """True if a report of that time has expired."""
        return self._state.now.boot_s - at_s > self._believed_s

    def load_mean(self, own_load: float, peers: Sequence[str]) -> float:
        """Mean load index over this node and those peers whose newest report has not expired."""
        return self._load_total.mean(own_load, peers, self, (self._reports, self._announced))

    def task_ended(self, node: str, spec: TaskSpec, exit_: Exit) -> None:
        """Record that a task of this home has ended on a peer: its last report on its devices may be outdated."""
        self.circuit_breaker.ended(node, spec, exit_)
        if spec.request.takes_devices:
            self._devices_freed_s[node] = self._state.now.boot_s

    def report_of_devices(self, node: str) -> LoadReport | None:
        """The newest report of a peer, if its part about devices is still valid."""
        known = self.report(node)
        told_s = self._state.now.boot_s - known.age_s if known is not None else 0.0
        return known.report if known is not None and told_s > self._devices_freed_s.get(node, -math.inf) else None

    def reports(
        self, nodes: Iterable[str], age_s_max: float = math.inf, wanted: Said | None = None
    ) -> Iterator[tuple[str, LoadReport]]:
        """The newest report of each of these peers, unless it is older than age_s_max or has expired; only those with
        the flag ``wanted``."""
        now_s, age_s_max = self._state.now.boot_s, min(age_s_max, self._believed_s)
        heard, announced = self._reports.by_name.get, self._announced.by_name.get
        for node in nodes:
            received, published = heard(node), announced(node)
            if received is None:
                received = published
                if received is None:
                    continue
            elif published is not None and received.report.sequence < published.report.sequence:
                received = published
            report = received.report
            if now_s - received.at_s <= age_s_max and (wanted is None or getattr(report, wanted)):
                yield node, report

    def reporting(self, nodes: Sequence[str], wanted: Reported) -> list[str]:
        """Peers among ``nodes`` whose newest report has the flag ``wanted`` and has not expired."""
        own, announced = self._reports, self._announced
        if wanted != "nothing":
            return [node for node, _ in self.saying(nodes, wanted)]
        names = nodes.all if isinstance(nodes, NamesThat) else nodes
        if self.is_older(min(own.oldest_s, announced.oldest_s)):
            return list(_besides(names, {node for node, _ in self.reports(names)}))
        return list(_besides(names, own.by_name, announced.by_name))

    def saying(
        self, nodes: Sequence[str], wanted: Said, age_s_max: float = math.inf
    ) -> Iterator[tuple[str, LoadReport]]:
        """Reports, as `reports`, of the peers whose newest report has the flag ``wanted``."""
        own, announced = self._reports, self._announced
        names = own.accepting | announced.accepting if wanted == "accepts" else own.giving | announced.giving
        return self.reports(_among(nodes, names), age_s_max, wanted)

    def last_report(self, node: str) -> ReceivedReport | None:
        """The newest report of a peer, of any age."""
        return self._reports.by_name.get(node)

    # -- this node itself ----------------------------------------------------------------------------------------------

    def start(
        self,
        known: Sequence[Identity],
        seeds: Sequence[str],
        asleep: Sequence[Profile],
        gone: Sequence[MembershipUpdate] = (),
    ) -> None:
        """Search for the members of earlier starts, and for nodes at these addresses. asleep: members that were asleep,
        whose profiles perhaps no other member can report; gone: members that had left or were forgotten, so that late
        updates do not revive them."""
        for rumour in gone:
            self.gossip.update_received(rumour, self._state.node, spread=False)
        self.gossip.anti_entropy.bury()
        self.gossip.anti_entropy.start(known, seeds)
        identities = {identity.node: identity for identity in known}
        for profile in asleep:
            if (identity := identities.get(profile.node)) is not None:
                rumour = msgspec.structs.replace(rumour_of(identity, profile, 0), standing=MemberStatus.ASLEEP)
                self.gossip.update_received(rumour, identity.node, spread=False)
                if (peer := self._own(identity.node)) is not None:
                    self.profiles.has(peer, profile, is_new=False)

    def announce_load(self, report: LoadReport) -> None:
        """Announce this node's load by gossip, unless a broker carries it; and its profile, if it has changed."""
        itself = self._state.profile.version, self._state.identity.boot
        if itself != self._told_itself:
            self._told_itself = itself
            self.gossip.announce_change()
        if not self.has_bus:
            self.gossip.spread_load(report)

    def leave(self) -> None:
        """Announce that this node leaves on purpose. A sleeping node has announced that already."""
        if self.gossip.own.standing is MemberStatus.ASLEEP:
            return
        alive = [node for node in self._names if (peer := self.get(node)) is not None and peer.state is PeerState.ALIVE]
        informed = alive if len(alive) <= LEAVING_SAID_MAX else self._state.rng.sample(alive, LEAVING_SAID_MAX)
        for node in informed:
            self._state.send(node, Leaving())
        self.gossip.leave()

    def hello(self, report: LoadReport) -> Hello:
        return Hello(self._state.identity, self._state.profile, report, refutation=self.gossip.refutation)

    # -- received ------------------------------------------------------------------------------------------------------

    def meet_all(self, directory: Directory) -> None:
        """Add all these members, which may include this node. Call it only before any other member is added."""
        self._directory = directory
        self._announced = directory.announced
        self._met_s = self._state.now.boot_s
        self._names = NamesWithout(directory.names, without=self._state.node)
        self._eligible.clear()

    def meet(
        self,
        identity: Identity,
        profile: Profile,
        report: LoadReport | None,
        *,
        refutation: int = 0,
        in_person: bool = True,
    ) -> bool:
        """Handle the introduction of a peer, ``in_person`` over its own link, else over a broker. True if it is new
        here, or a known peer has restarted."""
        node = identity.node
        if node == self._state.node:
            return False
        known = self.get(node)
        is_new = known is None or known.identity.boot != identity.boot
        if known is not None and known.was_later_than(identity):
            self._met_earlier(known, identity, in_person=in_person)
            return False
        if not self._is_listed(node):  # no gossip about members of a directory
            was_back = list(self._back)
            self.gossip.update_received(rumour_of(identity, profile, refutation), node, spread=in_person)
            self._back = was_back  # the caller handles this
        peer = self._own(node)
        if peer is None:
            self._state.count(metrics.PEERS_REFUSED)
            return False
        if self._is_listed(node):
            self._become(peer, PeerState.ALIVE, "met")
        if is_new:
            self._reports.drop(node)
            self.circuit_breaker.started_anew(node)
        peer.identity = identity
        self.profiles.has(peer, profile, is_new=is_new)
        if in_person:
            peer.introduced(identity)
            if profile.version < peer.profile.version:  # a late message, or others were wrong: ask the node
                self.profiles.want(node, node)
            peer.heard_s = self._state.now.boot_s
            self.gossip.anti_entropy.linked(node)
        if report is not None:
            self.report_received(node, report)
        return is_new

    def _met_earlier(self, known: PeerInfo, identity: Identity, *, in_person: bool) -> None:
        """Handle the introduction of an earlier start than the known one: a late message, unless that start was never
        seen; then the node has an older database."""
        if in_person and identity.boot != known.identity.boot and identity.boot not in known.boots:
            self._mediator.peer_came_back_older(identity.node)

    def heard_from(self, node: str) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            peer.heard_s = self._state.now.boot_s
            if peer.state is not PeerState.ALIVE:
                self.gossip.heard_from(node)

    def report_received(self, node: str, report: LoadReport, age_s: float = 0.0, *, by_itself: bool = True) -> bool:
        """Record a load report of a peer, ``age_s`` old, from itself or another. True if it replaces the earlier
        one."""
        reports, state = self._reports, self._state
        known, received = reports.by_name.get(node), ReceivedReport(report, state.now.boot_s - age_s, by_itself)
        if known is None:
            if node not in self._peers and not self._is_listed(node):
                return False
            if len(reports.by_name) >= state.config.reports_kept_max:
                reports.drop(next(iter(reports.by_name)))
        elif not known.is_superseded_by(received, self._peers[node].identity.incarnation if node in self._peers else 0):
            return False
        reports.put(node, received)
        return True

    def load_heard(self, load: Load, src: str) -> bool:
        """Store the load of a peer that ``src`` has passed on by gossip, and act on it. → True if it is new."""
        report = load.report()
        is_news = self.report_received(load.node, report, load.age_s, by_itself=src == load.node)
        if is_news:
            self._mediator.report_met(load.node, report)
        return is_news

    def own_load(self) -> LoadReport:
        return self._mediator.own_report()

    def unreachable(self, node: str) -> None:
        """Handle a link to a peer that broke or could not be made."""
        self.gossip.unreachable(node)

    def left(self, node: str) -> None:
        member = self.gossip.shared.members.get(node)
        if member is not None:
            rumour = msgspec.structs.replace(member.rumour, standing=MemberStatus.LEFT, by=())
            self.gossip.update_received(rumour, node)
        elif (peer := self._own(node)) is not None:
            self._become(peer, PeerState.LEFT, "it said good-bye")

    def shut_out(self, node: str) -> None:
        """Record that a peer was revoked: this start of it never runs a task again."""
        self.gossip.anti_entropy.known.pop(node, None)
        peer = self._peers.get(node)
        if peer is not None:
            peer.boot_shut_out = peer.identity.boot

    def forget(self, node: str) -> bool:
        """Drop a node that its operator declares gone for good, here and everywhere; also a member of an earlier start
        that was not met since. False if it is unknown or alive."""
        peer = self._peers.get(node)
        if peer is not None and peer.state in (PeerState.ALIVE, PeerState.SUSPECT):
            return False
        return self.gossip.forget(node)

    def back(self) -> list[str]:
        """Peers that gossip reported as returned or restarted since the last call."""
        back, self._back = self._back, []
        return back

    # -- calls from gossip ---------------------------------------------------------------------------------------------

    def member_changed(self, was: MembershipUpdate | None, now: MembershipUpdate, src: str) -> None:
        """Record a changed belief about a peer. src: the sender of the update; this node's name: from its own store."""
        node = now.node
        if now.standing is MemberStatus.FORGOTTEN:
            self._forgotten(node, was, src)
            return
        peer = self._own(node) or self._added(now)
        is_new_run = was is None or was.boot != now.boot
        if is_new_run or now.incarnation != peer.identity.incarnation or now.address != peer.identity.address:
            if now.boot != peer.identity.boot:
                self._reports.drop(node)
                peer.knows_profile = False  # the new run may have another profile
            peer.identity = identity_of(now)
        state = STATE_OF_STATUS[now.standing]
        is_back = state is PeerState.ALIVE and (is_new_run or peer.state in (PeerState.DEAD, PeerState.ASLEEP))
        reason = _reason(now, is_new=was is None)
        if was is None and self._is_history(peer, state, src):
            return
        if is_new_run and peer.state is state:  # the same state, but a new or restarted node
            self._state.note("node", state.value, node=node, reason=reason)
        self._become(peer, state, reason)
        if is_back:
            self._back.append(node)
        is_wakeable = state in (PeerState.ALIVE, PeerState.ASLEEP)
        if is_wakeable and (not peer.knows_profile or peer.profile.version < now.profile_version):
            self.profiles.want(node, src)
        elif not is_wakeable:
            self.profiles.have(node)
            if state is PeerState.DEAD and was is not None and was.standing is not now.standing:
                self._mediator.peer_died(node)

    def _added(self, now: MembershipUpdate) -> PeerInfo:
        peer = self._peers[now.node] = PeerInfo(identity_of(now), None, self._state.now.boot_s)
        self._names = sorted([*self._names, now.node])
        return peer

    def _is_history(self, peer: PeerInfo, state: PeerState, src: str) -> bool:
        """Date a peer that was lost before it was known here. True if that is no event: known at start, or too old."""
        if state not in (PeerState.DEAD, PeerState.LEFT):
            return False
        peer.heard_s = peer.since_s = self.gossip.shared.members[peer.identity.node].since_s
        if src != self._state.node and self._state.now.boot_s - peer.since_s <= NEWS_S:
            return False
        peer.state = state
        return True

    def _forgotten(self, node: str, was: MembershipUpdate | None, src: str) -> None:
        if was is not None or not src:  # otherwise the node was not known here
            has_left = was is not None and was.standing is MemberStatus.LEFT
            self._state.note(
                "node", "forgotten", node=node, reason="it had left" if has_left else "an operator said so"
            )
        self.member_forgotten(node)
        self._state.actions.append(ForgetPeer(node))

    def loads(self) -> Iterator[Load]:
        now_s = self._state.now.boot_s
        for node, received in self._reports.by_name.items():
            if self.is_usable(node):
                yield Load.of(node, received.report, max(now_s - received.at_s, 0.0))

    def has_room_for_member(self) -> bool:
        """True if there is space for one more peer; the peer lost longest ago is dropped if necessary."""
        if len(self._names) < self._state.config.peers_max:
            return True
        gone = [peer for peer in self._peers.values() if peer.state in (PeerState.DEAD, PeerState.LEFT)]
        if not gone:
            return False
        node = min(gone, key=lambda peer: (peer.since_s, peer.identity.node)).identity.node
        self.gossip.drop(node)
        self.member_forgotten(node)
        return True

    def member_forgotten(self, node: str) -> None:
        """Drop everything about a peer that is no longer a member."""
        if self._peers.pop(node, None) is not None:
            self._names = [name for name in self._names if name != node]
            self._reports.drop(node)
            self.profiles.have(node)
            self.waking.forgotten(node)
            self._eligible.clear()

    def timer(self, kind: Kind, subject: str) -> None:
        if kind is Kind.PROFILES:
            self.gossip.shared.expired_s(kind, subject)
            self.profiles.ask()
        else:
            self.gossip.timer(kind, subject)

    # -- requests over the peer link -----------------------------------------------------------------------------------

    def pinged(self, src: str, ping: Ping, report: LoadReport) -> None:
        self._state.send(src, Pong(ping.sequence, report))

    # -- eligible nodes ------------------------------------------------------------------------------------------------

    def eligible(self, need: Need, home: str) -> Sequence[str]:
        """Usable peers that could ever run this, by name, without those that are skipped, unless no others
        exist."""
        is_any_skipped = self.circuit_breaker.is_any()  # updates the skipped nodes first
        key = need if not need.migrations else Need(need.request, need.placement)
        found = self._eligible.get(key)
        if found is None:
            found = self._eligible_now(key, home)
            left = tuple(name for name in found if not self.circuit_breaker.why(name)) if is_any_skipped else ()
            if left:
                found = NamesWithout(left, self._state.node)
            if len(self._eligible) >= ELIGIBLE_KEPT_MAX:
                self._eligible.clear()
            self._eligible[key] = found
        return found

    def _eligible_now(self, need: Need, home: str) -> NamesWithout:
        listed = self._directory.eligible(need, home)
        if not self._peers:
            return NamesWithout(listed, without=self._state.node)
        own = (
            name
            for name, peer in self._peers.items()
            if self.is_usable(name) and not why_never(peer.profile, need.request, need.placement, home)
        )
        return NamesWithout(
            tuple(sorted([*own, *(name for name in listed if name not in self._peers)])), self._state.node
        )

    def could_ever(self, spec: TaskSpec, home: str) -> bool:
        """True if any peer could ever run this task. Peers that are silent, drained, not met since this agent's start,
        or whose file system does not answer count; peers that have left or are shut out do not."""
        return bool(self.unmet(spec.placement, home)) or any(
            peer.state is not PeerState.LEFT and not peer.is_shut_out and not self.never_there(peer, spec, home)
            for peer in self
        )

    def never_there(self, peer: PeerInfo, spec: TaskSpec, home: str) -> str:
        """The reason why a peer could never run this task, as far as known; "" if it could."""
        why = why_never(peer.profile, spec.request, spec.placement, home) if peer.knows_profile else ""
        if not why and self.declined_code(peer.identity.node, spec) != "stalled":
            why = self.why_declines(peer.identity.node, spec)
        return why

    def unmet(self, placement: Placement, home: str) -> list[str]:
        """The members of earlier starts, not met since, that this placement allows, by name; of unknown resources."""
        known = self.gossip.anti_entropy.known
        if not known or placement.local:
            return []
        return sorted(
            node for node in known if placement.node in (None, node) and node not in placement.exclude and node != home
        )

    def could_run(self, need: Need, home: str) -> list[str]:
        """The usable peers whose profile fits, by name; unlike `eligible`, without side effects."""
        fits = (
            peer.identity.node
            for peer in self
            if self.is_usable(peer.identity.node) and not why_never(peer.profile, need.request, need.placement, home)
        )
        return sorted(fits)

    def directory_answered(self, node: str, published: DirectoryTold) -> None:
        """Record a peer's answer whether it runs tasks of a user in a directory."""
        if published.code in DECLINES_LASTING:
            self.remember_decline(node, published.code, decline_subject(published.code, published))
        elif not published.code:
            for code in DECLINES_LASTING:
                self._declined.pop((node, code, decline_subject(code, published)), None)

    def remember_decline(self, node: str, code: str, subject: bytes) -> None:
        """Remember a decline for a lasting reason: do not probe for it again for a while."""
        now_s = self._state.now.boot_s
        lasts_s = STALLED_MEMORY_S if code == "stalled" else self._state.config.decline_memory_s
        for key in [key for key, until_s in self._declined.items() if until_s < now_s]:
            del self._declined[key]
        if len(self._declined) < self._state.config.declines_remembered_max:
            self._declined[(node, code, subject)] = now_s + lasts_s

    def has_declined(self, node: str, code: str, subject: bytes) -> bool:
        return bool(self._declined) and self._declined.get((node, code, subject), 0.0) > self._state.now.boot_s

    def declined_code(self, node: str, spec: TaskSpec) -> str:
        """The one of `DECLINES_LASTING` with which this node would decline this task, as far as known; "" if none."""
        if not self._declined:
            return ""
        found = (code for code in DECLINES_LASTING if self.has_declined(node, code, decline_subject(code, spec)))
        return next(found, "")

    def will_decline(self, node: str, spec: TaskSpec) -> bool:
        """True if this node recently declined a task for a lasting reason that also applies to this task."""
        return bool(self.declined_code(node, spec))

    def why_declines(self, node: str, spec: TaskSpec) -> str:
        """The reason why this node would decline this task; "" if none is known."""
        directory = spec.directory.decode(errors="replace")
        match self.declined_code(node, spec):
            case "directory":
                return f"no directory {directory} there"
            case "stalled":
                return f"the file system of {directory} does not answer there"
            case "policy":
                return f"its policy runs no tasks of {spec.user or 'this node'}"
            case "cache":
                return "no room in its cache or on its disk for the task's files"
            case "environment":
                return f"it could not build {spec.lock.name if spec.lock is not None else ''}"
            case _:
                return ""

    def missing_directories(self, node: str) -> list[tuple[bytes, str]]:
        """The directories for which this node declines tasks, each with the user whose tasks these are."""
        now_s = self._state.now.boot_s
        subjects = sorted(
            subject
            for (name, code, subject), until_s in self._declined.items()
            if name == node and code == "directory" and until_s > now_s
        )
        parts = (subject.partition(b"\0") for subject in subjects)
        return [(directory, user.decode()) for directory, _, user in parts]

    def any_declined(self) -> bool:
        """True if any refusal is remembered, which is rare."""
        return bool(self._declined)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _is_listed(self, node: str) -> bool:
        return node in self._directory.members and node != self._state.node

    def _listed(self, node: str) -> PeerInfo:
        identity, profile = self._directory.members[node]
        return PeerInfo(identity, profile, self._met_s)

    def _own(self, node: str) -> PeerInfo | None:
        """The peer of this name, for changing it."""
        peer = self._peers.get(node)
        if peer is None and self._is_listed(node):
            peer = self._peers[node] = self._listed(node)
        return peer

    def _become(self, peer: PeerInfo, state: PeerState, reason: str) -> None:
        if peer.state is not state:
            peer.state = state
            self._state.note("node", state.value, node=peer.identity.node, reason=reason)
            peer.since_s = self._state.now.boot_s
            self._eligible.clear()
            if state is PeerState.ALIVE:
                self.waking.is_there(peer.identity.node)
            self._state.count(metrics.labelled(metrics.PEERS_BECAME, state=state.value))


def _reason(now: MembershipUpdate, *, is_new: bool) -> str:
    """The reason for the belief about a peer, in words for people."""
    match now.standing:
        case MemberStatus.ALIVE:
            return "met" if is_new else "heard again"
        case MemberStatus.SUSPECT:
            return f"{', '.join(now.by) or 'a peer'} had no answer"
        case MemberStatus.DEAD:
            return "it did not refute its suspicion in time"
        case MemberStatus.ASLEEP:
            return "it was idle"
        case _:
            return "it said good-bye"
