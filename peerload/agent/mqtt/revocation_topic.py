"""Who was shut out, told by way of the broker: for nodes that no link reaches.

Such a word is signed by the CA and stands for itself, so it needs no seal, and none that a node might not have: it is
believed for its signature alone, whoever brings it, however often. It is no command, and names who is not to be believed any
more. The key that seals from then on is never told over a broker.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.agent.mqtt.message_filter import dropped
from peerload.wire import peer

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

WORD_BYTES_MAX = 1024
WORDS_MAX = 64
UNKNOWN_PER_S_MAX = 10
"""Messages with something new that are looked at in a second: a signature takes its time."""

_words = msgspec.msgpack.Decoder(
    tuple[Annotated[bytes, Meta(max_length=WORD_BYTES_MAX)], ...],
)


class RevocationTopic:
    """known: the words that this node has, the newest first; heard: (from whom, words), with those that it lacks."""

    def __init__(
        self,
        known: Callable[[], Sequence[bytes]],
        heard: Callable[[str, tuple[bytes, ...]], None],
        counters: Counter[str],
    ) -> None:
        self._known = known
        self._heard = heard
        self._counters = counters
        self._second_s = 0
        self._looked_at = 0

    def payload(self) -> bytes:
        """What is published: as many as fit, the newest of them. Empty if there is none."""
        told: list[bytes] = []
        size_bytes = peer.MQTT_BYTES_MAX - 8
        for word in self._known():
            size_bytes -= len(word) + 3
            if size_bytes < 0 or len(told) == WORDS_MAX:
                break
            told.append(word)
        return msgspec.msgpack.encode(told) if told else b""

    def take(self, src: str, payload: bytes) -> None:
        """What was heard on the topic of ``src``. Raises nothing."""
        try:
            if len(payload) > peer.MQTT_BYTES_MAX:
                raise msgspec.ValidationError("too large")
            words = _words.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            dropped(self._counters, "malformed")
            return
        known = set(self._known())
        new = tuple(word for word in words[:WORDS_MAX] if word not in known)
        if not new:
            return
        second_s = int(time.monotonic())
        if second_s != self._second_s:
            self._second_s, self._looked_at = second_s, 0
        self._looked_at += 1
        if self._looked_at > UNKNOWN_PER_S_MAX:
            dropped(self._counters, "too many words")
            return
        self._heard(src, new)
