"""Processes that work with files as a user, as the agent sees them: what they may ask for, and how they fail."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from peerload.agent.accounts import TaskUser
from peerload.agent.files import attempts
from peerload.agent.files.attempts import UserWork, WorkLost
from peerload.agent.files.transfer import FileCache, FileCaches, FileCacheSettings
from peerload.files import as_user
from peerload.files.manifest import FileEntry, Manifest, digest_of, encode
from peerload.files.store import NoRoom
from peerload.model.errors import StagingFailed
from tests.wording import Says

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.launcher.protocol import FilesJob

TEXT = b"text"
ALICE = TaskUser("n", "alice", 20001)


class Launcher:
    """Plays a launcher whose processes do this; it says afterwards what they return. asked: its requests."""

    def __init__(self, plays: Any) -> None:
        self._plays = plays
        self.asked: list[FilesJob] = []

    async def ask(self, job: FilesJob, within_s: float) -> str:
        """Start such a process."""
        assert within_s > 0
        self.asked.append(job)
        if isinstance(self._plays, str):
            return self._plays
        reader, writer = await asyncio.open_unix_connection(job.socket)
        try:
            why = await self._plays(reader, writer)
            assert isinstance(why, str)
            return why
        finally:
            writer.close()


def framed(*words: object) -> bytes:
    raw: bytes = msgpack.packb(words)
    return len(raw).to_bytes(4, "big") + raw


async def heard(reader: asyncio.StreamReader) -> Any:
    return msgpack.unpackb(await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")))


def caches_at(state: Path, limit_bytes: int = 1 << 24) -> FileCaches:
    links: Any = None
    return FileCaches(
        FileCacheSettings(state / "files", limit_bytes, 0, has_users=True, counters=Counter()), links, set
    )


def run(state: Path, plays: Any, *, limit_bytes: int = 1 << 24, held: bytes = TEXT) -> tuple[Any, Launcher]:
    """Some work of alice, whose cache has this block, done by such a process."""
    launcher = Launcher(plays)

    async def story() -> Any:
        caches = caches_at(state, limit_bytes)
        cache: FileCache = caches.of("20001")
        cache.store.put([held])
        bob = caches.of("20002")
        bob.store.put([b"his"])
        try:
            work = UserWork(launcher, state / "work")  # type: ignore[arg-type]
            return await work.run(cache, ALICE, "k", b"/d", "collect", (bytes(32), ["*"], True))
        finally:
            assert not any((state / "work").iterdir())
            await caches.close()

    return asyncio.run(story()), launcher


def test_a_process_gets_the_blocks_of_its_user_and_gives_others(tmp_path: Path) -> None:
    async def plays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        assert await heard(reader) == ["collect", bytes(32), ["*"], True]
        writer.write(framed("read", [digest_of(TEXT)], 1))
        assert await heard(reader) == [TEXT]
        writer.write(framed("read", [digest_of(b"his")], 1))
        assert await heard(reader) is None
        writer.write(framed("put", [b"new"]))
        assert await heard(reader) is True
        writer.write(framed("done", digest_of(b"new")))
        await reader.read()
        return ""

    result, launcher = run(tmp_path, plays)
    assert result == digest_of(b"new")
    (job,) = launcher.asked
    assert (job.key, job.directory, job.makes, job.home, job.user, job.uid) == ("k", b"/d", False, "n", "alice", 20001)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x00\x01\xc1",
        framed("steal", 1),
        framed("done", 5),
        framed("done", None),
        (5006).to_bytes(4, "big") + b"\x92\xa4done" + b"\x91" * 4999 + b"\xc0",
        framed("done", [["a"], {}]),
        framed("read", [b"short"], 1),
        framed("put", [bytes((1 << 20) + 1)]),
        b"\xff\xff\xff\xff",
    ],
    ids=[
        "no-msgpack",
        "unknown",
        "no-result",
        "none",
        "lists-without-end",
        "of-another-work",
        "no-digest",
        "too-large-a-block",
        "too-large-a-frame",
    ],
)
def test_what_no_process_says_fails_the_work(tmp_path: Path, said: bytes) -> None:
    async def plays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.write(said)
        await reader.read()
        return ""

    with pytest.raises(StagingFailed):
        run(tmp_path, plays)


def test_a_full_cache_fails_the_work_as_such(tmp_path: Path) -> None:
    """Whatever the process makes of it: the node has no room for these outputs."""

    async def plays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        await heard(reader)
        writer.write(framed("put", [bytes(600)]))
        assert await heard(reader) is None
        writer.write(framed("failed", 0, "", "", ""))
        await reader.read()
        return ""

    with pytest.raises(NoRoom):
        run(tmp_path, plays, limit_bytes=1000)


def test_an_error_of_the_operating_system_is_one(tmp_path: Path) -> None:
    async def plays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.write(framed("failed", 28, "out/a: no space", "", ""))
        await reader.read()
        return ""

    with pytest.raises(OSError, match="out/a") as raised:
        run(tmp_path, plays)
    assert raised.value.errno == 28


def test_a_process_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "SILENCE_S_MAX", 0.05)

    async def plays(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> str:
        await reader.read()  # the end
        return ""

    with pytest.raises(StagingFailed):
        run(tmp_path, plays)


def test_a_process_that_is_lost_is_asked_for_again_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is no room for it, as long as that lasts."""
    monkeypatch.setattr(attempts, "RETRY_S", 0.0)
    launcher, said = Launcher(""), ["busy: too many"] * 50 + ["it was ended (9)"] * attempts.TRIES_MAX

    async def ask(job: FilesJob, within_s: float) -> str:
        del within_s
        launcher.asked.append(job)
        return said.pop(0)

    launcher.ask = ask  # type: ignore[method-assign]
    work = UserWork(launcher, tmp_path / "work")  # type: ignore[arg-type]
    cache: Any = SimpleNamespace(turns=asyncio.Semaphore(1))
    with pytest.raises(WorkLost):
        asyncio.run(work.run(cache, ALICE, "k", b"/d", "make", ()))
    assert said == []


