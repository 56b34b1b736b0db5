"""Every state of the handoff: what holds, and what each rule is good for."""

from __future__ import annotations

import pytest

from tests.model.handoff import Handoff
from tests.model.refinement import Seen, explained
from tests.model.rows import Row, breaking, holding
from tests.model.state import Budget

SHORT = ("no queue, no return", "queue and return, at most once")
SHORT_BREAKING = (
    "park-equal",
    "return-queued",
    "n-not-burnt",
    "launcher-lost-died",
    "died-never-forked",
    "launcher-bound",
    "exit-torn",
)


def explore(row: Row) -> None:
    found = row.explored()
    story = "\n".join(found.story)
    assert found.is_complete
    if row.breaks:
        assert found.broken.startswith(row.breaks), f"{row.name}: {found.broken or 'nothing breaks'}\n{story}"
    else:
        assert not found.broken, f"{row.name}: {found.broken}\n{story}"


@pytest.mark.parametrize("row", [row for row in holding() if row.name in SHORT], ids=lambda row: row.name)
def test_the_protocol_holds(row: Row) -> None:
    explore(row)


@pytest.mark.parametrize("row", [row for row in breaking() if row.name in SHORT_BREAKING], ids=lambda row: row.name)
def test_without_a_rule_it_breaks(row: Row) -> None:
    explore(row)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", [*holding(), *breaking()], ids=lambda row: row.name)
def test_every_row(row: Row) -> None:
    explore(row)


def lenient(**more: object) -> Handoff:
    budget = Budget(9, 9, 9, 9, 9)
    return Handoff(budget, reinstates=True, loose=True, attempts=3, **more)  # type: ignore[arg-type]


RUN = [
    Seen(("submitted",)),
    Seen(("offer",), 1, 0),
    Seen(("accept",), 1, 0),
    Seen(("LEASED",), 1, 0),
    Seen(("START",), 1, 0),
    Seen(("forks",), 1, 0),
    Seen(("process ends",), 1, 0),
    Seen(("RESULT",), 1, 0),
    Seen(("recorded",), 1, 0),
]


def test_a_plain_run_is_explained() -> None:
    assert explained(lenient(), RUN) == len(RUN)


@pytest.mark.parametrize("left_out", range(len(RUN) - 1))
def test_a_run_with_a_step_left_out_is_not(left_out: int) -> None:
    run = RUN[:left_out] + RUN[left_out + 1 :]
    assert explained(lenient(), run) < len(run)


def test_a_task_taken_back_while_it_runs_on_is_not() -> None:
    run = [*RUN[:6], Seen(("lease over",), 1), Seen(("process ends",), 1, 0)]
    assert explained(lenient(), run[:7]) == 7
    assert explained(lenient(), run) == 7


def test_but_after_its_lease_was_taken_up_again_it_is() -> None:
    run = [*RUN[:6], Seen(("lease over",), 1), Seen(("leased again",), 1, 0), Seen(("process ends",), 1, 0)]
    assert explained(lenient(), run) == len(run)


def test_a_result_of_an_earlier_attempt_counts() -> None:
    run = [
        *RUN[:8],
        Seen(("lease over",), 1),
        Seen(("offer",), 2, 1),
        Seen(("accept",), 2, 1),
        Seen(("LEASED",), 2, 1),
        Seen(("recorded",), 1, 0),
    ]
    assert explained(lenient(), run) == len(run)
