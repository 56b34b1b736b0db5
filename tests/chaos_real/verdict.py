"""What a campaign has shown, from the ledger and from every node's database: what was lost, overlapped, recorded twice."""

from __future__ import annotations

import collections
import contextlib
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos_real.ledger import overlapping

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.chaos_real.ledger import Run

FINAL = ("done", "failed", "cancelled")
GAVE_UP = "given up"
"""What the reason of a task says that was failed since it lost its node too often."""
SHOWN_MAX = 10


class Recorded(NamedTuple):
    """A task as its home has it on disk; ``ends``: how often an end was written into its events."""

    task: str
    state: str
    attempt: int
    reason: str
    ends: int


class Asked(NamedTuple):
    """What was asked for and acknowledged. is_reused: an earlier submit was acknowledged with the same id, and is
    lost; may_be_cancelled: that was asked for; is_cancelled: and acknowledged."""

    task: str
    guarantee: str = "at-least-once"
    is_reused: bool = False
    may_be_cancelled: bool = False
    is_cancelled: bool = False


def recorded(node: str, database: Path) -> list[Recorded]:
    """Every task of a home, read from its database."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "SELECT t.counter, t.member, t.state, t.attempt, t.reason, (SELECT count(*) FROM events e WHERE e.what = 'task'"
            " AND e.counter = t.counter AND e.member = t.member AND e.state IN ('done', 'failed', 'cancelled'))"
            " FROM tasks t"
        ).fetchall()
    return [
        Recorded(f"{node}/{counter}" + (f".{member}" if member >= 0 else ""), state, attempt, reason, ends)
        for counter, member, state, attempt, reason, ends in rows
    ]


def history(task: str, database: Path) -> list[tuple[float, str]]:
    """What a node's event log has about a task: Unix time and words."""
    home, _, name = task.partition("/")
    counter, _, member = name.partition(".")
    own = database.parent.parent.name == home
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "SELECT at, state, attempt, node, reason FROM events WHERE what = 'task' AND"
            + (" counter = ? AND member IN (-1, ?)" if own else " task = ? AND ? IS NOT NULL"),
            (int(counter), int(member or -1)) if own else (task, member),
        ).fetchall()
    return [
        (at, f"{state}, attempt {attempt}, at {node or '-'}: {reason}") for at, state, attempt, node, reason in rows
    ]


class Verdict:
    """Everything that is wrong, by kind: task → what about it."""

    def __init__(self, asked: Iterable[Asked], tasks: Iterable[Recorded], runs: Mapping[str, list[Run]]) -> None:
        self.lost: dict[str, str] = {}
        self.overlapped: dict[str, str] = {}
        self.recorded_twice: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        """Anything else that must not be: an end that nobody came to, an attempt started twice, a task nobody asked for."""
        self.directory = Path()
        """Where everything is kept for study, if something is wrong."""
        self.gave_up = 0
        self.unknown = 0
        self.runs = sum(len(those) for those in runs.values())
        self.away = sum(run.node != task.partition("/")[0] for task, those in runs.items() for run in those)
        self.again = sum(len(those) > 1 for those in runs.values())
        known = {task.task: task for task in tasks}
        wanted = {one.task: one for one in asked}
        self.tasks = len(wanted)
        for one in wanted.values():
            self._judge(one, known.get(one.task), runs.get(one.task, []))
        for task in known.keys() - wanted.keys():
            self.wrong[task] = "nobody asked for it"
        for task in runs.keys() - wanted.keys():
            self.wrong[task] = "ran, and nobody asked for it"

    def _judge(self, asked: Asked, task: Recorded | None, runs: list[Run]) -> None:
        name = asked.task
        starts = collections.Counter(run.attempt for run in runs)
        if again := [attempt for attempt, count in starts.items() if count > 1]:
            self.wrong[name] = f"attempt {again[0]} was started twice: {_told(runs)}"
        if asked.guarantee == "once" and len(runs) > 1:
            self.wrong[name] = f"at most once, but {_told(runs)}"
        if asked.guarantee != "fast" and (pairs := overlapping(runs)):
            self.overlapped[name] = " with ".join(map(str, pairs[0]))
        if asked.is_reused:
            self.lost[name] = "its id was given to another submit"
            return
        if task is None:
            self.lost[name] = "its home does not know it"
            return
        if task.ends > 1:
            self.recorded_twice[name] = f"{task.ends} ends in its events"
        if asked.is_cancelled and task.state != "cancelled":
            self.wrong[name] = f"its cancel was acknowledged, but it is {task.state}"
        self._judge_end(asked, task, runs)

    def _judge_end(self, asked: Asked, task: Recorded, runs: list[Run]) -> None:
        name = asked.task
        if task.state == "unknown" and asked.guarantee == "once":
            self.unknown += 1
        elif task.state not in FINAL:
            self.lost[name] = f"{task.state}: {task.reason}"
        elif task.state == "done":
            if not any(run.is_whole and run.attempt <= task.attempt for run in runs):
                self.lost[name] = f"recorded as done, but {_told(runs) or 'it never ran'}"
        elif task.state == "failed":
            if GAVE_UP in task.reason:
                self.gave_up += 1
            else:
                self.wrong[name] = f"failed ({task.reason}), but {_told(runs) or 'it never ran'}"
        elif not asked.may_be_cancelled:
            self.wrong[name] = "cancelled, and nobody asked for that"

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.overlapped or self.recorded_twice or self.wrong)

    def complaints(self) -> list[str]:
        """What is wrong, some of each kind."""
        kinds = {
            "lost": self.lost,
            "overlapped": self.overlapped,
            "recorded twice": self.recorded_twice,
            "wrong": self.wrong,
        }
        return [f"{kind}: {task}: {why}" for kind, found in kinds.items() for task, why in [*found.items()][:SHOWN_MAX]]

    def concerned(self) -> list[str]:
        """Some of the tasks about which something is wrong."""
        found = {**self.lost, **self.overlapped, **self.recorded_twice, **self.wrong}
        return [task for task in found if "/" in task][:SHOWN_MAX]

    def __str__(self) -> str:
        parts = [f"lost {len(self.lost)}", f"overlapped {len(self.overlapped)}"]
        parts.append(f"recorded twice {len(self.recorded_twice)}")
        if self.wrong:
            parts.append(f"otherwise wrong {len(self.wrong)}")
        return ", ".join(parts)


def _told(runs: list[Run]) -> str:
    return "; ".join(map(str, runs))
