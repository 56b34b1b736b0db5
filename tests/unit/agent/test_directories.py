"""Whether a working directory is here."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from peerload.agent import directories
from peerload.agent.directories import KEPT_MAX, LOOKS_MAX, SeenDirectories
from peerload.agent.own_turns import STEP_S
from peerload.model.errors import SlowDown
from peerload.model.task import SCRATCH
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, what is there is found in time, and was seen lately."""
    monkeypatch.setattr(directories, "CHECK_S_MAX", PATIENCE_S)
    monkeypatch.setattr(directories, "SEEN_S", PATIENCE_S)


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
    assert asyncio.run(SeenDirectories().look(name)) is here


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    path.mkdir()
    assert asyncio.run(SeenDirectories().look(os.fsencode(path)))


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


@pytest.fixture(name="back")
def fixture_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Looks hang until this is set; then the directories are there."""
    for thread in looks():  # of the test before, which have told already
        thread.join(PATIENCE_S)
    back = threading.Event()
    monkeypatch.setattr(directories, "_may_enter", lambda _: back.wait(2 * PATIENCE_S))
    yield back
    back.set()
    for thread in looks():
        thread.join(PATIENCE_S)


def looks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "directory"]


def test_a_burst_for_one_slow_directory_shares_one_look(back: threading.Event) -> None:
    seen = SeenDirectories()

    async def story() -> None:
        asked = [asyncio.create_task(seen.look(b"/slow")) for _ in range(8 * LOOKS_MAX)]
        asked[0].cancel()  # who goes away takes nothing from the others
        await asyncio.sleep(0)
        assert len(looks()) == 1
        back.set()
        assert await asyncio.gather(*asked[1:]) == [True] * (8 * LOOKS_MAX - 1)
        assert seen.seen_lately(b"/slow")

    asyncio.run(story())


def test_a_loop_that_stood_still_holds_that_against_no_directory(
    back: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "CHECK_S_MAX", 2 * STEP_S)

    async def story() -> None:
        seen = SeenDirectories()
        asked = asyncio.create_task(seen.look(b"/there"))
        await asyncio.sleep(0)
        back.set()
        time.sleep(4 * STEP_S)  # noqa: ASYNC251 -- that is what is tried
        assert await asked

    asyncio.run(story())


def test_a_dead_mount_counts_as_missing_and_stops_nobody(
    back: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "CHECK_S_MAX", 0.05)

    async def story() -> None:
        seen = SeenDirectories()
        dead = [b"/dead/%d" % number for number in range(LOOKS_MAX)]
        assert await asyncio.gather(*map(seen.look, dead)) == [False] * LOOKS_MAX
        assert await seen.look(dead[0]) is False
        with pytest.raises(SlowDown):  # of a directory nobody has looked at nothing is said
            await seen.look(b"/")
        assert await seen.look(SCRATCH)
        assert len(looks()) == LOOKS_MAX
        assert await asyncio.to_thread(lambda: "other work") == "other work"
        monkeypatch.setattr(directories, "CHECK_S_MAX", PATIENCE_S)
        back.set()
        for thread in looks():  # who has ended has told before
            await asyncio.to_thread(thread.join, PATIENCE_S)
        await asyncio.sleep(0)
        assert await seen.look(b"/")

    asyncio.run(story())  # ends although the looks do not
