"""Where a state directory was made: a copy on another machine is refused, and nothing else is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from peerload.agent import preflight
from peerload.model.errors import StoreError


@pytest.fixture(name="machine")
def fixture_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the id of this machine, which a test may change."""
    path = tmp_path / "machine-id"
    path.write_text(f"{'a' * 32}\n", encoding="ascii")
    monkeypatch.setattr(preflight, "MACHINE_ID", path)
    return path


@pytest.fixture(name="state")
def fixture_state(tmp_path: Path, machine: Path) -> Path:
    """A state directory of this machine."""
    assert machine.exists()
    state = tmp_path / "state"
    state.mkdir()
    preflight.check_origin(state)
    return state


def test_a_copy_on_another_machine_is_refused_until_its_user_says_that_the_original_is_gone(
    tmp_path: Path, machine: Path, state: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(state, copy)
    machine.write_text("b" * 32, encoding="ascii")
    for _ in range(2):
        with pytest.raises(StoreError) as refused:
            preflight.check_origin(copy)
        assert str(copy / preflight.ORIGIN_FILE) in refused.value.hint
    (copy / preflight.ORIGIN_FILE).unlink()
    preflight.check_origin(copy)
    preflight.check_origin(copy)
    machine.write_text("a" * 32, encoding="ascii")
    preflight.check_origin(state)  # the original is at home


def test_what_is_no_copy_on_another_machine_is_not_refused(tmp_path: Path, machine: Path, state: Path) -> None:
    machine.write_text("b" * 32, encoding="ascii")
    preflight.check_origin(state)  # the disk was moved, or the machine gets a new id with each boot
    copy = tmp_path / "copy"
    shutil.copytree(state, copy)
    preflight.check_origin(copy)  # moved within the machine
    for unknown in ("", "uninitialized\n"):
        machine.write_text(unknown, encoding="ascii")
        preflight.check_origin(copy)
    machine.unlink()
    preflight.check_origin(copy)
    machine.write_text("c" * 32, encoding="ascii")
    for damaged in (b"", b"\xff\xfe", b"one", b"two words"):
        (copy / preflight.ORIGIN_FILE).write_bytes(damaged)
        preflight.check_origin(copy)
