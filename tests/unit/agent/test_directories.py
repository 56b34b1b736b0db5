"""Whether a working directory is here."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from peerload.agent import accounts
from peerload.agent.accounts import (
    ANSWERS_KEPT_MAX,
    KEPT_MAX,
    LOOKS_MAX,
    DirectoryCache,
    DirectoryQueries,
    FileSystemStalled,
)
from peerload.agent.runtime import STEP_S, Inbox
from peerload.model.errors import SlowDown, SnapshotWanted
from peerload.model.events import DirectoryFound
from peerload.model.messages import DirectoryRequest, DirectoryTold, Message
from peerload.model.task import SCRATCH, TaskSpec
from tests.each import each
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.agent.peers.links import PeerLinks


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, what is there is found in time, and was seen lately."""
    monkeypatch.setattr(accounts, "CHECK_S_MAX", PATIENCE_S)
    monkeypatch.setattr(accounts, "SEEN_S", PATIENCE_S)


@each(
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
    assert asyncio.run(DirectoryCache(Inbox(1)).look(name)) is here


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    path.mkdir()
    assert asyncio.run(DirectoryCache(Inbox(1)).look(os.fsencode(path)))


def test_it_is_remembered_while_it_was_there_lately(tmp_path: Path) -> None:
    seen = DirectoryCache(Inbox(1))
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
    monkeypatch.setattr(accounts, "_may_enter", lambda _: back.wait(2 * PATIENCE_S))
    yield back
    back.set()
    for thread in looks():
        thread.join(PATIENCE_S)


def looks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "own thread"]


def test_a_burst_for_one_slow_directory_shares_one_look(back: threading.Event) -> None:
    seen = DirectoryCache(Inbox(1))

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
    monkeypatch.setattr(accounts, "CHECK_S_MAX", 2 * STEP_S)

    async def story() -> None:
        seen = DirectoryCache(Inbox(1))
        asked = asyncio.create_task(seen.look(b"/there"))
        await asyncio.sleep(0)
        back.set()
        time.sleep(4 * STEP_S)  # noqa: ASYNC251 -- that is what is tried
        assert await asked

    asyncio.run(story())


def test_a_dead_mount_is_told_apart_from_a_missing_directory_and_stops_nobody(
    back: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "CHECK_S_MAX", 0.05)

    async def story() -> None:
        inbox = Inbox(2 * LOOKS_MAX)
        seen = DirectoryCache(inbox)
        dead = [b"/dead/%d" % number for number in range(LOOKS_MAX)]
        answers = await asyncio.gather(*map(seen.look, dead), return_exceptions=True)
        assert all(isinstance(answer, FileSystemStalled) for answer in answers)
        with pytest.raises(FileSystemStalled):
            await seen.look(dead[0])
        with pytest.raises(SlowDown):  # of a directory nobody has looked at nothing is said
            await seen.look(b"/")
        assert await seen.look(SCRATCH)
        assert len(looks()) == LOOKS_MAX
        assert await asyncio.to_thread(lambda: "other work") == "other work"
        monkeypatch.setattr(accounts, "CHECK_S_MAX", PATIENCE_S)
        back.set()
        for thread in looks():  # who has ended has told before
            await asyncio.to_thread(thread.join, PATIENCE_S)
        for _ in range(2):  # one turn of the loop for the result of each, one for what is done with it
            await asyncio.sleep(0)
        late = [event.directory for event in await inbox.turn() if isinstance(event, DirectoryFound)]
        assert sorted(late) == sorted(dead), "who asked for these is told that they are there after all"
        assert await seen.look(b"/")

    asyncio.run(story())  # ends although the looks do not


class Asked:
    """Nodes that are asked; those in ``codes`` answer at once."""

    def __init__(self, **codes: str) -> None:
        self.codes = codes
        self.asked: list[str] = []
        self.nodes = DirectoryQueries(cast("PeerLinks", self))

    def send(self, node: str, request: Message) -> None:
        assert isinstance(request, DirectoryRequest)
        self.asked.append(node)
        if node in self.codes:
            answer = DirectoryTold(request.directory, request.user, self.codes[node])
            asyncio.get_running_loop().call_soon(self.nodes.answer_received, node, answer)

    async def about(self, directory: bytes) -> list[str]:
        """Ask y and z → whom it was sent to."""
        self.asked.clear()
        await self.nodes.ask(["y", "z"], directory, "")
        return list(self.asked)


