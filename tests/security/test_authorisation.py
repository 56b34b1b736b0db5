"""The table of who may say what, held against a node: every kind of message, said by everybody, really handled (rule P3).

A kind that is new fails here until the table has a row for it, and the row is tried out.
"""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from peerload.agent.control.authorization import RIGHTS
from peerload.core.node import (
    ANY_MEMBER,
    DROPPED,
    ITS_HOME,
    PASSED_OVER,
    TABLE,
    TAKEN,
    WHO_WAS_ASKED,
    AuthorisationVerdict,
    Role,
)
from peerload.model import gossip, messages
from tests.core.given import Given
from tests.core.test_roles import HAD, HAS, NEVER, executor, home, seen, to_executor, to_home
from tests.docs_tables import rows, section
from tests.each import each
from tests.wire.test_peer_codec import SAMPLES

pytestmark = pytest.mark.rule("P3")

BEFORE_THE_NODE = (Role.REVOKED, Role.STRANGER)
"""They get no message to a node at all: tests/security/test_doors.py."""
WITHIN = [role for role in Role if role not in BEFORE_THE_NODE]
PEER: tuple[Any, ...] = get_args(messages.Message)
GOSSIP: tuple[Any, ...] = get_args(gossip.GossipMessage)
STREAMED = [kind for kind in PEER if kind in messages.STREAMED]
OF_THE_AGENT = (
    messages.Hello,
    messages.NameTaken,
    messages.WrongBoot,
    messages.DialBack,
    messages.NotDialled,
    messages.Trust,
    messages.CertificateRequest,
    messages.CertificateTold,
    messages.DialBack,
    messages.NotDialled,
)
"""They are answered before the node, and by it not understood."""
TO_HOME = [kind for kind in messages.Ownership.__args__ if TABLE[kind] not in (ITS_HOME, ANY_MEMBER)]
SAID: dict[Any, Any] = {type(sample): sample for sample in SAMPLES}


def test_the_table_has_every_kind_of_message_and_no_other() -> None:
    assert set(TABLE) == {*PEER, *GOSSIP}
    assert all(set(row) == set(Role) for row in TABLE.values())


def test_nobody_from_outside_and_no_node_itself_is_ever_heard() -> None:
    for row in TABLE.values():
        assert [row[role] for role in (Role.SELF, Role.REVOKED, Role.STRANGER)] == [DROPPED] * 3


def test_a_broker_brings_advice_and_nothing_that_is_owned() -> None:
    assert all(TABLE[kind] is ANY_MEMBER for kind in messages.ADVICE)
    assert not set(messages.ADVICE) & set(get_args(messages.Ownership))


def test_what_is_said_over_streams_is_said_there_alone() -> None:
    answers = {kind for kind in STREAMED if TABLE[kind] is WHO_WAS_ASKED}
    assert {messages.OutputChunk, messages.InputChunk, messages.Forwarded} <= answers


def told_p3(x: Given, src: str) -> bool:
    return any(note.what == "security" and note.state == "P3" and note.node == src for note in x.notes)


def judged(x: Given, src: str, message: Any, verdict: AuthorisationVerdict, before: Any) -> None:
    """Really send it, and see that this is what becomes of it."""
    assert x.node.authorisation.verdict(src, message) is verdict
    counted = dict(x.node.state.counts)
    x.hear(src, message)
    if verdict is not TAKEN:
        assert seen(x) == before
        assert x.node.state.counts != counted
    assert told_p3(x, src) == (verdict is DROPPED)


# -- what a home says, at the node that runs its task ---------------------------------------------------------------------

AT_EXECUTOR = {Role.HOME: "h", Role.HOLDER: "z", Role.FORMER: "w", Role.MEMBER: "z", Role.SELF: "x"}


@each(
    "kind, phase",
    [
        (kind.__name__, phase)
        for kind in get_args(messages.Ownership)
        if TABLE[kind] is ITS_HOME
        for phase in ("reserved", "running", "ended")
    ],
)
def test_what_only_a_home_may_say(kind: str, phase: str) -> None:
    x, accept = executor(phase)
    message = to_executor(kind, "h/1", accept)
    for role in sorted(WITHIN, key=lambda role: role is Role.HOME):  # its home last, since it is heard
        judged(x, AT_EXECUTOR[role], message, TABLE[type(message)][role], seen(x))


