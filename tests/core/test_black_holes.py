"""Nodes that draw tasks and do nothing with them are left alone for a while (rule P4)."""

from __future__ import annotations

import msgspec
import pytest

from peerload.core.membership.membership import COMMANDS_MAX, NODES_MAX
from peerload.model import events, messages
from peerload.model.config import CoreConfig
from peerload.model.resources import LoadReport
from peerload.model.task import Exit
from tests.core.given import ACCEPTS, Given, spec
from tests.core.test_losses import accepted
from tests.wording import Says

FULL = LoadReport(slots=1, load_tasks=1, accepts=False, incarnation=1, sequence=9)
CONFIG = CoreConfig()
NEED = messages.Need()


def skipped(x: Given) -> list[str]:
    return [node for node in ("y", "z") if x.node.membership.circuit_breaker.why(node)]


def eligible(x: Given) -> list[str]:
    return list(x.node.membership.eligible(NEED, "x"))


def offered(x: Given, number: int) -> messages.Offer:
    """A task of x is on offer to y."""
    x.submit()
    x.node.handoff.offer(x.task(number), "y", voluntary=False, search=False)
    return messages.Offer(f"x/{number}", x.task(number).uid, x.task(number).record.attempt + 1, spec(), 60.0)


def declines(x: Given, number: int, report: LoadReport = ACCEPTS, code: str = "room") -> None:
    said = offered(x, number)
    x.hear("y", messages.Decline(said.task, said.uid, said.attempt, code, "no", report))


def given() -> Given:
    x = Given(slots=1, peers=("y", "z"))
    x.submit()  # runs here, so that the others wait
    return x


def runs_there(x: Given, number: int, exit_: Exit, node: str = "y", argv: bytes = b"true") -> None:
    """A task of x runs on a node, and ends so."""
    x.submit(msgspec.structs.replace(spec(), argv=(argv,)))
    task = x.task(number)
    x.node.handoff.offer(task, node, voluntary=False, search=False)
    accepted(x, number, node)
    x.hear(node, messages.Result(task.task, task.uid, task.record.attempt, exit_, inline=True))


def failed(seconds: float = 0.1, exit_code: int = 1) -> Exit:
    return Exit(exit_code, started_at=5.0, ended_at=5.0 + seconds)


@pytest.mark.rule("P4")
def test_who_says_that_it_takes_tasks_and_refuses_them_is_skipped_for_a_minute() -> None:
    x = given()
    for number in range(2, 1 + CONFIG.refusals_max):
        declines(x, number)
    assert skipped(x) == []
    assert eligible(x) == ["y", "z"]
    declines(x, 1 + CONFIG.refusals_max)
    told = [(note.what, note.state, note.node) for note in x.notes]
    assert ("node", "skipped", "y") in told
    assert ("security", "P4", "y") in told
    assert skipped(x) == ["y"]
    assert eligible(x) == ["z"]
    x.after(CONFIG.skip_s + 1.0).timer("gates")
    assert eligible(x) == ["y", "z"]
    declines(x, 2 + CONFIG.refusals_max)
    assert skipped(x) == ["y"], "one more is enough when it is asked again"


@pytest.mark.rule("P4")
def test_who_does_not_answer_offers_is_skipped_too() -> None:
    x = given()
    for number in range(2, 2 + CONFIG.refusals_max):
        said = offered(x, number)
        x.after(CONFIG.offer_timeout_s).timer("offer", said.uid.hex())
    assert skipped(x) == ["y"]


@pytest.mark.parametrize(("report", "code"), [(FULL, "room"), (ACCEPTS, "directory"), (ACCEPTS, "floor")])
def test_who_is_full_or_has_a_reason_that_stays_is_not(report: LoadReport, code: str) -> None:
    x = given()
    for number in range(2, 2 + 2 * CONFIG.refusals_max):
        declines(x, number, report, code)
    assert skipped(x) == []


def test_one_that_takes_a_task_now_and_then_is_not() -> None:
    x = given()
    for number in range(2, 2 + CONFIG.refusals_max - 1):
        declines(x, number)
    number = 1 + CONFIG.refusals_max
    offered(x, number)
    accepted(x, number, "y")
    declines(x, number + 1)
    assert skipped(x) == []


def test_another_start_of_it_begins_anew() -> None:
    x = given()
    for number in range(2, 2 + CONFIG.refusals_max):
        declines(x, number)
    assert skipped(x) == ["y"]
    x.meet("y", start=2)
    assert skipped(x) == []


@pytest.mark.rule("P4")
def test_one_on_which_all_tasks_fail_at_once_is_skipped() -> None:
    x = given()
    for number in range(2, 1 + CONFIG.fast_failures_max):
        runs_there(x, number, failed())
    assert skipped(x) == []
    runs_there(x, 1 + CONFIG.fast_failures_max, failed())
    assert skipped(x) == ["y"]
    assert x.node.membership.circuit_breaker.why("y") == Says.SKIPPED(60, 10, 2)


@pytest.mark.rule("P4")
def test_a_result_that_is_repeated_since_its_output_cannot_be_kept_is_one_failure() -> None:
    x = given()
    runs_there(x, 2, failed())
    task = x.task(2)
    for _ in range(2 * CONFIG.fast_failures_max):
        x.when(events.OutputArrived(task.uid, 1, "the disk is full"))
        x.hear("y", messages.Result(task.task, task.uid, 1, failed(), inline=True))
    assert skipped(x) == []


@pytest.mark.parametrize("between", [failed(seconds=3.0), failed(exit_code=0)])
def test_one_that_lasts_or_succeeds_in_between_is_enough(between: Exit) -> None:
    x = given()
    for number in range(2, 2 + 3 * CONFIG.fast_failures_max):
        runs_there(x, number, between if number % CONFIG.fast_failures_max == 0 else failed())
    assert skipped(x) == []


def test_a_command_that_fails_everywhere_is_its_own_fault() -> None:
    x = given()
    for number in range(2, 60):
        runs_there(x, number, failed(), node="yz"[number % 2], argv=b"false")
    assert skipped(x) == []


def test_where_nobody_else_could_run_it_it_is_asked_all_the_same() -> None:
    x = Given(slots=1, peers=("y",))
    x.submit()
    for number in range(2, 2 + CONFIG.refusals_max):
        declines(x, number)
    assert skipped(x) == ["y"]
    assert eligible(x) == ["y"]


def test_what_is_remembered_is_bounded() -> None:
    x = given()
    holes = x.node.membership.circuit_breaker
    for number in range(2 * COMMANDS_MAX):
        holes.ended(f"n{number}", msgspec.structs.replace(spec(), argv=(f"c{number}".encode(),)), failed())
        holes.unanswered(f"n{number}")
    assert len(holes._failed_on) == COMMANDS_MAX
    assert len(holes._failures) == len(holes._refusals) == NODES_MAX
