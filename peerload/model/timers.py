"""The timers that a node sets: one frozen type for each, with the task, attempt or request that is due.

A timer is recorded as an array of words, its tag and then its key: ``["probe", "17"]``. So a key is text: a uid in
hexadecimal digits, a number in decimal ones; properties return the original values.
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
        return int(self.digits)


# -- tasks of this home ------------------------------------------------------------------------------------------------


class OfferTimeout(_OfTask, frozen=True, tag="offer"):
    """Timeout of an offer."""


class QueryDue(_OfTask, frozen=True, tag="ask"):
    """Time to query the executor of a task that has been silent."""


class Lease(_OfTask, frozen=True, tag="lease"):
    """End of the lease of a task that another node has."""


class Rest(_OfTask, frozen=True, tag="rest"):
    """End of the pause of a task that was lost, or has failed."""


class ClientTimeout(_OfTask, frozen=True, tag="attended"):
    """Timeout for the return of a task's client after a restart."""


class Stranded(_OfTask, frozen=True, tag="stranded"):
    """Time to search a node again for a task without a place."""


class Batch(_Numbered, frozen=True, tag="request"):
    """The next steps of a request about many tasks."""


class EligibilityDue(_Timer, frozen=True, tag="gates"):
    """Time to queue more eligible tasks: one event queues a bounded number."""


class AwaitedQueryDue(_Timer, frozen=True, tag="await"):
    """Time to ask another home about tasks that tasks here depend on."""

    home: str


class RemoteStatus(_Numbered, frozen=True, tag="inquiry"):
    """Timeout of a submission that waits for the state of tasks of other homes."""


# -- attempts on this node ---------------------------------------------------------------------------------------------


class ReservationTimeout(_OfAttempt, frozen=True, tag="reserved"):
    """Timeout of a reservation: no COMMIT has come."""


class RenewalDue(_Timer, frozen=True, tag="renew"):
    """Time to renew the leases of attempts here."""


class ResultTimeout(_OfAttempt, frozen=True, tag="result"):
    """Timeout of the acknowledgement of a result."""


class TimeLimit(_OfAttempt, frozen=True, tag="limit"):
    """Time limit of a task."""


class Kill(_OfAttempt, frozen=True, tag="kill"):
    """Timeout of a task to end after its first signal."""


class FrozenTimeout(_OfAttempt, frozen=True, tag="frozen"):
    """Time from which a frozen attempt may be evicted."""


class Fences(_Timer, frozen=True, tag="floors"):
    """Time to drop attempt fences that are no longer needed."""


class Devices(_Timer, frozen=True, tag="devices"):
    """Time from which a waiting task may take other devices."""


class Shortage(_Timer, frozen=True, tag="shortage"):
    """Time to try a start again."""


# -- load sharing ------------------------------------------------------------------------------------------------------


class ProbeTimeout(_Numbered, frozen=True, tag="probe"):
    """Timeout of the answers to a search."""


class RegionSettled(_Timer, frozen=True, tag="region"):
    """Time at which a load region has held for settle_s."""


class Period(_Timer, frozen=True, tag="period"):
    """Time of the periodic announcement of the load."""


class Announcement(_Timer, frozen=True, tag="tell"):
    """Time from which the load may be announced again."""


class AnswerDue(_Timer, frozen=True, tag="answer"):
    """End of the pause before the answer to a state request."""

    key: str


class Pair(_Timer, frozen=True, tag="pair"):
    """Time to ask another node to pair."""


class Paired(_Timer, frozen=True, tag="paired"):
    """Timeout of the partner of a pairing."""


class RetryDue(_Timer, frozen=True, tag="retry"):
    """Time at which a receiver asks for work again."""


class StartsTold(_Timer, frozen=True, tag="starts"):
    """Time to notify the homes of short tasks that they have started, if they still run."""


class Inbound(_OfTask, frozen=True, tag="inbound"):
    """Timeout of a promised task."""


# -- membership --------------------------------------------------------------------------------------------------------


class GossipTimerKind(enum.StrEnum):
    """Kinds of timers in gossip."""

    TURN = "turn"
    """Probe the next member."""
    ACK = "ack"
    """Timeout of a probe; subject: its number, as for the next two."""
    VERDICT = "verdict"
    """Timeout of the indirect probes."""
    NACK = "nack"
    """Timeout of a probe on behalf of another member."""
    SUSPECT = "suspect"
    """Timeout of a suspicion; subject: the member."""
    SPREAD = "spread"
    """Send membership updates."""
    LOADS = "loads"
    """Send loads."""
    JOIN = "join"
    """Try the seeds again."""
    SYNC = "sync"
    """Anti-entropy with one member."""
    AGAIN = "again"
    """Try a lost member again."""
    PROFILES = "profiles"
    """Request profiles of members."""


class GossipDue(_Timer, frozen=True, tag="gossip"):
    """Time of an action of gossip."""

    kind: GossipTimerKind
    subject: str = ""


class WakeTimeout(_Timer, frozen=True, tag="wake"):
    """Timeout of a node that was woken."""

    node: str


Timer = (
    OfferTimeout | QueryDue | Lease | Rest | ClientTimeout | Stranded | Batch | EligibilityDue | AwaitedQueryDue
    | RemoteStatus | ReservationTimeout | RenewalDue | ResultTimeout | TimeLimit | Kill | FrozenTimeout | Fences
    | Devices | Shortage | ProbeTimeout | RegionSettled | Period | Announcement | AnswerDue | Pair | Paired | RetryDue
    | Inbound | StartsTold | WakeTimeout | GossipDue
)  # fmt: skip


def timer(*words: str) -> Timer:
    """The timer that is recorded as these words. Raises msgspec.ValidationError if there is none."""
    found: Timer = msgspec.convert(words, Timer)
    return found
