"""Whether a working directory is here."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from peerload.agent import directories
from peerload.agent.directories import KEPT_MAX, LOOKS_MAX, SeenDirectories, is_directory_here
from peerload.model.task import SCRATCH


@pytest.mark.parametrize(
    ("name", "here"),
    [
        (SCRATCH, True),
        (b"/", True),
        (b"/no/such", False),
        (b"/dev/null", False),
        (b"/" + b"x" * 5000, False),
        (b"/nul\0", False),
        (b"/\xff\xfe", False),
    ],
)
def test_what_is_a_directory_here(name: bytes, here: bool) -> None:
    assert asyncio.run(is_directory_here(name)) is here


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    path.mkdir()
    assert asyncio.run(is_directory_here(os.fsencode(path)))


def test_it_is_remembered_while_it_was_there_lately(tmp_path: Path) -> None:
    seen = SeenDirectories()
    directory = os.fsencode(tmp_path)
    assert not seen.seen_lately(directory)
    assert seen.seen_lately(SCRATCH)
    assert asyncio.run(seen.look(directory))
    assert seen.seen_lately(directory)
    assert not asyncio.run(seen.look(b"/no/such"))
    assert not seen.seen_lately(b"/no/such")
    for number in range(KEPT_MAX):
        (tmp_path / str(number)).mkdir()
        asyncio.run(seen.look(os.fsencode(tmp_path / str(number))))
    assert len(seen._seen) <= KEPT_MAX


def test_a_dead_mount_counts_as_missing_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    back = threading.Event()

    def hangs(directory: bytes) -> bool:
        return back.wait(30)

    async def story() -> None:
        looks = [is_directory_here(b"/dead") for _ in range(LOOKS_MAX + 8)]
        assert await asyncio.gather(*looks) == [False] * (LOOKS_MAX + 8)
        assert sum(thread.name == "directory" for thread in threading.enumerate()) == LOOKS_MAX
        assert await asyncio.to_thread(lambda: "other work") == "other work"

    monkeypatch.setattr(directories, "_may_enter", hangs)
    monkeypatch.setattr(directories, "CHECK_S_MAX", 0.05)
    try:
        asyncio.run(story())  # ends although the looks do not
    finally:
        back.set()
        for thread in threading.enumerate():
            if thread.name == "directory":
                thread.join(10)
