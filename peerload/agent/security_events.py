"""What was refused for the sake of a rule of security: each is counted, and noted as an event and in the log.

Whoever is refused may come again as often as they like, so what is written is bounded: of one rule and one culprit once a
minute (with how many more there were), of one rule so many a minute whoever they are. The counters have them all.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol

from peerload.model.actions import EVENTS
from peerload.model.text import printable

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from peerload.agent.store.event_log import EventLog

RULES = frozenset(EVENTS["security"])
NOTICE_EVERY_S = 60.0
"""Of one rule and one culprit an event is kept so often."""
NOTED_MAX = 20
"""Of one rule, whoever breaks it, so many are kept within NOTICE_EVERY_S: somebody may have many addresses."""
CULPRITS_MAX = 1024
"""Whom to have told of is remembered; the one not heard of for longest is forgotten first."""
WHO_CHARS_MAX = 100
WHAT_CHARS_MAX = 300
"""Of a longer one the beginning is kept."""

_log = logging.getLogger("peerload.security")


class Tell(Protocol):
    """`SecurityEvents.tell`, for those who have something to tell and need not know to whom."""

    def __call__(self, rule: str, who: str, what: str, /, *, tolerated: int = 0) -> None:
        """Something was refused for the sake of a rule."""


def untold(rule: str, who: str, what: str, /, *, tolerated: int = 0) -> None:
    """Nobody is told: for parts that are tried alone."""


class _Culprit:
    """What is known of one who has broken one rule."""

    __slots__ = ("began_s", "noted_s", "seen", "unsaid")

    def __init__(self, now_s: float) -> None:
        self.noted_s = float("-inf")
        self.began_s = now_s
        self.seen = 0
        self.unsaid = 0


class SecurityEvents:
    """Of one agent. counters: the agent's own; clock: seconds, which only go forward."""

    def __init__(self, counters: Counter[str], journal: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters
        self._journal = journal
        self._clock = clock
        self._culprits: OrderedDict[tuple[str, str], _Culprit] = OrderedDict()
        self._noted: dict[str, deque[float]] = {}

    def tell(self, rule: str, who: str, what: str, *, tolerated: int = 0) -> None:
        """Something was refused: for which rule, as docs/security.md names it; to whom (a node, an address without its
        port, ``uid 1000``); and what it was, for people. Never raises. Foreign text may be in both: it is escaped here.

        tolerated: so many of these within a minute may be nobody's fault (a datagram that the network has doubled): they
        are counted, and no event.
        """
        assert rule in RULES, rule
        self.counters["security events"] += 1
        self.counters[f"security: {rule}"] += 1
        who, what = printable(who[:WHO_CHARS_MAX]), printable(what[:WHAT_CHARS_MAX])
        now_s = self._clock()
        culprit = self._culprit(rule, who, now_s)
        culprit.seen += 1
        if culprit.seen <= tolerated:
            return
        if now_s - culprit.noted_s < NOTICE_EVERY_S or not self._has_room(rule, now_s):
            culprit.unsaid += 1
            return
        culprit.noted_s = now_s
        more = f" (and {culprit.unsaid} more before)" if culprit.unsaid else ""
        culprit.unsaid = 0
        self._note(rule, who, what + more)

    def _culprit(self, rule: str, who: str, now_s: float) -> _Culprit:
        known = self._culprits.get((rule, who))
        if known is None:
            known = self._culprits[rule, who] = _Culprit(now_s)
            if len(self._culprits) > CULPRITS_MAX:
                self._culprits.popitem(last=False)
        self._culprits.move_to_end((rule, who))
        if now_s - known.began_s >= NOTICE_EVERY_S:
            known.began_s, known.seen = now_s, 0
        return known

    def _has_room(self, rule: str, now_s: float) -> bool:
        noted = self._noted.setdefault(rule, deque(maxlen=NOTED_MAX))
        if len(noted) == NOTED_MAX and now_s - noted[0] < NOTICE_EVERY_S:
            return False
        noted.append(now_s)
        return True

    def _note(self, rule: str, who: str, what: str) -> None:
        _log.warning("rule %s: %s: %s", rule, who or "somebody", what)
        self._journal.happened("security", rule, node=who, reason=what)
