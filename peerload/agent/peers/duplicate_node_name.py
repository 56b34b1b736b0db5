"""Duplicate node names: what this agent does when another one has its name.

A new agent that is refused ends: it started less than NEWCOMER_S ago and never had a task, so nothing is lost. Any other
stays, cut off from the peers that refuse it, and reports that: no peer's word ends an agent that is at work. Of two agents
with copies of one state directory, which have proven that to each other, the younger ends.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from peerload.agent.runtime import AgentInfo, RunState
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.model.messages import Identity

NEWCOMER_S = 60.0
HINT = "start this one with a name of its own:  peerload up --node NAME"
COPY_NOTICE = "another agent with a copy"
COPIES_REPORTED_MAX = 8
"""Addresses of copies that are reported and dialled: any member can make up more."""

_log = logging.getLogger("peerload.agent")


@dataclass(eq=False, repr=False)
class DuplicateNames:
    """Reactions of one agent to others with its name."""

    _info: AgentInfo
    _node: Node
    _run: RunState
    _events: EventLog

    def copy_proven(self, other: Identity, up_s: float) -> None:
        """Another agent has proven, by its certificate, that it has this node's name, and it has this node's database, too:
        both would run the same tasks. The younger of the two ends, with its tasks."""
        info = self._info
        what = (
            f"another agent with a copy of {info.config.state} runs at {other.address}; both would run the same tasks"
        )
        if (info.up_s(), info.identity.boot) < (up_s, other.boot):
            hint = "stop one of the two; a new node has its own state:  peerload up --node NAME --state NEW_DIR"
            self._run.refuse(ConfigError("state", f"{what}, and this one was started later", hint=hint))
            return
        notice = f"{what}. It was started later than this one, and ends"
        if notice not in info.notices:
            info.notices.append(notice)
        _log.error("another agent has a copy of this state directory: address=%s; it ends", other.address)

    def copy_reported(self, other: Identity) -> bool:
        """A message over the broker claims to come from an agent with this node's name and database; any member can send
        that. Returns whether its address is to be dialled, where a certificate proves its name (`copy_proven`)."""
        info = self._info
        notice = (
            f"{COPY_NOTICE} of {info.config.state} runs at {other.address or 'an unknown address'}, says the broker;"
            " both would run the same tasks: stop one of the two"
        )
        reported = [known for known in info.notices if known.startswith(COPY_NOTICE)]
        if notice in reported or len(reported) >= COPIES_REPORTED_MAX:
            return False
        info.notices.append(notice)
        _log.error("%s", notice)
        self._events.record("store", "copied", node=other.node, reason=notice)
        return bool(other.address)

    def refused(self, by: str) -> None:
        """The peer at this address refuses this node, because another agent has its name."""
        info, node = self._info, self._node
        name = info.identity.node
        if by in info.refused_by:
            return
        is_newcomer = time.time() - info.started_at < NEWCOMER_S
        has_worked = node.submissions.counter > 0 or node.executor.guests or len(node.executor.fences) > 0
        if is_newcomer and not has_worked:
            self._run.refuse(ConfigError("node", f"another agent is called {name}, says the peer at {by}", hint=HINT))
            return
        info.add_refusal(by)
        what = f"the peer at {by} refuses this node: another agent is called {name}"
        info.notices[:] = [notice for notice in info.notices if "another agent is called" not in notice]
        info.notices.append(f"{what} (peerload down, then peerload up --node NAME)")
        _log.error("%s; %s", what, HINT)
