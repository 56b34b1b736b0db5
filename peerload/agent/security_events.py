"""Security events: each refusal for the sake of a security rule is counted, logged and kept as an event.

The number of events is bounded, since a refused peer may come again at any rate: one event a minute for each rule and
culprit (with the number of those between), and a number a minute for each rule. The counters have all.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from peerload.model import metrics
from peerload.model.actions import EVENTS
from peerload.model.bounded import BoundedDict
from peerload.model.text import printable

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from peerload.agent.store.event_log import EventLog

RULES = frozenset(EVENTS["security"])
NOTICE_EVERY_S = 60.0
"""Interval of the events about one rule and one culprit."""
NOTED_MAX = 20
"""Bound on the events about one rule within NOTICE_EVERY_S, whoever the culprits are: one attacker may have many
addresses."""
CULPRITS_MAX = 1024
"""Bound on the culprits that are remembered; the one not seen for longest is forgotten first."""
WHO_CHARS_MAX = 100
WHAT_CHARS_MAX = 300
"""Bound on the description; a longer one is cut off."""

_log = logging.getLogger("peerload.security")


class _Culprit:
    """The refusals of one culprit by one rule."""

    __slots__ = ("began_s", "noted_s", "seen", "unsaid")

    def __init__(self, now_s: float) -> None:
        self.noted_s = float("-inf")
        self.began_s = now_s
        self.seen = 0
        self.unsaid = 0


class SecurityEvents:
    """The security events of one agent. counters: the agent's own; clock: seconds, which never go back."""

    def __init__(self, counters: Counter[str], journal: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters
        self._journal = journal
        self._clock = clock
        self._culprits: BoundedDict[tuple[str, str], _Culprit] = BoundedDict(CULPRITS_MAX)
        self._noted: dict[str, deque[float]] = {}

    def report(self, rule: str, who: str, what: str, *, tolerated: int = 0) -> None:
        """Count a refusal, and keep an event of it within the bounds. Never raises.

        rule: its name in docs/security.md; who: a node, an address without its port, or ``uid 1000``; what: a
        description for people. Foreign text in both is escaped. tolerated: number of refusals within a minute that may
        be nobody's fault (a datagram that the network has doubled): they are counted, and are no events.
        """
        assert rule in RULES, rule
        self.counters[metrics.SECURITY_EVENTS] += 1
        self.counters[metrics.labelled(metrics.SECURITY_EVENTS, rule=rule)] += 1
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
        known = self._culprits[rule, who] = self._culprits.get((rule, who)) or _Culprit(now_s)
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
        self._journal.record("security", rule, node=who, reason=what)
