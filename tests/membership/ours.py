"""The detector of this project, driven in the arena through the one door of its core, `Node.handle`.

What a driver does is done here as the agent does it: datagrams as they are, peer links that are made by a Hello from
either end and break when the other end was started again, timers by name. No task is ever submitted.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from peerload.core.node import Node
from peerload.model import actions, events, timers
from peerload.model.config import CoreConfig
from peerload.model.events import Instant
from peerload.model.gossip import LAN, GossipMessage, GossipPreset, MembershipUpdate
from peerload.model.messages import Hello, Identity
from peerload.model.resources import Profile
from peerload.policy.registry import load_preset
from tests.membership.arena import Believe, Expired, Lagged, Quiet, Received, Say, Wake

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from peerload.model.events import Event
    from peerload.policy.preset import PolicySet
    from tests.membership.arena import Input, Output

DIAL_S = 5.0
"""A link that is not there by then could not be made."""
SEALED_BYTES = 60
"""What sealing adds to a datagram: the sender's name and boot id, counter and tag."""
FRAME_BYTES = 60
"""What an envelope and TLS add to a message on a link."""
WAITING_MAX = 1024
WALL_S = 1_000_000.0

_encode = msgspec.msgpack.Encoder().encode


@functools.cache
def _policies() -> PolicySet:
    """One for all nodes: nobody asks it for anything."""
    return load_preset("adaptive")


class Datagram(msgspec.Struct, frozen=True, gc=False):
    boot: str
    messages: tuple[GossipMessage, ...]


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A message on a peer link, or its first (a Hello), or, with None, the word that the link is no more."""

    boot: str
    message: object


class Peerload:
    """One node: its address is its name."""

    def __init__(self, name: str, run: int, rng: random.Random, preset: GossipPreset = LAN) -> None:
        self.name = name
        self._identity = Identity(name, f"{name}-{run}".ljust(16, "x"), f"{name}-machine", f"{name}-store", run, name)
        profile = Profile(name, 2, 2.0, slots_fixed=True)
        self.node = Node(CoreConfig(gossip=preset), _policies(), self._identity, profile, rng)
        self._links: dict[str, str] = {}
        self._dialled: dict[str, list[object]] = {}
        self._out: list[Output] = []
        membership = self.node.membership
        inner = membership.member_changed

        def changed(was: MembershipUpdate | None, now: MembershipUpdate, src: str) -> None:
            inner(was, now, src)
            if was is None or was.standing is not now.standing:
                self._out.append(Believe(now.node, now.standing.name.lower()))

        membership.member_changed = changed  # type: ignore[method-assign]

    def start(self, now_s: float, seeds: Sequence[str]) -> Sequence[Output]:
        self._out = []
        self._happen(now_s, events.AgentStarted(seeds=tuple(seeds)))
        return self._out

    def drain(self, now_s: float) -> Sequence[Output]:
        """Have this node take no more tasks, which all others are to hear."""
        self._out = []
        self._happen(now_s, events.DrainRequested(1))
        return self._out

    def knows_drained(self, node: str) -> bool:
        peer = self.node.membership.get(node)
        return peer is not None and peer.profile.drained

    def handle(self, now_s: float, given: Input) -> Sequence[Output]:
        self._out = []
        match given:
            case Received(src, Datagram(boot, messages)):
                self._happen(now_s, events.GossipReceived(src, boot, messages, src))
            case Received(src, Frame(boot, message)):
                self._framed(now_s, src, boot, message)
            case Expired(("dial", str(dst))):
                self._not_made(now_s, dst)
            case Expired(timer):
                self._happen(now_s, events.TimerExpired(timers.timer(*map(str, timer))))
            case Lagged(lag_s):
                self._happen(now_s, events.LoopLagged(lag_s))
        return self._out

    def _happen(self, now_s: float, event: Event) -> None:
        for action in self.node.handle(Instant(now_s, WALL_S + now_s), event):
            match action:
                case actions.SendGossip():
                    said = Datagram(self._identity.boot, action.messages)
                    size = len(_encode(action.messages)) + SEALED_BYTES
                    self._out.append(Say(action.address, said, size))
                case actions.SetTimer():
                    self._out.append(Wake(tuple(msgspec.to_builtins(action.timer)), max(0.0, action.at_s - now_s)))
                case actions.ClearTimer():
                    self._out.append(Quiet(tuple(msgspec.to_builtins(action.timer))))
                case actions.Send():
                    self._send(action.dst, action.message)
                case actions.Dial():
                    self._dial(action.identity.node)
                case actions.DialAddress():
                    self._dial(action.address)
                case _:
                    pass

    # -- links ---------------------------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        return self.node.membership.hello(self.node.sharing.shown())

    def _say(self, dst: str, message: object, *, dials: bool = False) -> None:
        size = len(_encode(message)) + FRAME_BYTES
        self._out.append(Say(dst, Frame(self._identity.boot, message), size, connected=True, dials=dials))

    def _send(self, dst: str, message: object) -> None:
        if dst in self._links:
            self._say(dst, message)
            return
        self._dial(dst)
        if len(self._dialled[dst]) < WAITING_MAX:
            self._dialled[dst].append(message)

    def _dial(self, dst: str) -> None:
        if dst not in self._links and dst not in self._dialled:
            self._dialled[dst] = []
            self._out.append(Wake(("dial", dst), DIAL_S))
            self._say(dst, self._hello(), dials=True)

    def _framed(self, now_s: float, src: str, boot: str, message: object) -> None:
        if isinstance(message, Hello):
            if self._links.get(src) != boot:
                self._links[src] = boot
                if src not in self._dialled:
                    self._say(src, self._hello())
            met = events.PeerMet(
                message.identity, message.profile, message.report, message.peers, refutation=message.refutation
            )
            self._happen(now_s, met)
            self._out.append(Quiet(("dial", src)))
            for waiting in self._dialled.pop(src, ()):
                self._say(src, waiting)
        elif message is None:
            if self._links.pop(src, None) is not None:
                self._happen(now_s, events.PeerUnreachable(src, "the link broke"))
        elif self._links.get(src) == boot:
            self._happen(now_s, events.MessageReceived(src, message))  # type: ignore[arg-type]
        else:
            self._say(src, None)

    def _not_made(self, now_s: float, dst: str) -> None:
        for message in self._dialled.pop(dst, ()):
            self._happen(now_s, events.SendFailed(dst, message))  # type: ignore[arg-type]
        self._happen(now_s, events.PeerUnreachable(dst, "it could not be reached"))
