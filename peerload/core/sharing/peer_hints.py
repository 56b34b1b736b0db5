"""Hints of which peer was last seen with room, and which with work, after the sender and receiver lists of [SK90].

A search that found nothing leaves its node's name with those it asked at random: a sender's on the busy list, a
receiver's on the idle list. Where reports guide probing, a node that refuses remembers the searcher at once instead, which
costs no message. A name is only a hint: it is taken off when it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES_MAX = 16
"""Names on each list; a further one drops the oldest."""


class PeerHints:
    """The two lists of one node, newest last. Where the preset has no memory both stay empty."""

    __slots__ = ("_busy", "_idle", "_is_on", "leaves_footprints")

    def __init__(self, *, is_on: bool, by_refusal: bool = False) -> None:
        self._is_on = is_on
        self.leaves_footprints = is_on and not by_refusal
        """True if a search that found nothing tells those whom it asked."""
        self._idle: list[str] = []
        self._busy: list[str] = []

    @property
    def idle(self) -> Sequence[str]:
        """Nodes that searched for work in vain."""
        return self._idle

    @property
    def busy(self) -> Sequence[str]:
        """Nodes that searched for room in vain, or say that they have too much."""
        return self._busy

    def is_idle(self, node: str) -> None:
        """Note a node that searched here for work in vain."""
        self._put(self._idle, node)

    def is_busy(self, node: str) -> None:
        """Note a node that searched here for room in vain."""
        self._put(self._busy, node)

    def refused_work(self, node: str) -> None:
        """Note a node that searched for work, which this node had none of."""
        if not self.leaves_footprints:
            self.is_idle(node)

    def refused_room(self, node: str) -> None:
        """Note a node that searched for room, which this node had none of."""
        if not self.leaves_footprints:
            self.is_busy(node)

    def take_idle(self, node: str) -> bool:
        """Take a node that is asked now off the idle list → whether it was on it."""
        return _taken(self._idle, node)

    def take_busy(self, node: str) -> bool:
        """Take a node that is asked now off the busy list → whether it was on it."""
        return _taken(self._busy, node)

    def _put(self, names: list[str], node: str) -> None:
        if not self._is_on:
            return
        _taken(names, node)
        names.append(node)
        del names[:-NAMES_MAX]


def _taken(names: list[str], node: str) -> bool:
    if node not in names:
        return False
    names.remove(node)
    return True
