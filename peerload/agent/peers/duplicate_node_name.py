"""What an agent does that is refused since another has its name.

A newcomer ends: it started less than NEWCOMER_S ago and never had a task, so nothing is lost, and two of one name would
speak for one another. Any other stays, alone as far as those peers go that refuse it, and says so: no peer's word ends an agent
that is at work. Of two agents with copies of one state directory, which have proven that to each other, the younger ends.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from peerload.agent.parts import Parts
    from peerload.model.messages import Identity

NEWCOMER_S = 60.0
HINT = "start this one with a name of its own:  peerload up --node NAME"

_log = logging.getLogger("peerload.agent")
COPY_NOTICE = "another agent with a copy"
COPIES_TOLD_MAX = 8
"""Addresses of copies that are reported and dialled: any member can make up more."""


def copied(parts: Parts, other: Identity, up_s: float) -> None:
    """Another agent has this node's name and its database: two copies of one state directory, both of which would run the
    same tasks. It has proven its name to us by its certificate. The younger of the two ends, with its tasks."""
    what = f"another agent with a copy of {parts.config.state} runs at {other.address}; both would run the same tasks"
    if (parts.up_s(), parts.identity.boot) < (up_s, other.boot):
        hint = (
            "stop one of the two; a new node begins with a state of its own:  peerload up --node NAME --state NEW_DIR"
        )
        parts.run.refuse(ConfigError("state", f"{what}, and this one was started later", hint=hint))
        return
    said = f"{what}. It was started later than this one, and ends"
    if said not in parts.notices:
        parts.notices.append(said)
    _log.error("%s", said)


def heard_of_copy(parts: Parts, other: Identity) -> None:
    """An agent with this node's name and database speaks over the broker. That proves no more than that a member of the
    cluster says so; so it is said, and that agent is dialled once: its certificate proves its name then (`copied`)."""
    said = (
        f"{COPY_NOTICE} of {parts.config.state} runs at {other.address or 'an unknown address'}, says the broker;"
        " both would run the same tasks: stop one of the two"
    )
    told = [notice for notice in parts.notices if notice.startswith(COPY_NOTICE)]
    if said in told or len(told) >= COPIES_TOLD_MAX:
        return
    parts.notices.append(said)
    _log.error("%s", said)
    parts.journal.happened("store", "copied", node=other.node, reason=said)
    if other.address:
        parts.links.meet_copy(other.address)


def name_taken(parts: Parts, by: str) -> None:
    """The peer at ``by`` refuses this agent for its name."""
    node = parts.node
    name = parts.identity.node
    if by in parts.refused_by:
        return
    is_newcomer = time.time() - parts.started_at < NEWCOMER_S
    has_worked = node.submissions.counter > 0 or node.executor.guests or len(node.executor.fences) > 0
    if is_newcomer and not has_worked:
        parts.run.refuse(ConfigError("node", f"another agent is called {name}, says the peer at {by}", hint=HINT))
        return
    parts.refused_by = (*parts.refused_by, by)[-parts.REFUSED_BY_MAX :]
    said = f"the peer at {by} refuses this node: another agent is called {name}"
    parts.notices[:] = [notice for notice in parts.notices if "another agent is called" not in notice]
    parts.notices.append(f"{said} (peerload down, then peerload up --node NAME)")
    _log.error("%s; %s", said, HINT)
