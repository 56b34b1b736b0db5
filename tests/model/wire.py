"""The model's network: a growing set of messages, each of which may arrive never, late, out of order or many times.

A set of messages is an int with one bit for each message there can be. Those whose age counts (an ACCEPT carries its
sender's clock, what answers it hands that clock back) have a bit for each age in ticks, next to one another, so that a
tick of time is a shift. The oldest age stands for "a lease or more".
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

OFFER, ACCEPT, COMMIT, RENEW, RENEW_OK = "OFFER", "ACCEPT", "COMMIT", "RENEW", "RENEW_OK"
REVOKE, RESULT, RESULT_ACK, QUERY, PARK = "REVOKE", "RESULT", "RESULT_ACK", "QUERY", "PARK"
NOT_STARTED, DIED, RETURN = "NOT_STARTED", "DIED", "RETURN"

AGED = (ACCEPT, COMMIT, RENEW, RENEW_OK)
AGELESS = (OFFER, REVOKE, RESULT, RESULT_ACK, NOT_STARTED, DIED, RETURN, QUERY)


class Message(NamedTuple):
    """``node`` is the executor that says or hears it. era: how many PARKs home had made when the executor took the time
    stamp that it carries (of a PARK: its number); holds: a RENEW states a deadline given in this era."""

    kind: str
    attempt: int
    node: int
    era: int = 0
    age: int = 0
    holds: bool = False


class Wire:
    """All messages there can be, as bits, and the sets of them that the rules speak of. keeps_renewals: a RENEW that is older
    than a lease still says that its node has the task."""

    def __init__(self, attempts: int, nodes: int, lease: int, parks: int, *, keeps_renewals: bool = False) -> None:
        self._bits: dict[Message, int] = {}
        self._messages: list[Message] = []
        self._lease = lease
        self._aged = self._valid = self._saturated = 0
        for kind, attempt, node, era in product(AGED, range(1, attempts + 1), range(nodes), range(parks + 1)):
            for holds in (False, True) if kind == RENEW else (False,):
                for age in range(lease + 1):
                    bit = self._add(Message(kind, attempt, node, era, age, holds))
                    self._aged |= bit
                    if age < lease:
                        self._valid |= bit
                    elif kind == COMMIT or (kind in (RENEW, RENEW_OK) and era) or (kind == RENEW and keeps_renewals):
                        self._saturated |= bit  # too old to grant time, but it still says something
        for kind, attempt, node in product(AGELESS, range(1, attempts + 1), range(nodes)):
            self._add(Message(kind, attempt, node))
        for attempt, node, era in product(range(1, attempts + 1), range(nodes), range(1, parks + 1)):
            self._add(Message(PARK, attempt, node, era))
        self._sets: dict[tuple[str, int, int], int] = {}
        for message, bit in self._bits.items():
            key = (message.kind, message.attempt, message.node)
            self._sets[key] = self._sets.get(key, 0) | bit
        self._about = {
            (attempt, node): self.some(attempt, node, *AGED, *AGELESS, PARK)
            for attempt, node in product(range(1, attempts + 1), range(nodes))
        }
        self._renewals = [
            sum(bit for message, bit in self._bits.items() if message.kind == RENEW and message.era < era)
            for era in range(parks + 1)
        ]
        self.renewals_too_old = sum(
            bit for message, bit in self._bits.items() if message.kind == RENEW and message.age == lease
        )
        """RENEWs that grant no time any more."""
        self._orders: dict[tuple[int, int, int], int] = {}
        self._mirrored: dict[int, int] = {}

    def _add(self, message: Message) -> int:
        bit = 1 << len(self._messages)
        self._messages.append(message)
        self._bits[message] = bit
        return bit

    def bit(self, kind: str, attempt: int, node: int, era: int = 0, age: int = 0, *, holds: bool = False) -> int:
        """The set of this one message."""
        return self._bits[Message(kind, attempt, node, era, age, holds)]

    def some(self, attempt: int, node: int, *kinds: str) -> int:
        """Every message of these kinds about this attempt on this node."""
        found = 0
        for kind in kinds:
            found |= self._sets.get((kind, attempt, node), 0)
        return found

    def about(self, attempt: int, node: int) -> int:
        """Every message about this attempt on this node."""
        return self._about[attempt, node]

    def orders_before(self, attempt: int, node: int, applied: int) -> int:
        """RENEW_OKs and PARKs that an executor which has followed ``applied`` follows no more."""
        found = self._orders.get((attempt, node, applied))
        if found is None:
            found = 0
            for message in self.in_it(self.some(attempt, node, RENEW_OK, PARK)):
                if (2 * message.era < applied) if message.kind == RENEW_OK else (2 * message.era - 1 <= applied):
                    found |= self._bits[message]
            self._orders[attempt, node, applied] = found
        return found

    def renewals_before(self, era: int) -> int:
        """Every RENEW whose time stamp is older than PARK number ``era``."""
        return self._renewals[era]

    def in_it(self, messages: int) -> list[Message]:
        """The messages of a set."""
        found = []
        while messages:
            lowest = messages & -messages
            messages ^= lowest
            found.append(self._messages[lowest.bit_length() - 1])
        return found

    def older(self, messages: int) -> int:
        """The set one tick later."""
        aged = messages & self._aged
        return (
            (messages & ~self._aged)
            | ((aged & self._valid) << 1 & (self._valid | self._saturated))
            | (aged & self._saturated)
        )

    def too_late(self, messages: int, attempt: int, node: int) -> int:
        """The set in which every COMMIT of this attempt has lost its reservation: it counts as too old."""
        commits = messages & self.some(attempt, node, COMMIT)
        for message in self.in_it(commits):
            messages &= ~self._bits[message]
            messages |= self._bits[message._replace(age=self._lease)]
        return messages

    def mirrored(self, messages: int) -> int:
        """The set with the two executors in each other's place."""
        known = self._mirrored.get(messages)
        if known is None:
            known = 0
            for message in self.in_it(messages):
                known |= self._bits[message._replace(node=1 - message.node)]
            self._mirrored[messages] = known
        return known
