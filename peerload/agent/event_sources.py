"""What comes in from outside, as the events of the core: from the launcher, the peers, the broker and the disk.

Nothing is decided here. The one rule is order: what the launcher tells before it was asked what it has, or while that
answer waits for its outputs to be on disk, waits behind that answer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from peerload.agent.joining.distribution import WORDS
from peerload.launcher.protocol import StdinFed
from peerload.model import events
from peerload.model.messages import State

if TYPE_CHECKING:
    from peerload.agent.effects import Performer
    from peerload.agent.parts import Parts
    from peerload.model.events import Event
    from peerload.model.messages import Envelope, Hello, Message

log = logging.getLogger("peerload.agent")


class Incoming:
    """What the parts of one agent call when something comes in. ``performer``: set before anything is started that calls."""

    performer: Performer

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._early: list[Event] | None = []
        """What waits; None: nothing needs to."""

    def from_launcher(self, event: Event | StdinFed) -> None:
        """Into the inbox, ends only with their output on disk; nothing overtakes a launcher's list of what it has."""
        if isinstance(event, StdinFed):
            if self._early is None:  # else it is asked again, by `StdinForwarding.adopt`
                self._parts.feeding.fed(event.key, event.offset, is_closed=event.is_closed)
            return
        if self._parts.chores.notices.heard(event) or self._parts.inside.heard(event):
            return
        if isinstance(event, events.LauncherReady):
            event = self._parts.inside.listed(self._parts.chores.notices.listed(event))
        self._take(event)

    def _take(self, event: Event) -> None:
        if self._early is not None:  # AgentStarted or such a list has not been told yet
            self._early.append(event)
        elif isinstance(event, events.LauncherReady):
            self._early = []
            self.performer.settle_listed(event, self.release_early)
        elif isinstance(event, events.TaskEnded):
            self.performer.settle(event)
        else:
            self._parts.inbox.put(event)

    def release_early(self) -> None:
        """What has waited, in the order that it came in."""
        early, self._early = self._early, None
        for event in early or ():
            self._take(event)

    def disk_changed(self, state: str, reason: str) -> None:
        """There is no more room on the disk of the state, or there is again."""
        log.warning("the disk of %s is %s: %s", self._parts.config.state, state, reason)
        self._parts.journal.happened("disk", state, reason=reason)
        self._parts.inbox.put(events.DiskRoomChanged(state == "ok", "" if state == "ok" else f"disk {state}"))

    def from_peer(self, src: str, message: Message) -> None:
        """A message of a peer, over a link."""
        if isinstance(message, WORDS):
            self._parts.trust.received(src, message)
        else:
            self.performer.received(src, message)

    def from_bus(self, envelope: Envelope, retained: bool) -> None:
        """What was heard over the broker; believed only of nodes that are let in."""
        del retained
        if not self._parts.trust.hears(envelope.src, envelope.src_boot):
            self._parts.counters["mqtt dropped: of a node that was shut out"] += 1
            self._parts.security.tell("J4", envelope.src, "a message over MQTT, though it was shut out")
            return
        self.performer.heard_on_bus(envelope)
        body = envelope.body
        if isinstance(body, State):
            if body.identity.address:
                self._parts.links.learn(body.identity)
                self._parts.members.news()
            # However live, it may be late: only a Hello proves that a machine was started anew.
            self._parts.inbox.put(events.PeerMet(body.identity, body.profile, body.report, retained=True))
        else:
            self._parts.inbox.put(events.MessageReceived(envelope.src, body))  # type: ignore[arg-type]

    def met(self, hello: Hello) -> None:
        """A peer has introduced itself on a new link."""
        self._parts.trust.met(hello)
        self._parts.links.learn(hello.identity)
        self._parts.members.news()
        self._parts.peer_facts.met(hello.identity.node, hello.wall_at)
        self._parts.inbox.put(
            events.PeerMet(hello.identity, hello.profile, hello.report, hello.peers, refutation=hello.refutation)
        )

    def send_failed(self, dst: str, message: Message) -> None:
        """This never left."""
        self._parts.counters["peer sends failed"] += 1
        self._parts.inbox.put(events.SendFailed(dst, message))  # type: ignore[arg-type]
