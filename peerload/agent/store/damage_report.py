"""Damage report: notices, events and log lines about a database with unreadable rows, or one that was lost."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from peerload.agent.store.high_water import FILE, GAP
from peerload.agent.store.rows import is_id
from peerload.model.actions import PutEvent

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.agent.store.event_log import EventLog
    from peerload.agent.store.recovery import Recovered
    from peerload.agent.store.store import Store
    from peerload.model.config import AgentConfig

log = logging.getLogger("peerload.agent")

TOLD_MAX = 100
"""Damaged rows that are named one by one at a start; `ls` has all of them."""
JUMP = 1_000_000
"""Lowest number at which ids continue if the earlier ones are not known."""
TRACES = ("spool", "launcher", "addresses", "tls", FILE)
"""Entries of STATE that an agent makes only when it has a database."""


def traces(state: Path) -> list[str]:
    """The traces of an earlier agent in this directory, as long as nothing new is made there."""
    return [name for name in TRACES if _has_any_entry(state / name)]


def _has_any_entry(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def begin_anew(store: Store, config: AgentConfig, found: list[str]) -> str:
    """Let ids continue in a new database where traces of an earlier one are ``found``: beyond the high-water mark
    and beyond the Unix time in seconds, which no home has reached that had less than one task a second. → a notice,
    or ""."""
    if not store.is_new or not found:
        return ""
    node, mark = config.node, store.found_mark
    counter = max(int(time.time()), JUMP, mark.counter + GAP if mark is not None else 0)
    store.count_on_from(counter)
    last = f", of which {node}/{mark.counter} was the last," if mark is not None and mark.counter else ""
    notice = (
        f"the database of {config.state} is new, though an agent was here before (there is {', '.join(found)}): "
        f"what it had acknowledged{last} is not known any more; new ids begin at {node}/{counter + 1}"
    )
    log.warning("%s", notice)
    return notice


def begin_as_copy(store: Store, config: AgentConfig) -> str:
    """Give the database a new id, since the state directory is a copy of one whose launcher ran tasks until now
    (they were ended). The database may be older than the promises of this node, so peers must not believe its
    promises about earlier attempts. → a notice."""
    store.take_new_id()
    notice = (
        f"{config.state} is a copy, or was put back from one: the launcher of the original still ran and was ended with"
        " its tasks, and what was done since the copy was made is not known here"
    )
    log.error("%s", notice)
    return notice


def report_damage(notices: list[str], store: Store, kept: Recovered, journal: EventLog) -> list[str]:
    """Write to the log and the event log what of the database is lost or cannot be read. notices: of `begin_anew` and
    `begin_as_copy`. → all notices for whoever starts the agent."""
    notices = list(notices)
    for notice in notices:
        journal.record("store", "lost", reason=notice)
    for damage in kept.damaged[:TOLD_MAX]:
        log.error("task is damaged and is not served: task=%s reason=%s", damage.task, damage.why)
        task, reason = (damage.task, damage.why) if is_id(damage.task) else ("", f"{damage.task}: {damage.why}")
        journal.note(PutEvent(time.time(), "store", "damaged", task=task, reason=reason))
    for reason in kept.unreadable[:TOLD_MAX]:
        log.error("database row cannot be read: reason=%s", reason)
        journal.record("store", "damaged", reason=reason)
    if kept.damaged:
        names = ", ".join(damage.task for damage in kept.damaged[:3]) + (" ..." if len(kept.damaged) > 3 else "")  # noqa: PLR2004
        notices.append(f"{len(kept.damaged)} damaged tasks are not served ({names}); see:  peerload ls")
    if kept.unreadable:
        notices.append(
            f"{len(kept.unreadable)} other rows of the database cannot be read; see:  peerload events --what store"
        )
    if store.lost is not None:  # its event is in the database already
        notices.append(store.lost.words(store.node))
        log.error("%s", notices[-1])
    return notices