@pytest.mark.parametrize("claim", ["z/1", "h/1", "h1/1", "/1", "hh/1"])
def test_an_id_that_claims_another_home_helps_nobody(claim: str) -> None:
    x, accept = executor("running")
    before = seen(x)
    for kind in ("Offer", "Commit", "Revoke", "Signal", "Query", "ResultAck"):
        judged(x, "z", to_executor(kind, claim, accept), DROPPED, before)


def test_a_home_whose_name_begins_as_anothers_is_another() -> None:
    x = Given(slots=2, peers=("n1", "n10"))
    offered = messages.Offer("n10/1", bytes(16), 1, SAID[messages.Offer].spec, 60.0)
    judged(x, "n1", offered, DROPPED, seen(x))
    assert x.node.authorisation.verdict("n10", offered) is TAKEN


# -- what a node that runs a task says, at its home -----------------------------------------------------------------------

AT_HOME = {Role.HOME: "x", Role.HOLDER: HAS, Role.FORMER: HAD, Role.MEMBER: NEVER, Role.SELF: "x"}


@each("kind, role", [(kind.__name__, role) for kind in TO_HOME for role in WITHIN])
def test_what_only_a_node_that_has_it_may_say(kind: str, role: Role) -> None:
    phase = "offered" if kind in ("Accept", "Staging", "Decline") else "away"
    x, task = home(phase)
    who = HAS if AT_HOME[role] == "x" else AT_HOME[role]
    src, message = to_home(kind, phase, task, who)
    src = "x" if AT_HOME[role] == "x" else src
    before = seen(x)
    verdict = TABLE[type(message)][role]
    if kind in ("Renew", "Result") and role is Role.FORMER:  # of the attempt that it had, which is over
        assert x.node.authorisation.verdict(src, message) is not DROPPED
        x.hear(src, message)
        assert not told_p3(x, src)
        return
    if kind == "Renew" and role is Role.MEMBER:  # a batch: each is looked at where it is read
        x.hear(src, message)
        assert seen(x) == before
        return
    judged(x, src, message, verdict, before)
    if role is Role.HOLDER:
        assert seen(x) != before, "the one who may say it is heard"


# -- what any member may say: nothing that anybody has is moved by it -------------------------------------------------------

ANYBODYS = [kind for kind in PEER if TABLE[kind] is ANY_MEMBER and kind not in (*STREAMED, *OF_THE_AGENT)]


@pytest.mark.parametrize("role", WITHIN)
def test_what_any_member_may_say_moves_nothing(role: Role) -> None:
    x, _ = executor("running")
    before, src = seen(x), AT_EXECUTOR[role]
    for kind in ANYBODYS:
        message = SAID[kind]
        assert x.node.authorisation.verdict(src, message) is (DROPPED if role is Role.SELF else TAKEN), kind
        x.hear(src, message)
        assert seen(x) == before, kind
        is_another = kind is messages.State and src != message.identity.node
        assert told_p3(x, src) == (role is Role.SELF or is_another), kind


@pytest.mark.parametrize("role", WITHIN)
def test_what_does_not_belong_on_a_link_is_nothing_to_the_node(role: Role) -> None:
    for x in (executor("running")[0], home("away")[0]):
        before = seen(x)
        for kind in (*STREAMED, *OF_THE_AGENT):
            x.hear(AT_EXECUTOR[role], SAID[kind])
            assert seen(x) == before, kind


def test_the_words_for_what_is_late_are_no_accusation() -> None:
    assert {row[Role.MEMBER] for row in TABLE.values()} == {TAKEN, PASSED_OVER, DROPPED}


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_page_says_what_the_table_says() -> None:
    told: dict[str, list[str]] = {}
    for kinds, *verdicts in rows(section("wire.md", "## Who may say what")):
        told |= dict.fromkeys(codes(kinds), verdicts)
    columns = (Role.HOME, Role.HOLDER, Role.FORMER, Role.MEMBER)
    true = {str(kind.__struct_config__.tag): [TABLE[kind][role].value for role in columns] for kind in PEER}
    assert told == true


def test_the_page_says_who_may_ask_what() -> None:
    told = {
        verb: right for verbs, right in rows(section("security.md", "### Who may ask what")) for verb in codes(verbs)
    }
    assert told == {str(kind.__struct_config__.tag): right.value for kind, right in RIGHTS.items()}
