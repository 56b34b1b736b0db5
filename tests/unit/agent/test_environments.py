"""Environments of an agent, with a launcher that is played: one build for all, its end, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerload.agent.accounts import TaskUser
from peerload.agent.files import environments
from peerload.agent.files.environments import LAST_CHARACTERS, BuildFailed, Environments, last_lines
from peerload.agent.files.transfer import FileCaches, FileCacheSettings
from peerload.agent.output.spool import Spool
from peerload.environments import builders
from peerload.files.manifest import FileEntry, Manifest, digest_of, encode
from peerload.files.work import WORK
from peerload.model.actions import SpawnTask, StageFiles
from peerload.model.events import TaskEnded
from peerload.model.task import EnvironmentLock, Exit, TaskSpec
from tests.each import each

LINES = b"tool==1\n"
MANIFEST, OWN = encode(Manifest((FileEntry("requirements.txt", 0o644, len(LINES), 0, (digest_of(LINES),)),)))
LOCK = EnvironmentLock(MANIFEST, "pip", "requirements.txt")


class Lab:
    """One agent's environments. spawned: builders by key; did: other orders to the launcher."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch, *, limit_bytes: int = 1 << 30) -> None:
        self.spawned: dict[str, SpawnTask] = {}
        self.did: list[tuple[str, str]] = []
        self.told: list[str] = []
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.killed: asyncio.Queue[str] = asyncio.Queue()
        self.spool = Spool(state)
        settings = FileCacheSettings(state / "files", limit_bytes, 0, has_users=False, counters=Counter())
        self.caches = FileCaches(settings, cast("Any", None), lambda: {MANIFEST})
        store = self.caches.of("").store
        store.put([LINES, *OWN])
        launcher: Any = SimpleNamespace(
            spawn=self._spawn,
            signal=self._kill,
            forget=lambda key: self.did.append(("forget", key)),
        )

        async def do(name: str, _: object, __: str, directory: bytes, *values: object) -> object:
            return WORK[name](directory, store, *values)

        files: Any = SimpleNamespace(
            caches=self.caches, bring_manifest=self._bring, do=do, user_of=lambda _: TaskUser("n1", "")
        )
        config: Any = SimpleNamespace(state=str(state), mode="user", files=SimpleNamespace(build_s_max=3600.0))
        log: Any = SimpleNamespace(record=lambda _, state, **__: self.told.append(state))
        self.answered: list[Any] = []
        links: Any = SimpleNamespace(send=lambda *_: None)
        inbox: Any = SimpleNamespace(put=self.answered.append)
        self.looks = 0
        monkeypatch.setattr(builders, "plan_of", self._plan_of)
        self.made = Environments(config, files, launcher, self.spool, links, inbox, log)

    def _plan_of(self, lock: EnvironmentLock) -> builders.Plan:
        self.looks += 1
        return builders.Plan("k" + lock.name[:1], (b"build",), is_conda=False)

    def _spawn(self, action: SpawnTask, *_: object, owner: int) -> None:
        assert owner == -1
        self.spawned[action.key] = action
        self.begun.put_nowait(action.key)

    def _kill(self, key: str, _: int) -> None:
        self.did.append(("kill", key))
        self.killed.put_nowait(key)

    async def _bring(self, *_: object) -> None:
        return

    def prepare(self, number: int, lock: EnvironmentLock = LOCK) -> asyncio.Task[None]:
        """An attempt that is to have the environment."""
        action = SpawnTask(f"a{number}", f"n1/{number}", 1, "n1", TaskSpec((b"true",), b"/", lock=lock))
        return asyncio.create_task(self.made.stage_own(action))

    async def builder(self) -> str:
        """The key of the next builder, when it has been started."""
        return await self.begun.get()

    def ends(self, key: str, exit_code: int = 0, said: bytes = b"") -> None:
        self.spool.paths(key)[1].write_bytes(said)
        self.made.event_received(TaskEnded(key, Exit(exit_code, stderr_bytes=len(said))))


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Lab], Awaitable[None]]], None]:
    def play(story: Callable[[Lab], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            lab = Lab(tmp_path, monkeypatch)
            await story(lab)
            await lab.made.close()

        asyncio.run(all_of_it())

    return play


Play = Callable[[Callable[[Lab], Awaitable[None]]], None]


def test_all_tasks_of_a_lock_wait_for_one_build_and_later_ones_for_none(played: Play) -> None:
    async def story(lab: Lab) -> None:
        waiting = [lab.prepare(number) for number in range(32)]
        key = await lab.builder()
        assert lab.made.prepares("a31")
        directory = Path(os.fsdecode(lab.spawned[key].spec.directory))
        assert (directory / "lock/requirements.txt").read_bytes() == LINES
        assert (directory / "client/cloudpickle").is_dir()
        (directory / "env").mkdir()
        (directory / "env/large").write_bytes(bytes(1000))
        lab.ends(key)
        await asyncio.gather(*waiting)
        await lab.prepare(99)
        assert not lab.made.prepares("a31")
        assert lab.looks == 1
        assert (len(lab.spawned), lab.told) == (1, ["building", "built"])
        (kept,) = lab.made.usage()
        assert (kept["name"], kept["bytes"], kept["in_use"]) == ("requirements.txt", 1000 + len(LINES), True)
        assert lab.made.variables("a7", {b"PATH": b"/bin"})["PATH"] == f"{directory}/env/bin:/bin"
        assert lab.made.variables("b1", {}) == {}

    played(story)


def test_a_build_that_fails_is_told_with_its_last_lines_and_not_repeated_at_once(
    played: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(lab: Lab) -> None:
        first = lab.prepare(1)
        lab.ends(await lab.builder(), 1, b"Collecting\nERROR: no tool\n")
        with pytest.raises(BuildFailed, match="ERROR: no tool"):
            await first
        with pytest.raises(BuildFailed, match="ERROR: no tool"):
            await lab.prepare(2)
        assert (len(lab.spawned), lab.told, lab.made.usage()) == (1, ["building", "failed"], [])
        monkeypatch.setattr(environments, "FAILED_S", 0.0)
        again = lab.prepare(3)
        lab.ends(await lab.builder())
        await again

    played(story)


@each(
    ("said", "last"),
    [
        (b"", ""),
        (b"\n one \n\n two\n", "one; two"),
        (b"1\n2\n3\n4\n5\n", "2; 3; 4; 5"),
        (
            b"WARNING: Retrying, %b\nERROR: no version\nERROR: no tool\n" % (b"x" * 300),
            "ERROR: no version; ERROR: no tool",
        ),
        (b"Warning: only this\n", "Warning: only this"),
        (b"%b\nerror: no tool\n" % (b"x" * LAST_CHARACTERS), "error: no tool"),
        (b"x" * (LAST_CHARACTERS + 1), "x" * LAST_CHARACTERS),
    ],
)
def test_of_the_words_of_a_builder_the_last_whole_lines_are_told(said: bytes, last: str) -> None:
    assert last_lines(said) == last


def test_a_build_that_nobody_waits_for_is_ended(played: Play) -> None:
    async def story(lab: Lab) -> None:
        one, other = lab.prepare(1), lab.prepare(2)
        key = await lab.builder()
        assert lab.made.ended_early("a1")
        await asyncio.gather(one, return_exceptions=True)
        assert ("kill", key) not in lab.did
        assert lab.made.ended_early("a2")
        await asyncio.gather(other, return_exceptions=True)
        assert await lab.killed.get() == key
        assert not lab.made.ended_early("a2")
        lab.did.clear()
        lab.made.event_received(TaskEnded(key, Exit(137)))
        assert lab.did == [("forget", key)]

    played(story)


def test_an_offer_that_is_withdrawn_ends_its_build_and_the_next_begins_another(played: Play) -> None:
    async def story(lab: Lab) -> None:
        lab.made.offered(StageFiles("g1", "n2/1", bytes(16), 1, "n2", TaskSpec((b"true",), b"/", lock=LOCK)))
        key = await lab.builder()
        assert lab.made.prepares("g1")
        lab.made.forget("g1")
        assert await lab.killed.get() == key
        again = lab.prepare(2)
        second = await lab.builder()
        assert second != key
        lab.made.event_received(TaskEnded(key, Exit(137)))
        lab.ends(second)
        await again
        assert not lab.made.prepares("g1")
        assert lab.answered == []

    played(story)


def test_a_build_whose_launcher_is_lost_fails_and_builders_of_an_earlier_agent_are_ended(played: Play) -> None:
    async def story(lab: Lab) -> None:
        waits = lab.prepare(1)
        await lab.builder()
        lab.made.listed({"build-old-1"}, {})
        assert ("kill", "build-old-1") in lab.did
        with pytest.raises(Exception, match="lost"):
            await waits

    played(story)


def test_what_is_not_used_goes_first_and_what_is_used_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        lab = Lab(tmp_path, monkeypatch, limit_bytes=3000)
        for number, name in enumerate("abc"):
            waits = lab.prepare(number, EnvironmentLock(MANIFEST, "pip", name))
            key = await lab.builder()
            directory = Path(os.fsdecode(lab.spawned[key].spec.directory))
            (directory / "large").write_bytes(bytes(1200))
            os.utime(directory, (number, number))
            if name != "c":
                lab.made.forget(f"a{number - 1}")
            lab.ends(key)
            await waits
        assert {one["name"] for one in lab.made.usage()} == {"b", "c"}, "a was used least recently"
        (tmp_path / "environments/unfinished").mkdir()
        lab.made.keep_only(cast("Any", SimpleNamespace(knows=lambda attempt: attempt == "a2")))
        assert not (tmp_path / "environments/unfinished").exists()
        assert lab.made.collect(everything=True) > 1200
        assert [one["name"] for one in lab.made.usage()] == ["c"]
        again = Lab(tmp_path, monkeypatch)
        assert again.made.usage()[0]["in_use"], "an attempt of an earlier agent"
        await lab.made.close()

    asyncio.run(story())


def test_files_that_no_task_needs_give_way_to_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        lab = Lab(tmp_path, monkeypatch, limit_bytes=40_000)
        store = lab.caches.of("").store
        tree, own = encode(Manifest((FileEntry("data", 0o644, 30_000, 0, tuple(store.put([bytes(30_000)]))),)))
        store.put(own)
        assert store.missing_of(tree) == []
        for number, name in enumerate("ab"):
            waits = lab.prepare(number, EnvironmentLock(MANIFEST, "pip", name))
            key = await lab.builder()
            (Path(os.fsdecode(lab.spawned[key].spec.directory)) / "large").write_bytes(bytes(10_000))
            lab.ends(key)
            await waits
            lab.made.forget(f"a{number}")
        assert {one["name"] for one in lab.made.usage()} == {"a", "b"}
        assert not store.has(tree)
        assert store.missing_of(MANIFEST) == []
        await lab.made.close()
        await lab.caches.close()

    asyncio.run(story())


def test_an_environment_that_is_built_again_while_it_is_removed_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        lab = Lab(tmp_path, monkeypatch)
        directory = tmp_path / "environments/a"
        directory.mkdir()
        (directory / "built").write_text("7 lock")
        rmtree = shutil.rmtree

        def built_again_meanwhile(path: Path, **how: Any) -> None:
            (directory / "env").mkdir(parents=True)
            rmtree(path, **how)

        monkeypatch.setattr(shutil, "rmtree", built_again_meanwhile)
        assert lab.made.collect(everything=True) == 7
        assert [path.name for path in directory.parent.iterdir() if path.name != "uses"] == ["a"]
        assert [path.name for path in directory.iterdir()] == ["env"]
        await lab.made.close()

    asyncio.run(story())


def test_a_damaged_mark_of_an_environment_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "environments"
    for key, mark in (("a", b""), ("b", b"\xff"), ("c", b"7 lock")):
        (root / key).mkdir(parents=True)
        (root / key / "built").write_bytes(mark)
    (root / "uses").mkdir()
    (root / "uses" / "x").write_bytes(b"\xff")
    lab = Lab(tmp_path, monkeypatch)
    assert sorted((one["id"], one["bytes"]) for one in lab.made.usage()) == [("a", 0), ("b", 0), ("c", 7)]
    assert lab.made.collect(everything=True) == 7
    assert not [*root.glob("*/built")]
