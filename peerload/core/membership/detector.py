"""Probing: one member at a time is pinged, and those that answer nobody are suspected ([SWIM02], [LIFEGUARD17]).

At every second turn it is the next on the ring of names: each node is probed by its neighbour every 2·probe_s whatever
chance does, and a loss waits no longer for its first probe. At the turns between it is the next of all, in an order
drawn anew for each round: however many are lost at once, somebody probes each of them.

A ping without an answer is followed by three helpers' pings and one over the peer link, where no datagram is lost. A
node that was not running itself draws no conclusions from answers it did not hear.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING
from zlib import crc32

from peerload.model import metrics
from peerload.model.gossip import GossipAck, GossipNack, GossipPing, GossipPingRequest
from peerload.model.messages import Ping
from peerload.model.timers import GossipTimerKind as Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.core.membership.gossip_state import GossipState

PROBES_MAX = 64
"""Probes in flight; there are more than one where suspicions are followed up."""
HELPED_MAX = 256
"""Pings in flight on behalf of others."""
NACK_SHARE = 0.8
"""A helper says that it has heard nothing after this share of probe_timeout_s, so that the word is in time."""


class _Probe:
    """One in flight. helpers: those asked, and whether they gave a sign of life."""

    __slots__ = ("helpers", "node", "started_s")

    def __init__(self, node: str, started_s: float) -> None:
        self.node = node
        self.started_s = started_s
        self.helpers: dict[str, bool] = {}


class Detector:
    """``suspect`` is called with a member that has answered nobody."""

    def __init__(self, shared: GossipState, suspect: Callable[[str], None]) -> None:
        self._shared = shared
        self._suspect = suspect
        self._sequence = 0
        self._probes: dict[int, _Probe] = {}
        self._helped: dict[int, tuple[str, str, int]] = {}
        self._order: list[str] = []
        self._is_neighbours_turn = False
        self._stalled_s = float("-inf")
        self._is_stale = False

    @property
    def may_judge(self) -> bool:
        """True if this node has run, and probed, since it last stood still."""
        return not self._is_stale

    # -- whose turn it is ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """There is somebody to probe: begin at a random moment, so that nodes that start together do not beat
        together."""
        shared = self._shared
        if not shared.is_armed(Kind.TURN):
            shared.arm(Kind.TURN, shared.preset.probe_s * shared.rng.random())

    def turn(self) -> None:
        """Every probe_s: probe the next."""
        shared = self._shared
        if not shared.there:
            return
        shared.arm(Kind.TURN, shared.preset.probe_s * shared.health.factor)
        self._is_neighbours_turn = not self._is_neighbours_turn
        self.probe(self._neighbour() if self._is_neighbours_turn else self._next())

    def _neighbour(self) -> str:
        """The next on the ring, where names lie in the order of a checksum, so that racks are mixed."""
        shared = self._shared
        ring = shared.ring
        place = bisect_right(ring, ring_place(shared.core.node))
        return ring[place % len(ring)][1]

    def _next(self) -> str:
        shared = self._shared
        while self._order:
            node = self._order.pop()
            member = shared.members.get(node)
            if member is not None and member.is_there:
                return node
        self._order = list(shared.there)
        shared.rng.shuffle(self._order)
        return self._order.pop()

    def joined(self, node: str) -> None:
        """A new member takes a random place in the rest of this round."""
        if node not in self._order:
            self._order.insert(self._shared.rng.randint(0, len(self._order)), node)

    def gone(self, node: str) -> None:
        """Remove a member from the ring."""
        if node in self._order:
            self._order.remove(node)

    # -- one probe -----------------------------------------------------------------------------------------------------

    def probe(self, node: str) -> None:
        """Ping it, unless that is being done."""
        shared = self._shared
        if len(self._probes) >= PROBES_MAX or any(probe.node == node for probe in self._probes.values()):
            return
        self._sequence += 1
        self._probes[self._sequence] = _Probe(node, shared.now_s)
        self._ping(node, self._sequence)
        shared.arm(Kind.ACK, shared.preset.probe_timeout_s * shared.health.factor, str(self._sequence))

    def _ping(self, node: str, sequence: int, address: str = "") -> None:
        member = self._shared.members.get(node)
        ping = GossipPing(sequence, node)
        if member is not None and member.rumour.standing:  # it is the first to hear what is said of it
            self._shared.send(node, ping, member.rumour, address=address, with_load=True)
        else:
            self._shared.send(node, ping, address=address, with_load=True)

    def unanswered(self, sequence: int) -> None:
        """probe_timeout_s is over: others try, and the peer link."""
        probe = self._probes.get(sequence)
        if probe is None:
            return
        shared = self._shared
        shared.core.count(metrics.INDIRECT_PROBES)
        address = shared.members[probe.node].rumour.address if probe.node in shared.members else ""
        for helper in shared.draw(shared.preset.helpers, without=probe.node):
            probe.helpers[helper] = False
            shared.send(helper, GossipPingRequest(sequence, probe.node, address))
        shared.core.send(probe.node, Ping(sequence))
        shared.arm(Kind.VERDICT, shared.preset.indirect_timeout_s * shared.health.factor, str(sequence))

    def failed(self, sequence: int) -> None:
        """End a probe that failed, indirect probes included."""
        probe = self._probes.pop(sequence, None)
        if probe is None:
            return
        self._concluded(probe)
        silent = sum(not heard for heard in probe.helpers.values())
        if silent or not probe.helpers:
            self._shared.health.worse(max(silent, 1))
        self._shared.core.count(metrics.MEMBER_PROBES_FAILED)
        self._suspect(probe.node)

    def _concluded(self, probe: _Probe) -> None:
        if probe.started_s >= self._stalled_s:
            self._is_stale = False

    # -- answers -------------------------------------------------------------------------------------------------------

    def pinged(self, src: str, ping: GossipPing, address: str) -> None:
        """Answer, if it is this node that is meant."""
        if ping.to == self._shared.core.node:
            self._shared.send(src, GossipAck(ping.sequence), address=address, with_load=True)

    def acked(self, src: str, sequence: int) -> None:
        """Note the answer of a member, to this node or to a helper."""
        helped = self._helped.pop(sequence, None)
        if helped is not None:
            asker, address, asked = helped
            self._shared.disarm(Kind.NACK, str(sequence))
            self._shared.send(asker, GossipAck(asked), address=address)
            return
        probe = self._probes.get(sequence)
        if probe is None or (src != probe.node and src not in probe.helpers):
            return
        del self._probes[sequence]
        self._concluded(probe)
        self._shared.disarm(Kind.ACK, str(sequence))
        self._shared.disarm(Kind.VERDICT, str(sequence))
        self._shared.health.better()

    def nacked(self, src: str, sequence: int) -> None:
        """A helper has heard nothing; but it is there itself."""
        probe = self._probes.get(sequence)
        if probe is not None and src in probe.helpers:
            probe.helpers[src] = True

    # -- helping others ------------------------------------------------------------------------------------------------

    def asked(self, src: str, request: GossipPingRequest, address: str) -> None:
        """Ping somebody on behalf of another."""
        shared = self._shared
        if len(self._helped) >= HELPED_MAX:
            dropped = next(iter(self._helped))
            del self._helped[dropped]
            shared.disarm(Kind.NACK, str(dropped))
        self._sequence += 1
        self._helped[self._sequence] = (src, address, request.sequence)
        self._ping(request.node, self._sequence, request.address)
        shared.arm(Kind.NACK, shared.preset.probe_timeout_s * NACK_SHARE, str(self._sequence))

    def nothing_heard(self, sequence: int) -> None:
        """Say so; an ack that comes later is still passed on."""
        helped = self._helped.get(sequence)
        if helped is not None:
            asker, address, asked = helped
            self._shared.send(asker, GossipNack(asked), address=address)

    # -- standing still ------------------------------------------------------------------------------------------------

    def stalled(self) -> None:
        """This node did not run for a while: what it has not heard proves nothing."""
        shared = self._shared
        if shared.now_s > self._stalled_s + shared.preset.lag_s:
            shared.core.count(metrics.STALLS)
            shared.health.worse()
        self._stalled_s = shared.now_s
        self._is_stale = True
        for sequence in self._probes:
            shared.disarm(Kind.ACK, str(sequence))
            shared.disarm(Kind.VERDICT, str(sequence))
        self._probes.clear()


def ring_place(node: str) -> tuple[int, str]:
    """Position of a name on the ring."""
    return crc32(node.encode()), node