def test_what_the_launcher_refuses_is_not_asked_for_again(tmp_path: Path) -> None:
    with pytest.raises(StagingFailed, match=Says.GUESTS_WITHOUT_FILES()):
        run(tmp_path, "policy: guests have no files here")


def test_both_ends_understand_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself, in a thread: it makes a tree, and collects what was added to it."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "left").write_text("of an earlier try")
    monkeypatch.chdir(made)
    many = [f"{number:04}".encode() for number in range(as_user.READ_BLOCKS_MAX)]
    files = [FileEntry(f"many/{text.decode()}", 0o644, 4, 1, (digest_of(text),)) for text in many]
    tree, blocks = encode(Manifest((FileEntry("a", 0o644, 4, 1, (digest_of(TEXT),)), *files)))

    async def plays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        raise AssertionError

    launcher = Launcher(plays)

    async def ask(job: FilesJob, within_s: float) -> str:
        del within_s
        agent = socket.socket(socket.AF_UNIX)
        agent.connect(job.socket)
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", lambda **_: agent)
            process = threading.Thread(target=as_user.main)
            process.start()
        await asyncio.to_thread(process.join)
        return ""

    launcher.ask = ask  # type: ignore[method-assign]

    async def story() -> tuple[bytes, FileCache]:
        cache = caches_at(tmp_path).of("20001")
        cache.store.put([TEXT, *many, *blocks])
        work = UserWork(launcher, tmp_path / "work")  # type: ignore[arg-type]
        await work.run(cache, ALICE, "k", b"-", "make", (tree, ["out/*"]), makes=True)
        assert {path.name for path in made.iterdir()} == {"a", "many", "out"}
        assert [path.read_bytes() for path in sorted((made / "many").iterdir())] == many
        (made / "out/b").write_bytes(b"new")
        found: bytes = await work.run(cache, ALICE, "k", b"-", "collect", (tree, ["out/*"], True))
        with pytest.raises(StagingFailed, match="out/c"):
            await work.run(cache, ALICE, "k", b"-", "collect", (tree, ["out/c"], True))
        with pytest.raises(StagingFailed):
            await work.run(cache, ALICE, "k", b"-", "make", (bytes(32), []), makes=True)
        return found, cache

    id_, cache = asyncio.run(story())
    assert cache.store.missing_of(id_) == []
    assert cache.store.read(digest_of(b"new")) == b"new"
