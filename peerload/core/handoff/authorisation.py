"""Authorisation of messages between nodes: every kind of message against everybody who could have sent it (rule P3), in one table.

Who sent a message is proven before it gets here: the peer link knows it by certificate, gossip and the broker by the seal.
All else in it is a claim. What a role may not say is dropped, told as an event of security, and changes nothing. `Node`
asks `verdict` of every message before it looks at what it says; streams, gossip and the broker have their rows here, too.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from peerload.core.work import HomePhase
from peerload.model import gossip, messages
from peerload.model.task import task_home

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.tasks.home import Home


class Role(enum.StrEnum):
    """Role of a sender towards the task or attempt that its message is about; where it is about none, towards this node."""

    HOME = "its home"
    HOLDER = "the node it is leased, or offered, to"
    FORMER = "a node that had it before, or may have had"
    MEMBER = "any other member"
    SELF = "this node itself"
    REVOKED = "a member that was shut out"
    STRANGER = "anybody else"


class AuthorisationVerdict(enum.StrEnum):
    """Verdict on a message."""

    TAKEN = "taken"
    PASSED_OVER = "passed over"
    DROPPED = "dropped"


TAKEN, PASSED_OVER, DROPPED = AuthorisationVerdict.TAKEN, AuthorisationVerdict.PASSED_OVER, AuthorisationVerdict.DROPPED
"""TAKEN: what it says is weighed. PASSED_OVER: nothing of it counts, and that may be nobody's fault: it may be late; who
sent it may be told how things stand. DROPPED: no node that keeps the rules says that; an event of security."""

Row = dict[Role, AuthorisationVerdict]
_NOBODY: Row = dict.fromkeys(Role, DROPPED)
ANY_MEMBER: Row = _NOBODY | {Role.HOME: TAKEN, Role.HOLDER: TAKEN, Role.FORMER: TAKEN, Role.MEMBER: TAKEN}
"""Advice, and who is there: it moves nothing that anybody has."""
ITS_HOME: Row = _NOBODY | {Role.HOME: TAKEN}
ITS_HOLDER: Row = _NOBODY | {Role.HOLDER: TAKEN, Role.FORMER: PASSED_OVER, Role.MEMBER: PASSED_OVER}
"""Nothing is remembered of nodes that gave an attempt back, so that their late words look like those of any member."""
MAY_BE_BACK: Row = ITS_HOLDER | {Role.FORMER: TAKEN}
"""A node that was lost sight of, and still has what nobody else was given since (R11)."""
HAD_IT: Row = _NOBODY | {Role.HOLDER: TAKEN, Role.FORMER: TAKEN}
"""The first result of any attempt that was granted counts (R9)."""
WHO_WAS_ASKED: Row = ANY_MEMBER
"""Over a stream that this node has opened, to that very member; over any other it closes the stream."""

TABLE: Mapping[type[Any], Row] = {
    # who is there
    messages.Hello: ANY_MEMBER,
    messages.Ping: ANY_MEMBER,
    messages.Pong: ANY_MEMBER,
    messages.Sync: ANY_MEMBER,
    messages.ProfileRequest: ANY_MEMBER,
    messages.ProfileTold: ANY_MEMBER,
    messages.Trust: ANY_MEMBER,  # each word in it is signed by the CA, or nothing
    messages.CertificateRequest: ANY_MEMBER,
    messages.CertificateTold: ANY_MEMBER,
    messages.Leaving: ANY_MEMBER,
    messages.Wake: ANY_MEMBER,  # no more than waking a member that is asleep, once a second
    messages.NameTaken: ANY_MEMBER,
    messages.WrongBoot: ANY_MEMBER,
    messages.DialBack: ANY_MEMBER,  # a connection to the asker, who could have made it, and proves to be itself
    messages.NotDialled: ANY_MEMBER,
    messages.DirectoryRequest: ANY_MEMBER,
    messages.DirectoryTold: ANY_MEMBER,  # of the teller itself
    # advice
    messages.State: ANY_MEMBER,
    messages.ProbeRequest: ANY_MEMBER,
    messages.ProbeReply: ANY_MEMBER,
    messages.StateRequest: ANY_MEMBER,
    messages.StateAnswer: ANY_MEMBER,
    messages.Enough: ANY_MEMBER,
    messages.GiveRequest: ANY_MEMBER,
    messages.GiveReply: ANY_MEMBER,
    messages.Footprint: ANY_MEMBER,
    messages.PairRequest: ANY_MEMBER,
    messages.PairReply: ANY_MEMBER,
    messages.Unpair: ANY_MEMBER,
    # home → executor
    messages.Offer: ITS_HOME,
    messages.Commit: ITS_HOME,
    messages.RenewOk: ITS_HOME,
    messages.Park: ITS_HOME,
    messages.Revoke: ITS_HOME,
    messages.Signal: ITS_HOME,
    messages.Query: ITS_HOME,
    messages.ResultAck: ITS_HOME,
    # executor → home
    messages.Accept: ITS_HOLDER,
    messages.Staging: ITS_HOLDER,
    messages.Decline: ITS_HOLDER,
    messages.Renew: MAY_BE_BACK,
    messages.NotStarted: ITS_HOLDER,
    messages.Return: ITS_HOLDER,
    messages.Died: ITS_HOLDER,
    messages.Result: HAD_IT,
    # home → home: of tasks of the node that is asked, or that was asked
    messages.AwaitTasks: ANY_MEMBER,
    messages.TasksTold: ANY_MEMBER,
    # streams
    messages.OutputRequest: ITS_HOME,
    messages.OutputChunk: WHO_WAS_ASKED,
    messages.OutputEnd: WHO_WAS_ASKED,
    messages.InputRequest: ITS_HOLDER,
    messages.InputChunk: WHO_WAS_ASKED,
    messages.InputWindow: WHO_WAS_ASKED,
    messages.InputEnd: WHO_WAS_ASKED,
    messages.BlocksRequest: ANY_MEMBER,  # who knows the digest of a block has a manifest that names it
    messages.Blocks: WHO_WAS_ASKED,
    messages.BlocksEnd: WHO_WAS_ASKED,
    messages.Forward: ANY_MEMBER,  # what its user may is the other table: agent/control/authorization.py
    messages.Forwarded: WHO_WAS_ASKED,
    messages.ForwardStop: ANY_MEMBER,
    # gossip
    gossip.GossipPing: ANY_MEMBER,
    gossip.GossipAck: ANY_MEMBER,
    gossip.GossipPingRequest: ANY_MEMBER,
    gossip.GossipNack: ANY_MEMBER,
    gossip.MembershipUpdate: ANY_MEMBER,
    gossip.Load: ANY_MEMBER,
}

_BY_HOME = frozenset(kind for kind, row in TABLE.items() if row is ITS_HOME)
_BY_HOLDER = frozenset(kind for kind, row in TABLE.items() if row in (ITS_HOLDER, MAY_BE_BACK, HAD_IT))


class Authorisation:
    """The table, for one node that knows what it has of others (``executor``) and what others have of it (``home``)."""

    def __init__(self, node: str, home: Home, executor: ExecutorHandoff) -> None:
        self._node = node
        self._home = home
        self._executor = executor

    def verdict(self, src: str, message: Any) -> AuthorisationVerdict:  # noqa: ANN401 -- any of the table
        """The verdict on this message of this member. Of one about several attempts: of the best of them, since each is
        looked at where it is read."""
        kind = type(message)
        if src == self._node:
            return TABLE[kind][Role.SELF]
        if kind in _BY_HOME:
            return TABLE[kind][self._as_home(src, message)]
        if kind in _BY_HOLDER:
            return TABLE[kind][self._as_holder(src, message)]
        return TABLE[kind][Role.MEMBER]

    def _as_home(self, src: str, message: Any) -> Role:  # noqa: ANN401 -- as above
        """The role of src towards an attempt here, or one that is to come here: its home is whose guest it is; of one that nobody
        here knows, the node in its id."""
        if isinstance(message, messages.RenewOk | messages.Park):
            items = message.extensions if isinstance(message, messages.RenewOk) else message.parkings
            known = [guest for item in items if (guest := self._executor.by_uid.get(item.uid)) is not None]
            return Role.MEMBER if known and all(guest.home != src for guest in known) else Role.HOME
        guest = self._executor.by_uid.get(message.uid)
        home = guest.home if guest is not None else task_home(message.task)
        return Role.HOME if home == src else Role.MEMBER

    def _as_holder(self, src: str, message: Any) -> Role:  # noqa: ANN401 -- as above
        """The role of src towards a task of this home. One that has ended, or is not known, may have been anybody's."""
        if isinstance(message, messages.Renew):
            return Role.FORMER  # each renewal is of another task
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is HomePhase.OVER or message.attempt > self._home.next_attempt(task):
            return Role.FORMER
        record = task.record
        if src in (record.node, task.offered_to):
            return Role.HOLDER
        is_former = (
            src == record.last_node or src in record.lost_on or any(grant.node == src for grant in record.grants)
        )
        is_former = is_former or message.attempt > record.attempt or self._home.may_be_lost(task, message.attempt)
        return Role.FORMER if is_former else Role.MEMBER
