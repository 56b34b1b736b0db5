"""A peer that is none: a test that speaks the peer protocol over one TLS connection, and may break off anywhere."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Self, TypeVar

from peerload.model.messages import (
    Accept,
    Commit,
    Envelope,
    GiveReply,
    GiveRequest,
    Hello,
    Identity,
    Message,
    Offer,
    Ping,
    Pong,
    ProbeReply,
    ProbeRequest,
    Renew,
    Renewal,
)
from peerload.model.resources import LoadReport, Profile
from peerload.wire import peer
from tests.support import credentials_of

if TYPE_CHECKING:
    from types import TracebackType

MessageT = TypeVar("MessageT")
IDLE = LoadReport(slots=8, accepts=True, incarnation=1, sequence=1)


class FakePeer:
    """Dials an agent, introduces itself and says that it is idle and takes everything. Pings, probes and requests to
    give are answered while it waits for something else. ``certified``: whose certificate it shows, if not its own; ``stream``:
    it dials for a stream; ``at``: where it says that it listens."""

    def __init__(
        self,
        address: str,
        node: str = "ghost",
        *,
        boot: str = "boot",
        report: LoadReport = IDLE,
        certified: str = "",
        stream: bool = False,
        at: str = "",
    ) -> None:
        host, _, port = address.rpartition(":")
        self.node = node
        self.boot = boot
        self.report = report
        self.identity = Identity(node=node, boot=boot, machine_boot="machine", store="store", incarnation=1, address=at)
        self.profile = Profile(node=node, slots=8, cpus=8.0)
        self.peer: Hello | None = None
        self._sequence = 0
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=60)
        self._socket = credentials_of(certified or node).client.wrap_socket(plain)
        self._buffer = b""
        self.send(Hello(self.identity, self.profile, report, stream=stream))
        self.peer = self.expect(Hello)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def hang_up(self) -> None:
        """Break off while another thread waits for a message: it is told that there will be none."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break off."""
        self._socket.close()

    def send(self, message: Message) -> None:
        """Say something."""
        self._sequence += 1
        to = self.peer.identity if self.peer is not None else None
        self._socket.sendall(
            peer.encode_frame(
                Envelope(
                    1,
                    "default",
                    self.node,
                    self.boot,
                    self._sequence,
                    message,
                    to.node if to else "",
                    to.boot if to else "",
                )
            )
        )

    def send_raw(self, raw: bytes) -> None:
        """Say anything."""
        self._socket.sendall(raw)

    def receive(self) -> Message:
        """The next message, whatever it is."""
        size = int.from_bytes(self._read(4), "big")
        return peer.decode(self._read(size)).body

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the agent closed the link")
            self._buffer += data
        raw, self._buffer = self._buffer[:size], self._buffer[size:]
        return raw

    def expect(self, kind: type[MessageT], timeout_s: float = 60.0) -> MessageT:
        """The next message of this kind; others are answered as an idle node would, or dropped."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            message = self.receive()
            if isinstance(message, kind):
                return message
            self._answer(message)
        raise AssertionError(f"no {kind.__name__} within {timeout_s:g} s")

    def _answer(self, message: Message) -> None:
        if isinstance(message, Ping):
            self.send(Pong(message.sequence, self.report))
        elif isinstance(message, ProbeRequest):
            self.send(ProbeReply(message.search, accepts=True, report=self.report))
        elif isinstance(message, GiveRequest):
            self.send(GiveReply(message.search, self.report))

    def accept(self, offer: Offer, nonce: int = 1) -> None:
        """Take an offer."""
        self.send(Accept(offer.task, offer.uid, offer.attempt, nonce, time.clock_gettime(time.CLOCK_BOOTTIME)))

    def accept_and_take(self) -> tuple[Offer, Commit]:
        """Wait for an offer, take it, and wait until it is committed."""
        offer = self.expect(Offer)
        self.accept(offer)
        return offer, self.expect(Commit)

    def renew(self, offer: Offer, started_at: float = 0.0) -> None:
        """Ask for more time."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.send(Renew((Renewal(offer.task, offer.uid, offer.attempt, now_s, started_at),)))
