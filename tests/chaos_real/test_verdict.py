"""What the checks of a campaign find, shown on ledgers written by hand: a check that finds nothing proves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos_real.ledger import Ledger, overlapping
from tests.chaos_real.verdict import Asked, Recorded, Verdict

TASK = "n1/1"


def judged(
    directory: Path,
    *lines: str,
    state: str = "done",
    ends: int = 1,
    reason: str = "",
    attempt: int = 9,
    **asked: object,
) -> Verdict:
    """The verdict on one task. A line is `attempt node begun word`."""
    ledger = Ledger(directory / "ledger")
    with ledger.path.open("a", encoding="ascii") as file:
        for line in lines:
            number, node, begun, word = line.split()
            file.write(f"{TASK} {number} {node} {word} 0 {begun} 1\n")
    return Verdict([Asked(TASK, **asked)], [Recorded(TASK, state, attempt, reason, ends)], ledger.runs())  # type: ignore[arg-type]


def _more(directory: Path) -> Path:
    """Another directory, for another ledger."""
    more = directory / "more"
    more.mkdir()
    return more


def test_one_whole_run_is_good(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "1 n2 10 start", "1 n2 10 beat", "1 n2 10 stop")
    assert verdict.is_good
    assert str(verdict) == "lost 0, overlapped 0, recorded twice 0"
    assert (verdict.tasks, verdict.runs) == (1, 1)


def test_one_after_the_other_is_good(tmp_path: Path) -> None:
    assert judged(tmp_path, "1 n2 10 start", "1 n2 10 beat", "2 n3 20 start", "2 n3 20 stop").is_good


@pytest.mark.parametrize(
    "lines",
    [
        ("1 n2 10 start", "2 n3 20 start", "1 n2 10 beat", "2 n3 20 stop"),
        ("1 n2 10 start", "2 n3 20 start", "2 n3 20 stop", "1 n2 10 beat"),
        ("1 n2 10 start", "2 n3 20 start", "2 n3 20 stop", "1 n2 10 child"),
        ("2 n3 20 start", "1 n2 10 start", "2 n3 20 stop", "1 n2 10 stop"),
    ],
)
def test_what_goes_on_after_another_has_begun_overlaps(tmp_path: Path, lines: tuple[str, ...]) -> None:
    verdict = judged(tmp_path, *lines)
    assert set(verdict.overlapped) == {TASK}
    assert "overlapped 1" in str(verdict)
    assert judged(_more(tmp_path), *lines, guarantee="fast").overlapped == {}


def test_every_pair_is_looked_at(tmp_path: Path) -> None:
    lines = ("1 n2 10 start", "2 n3 20 start", "2 n3 20 stop", "3 n4 30 start", "3 n4 30 stop", "1 n2 10 stop")
    judged(tmp_path, *lines)
    (runs,) = Ledger(tmp_path / "ledger").runs().values()
    assert [(one.attempt, other.attempt) for one, other in overlapping(runs)] == [(1, 2), (1, 3)]


@pytest.mark.parametrize("state", ["queued", "leased", "held", "unknown"])
def test_a_task_without_an_end_is_lost(tmp_path: Path, state: str) -> None:
    assert set(judged(tmp_path, "1 n2 10 start", "1 n2 10 stop", state=state).lost) == {TASK}


def test_a_task_that_is_recorded_as_done_and_never_was_is_lost(tmp_path: Path) -> None:
    assert set(judged(tmp_path, "1 n2 10 start").lost) == {TASK}
    assert set(judged(tmp_path, "3 n2 20 start", "3 n2 20 stop", attempt=2).lost) == {TASK}


def test_a_task_that_nobody_knows_is_lost() -> None:
    verdict = Verdict([Asked(TASK)], [], {})
    assert not verdict.is_good
    assert set(verdict.lost) == {TASK}


def test_a_task_whose_id_was_given_out_again_is_lost(tmp_path: Path) -> None:
    assert set(judged(tmp_path, "1 n2 10 start", "1 n2 10 stop", is_reused=True).lost) == {TASK}


def test_an_end_recorded_twice(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "1 n2 10 start", "1 n2 10 stop", ends=2)
    assert set(verdict.recorded_twice) == {TASK}
    assert not verdict.is_good


@pytest.mark.parametrize(
    ("lines", "more"),
    [
        (("1 n2 10 start", "1 n2 20 start", "1 n2 20 stop"), {}),
        (("1 n2 10 start", "2 n2 20 start", "2 n2 20 stop"), {"guarantee": "once"}),
        (("1 n2 10 start", "1 n2 10 stop"), {"is_cancelled": True}),
        (("1 n2 10 start", "1 n2 10 stop"), {"state": "cancelled"}),
        (("1 n2 10 start", "1 n2 10 stop"), {"state": "failed", "reason": "signal 15"}),
    ],
)
def test_what_else_must_not_be(tmp_path: Path, lines: tuple[str, ...], more: dict[str, object]) -> None:
    verdict = judged(tmp_path, *lines, **more)  # type: ignore[arg-type]
    assert set(verdict.wrong) == {TASK}
    assert "otherwise wrong 1" in str(verdict)


def test_a_task_nobody_asked_for() -> None:
    verdict = Verdict([], [Recorded(TASK, "done", 1, "", 1)], {})
    assert set(verdict.wrong) == {TASK}


def test_a_cancel_that_was_asked_for_may_come_too_late(tmp_path: Path) -> None:
    assert judged(tmp_path, "1 n2 10 start", "1 n2 10 stop", may_be_cancelled=True).is_good
    assert judged(_more(tmp_path), "1 n2 10 start", state="cancelled", may_be_cancelled=True).is_good


def test_what_may_be(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "1 n2 10 start", state="failed", reason="given up after 5 lost attempts; the last: gone")
    assert verdict.is_good
    assert verdict.gave_up == 1
    verdict = judged(_more(tmp_path), "1 n2 10 start", state="unknown", guarantee="once", ends=0)
    assert verdict.is_good
    assert verdict.unknown == 1
