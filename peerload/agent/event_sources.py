"""What comes in from outside, as the events of the core: from the launcher, the peers, the broker and the disk.

Nothing is decided here. The one rule is order: what the launcher tells before it was asked what it has, or while that
answer waits for its outputs to be on disk, waits behind that answer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from peerload.model import events, metrics
from peerload.model.messages import CertificateRequest, CertificateTold, State, Trust

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from peerload.agent.effects import Performer
    from peerload.agent.parts import Parts
    from peerload.agent.peers.streams import Piece
    from peerload.model.events import Event
    from peerload.model.messages import Envelope, Hello, Identity, Message, OutputRequest

log = logging.getLogger("peerload.agent")


class Incoming:
    """What the parts of one agent call when something comes in. ``performer``: set before anything is started that calls."""

    performer: Performer

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._early: list[Event] | None = []
        """What waits; None: nothing needs to."""

    def from_launcher(self, event: Event) -> None:
        """Into the inbox, ends only with their output on disk; nothing overtakes a launcher's list of what it has."""
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

    # -- LinkOwner: what comes over the peer links -----------------------------------------------------------------------

    def deliver(self, src: str, message: Message) -> None:
        """A message of a peer came."""
        match message:
            case Trust():
                try:
                    self._parts.trust.received(src, message)
                except OSError as error:
                    self._parts.run.fail(f"cannot save the statements of the CA: {error.strerror}")
            case CertificateRequest():
                self._parts.renewal.requested(src)
            case CertificateTold():
                self._parts.renewal.received(src, message)
            case _:
                self.performer.received(src, message)

    def met(self, hello: Hello) -> None:
        """A link to a peer was made."""
        self._parts.trust.met(hello)
        self._parts.links.learn(hello.identity)
        self._parts.members.met(hello)
        self._parts.inbox.put(
            events.PeerMet(hello.identity, hello.profile, hello.report, hello.peers, refutation=hello.refutation)
        )

    def unreachable(self, node: str, reason: str) -> None:
        """The last link to a peer is lost, or none could be made."""
        self._parts.inbox.put(events.PeerUnreachable(node, reason))

    def send_failed(self, dst: str, message: Message) -> None:
        """This message was not sent."""
        self._parts.counters[metrics.PEER_SENDS_FAILED] += 1
        self._parts.inbox.put(events.SendFailed(dst, message))  # type: ignore[arg-type]

    def serve_output(self, src: str, request: OutputRequest) -> AsyncIterator[Piece]:
        """The output of an attempt that ran here."""
        return self._parts.output.serve(src, request)

    def name_taken(self, by: str) -> None:
        """The peer at this address refuses this node, because another agent has its name."""
        self._parts.duplicates.refused(by)

    def copied(self, other: Identity, up_s: float) -> None:
        """An agent with this node's name and database, up for so long, has proven its name."""
        self._parts.duplicates.copy_proven(other, up_s)

    # -- BusOwner: what comes over the broker ----------------------------------------------------------------------------

    def bus_changed(self, *, connected: bool) -> None:
        """A broker can be reached, or no longer."""
        self._parts.inbox.put(events.BusChanged(connected))

    def copy_reported(self, other: Identity) -> None:
        """A message over the broker claims to come from an agent with this node's name and database."""
        if self._parts.duplicates.copy_reported(other):
            self._parts.links.dial_copy(other.address)

    def from_bus(self, envelope: Envelope, *, retained: bool) -> None:
        """Advice came over the broker. It counts if its sender does."""
        del retained
        if not self._parts.trust.trust.admits(envelope.src, envelope.src_boot):
            self._parts.counters[metrics.labelled(metrics.MQTT_MESSAGES_DROPPED, reason="revoked node")] += 1
            self._parts.security.tell("J4", envelope.src, "a message over MQTT, though it was revoked")
            return
        self.performer.heard_on_bus(envelope)
        body = envelope.body
        if isinstance(body, State):
            if body.identity.address:
                self._parts.links.learn(body.identity)
                self._parts.members.changed()
            # However live, it may be late: only a Hello proves that a machine was started anew.
            self._parts.inbox.put(events.PeerMet(body.identity, body.profile, body.report, retained=True))
        else:
            self._parts.inbox.put(events.MessageReceived(envelope.src, body))  # type: ignore[arg-type]
