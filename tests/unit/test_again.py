"""A test that failed once is tried alone, and a change that broke something does not get through by that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import again

ROOT = Path(__file__).parents[2]
STEADY = "def test_steady():\n    pass\n"
BROKEN = "def test_broken():\n    assert 0\n"


def tried_again(directory: Path, status: int, code: str, failed: list[str]) -> tuple[int, str]:
    (directory / "test_it.py").write_text(code, encoding="utf-8")
    (directory / "build").mkdir()
    (directory / again.FAILED).write_text("".join(f"test_it.py::{test}\n" for test in failed), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.again", str(status)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return done.returncode, done.stdout


def test_what_passes_alone_is_named_as_unsteady(tmp_path: Path) -> None:
    status, said = tried_again(tmp_path, 1, STEADY, ["test_steady"])
    assert status == 0
    assert said.count("1 passed") == again.TIMES
    assert "UNSTEADY  test_it.py::test_steady" in said


def test_what_fails_alone_fails(tmp_path: Path) -> None:
    status, said = tried_again(tmp_path, 1, STEADY + BROKEN, ["test_broken", "test_steady"])
    assert status == 1
    assert "UNSTEADY" not in said


@pytest.mark.parametrize(
    ("status", "failed"), [(1, ["test_steady"] * (again.SO_MANY + 1)), (1, []), (2, ["test_steady"]), (5, [])]
)
def test_everything_else_fails_as_it_did(tmp_path: Path, status: int, failed: list[str]) -> None:
    assert tried_again(tmp_path, status, STEADY, failed) == (status, "")
