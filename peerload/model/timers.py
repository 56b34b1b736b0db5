"""The timers that a node sets: one frozen type for each, which says what is due, and of which task, attempt or request.

A timer is recorded as an array of words, its tag and then its key: ``["probe", "17"]``. So a key is text: a uid in hexadecimal
digits, a number in decimal ones; properties give back what it stands for.
"""

from __future__ import annotations

import enum

import msgspec


class _Timer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    def __repr__(self) -> str:
        return repr(tuple(msgspec.to_builtins(self)))


class _OfTask(_Timer, frozen=True):
    uid_hex: str

    @property
    def uid(self) -> bytes:
        return bytes.fromhex(self.uid_hex)


class _OfAttempt(_Timer, frozen=True):
    key: str
    """The execution key of its attempt."""


class _Numbered(_Timer, frozen=True):
    digits: str

    @property
    def number(self) -> int:
        """The number of its search or request."""
        return int(self.digits)


# -- tasks of this home ------------------------------------------------------------------------------------------------


class OfferTimeout(_OfTask, frozen=True, tag="offer"):
    """An offer is not answered."""


class QueryDue(_OfTask, frozen=True, tag="ask"):
    """The node that has a task was not heard of: it is asked."""


class Lease(_OfTask, frozen=True, tag="lease"):
    """The lease of a task that another node has is over."""


class Rest(_OfTask, frozen=True, tag="rest"):
    """The pause of a task that was lost, or has failed, is over."""


class ClientTimeout(_OfTask, frozen=True, tag="attended"):
    """The client of a task has not come back after a restart."""


class Stranded(_OfTask, frozen=True, tag="stranded"):
    """A task without a place is asked about again."""


class Batch(_Numbered, frozen=True, tag="request"):
    """The next steps of a request about many tasks."""


class EligibilityDue(_Timer, frozen=True, tag="gates"):
    """More tasks are eligible than one event lets pass."""


class AwaitedQueryDue(_Timer, frozen=True, tag="await"):
    """Another home is asked about tasks that are waited for here."""

    home: str


class RemoteStatus(_Numbered, frozen=True, tag="inquiry"):
    """Other homes have not told what a submission wants to know of their tasks."""


# -- attempts on this node ---------------------------------------------------------------------------------------------


class ReservationTimeout(_OfAttempt, frozen=True, tag="reserved"):
    """Timeout of a reservation: no COMMIT has come."""


class RenewalDue(_Timer, frozen=True, tag="renew"):
    """The leases of attempts here are renewed."""


class ResultTimeout(_OfAttempt, frozen=True, tag="result"):
    """A result is not acknowledged."""


class TimeLimit(_OfAttempt, frozen=True, tag="limit"):
    """The time limit of a task is reached."""


class Kill(_OfAttempt, frozen=True, tag="kill"):
    """A task has not obeyed its first signal."""


class FrozenTimeout(_OfAttempt, frozen=True, tag="frozen"):
    """The room of a frozen attempt may be had."""


class Fences(_Timer, frozen=True, tag="floors"):
    """Attempt fences that are of no use any more are forgotten."""


class Devices(_Timer, frozen=True, tag="devices"):
    """A waiting task may take other devices from now on."""


class Shortage(_Timer, frozen=True, tag="shortage"):
    """A start is tried again."""


# -- load sharing ------------------------------------------------------------------------------------------------------


class ProbeTimeout(_Numbered, frozen=True, tag="probe"):
    """A search has waited long enough for answers."""


class RegionSettled(_Timer, frozen=True, tag="region"):
    """A load region has held for settle_s."""


class Period(_Timer, frozen=True, tag="period"):
    """The periodic announcement of the load is due."""


class Announcement(_Timer, frozen=True, tag="tell"):
    """The load may be announced again."""


class AnswerDue(_Timer, frozen=True, tag="answer"):
    """The pause before the answer to a state request is over."""

    key: str


class Pair(_Timer, frozen=True, tag="pair"):
    """Another node is asked to pair."""


class Paired(_Timer, frozen=True, tag="paired"):
    """The partner was not heard of."""


class RetryDue(_Timer, frozen=True, tag="retry"):
    """A receiver asks for work again."""


class Inbound(_OfTask, frozen=True, tag="inbound"):
    """A promised task has not come."""


# -- membership --------------------------------------------------------------------------------------------------------


class GossipTimerKind(enum.StrEnum):
    """Kinds of timers in gossip."""

    TURN = "turn"
    """The next member is probed."""
    ACK = "ack"
    """A probe is not answered; subject: its number, as of the next two."""
    VERDICT = "verdict"
    """Indirect probes are not answered, either."""
    NACK = "nack"
    """A probe on behalf of another member is not answered."""
    SUSPECT = "suspect"
    """A suspicion is not refuted; subject: the member."""
    SPREAD = "spread"
    """Membership updates are sent."""
    LOADS = "loads"
    """Loads are sent."""
    JOIN = "join"
    """The seeds are tried again."""
    SYNC = "sync"
    """All is exchanged with one member."""
    AGAIN = "again"
    """A member that was lost is tried again."""
    PROFILES = "profiles"
    """Profiles of members are asked for."""


class GossipDue(_Timer, frozen=True, tag="gossip"):
    """Something is due in gossip."""

    kind: GossipTimerKind
    subject: str = ""


class WakeTimeout(_Timer, frozen=True, tag="wake"):
    """A node that was asked to wake should be there by now."""

    node: str


Timer = (
    OfferTimeout
    | QueryDue
    | Lease
    | Rest
    | ClientTimeout
    | Stranded
    | Batch
    | EligibilityDue
    | AwaitedQueryDue
    | RemoteStatus
    | ReservationTimeout
    | RenewalDue
    | ResultTimeout
    | TimeLimit
    | Kill
    | FrozenTimeout
    | Fences
    | Devices
    | Shortage
    | ProbeTimeout
    | RegionSettled
    | Period
    | Announcement
    | AnswerDue
    | Pair
    | Paired
    | RetryDue
    | Inbound
    | WakeTimeout
    | GossipDue
)


def timer(*words: str) -> Timer:
    """The timer that is recorded as these words. Raises msgspec.ValidationError if there is none."""
    found: Timer = msgspec.convert(words, Timer)
    return found
