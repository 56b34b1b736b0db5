"""Broadcast queue: membership updates that are still to be passed on, what is sent next, how often, and when that is
enough.

News rides on every datagram that is sent anyway; while there is any, rounds of datagrams are sent for its sake. Of each
member only the newest is kept. What concerns life and death goes first, then who is there, then loads; among those,
what was sent least ([SWIM02] section 4.1). Size: one piece of news and one load per member at most.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from peerload.model.gossip import MESSAGES_BYTES_MAX, MESSAGES_MAX, MembershipUpdate, MemberStatus, size_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.model.gossip import GossipMessage, Load

GRAVE, PRESENCE, LOADS = range(3)


class _News:
    """One piece. urgency: GRAVE, PRESENCE or LOADS; sent: in so many datagrams."""

    __slots__ = ("bytes", "message", "number", "sent", "urgency")

    def __init__(self, message: GossipMessage, urgency: int, number: int) -> None:
        self.message = message
        self.urgency = urgency
        self.bytes = size_bytes(message)
        self.number = number
        self.sent = 0


def transmissions(mult: int, members: int) -> int:
    """The number of times that each node sends each update: mult · max(2, ceil(log10(n + 1))); as often among a few as among
    99, since what answers pings tells the same few again and again."""
    return mult * max(math.ceil(math.log10(members + 1)), 2)


class BroadcastQueue:
    """The queue; rumours, loads: how many of each. ``mult``, ``loads_max``: of the preset."""

    def __init__(self, mult: int, loads_max: int) -> None:
        self._mult = mult
        self._loads_max = loads_max
        self.rumours = 0
        self.loads = 0
        self._news: dict[tuple[bool, str], _News] = {}
        self._number = 0

    def put(self, rumour: MembershipUpdate, *, grave: bool = False) -> None:
        """Queue the newest update about a member. ``grave``: it goes first whatever it says."""
        grave = grave or rumour.standing in (MemberStatus.SUSPECT, MemberStatus.DEAD)
        self._put((True, rumour.node), rumour, GRAVE if grave else PRESENCE)

    def put_load(self, load: Load) -> None:
        """The newest load of a member."""
        self._put((False, load.node), load, LOADS)

    def _put(self, key: tuple[bool, str], message: GossipMessage, urgency: int) -> None:
        self._number += 1
        if key not in self._news:
            self._count(key, 1)
        self._news[key] = _News(message, urgency, self._number)

    def _count(self, key: tuple[bool, str], by: int) -> None:
        if key[0]:
            self.rumours += by
        else:
            self.loads += by

    def _drop(self, key: tuple[bool, str]) -> None:
        if self._news.pop(key, None) is not None:
            self._count(key, -1)

    def drop(self, node: str) -> None:
        """Drop the update about a member."""
        self._drop((True, node))
        self._drop((False, node))

    def take(self, room: Iterable[GossipMessage], members: int) -> list[GossipMessage]:
        """Take the updates for a datagram that already has ``room`` taken by these; each counts as sent once more.
        members: n, on which depends what was sent often enough."""
        taken = list(room)
        if not self._news:
            return taken
        left = MESSAGES_BYTES_MAX - sum(size_bytes(message) for message in taken)
        told = {message.node for message in taken if isinstance(message, MembershipUpdate)}
        limit = transmissions(self._mult, members)
        loads = 0
        for key, news in sorted(self._news.items(), key=_order):
            if len(taken) >= MESSAGES_MAX:
                break
            if news.bytes > left or (key[0] and key[1] in told):
                continue
            if news.urgency == LOADS:
                if loads >= self._loads_max:
                    break
                loads += 1
            taken.append(news.message)
            left -= news.bytes
            news.sent += 1
            if news.sent >= limit:
                self._drop(key)
        return taken


def _order(item: tuple[tuple[bool, str], _News]) -> tuple[int, int, int]:
    """The graver first, then what was sent less, then the newer."""
    news = item[1]
    return news.urgency, news.sent, -news.number
