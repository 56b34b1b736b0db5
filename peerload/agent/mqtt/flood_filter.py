"""Flood filter of a broker connection: mutes a publisher that sends thousands of messages a second that are not new.

Each message counts once, so repeated ones change nothing, but they cost every node time. What a muted publisher sends is
dropped before it is opened, and the broker stays in use: with the rights of docs/mqtt.md a node publishes below its own name
alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from peerload.model import metrics, rules

if TYPE_CHECKING:
    from peerload.agent.security_events import SecurityEvents

WINDOW_S = 5.0
"""Messages are judged in windows of this length."""
FLOOD_MAX = 1000
"""Messages in one window that are a flood …"""
NEW_PART_MIN = 0.1
"""… if less than this part of them was new."""
MUTED_S = 60.0
PUBLISHERS_MAX = 1024
"""Publishers that are counted; the one that was silent for longest is forgotten first."""

_log = logging.getLogger("peerload.mqtt")


class _Publisher:
    """Messages of one publisher since ``began_s``."""

    __slots__ = ("began_s", "count", "muted_until_s", "new_count")

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.count = self.new_count = 0
        self.muted_until_s = 0.0

    @property
    def floods(self) -> bool:
        return self.count >= FLOOD_MAX and self.new_count < self.count * NEW_PART_MIN


class FloodFilter:
    """The publishers on one connection. Retained messages are not counted: they come again at each connection. Nor are those
    of this node, ``own``: the broker passes on to it what it sends to all, and nothing of that is new."""

    def __init__(self, security: SecurityEvents, own: str = "") -> None:
        self._security = security
        self._own = own
        self._publishers: OrderedDict[str, _Publisher] = OrderedDict()

    def admits(self, name: str, now_s: float) -> bool:
        """Count a message. False if its publisher is muted."""
        if name == self._own:
            return True
        publisher = self._publishers.get(name)
        if publisher is None:
            publisher = self._publishers[name] = _Publisher(now_s)
            if len(self._publishers) > PUBLISHERS_MAX:
                self._publishers.popitem(last=False)
        self._publishers.move_to_end(name)
        if now_s - publisher.began_s >= WINDOW_S:
            if publisher.floods:
                if now_s >= publisher.muted_until_s:
                    self._mute(name)
                publisher.muted_until_s = now_s + MUTED_S
            publisher.began_s, publisher.count, publisher.new_count = now_s, 0, 0
        publisher.count += 1
        return now_s >= publisher.muted_until_s

    def count_new(self, name: str) -> None:
        """The last message of this publisher was new."""
        if (publisher := self._publishers.get(name)) is not None:
            publisher.new_count += 1

    def _mute(self, name: str) -> None:
        self._security.counters[metrics.MQTT_PUBLISHERS_MUTED] += 1
        self._security.report(
            rules.PEERS_LIMITED, name, f"over MQTT: a flood; its messages are dropped for {MUTED_S:g} s"
        )
        _log.warning("publisher muted for a flood: node=%s muted_s=%g", name, MUTED_S)
