"""What goes between nodes fits through 1280 bytes, whatever stands on the way."""

from __future__ import annotations

import socket

from peerload.agent.peers.links import SEGMENT_BYTES_MAX, _listening
from peerload.model.gossip import MESSAGES_BYTES_MAX, GossipMessage, Load, size_bytes
from peerload.model.resources import LoadReport
from peerload.wire import peer
from peerload.wire.seal import KEY_BYTES, Sealer
from tests.each import each

LEAST_BYTES = 1280
"""Through this every network of IPv6 lets a packet whole, and so does every usual tunnel."""
HEADS_BYTES = 40 + 8
"""Of IPv6 and UDP."""


@each(("host", "is_small"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_segments_are_small_but_on_loopback(host: str, is_small: bool) -> None:
    with _listening(host, 0) as listening:
        size = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    assert (size == SEGMENT_BYTES_MAX) is is_small
    assert SEGMENT_BYTES_MAX + 40 + 20 <= LEAST_BYTES


def test_the_largest_datagram_passes_in_one_piece() -> None:
    longest = "n" * 40
    messages: list[GossipMessage] = []
    load = Load.of(longest, LoadReport())
    while sum(map(size_bytes, messages)) + size_bytes(load) <= MESSAGES_BYTES_MAX:
        messages.append(load)
    filled = peer.encode_datagram(tuple(messages))
    room = MESSAGES_BYTES_MAX - sum(map(size_bytes, messages))
    sealer = Sealer(b"k" * KEY_BYTES, "c", longest, "b" * 32)
    assert len(sealer.seal(filled, longest.encode())) + room + HEADS_BYTES <= LEAST_BYTES