def test_nodes_are_asked_once_while_their_answers_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "ANSWER_S_MAX", PATIENCE_S)
    monkeypatch.setattr(accounts, "MISSING_S", 0.0)

    async def story() -> None:
        others = Asked(y="", z="directory")
        assert await others.about(SCRATCH) == []
        assert await others.about(b"/data") == ["y", "z"]
        assert await others.about(b"/data") == ["z"], "somebody may have made it there meanwhile"
        assert await others.about(b"/other") == ["y", "z"]

    asyncio.run(story())


def test_a_silent_node_holds_up_one_submission_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MISSING_S", PATIENCE_S)

    async def story() -> None:
        others = Asked(y="")
        monkeypatch.setattr(accounts, "ANSWER_S_MAX", 0.01)
        assert await others.about(b"/data") == ["y", "z"]
        monkeypatch.setattr(accounts, "ANSWER_S_MAX", PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S / 2):
            assert await others.about(b"/data") == []
        assert others.nodes.answer_received("z", DirectoryTold(b"/data")), "a late answer counts"

    asyncio.run(story())


def test_an_answer_that_decides_whether_a_directory_travels_is_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "ANSWER_S_MAX", 0.0)
    monkeypatch.setattr(accounts, "ANSWER_ELSEWHERE_S_MAX", PATIENCE_S)

    async def story() -> None:
        others = Asked()
        asking = asyncio.create_task(others.nodes.ask(["z"], b"/data", "", decides=True))
        await asyncio.sleep(0)
        await others.about(b"/data")  # this one does not wait so long
        assert not asking.done()
        others.nodes.answer_received("z", DirectoryTold(b"/data", code="directory"))
        await asking

    asyncio.run(story())


def test_a_submission_whose_client_is_gone_leaves_the_question_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "ANSWER_S_MAX", PATIENCE_S)

    async def story() -> None:
        others = Asked(y="")
        first = asyncio.create_task(others.nodes.ask(["z"], b"/data", ""))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(others.nodes.ask(["z"], b"/data", ""))
        await asyncio.sleep(0)
        assert others.asked == ["z", "z"]
        assert not second.done(), "z has not answered yet"
        assert others.nodes.answer_received("z", DirectoryTold(b"/data"))
        await second

    asyncio.run(story())


def test_an_answer_to_no_question_is_not_believed_and_few_are_kept() -> None:
    async def story() -> None:
        others = Asked(y="", z="")
        assert not others.nodes.answer_received("y", DirectoryTold(b"/data"))
        for number in range(ANSWERS_KEPT_MAX // 2 + 1):
            await others.about(b"/%d" % number)
        assert len(others.nodes._fresh_until_s) == ANSWERS_KEPT_MAX
        assert not others.nodes._awaited

    asyncio.run(story())


@pytest.mark.parametrize(
    ("answer", "identity", "differs"),
    [
        (DirectoryTold(b"/data", code="directory"), "a", True),
        (DirectoryTold(b"/data", identity="b"), "a", True),
        (DirectoryTold(b"/data", identity="a"), "a", False),
        (DirectoryTold(b"/data"), "a", False),
        (DirectoryTold(b"/data", identity="b"), "", False),
        (DirectoryTold(b"/data", code="stalled"), "a", False),
        (DirectoryTold(b"/other", code="directory"), "a", False),
    ],
)
def test_a_directory_travels_where_a_node_says_that_it_is_not_the_same_there(
    answer: DirectoryTold, identity: str, differs: bool
) -> None:
    async def story(*, freezes: bool) -> bool:
        queries = DirectoryQueries(cast("PeerLinks", SimpleNamespace(send=lambda *_: None)), freezes=freezes)
        asking = asyncio.create_task(queries.ask(["z"], answer.directory, ""))
        await asyncio.sleep(0)
        assert queries.answer_received("z", answer)
        await asking
        try:
            queries.check_same(["y", "z"], TaskSpec((b"true",), b"/data"), identity)
        except SnapshotWanted:
            return True
        return False

    assert asyncio.run(story(freezes=True)) is differs
    assert not asyncio.run(story(freezes=False))
