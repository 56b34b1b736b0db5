"""Each rule of docs/security.md is held by tests that bear its id, and no test names a rule that there is not."""

from __future__ import annotations

import re

from peerload.agent.control.connection import REQUESTS_PENDING_MAX, UNREAD_BYTES_MAX
from peerload.agent.joining import NEWCOMERS_MAX
from peerload.agent.output.spool import FOLLOWED_BYTES_MAX
from peerload.agent.peers.connection import (
    HELLO_BYTES_MAX,
    MESSAGES_PER_S_MAX,
    WAITING_BYTES_MAX,
    WAITING_MESSAGES_MAX,
)
from peerload.agent.peers.links import STRANGERS_MAX, STRANGERS_OF_ONE_MAX
from peerload.cli.verbs.join import TTL_S, TTL_S_MAX
from peerload.core.handoff.executor import OFFERS_MAX
from peerload.files import tree
from peerload.files.manifest import FILES_MAX
from peerload.model.config import AgentConfig, CoreConfig
from peerload.model.task import ARGV_BYTES_MAX, ARGV_ITEMS_MAX, ENVIRONMENT_BYTES_MAX
from peerload.security import certificates, revocation
from peerload.wire import frame, peer
from tests.each import each
from tests.security.rules import IDS, PAGE, TESTS, marked


def test_tests_name_rules_that_there_are() -> None:
    assert set(marked()) <= set(IDS)
    assert tuple(TESTS) == IDS


@each("rule", IDS)
def test_the_tests_that_are_named_are_there_and_marked(rule: str) -> None:
    assert TESTS[rule]
    assert set(TESTS[rule]) <= set(marked().get(rule, ())), "each bears the mark of its rule"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


AGENT, CORE = AgentConfig(node="x", state="/", socket="/s"), CoreConfig()
FIGURES = {
    "J1": (f"last {certificates.NODE_LIFE.days} days", f"after {2 * certificates.NODE_LIFE.days // 3}"),
    "J2": (f"at most {TTL_S_MAX / 86_400:g} days", f"for {TTL_S / 60:g} minutes"),
    "J3": (f"{STRANGERS_MAX} strangers", f"{STRANGERS_OF_ONE_MAX} of one address", f"{NEWCOMERS_MAX} newcomers"),
    "J4": (f"{revocation.ENDS_AFTER_S / 86_400:g} days",),
    "J5": (f"{revocation.OVERLAP_REVOKED_S:g} s",),
    "L3": (
        f"{_mib(frame.CONTROL_BYTES_MAX)} a request", f"{_mib(ARGV_BYTES_MAX)} of {ARGV_ITEMS_MAX:,} arguments", f"{_mib(ENVIRONMENT_BYTES_MAX)} of variables",
        f"{AGENT.clients_max} clients", f"{REQUESTS_PENDING_MAX:,} requests", f"{_mib(UNREAD_BYTES_MAX)} of unread",
    ),
    "F1": (f"{FILES_MAX:,} files", f"{tree.BYTES_MAX >> 40} TiB"),
    "F2": (f"{_mib(AGENT.output_bytes_max)} a stream", f"{_mib(FOLLOWED_BYTES_MAX)} where wanted in full"),
    "P1": (f"{_mib(HELLO_BYTES_MAX)} for the introduction", f"{_mib(peer.DATA_BYTES_MAX)} a frame"),
    "P2": (
        f"{OFFERS_MAX:,} offers", f"{CORE.guests_max:,} remote tasks", f"{MESSAGES_PER_S_MAX:,} messages a second",
        f"{_mib(WAITING_BYTES_MAX)} and {WAITING_MESSAGES_MAX:,} messages",
    ),
    "P4": (f"within {CORE.fast_failure_s:g} s",),
    "S18": (f"{frame.DEPTH_MAX} levels",),
}  # fmt: skip
"""Bounds that the page tells, as the code has them."""


@each("rule", FIGURES)
def test_the_bounds_of_a_rule_are_those_of_the_code(rule: str) -> None:
    (row,) = re.findall(rf"^\| {rule} \| .*$", PAGE, re.MULTILINE)
    assert [figure for figure in FIGURES[rule] if figure not in row] == []
