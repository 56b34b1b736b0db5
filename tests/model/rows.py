"""What is explored, and what has to come of it: the protocol as it is, and without one of its rules."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.handoff import Handoff
from tests.model.search import STUCK, Found, explore
from tests.model.state import Budget

QUIET = Budget(home_machine=0, executor_agent=0, executor_machine=0)
"""Nothing crashes."""
EVERYTHING = Budget(executor_launcher=1, parks=1)


class Row(NamedTuple):
    """One exploration. breaks: how the broken invariant's name begins, "" if everything holds."""

    name: str
    model: Handoff
    breaks: str = ""

    def explored(self, states_max: int = 3_000_000) -> Found:
        """Look at every state; liveness only where it is in question."""
        return explore(self.model, states_max=states_max, liveness=not self.breaks or self.breaks == STUCK)


def holding() -> list[Row]:
    """The protocol: nothing breaks, and an end can always be reached."""
    launcher = Budget(executor_launcher=1)
    return [
        Row("no queue, no return", Handoff(Budget(), waits=False, returns=False)),
        Row("queue and return", Handoff(launcher)),
        Row("queue and return, at most once", Handoff(launcher, at_most_once=True)),
        Row("everything", Handoff(EVERYTHING)),
        Row("everything, at most once", Handoff(EVERYTHING, at_most_once=True)),
        Row("parked twice", Handoff(Budget(executor_agent=0, executor_machine=0, parks=2))),
        Row("home's agent crashes", Handoff(QUIET._replace(home_agent=1, executor_agent=1, parks=1))),
        Row("a lease of two ticks", Handoff(QUIET._replace(parks=1), lease=2)),
        Row("a lease given up is taken up again", Handoff(Budget(0, 0, 1, 0, parks=1), reinstates=True)),
        Row("loose", Handoff(QUIET._replace(parks=1), loose=True)),
        Row("home runs it, too", Handoff(QUIET._replace(home_machine=1, parks=1), local=True)),
    ]


def breaking() -> list[Row]:
    """One rule left out each, and what breaks."""
    parks, launcher = QUIET._replace(parks=1), QUIET._replace(executor_launcher=1)
    no_home = Budget(home_machine=0, executor_agent=0)

    def row(rule: str, breaks: str, budget: Budget, **more: object) -> Row:
        return Row(rule, Handoff(budget, without=(rule,), **more), breaks)  # type: ignore[arg-type]

    return [
        row("park-not-durable", "I2", parks._replace(home_machine=1)),
        row("park-confirmed", "I2", parks),
        row("park-late", "I2", parks),
        row("park-equal", "U1", parks),
        row("park-ts-volatile", "I2", parks._replace(executor_agent=1)),
        Row("nonces", Handoff(parks._replace(executor_agent=1), nonces=False), "I2"),
        row("revoke-keeps-start", STUCK, Budget(parks=1), at_most_once=True),
        row("return-not-durable", "I2", QUIET),
        row("return-queued", "I2", QUIET),
        row("same-n-two-commits", "I", QUIET),
        row("n-not-burnt", "I", QUIET),
        row("boot-id-any", "I2", no_home),
        row("launcher-lost-died", "I5", launcher, at_most_once=True),
        row("died-never-forked", "I2", launcher),
        row("launcher-bound", "I2", launcher),
        row("exit-torn", "I6", QUIET._replace(executor_machine=1)),
    ]
