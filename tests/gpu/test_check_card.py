"""The check of a real card, on one that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.nvml import GIB, Machine, load
from tests.gpu import check_card


def answers(*rows: list[str]) -> object:
    def ask(query: str) -> list[list[str]]:
        if query.startswith("--query-compute-apps"):
            return [["GPU-0", "77"]]
        assert query == f"--query-gpu={','.join(check_card.FIELDS)}"
        return list(rows)

    return ask


@pytest.mark.parametrize(("used", "good"), [("3072", True), ("9000", False)])
def test_readings_are_held_against_what_the_tool_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used: str, good: bool
) -> None:
    machine = Machine(tmp_path / "machine")
    machine.gpu(0, uuid="GPU-0", name="H200", total=141 * GIB, temp=41, util=55)
    machine.process("0", 77, 3 * GIB)
    monkeypatch.setattr(check_card, "find_library", lambda: load(monkeypatch, machine.path))
    row = ["GPU-0", "0", "H200", str(141 << 10), used, "50", "40", "00000000:01:00.0", "9.0", "0x0000000000000000", "0"]
    lines, is_good = check_card.readings(answers(row))  # type: ignore[arg-type]
    assert is_good == good, lines
    assert any("| processes | [('GPU-0', 77)] | [('GPU-0', 77)] | same |" in line for line in lines)
    assert any("differs" in line for line in lines) != good


@pytest.mark.parametrize(
    ("ours", "foreign", "good"),
    [
        ((0, 8 * 2300), (500, 500), True),
        ((0, 8 * 2300), (9000, 600), True),  # what was seen of others before all tasks were there may have been theirs
        ((2300,), (500,), False),
        ((8 * 2300,), (2800,), False),
        ((), (), False),
    ],
)
def test_all_that_the_tasks_take_is_to_be_seen_as_theirs(
    ours: tuple[int, ...], foreign: tuple[int, ...], good: bool
) -> None:
    mib = check_card.MIB
    samples = [check_card.Seen(one * mib, other * mib) for one, other in zip(ours, foreign, strict=True)]
    assert check_card.seen_well(samples, 500 * mib)[1] is good
