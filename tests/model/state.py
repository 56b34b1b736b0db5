"""One task in the model: what its home and its two executors know of it, on disk and in memory, and what has happened."""

from __future__ import annotations

import enum
from typing import NamedTuple

NOBODY = -1
HERE = 99
"""The lease is home's own: the task runs there."""
UNBOUNDED = 99
"""A parked attempt runs without a deadline."""
UNWATCHED = -1
"""The launcher is dead and nothing ends or freezes what it has left (broken variants only)."""


class At(enum.IntEnum):
    """The durable state of the task at home."""

    NEW = 0
    QUEUED = 1
    LEASED = 2
    OVER = 3
    UNKNOWN = 4


class Kept(enum.IntEnum):
    """What an executor has on disk about its newest attempt. EXIT: an exit record that is written and not yet synced."""

    NOTHING = 0
    START = 1
    RESULT = 2
    REFUSED = 3
    EXIT = 4


class Home(NamedTuple):
    """state, attempt, holder, result and parked are durable; the rest is memory. result: the attempt whose result is
    recorded; offered: to whom an offer is out; deadline: ticks until the lease is over for sure; away: stopped politely,
    or asleep; runs: the attempt that runs on home itself; unsynced: PARKED is not on disk yet (a broken variant)."""

    state: At = At.NEW
    attempt: int = 0
    holder: int = NOBODY
    result: int = 0
    offered: int = NOBODY
    deadline: int = 0
    parked: bool = False
    away: bool = False
    runs: int = 0
    unsynced: bool = False


class Executor(NamedTuple):
    """floor, kept and kept_attempt are durable; reserved and waiting are memory; runs, left and applied live in the
    launcher. left: ticks until the deadline, 0 = frozen; applied: the newest order followed, 2e for one of era e, 2e-1
    for PARK number e."""

    floor: int = 0
    kept: Kept = Kept.NOTHING
    kept_attempt: int = 0
    reserved: int = 0
    waiting: int = 0
    runs: int = 0
    left: int = 0
    applied: int = 0

    @property
    def has(self) -> int:
        """The committed attempt that is here, 0 = none."""
        return self.runs or self.waiting

    @property
    def has_begun(self) -> bool:
        """START is on disk, and the process is not there yet."""
        return bool(self.waiting) and self.kept is Kept.START and self.kept_attempt == self.waiting


class History(NamedTuple):
    """What happened, for the invariants only: the protocol does not know it. finished, rows, killed, short: sets of
    attempts (bits) that have ended, whose RESULT row was synced, that a signal ended, and that ran out of GPU memory."""

    acknowledged: bool = False
    recorded: int = 0
    starts: tuple[int, ...] = ()
    finished: int = 0
    rows: int = 0
    killed: int = 0
    short: int = 0
    error: str = ""


class Budget(NamedTuple):
    """How many crashes of each kind, and how many PARKs, may still come."""

    home_machine: int = 1
    home_agent: int = 0
    executor_agent: int = 1
    executor_machine: int = 1
    executor_launcher: int = 0
    parks: int = 0


class State(NamedTuple):
    """Everything. ``messages``: a set of `wire.Wire`."""

    home: Home
    executors: tuple[Executor, ...]
    messages: int
    history: History
    budget: Budget


class Step(NamedTuple):
    """What happens on the way from one state to the next: for people, and for `refinement.py`, which matches them."""

    what: str
    attempt: int = 0
    node: int = NOBODY
    note: str = ""

    def __str__(self) -> str:
        where = f" X{self.node}" if self.node >= 0 else ""
        number = f"({self.attempt})" if self.attempt else ""
        return f"{self.what}{number}{where}{f': {self.note}' if self.note else ''}"


def broken(state: State, *, at_most_once: bool) -> str:
    """The invariant that this state breaks; "" if none."""
    home, history = state.home, state.history
    if history.error:
        return history.error
    if history.acknowledged and home.state is At.NEW:
        return "I1 an acknowledged task is lost"
    if sum(1 for executor in state.executors if executor.runs and executor.left != 0) + bool(home.runs) > 1:
        return "I2 two copies execute"
    if history.recorded > 1:
        return "I3 a result is recorded twice"
    if any(count > 1 for count in history.starts):
        return "I4 an attempt starts twice"
    if at_most_once and sum(history.starts) > 1:
        return "I5 an at-most-once task starts twice"
    if home.state is At.OVER and home.result and not history.finished >> home.result & 1:
        return "I6 the recorded result is of an attempt that never finished"
    is_recorded = home.state is At.OVER and home.result
    if (
        history.rows
        and not history.recorded
        and not is_recorded
        and all(executor.kept is not Kept.RESULT for executor in state.executors)
    ):
        return "I7 a finished result is lost"
    return ""
