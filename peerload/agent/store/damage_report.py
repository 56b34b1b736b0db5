"""What is said of a database that is not what it was: rows that cannot be read, or none left of it at all."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from peerload.agent.store.high_water import FILE, GAP
from peerload.agent.store.rows import is_id
from peerload.model.actions import PutEvent

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.agent.parts import Parts
    from peerload.agent.store.recovery import Recovered

log = logging.getLogger("peerload.agent")

TOLD_MAX = 100
"""Damaged rows that are named one by one at a start; `ls` has all of them."""
JUMP = 1_000_000
"""Where ids begin again at the least, if those given before are not known."""
TRACES = ("spool", "launcher", "addresses", "tls", FILE)
"""What an agent leaves in STATE only when it has had a database."""


def traces(state: Path) -> list[str]:
    """What is there of an agent that was here before. To be asked before anything is made."""
    return [name for name in TRACES if _has_any(state / name)]


def _has_any(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def begin_anew(parts: Parts, found: list[str]) -> None:
    """If the database is new and something of a former one is ``found``: remember to say so, and let ids go on beyond the
    high-water mark and the moment in seconds, which no home has reached that was given less than a task a second."""
    if not parts.store.is_new or not found:
        return
    node, mark = parts.config.node, parts.store.found_mark
    counter = max(int(time.time()), JUMP, mark.counter + GAP if mark is not None else 0)
    parts.store.count_on_from(counter)
    last = f", of which {node}/{mark.counter} was the last," if mark is not None and mark.counter else ""
    said = (
        f"the database of {parts.config.state} is new, though an agent was here before (there is {', '.join(found)}): "
        f"what it had acknowledged{last} is not known any more; new ids begin at {node}/{counter + 1}"
    )
    log.warning("%s", said)
    parts.notices.append(said)


def begin_as_copy(parts: Parts) -> None:
    """This state directory is a copy of one whose launcher ran tasks until now, which were ended: what the database knows may
    be older than what was promised, so it takes a new id, and peers believe none of its promises about earlier attempts."""
    parts.store.take_new_id()
    said = (
        f"{parts.config.state} is a copy, or was put back from one: the launcher of the original still ran and was ended with"
        " its tasks, and what was done since the copy was made is not known here"
    )
    log.error("%s", said)
    parts.notices.append(said)


def tell_loss(parts: Parts) -> None:
    """If the database has lost commits: say so in the log and to whoever starts the agent; the event is kept already."""
    if parts.store.lost is not None:
        said = parts.store.lost.words(parts.config.node)
        log.error("%s", said)
        parts.notices.append(said)


def tell(parts: Parts, kept: Recovered) -> None:
    """Name what cannot be read, in the log and as events; remember it for who starts the agent."""
    for said in parts.notices:
        parts.journal.happened("store", "lost", reason=said)
    for damage in kept.damaged[:TOLD_MAX]:
        log.error("%s is damaged and is not served: %s", damage.task, damage.why)
        task, reason = (damage.task, damage.why) if is_id(damage.task) else ("", f"{damage.task}: {damage.why}")
        parts.journal.note(PutEvent(time.time(), "store", "damaged", task=task, reason=reason))
    for reason in kept.unreadable[:TOLD_MAX]:
        log.error("in the database: %s", reason)
        parts.journal.happened("store", "damaged", reason=reason)
    if kept.damaged:
        names = ", ".join(damage.task for damage in kept.damaged[:3]) + (" ..." if len(kept.damaged) > 3 else "")  # noqa: PLR2004
        parts.notices.append(f"{len(kept.damaged)} damaged tasks are not served ({names}); see:  peerload ls")
    if kept.unreadable:
        parts.notices.append(
            f"{len(kept.unreadable)} other rows of the database cannot be read; see:  peerload events --what store"
        )
