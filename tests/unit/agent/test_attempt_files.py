"""Files of attempts on one node: refused where they cannot travel, removed beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.accounts import TaskUser
from peerload.agent.files import attempts, transfer
from peerload.agent.files.attempts import AttemptFiles, AttemptNote
from peerload.agent.files.transfer import Fetch, FileCacheSettings
from peerload.agent.output.spool import Spool
from peerload.files import manifest, work
from peerload.files.manifest import FileEntry, Manifest, digest_of, encode
from peerload.files.store import BlockStore, NoRoom
from peerload.model.actions import KeepOutput, StageFiles
from peerload.model.errors import PeerloadError
from peerload.model.events import FilesStaged, OutputComing
from peerload.model.messages import Blocks, BlocksEnd, BlocksRequest
from peerload.model.task import SCRATCH, Exit, SubmitOptions, TaskFiles, TaskSpec
from tests.each import each
from tests.support import PATIENCE_S

UID = bytes(16)
KEY = f"{UID.hex()}-1"
SPEC = TaskSpec((b"true",), SCRATCH, files=TaskFiles(bytes(32)))


def files_of(
    state: Path, came: list[Any], mode: str = "user", limit_bytes: int = 1 << 30, links: Any = None
) -> AttemptFiles:
    home: Any = SimpleNamespace(home=SimpleNamespace(tasks={}, by_id={}, untouched={}), state=SimpleNamespace(node="n"))
    inbox: Any = SimpleNamespace(put=came.append, put_count=0, taken_count=0)
    launcher: Any = SimpleNamespace(run="", forget=came.append)
    event_log: Any = SimpleNamespace(record=lambda *_, **__: None)
    settings = FileCacheSettings(state / "files", limit_bytes, 0, has_users=mode == "system", counters=Counter())
    files = AttemptFiles(settings, Spool(state), launcher, links, inbox, home, event_log)
    files.caches.keeps_all = False
    return files


async def others() -> None:
    """Wait for all other tasks of the loop."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


def test_a_working_directory_is_gone_at_once_and_its_files_are_removed_in_a_thread(tmp_path: Path) -> None:
    async def story() -> None:
        files = files_of(tmp_path, [])
        for number in range(50):
            made = tmp_path / "scratch" / f"{number:032x}-1" / "sub"
            made.mkdir(parents=True)
            (made / "file").write_text("text")
            files.forget(made.parent.name)
            assert not made.parent.exists()
        await others()
        assert not any((tmp_path / "scratch").iterdir())
        await files.close()

    asyncio.run(story())


def test_the_progress_of_outputs_on_their_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "TELL_EVERY_S", 0.001)
    came: list[Any] = []
    recorded: list[tuple[str, str]] = []

    async def story() -> None:
        files = files_of(tmp_path, came)
        files._event_log = SimpleNamespace(record=lambda *what, **more: recorded.append((what[1], more["reason"])))  # type: ignore[assignment]
        record = SimpleNamespace(submitted_at=1.0)
        task: Any = SimpleNamespace(spec=SPEC, terms=SubmitOptions(files_home=b"/home/u"), record=record)
        files._node.home.tasks[UID] = task
        fetch = Fetch(bytes(32))
        fetch.size_bytes = 5 << 20
        told = asyncio.Event()

        async def work() -> None:
            fetch.done_bytes = 1 << 20
            await told.wait()
            raise PeerloadError("it broke off")

        def put(event: Any) -> None:
            came.append(event)
            told.set()

        files._inbox = SimpleNamespace(put=put, put_count=0, taken_count=0)  # type: ignore[assignment]
        fetch.work = asyncio.get_running_loop().create_task(work())
        monkeypatch.setattr(files.caches.of("").transfer, "fetch", lambda *_, **__: fetch)
        error, _ = await files.bring_home("y", KeepOutput(KEY, "n/1", UID, 1, b"", b"", "y", bytes(32)))
        assert error == "it broke off"
        await files.close()

    asyncio.run(story())
    assert came[0] == OutputComing(UID, 1, 1 << 20)
    assert recorded[0] == ("returning", "5 MiB on the way from y")


def test_a_working_directory_is_made_from_what_came_just_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RECENT_PIECES", 2)
    contents = {digest_of(content): content for content in (b"one", b"two", b"three", b"four")}
    digests = list(contents)

    async def story() -> None:
        files = files_of(tmp_path, [])
        cache = files.caches.of("")
        read: list[bytes] = []
        read_some = cache.store.read_some

        def counted(wanted: Any, *more: Any) -> list[bytes]:
            read.extend(wanted)
            return read_some(wanted, *more)

        monkeypatch.setattr(cache.store, "read_some", counted)
        fetch = Fetch(bytes(32))
        fetch.begin(digests)
        blocks = attempts._WhileWanted(cache, lambda: True, fetch)
        for digest, content in contents.items():
            cache.store.put([content])
            fetch.blocks_stored([digest], [memoryview(content)])
        assert blocks.read_some(digests[2:], 1 << 20) == [b"three", b"four"]
        assert not read
        assert blocks.read_some(digests, 5) == [b"one", b"two"]  # too long ago
        assert blocks.read_some(digests[3:], 1 << 20) == [b"four"]  # it was taken
        assert read == [*digests, digests[3]]
        fetch.over()
        await files.close()

    asyncio.run(story())


def test_outputs_exceed_the_cache_and_wait_for_a_disk(tmp_path: Path) -> None:
    async def story() -> Exit:
        files = files_of(tmp_path, [], limit_bytes=2000)
        store = files.caches.of("").store
        tree, blocks = encode(Manifest())
        store.put([*blocks, b"not needed by a task"])
        note = AttemptNote("n/1", TaskFiles(tree, outputs=("*",)), TaskUser("n", ""), is_ready=True)
        files._notes[KEY] = note
        scratch = tmp_path / "scratch" / KEY
        scratch.mkdir(parents=True)
        (scratch / "out").write_bytes(bytes(5000))
        free_bytes, store._free_bytes = store._free_bytes, lambda: 0  # type: ignore[method-assign]
        try:
            for exit_ in (Exit(3), Exit(0)):
                with pytest.raises(NoRoom):
                    await files.settled(KEY, exit_)
            store._free_bytes = free_bytes  # type: ignore[method-assign]
            return await files.settled(KEY, Exit(0))
        finally:
            await files.close()

    ended = asyncio.run(story())
    assert ended.exit_code == 0
    assert ended.staged is not None
    assert (ended.staged.out_count, ended.staged.out_bytes) == (1, 5000)


def test_outputs_that_a_task_has_placed_are_remembered_until_it_is_over(tmp_path: Path) -> None:
    async def story() -> None:
        files = files_of(tmp_path, [])
        (tmp_path / "home").mkdir()
        store = files.caches.of("").store
        outputs = kept_tree(store, b"output")
        tree, own = encode(Manifest())
        store.put(own)
        wanted, user = TaskFiles(tree, outputs=("in",)), TaskUser("n", "")
        tasks: dict[bytes, Any] = files._node.home.tasks
        for number in range(5):
            uid = bytes([number]) * 16
            tasks[uid] = None
            for _ in range(2):
                place = files._place(uid, f"n/{number}", user, wanted, bytes(tmp_path / "home"), 0.0, outputs, 0.0)
                assert (await place)[:2] == ("", 0)
                assert list(files._placed) == [uid]
            del tasks[uid]
        await files.close()

    asyncio.run(story())


def kept_tree(store: BlockStore, content: bytes) -> bytes:
    """A manifest of one file that is in the store with its block."""
    tree, own = encode(Manifest((FileEntry("in", 0o644, len(content), 1, tuple(store.put([content]))),)))
    store.put(own)
    assert store.missing_of(tree) == []
    return tree


def test_outputs_cost_no_files_of_queued_tasks_before_these_are_known(tmp_path: Path) -> None:
    async def story() -> None:
        files = files_of(tmp_path, [], limit_bytes=10_000)
        files.caches.keeps_all = True  # as in an agent that has just been started
        store = files.caches.of("").store
        inputs = [kept_tree(store, bytes([number]) * 4000) for number in range(2)]
        tree, blocks = encode(Manifest())
        store.put(blocks)
        files._notes[KEY] = AttemptNote("n/1", TaskFiles(tree, outputs=("*",)), TaskUser("n", ""), is_ready=True)
        scratch = tmp_path / "scratch" / KEY
        scratch.mkdir(parents=True)
        (scratch / "out").write_bytes(bytes(range(256)) * 20)
        ended = await files.settled(KEY, Exit(0))
        assert ended.staged is not None
        assert [store.missing_of(tree) for tree in (*inputs, ended.staged.outputs)] == [[], [], []]
        files._node.knows = lambda _: True  # type: ignore[method-assign, assignment]
        files.keep_only_known()
        await files._give_back(files.caches.of(""))
        assert store.missing_of(ended.staged.outputs) == []
        assert any(store.missing_of(tree) for tree in inputs), "no task needs them"
        await files.close()

    asyncio.run(story())


def test_files_of_array_members_of_which_nothing_has_become_are_in_use(tmp_path: Path) -> None:
    async def story() -> None:
        files = files_of(tmp_path, [])
        cache = files.caches.of("")
        tree = kept_tree(cache.store, b"content")
        members = SimpleNamespace(spec=TaskSpec((b"true",), SCRATCH, files=TaskFiles(tree)))
        files._node.home.untouched["n/1"] = [members]  # type: ignore[list-item]
        await files.collect_garbage([cache])
        assert cache.store.missing_of(tree) == []
        files._node.home.untouched.clear()
        await files.collect_garbage([cache])
        assert cache.store.missing_of(tree) == [tree]
        await files.close()

    asyncio.run(story())


def test_files_of_a_submission_are_in_use_from_its_check_until_its_task_is_known(tmp_path: Path) -> None:
    async def story() -> None:
        files = files_of(tmp_path, [])
        cache = files.caches.of("")
        trees = [kept_tree(cache.store, content) for content in (b"one", b"two")]
        specs = [TaskSpec((b"true",), SCRATCH, files=TaskFiles(tree)) for tree in trees]
        terms = SubmitOptions(files_home=bytes(tmp_path))
        inbox: Any = files._inbox
        requests = contextlib.ExitStack()

        async def checked(spec: TaskSpec) -> None:
            requests.enter_context(files.held(spec))
            await files.check(spec, terms)

        await checked(specs[0])
        collect = cache.store.collect

        def late(*args: Any, **kwargs: Any) -> int:
            """Another submission is checked while the collection waits for a thread."""
            asyncio.run_coroutine_threadsafe(checked(specs[1]), loop).result()
            return collect(*args, **kwargs)

        loop = asyncio.get_running_loop()
        cache.store.collect = late  # type: ignore[method-assign]
        await files.collect_garbage([cache])
        cache.store.collect = collect  # type: ignore[method-assign]
        inbox.put_count = 2
        requests.close()
        await files.collect_garbage([cache])
        assert [cache.store.missing_of(tree) for tree in trees] == [[], []]
        inbox.taken_count = 2
        files._node.home.untouched["n/1"] = [SimpleNamespace(spec=spec) for spec in specs]  # type: ignore[misc]
        await files.collect_garbage([cache])
        files._node.home.untouched.clear()
        await files.collect_garbage([cache])
        assert [cache.store.missing_of(tree) for tree in trees] == [[tree] for tree in trees]
        await files.close()

    asyncio.run(story())


def test_a_dead_mount_holds_up_no_other_placement_and_no_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def place(directory: bytes, *_: Any) -> tuple[list[str], dict[str, bytes]]:
        if directory.startswith(b"/dead"):
            over.wait()
        return [], {}

    monkeypatch.setitem(work.WORK, "place", place)
    monkeypatch.setattr(attempts, "mount_point", lambda path: path)
    monkeypatch.setattr(attempts, "PLACED_WITHIN_S", 0.01)
    told: set[tuple[str, str]] = set()

    async def story() -> None:
        files = files_of(tmp_path, [])
        files._event_log = SimpleNamespace(
            record=lambda *what, task, reason: told.add((what[1], task)) if "/dead/" in reason else None
        )  # type: ignore[assignment]
        store = files.caches.of("").store
        outputs, user = kept_tree(store, b"output"), TaskUser("n", "")

        def placed(number: int, directory: bytes) -> asyncio.Task[Any]:
            uid = bytes([number]) * 16
            return asyncio.create_task(
                files._place(uid, f"n/{number}", user, TaskFiles(outputs), directory, 0.0, outputs, 0.0)
            )

        try:
            dead = [placed(number, b"/dead/%d" % number) for number in range(5)]
            async with asyncio.timeout(PATIENCE_S):
                assert (await placed(9, b"/live"))[:2] == ("", 0)
                await files.do("make", user, KEY, SCRATCH, outputs, ())
                while len(told) < len(dead):  # noqa: ASYNC110 -- an event log tells nobody
                    await asyncio.sleep(0.01)
            assert not any(one.done() for one in dead)
            over.set()
            await asyncio.gather(*dead)
        finally:
            over.set()
            await files.close()

    asyncio.run(story())
    assert told == {("waiting", f"n/{number}") for number in range(5)}


@each(
    ("error", "raised"),
    [
        (RecursionError("too deep"), None),
        (OSError(errno.EIO, "Input/output error"), None),
        (OSError(errno.ENOSPC, "No space left on device"), NoRoom),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), NoRoom),
        (OSError(errno.EMFILE, "Too many open files"), OSError),
    ],
)
def test_outputs_that_cannot_be_collected_fail_the_task_and_a_shortage_of_the_agent_does_not(
    tmp_path: Path, error: Exception, raised: type[Exception] | None
) -> None:
    async def story() -> Exit:
        files = files_of(tmp_path, [])
        files._notes[KEY] = AttemptNote("n/1", TaskFiles(bytes(32), outputs=("*",)), TaskUser("n", ""), is_ready=True)

        async def do(*_: object, **__: object) -> None:
            raise error

        files.do = do  # type: ignore[method-assign]
        try:
            return await files.settled(KEY, Exit(0))
        finally:
            await files.close()

    if raised is not None:
        with pytest.raises(raised, match=str(error.args[-1])):
            asyncio.run(story())
        return
    ended = asyncio.run(story())
    assert ended.exit_code == 125
    assert str(error.args[-1]) in ended.reason
    assert "Errno" not in ended.reason


def test_a_user_has_half_of_the_cache_at_most_and_others_give_way_with_what_nobody_needs(tmp_path: Path) -> None:
    async def story() -> None:
        files = files_of(tmp_path, [], "system", limit_bytes=10_000)
        alice, bob, carol = (files.caches.of(uid) for uid in ("20001", "20002", "20003"))
        for cache in (bob, carol):
            content = bytes((len(cache.store.usage().manifests),)) * 4000 + cache.store._directory.name.encode()
            tree, own = encode(Manifest((FileEntry("a", 0o644, len(content), 1, (digest_of(content),)),)))
            await cache.keep([content, *own])
            assert cache.is_complete(tree)
        with pytest.raises(NoRoom):
            await alice.keep([b"x" * 6000])
        await alice.keep([b"x" * 3000])
        assert alice.store.size_bytes == 3000
        assert files.caches.size_bytes <= 10_000
        assert bob.store.usage().manifests == []
        await files.close()

    asyncio.run(story())


@each(
    ("failure", "code"),
    [(OSError(errno.ENOSPC, "a: no space left on the device"), "disk"), (TypeError("a bug of ours"), "busy")],
)
def test_files_that_cannot_be_put_in_place_send_the_task_elsewhere_and_harm_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: str
) -> None:
    came: list[Any] = []
    running = f"{bytes([1]).hex() * 16}-1"

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setitem(work.WORK, "make", fail)

    async def story() -> None:
        files = files_of(tmp_path, came, links=SimpleNamespace(send=lambda *_: None))
        tree, own = encode(Manifest())
        files.caches.of("").store.put(own)
        files._notes[running] = AttemptNote("h/2", TaskFiles(tree), TaskUser("h", ""), is_ready=True)
        files._spool.make_scratch(running)
        files.offered(StageFiles(KEY, "h/1", UID, 1, "h", TaskSpec((b"true",), SCRATCH, files=TaskFiles(tree))))
        await others()
        assert (files.has(running), files.has(KEY)) == (True, False)
        await files.close()

    asyncio.run(story())
    assert (tmp_path / "scratch" / running).is_dir()
    assert not (tmp_path / "scratch" / KEY).exists()
    (told,) = came
    assert (told.key, told.code) == (KEY, code)


def test_where_users_are_apart_who_knows_a_manifest_has_its_blocks_and_no_others(tmp_path: Path) -> None:
    async def story() -> None:
        files = files_of(tmp_path, [], "system")
        alice, bob = (files.caches.of(f"h:{name}") for name in ("alice", "bob"))
        contents = [b"hers", b"his"]
        hers, his = map(digest_of, contents)
        trees = []
        for cache, content, digest in zip((alice, bob), contents, (hers, his), strict=True):
            tree, own = encode(Manifest((FileEntry("a", 0o600, len(content), 1, (digest,)),)))
            await cache.keep([content, *own])
            assert cache.is_complete(tree)
            trees.append(tree)

        async def told(digests: list[bytes], id_: bytes) -> list[bytes]:
            request = BlocksRequest(tuple(digests), task=UID, manifest=id_)
            pieces = [piece async for piece in files.serve("x", request)]
            return [bytes(block) for piece in pieces if isinstance(piece, Blocks) for block in piece.blocks]

        assert await told([hers], trees[0]) == [b"hers"]
        assert digest_of((await told([trees[0]], trees[0]))[0]) == trees[0]
        for digests, id_ in (([his], trees[0]), ([hers, his], trees[0]), ([hers], b""), ([hers], bytes(32))):
            assert await told(digests, id_) == []
        await files.close()

    asyncio.run(story())


def test_a_piece_waits_until_the_working_directory_has_taken_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "TAKE_S_MAX", PATIENCE_S)
    digests = [digest_of(content) for content in (b"one", b"two", b"three")]

    async def story() -> None:
        files = files_of(tmp_path, [])
        cache = files.caches.of("")
        fetch = Fetch(bytes(32))
        fetch.begin(digests)
        blocks = attempts._WhileWanted(cache, lambda: True, fetch)
        cache.store.put([b"one", b"two", b"three"])
        await fetch.recent_taken()
        fetch.blocks_stored(digests[:1], [memoryview(b"one")])
        waiting = asyncio.ensure_future(fetch.recent_taken())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await cache.transfer.in_thread(blocks.read_some, digests, 1 << 20) == [b"one"]
        await waiting
        fetch.blocks_stored(digests[2:], [memoryview(b"three")])
        await fetch.recent_taken()  # the second one is needed before
        assert fetch.take_recent(digests[2:]) == [b"three"]
        fetch.over()
        await files.close()

    asyncio.run(story())


def test_files_come_without_a_pause_after_their_directory_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "TAKE_S_MAX", 10 * PATIENCE_S)
    store = BlockStore(tmp_path / "home", 1 << 30)
    digests = store.put([b"one", b"two", b"three"])
    entries = [
        FileEntry(f"f{number}", 0o644, len(store.read(digest)), 0, (digest,)) for number, digest in enumerate(digests)
    ]
    id_, blocks = manifest.encode(Manifest(tuple(entries)))
    store.put(blocks)
    failed = threading.Event()
    came: list[Any] = []

    def make(*_: object) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(work, "make_anew", make)
    (tmp_path / "node").mkdir()

    async def serve(_: str, request: BlocksRequest, *__: object) -> AsyncIterator[Blocks | BlocksEnd]:
        for digest in request.digests:
            if digest in digests:
                await asyncio.to_thread(failed.wait)
            yield Blocks((memoryview(store.read(digest)),))
        yield BlocksEnd()

    async def story() -> None:
        links: Any = SimpleNamespace(fetch_blocks=serve, send=lambda *_: None)
        files = files_of(tmp_path / "node", came, links=links)
        spec = TaskSpec((b"true",), SCRATCH, files=TaskFiles(id_, 11, 3))
        files.offered(StageFiles(KEY, "h/1", UID, 1, "h", spec))
        async with asyncio.timeout(PATIENCE_S):
            while files.caches.of("").store.missing_of(id_):  # noqa: ASYNC110 -- a thread stores them
                await asyncio.sleep(0.01)
            await others()
        await files.close()

    asyncio.run(story())
    assert [(told.key, told.code) for told in came if isinstance(told, FilesStaged)] == [(KEY, "disk")]


def test_files_are_written_while_others_are_still_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(tmp_path / "home", 1 << 30)
    digests = store.put([bytes([number]) * 1000 for number in range(3)])
    entries = [FileEntry(f"f{number}", 0o644, 1000, 0, (digest,)) for number, digest in enumerate(digests)]
    id_, blocks = manifest.encode(Manifest(tuple(entries)))
    store.put(blocks)
    came: list[Any] = []
    decoded: list[Manifest] = []
    check = manifest._check

    def counted(found: Manifest) -> None:
        decoded.append(found)
        check(found)

    monkeypatch.setattr(manifest, "_check", counted)
    scratch = tmp_path / "node" / "scratch" / KEY
    (tmp_path / "node").mkdir()

    async def serve(_: str, request: BlocksRequest, *__: object) -> AsyncIterator[Blocks | BlocksEnd]:
        for digest in request.digests:
            if digest in digests[1:]:  # the file before it is there already
                before = scratch / f"f{digests.index(digest) - 1}"
                async with asyncio.timeout(PATIENCE_S):
                    while not before.exists():  # noqa: ASYNC110 -- a thread makes it
                        await asyncio.sleep(0.01)
            yield Blocks((memoryview(store.read(digest)),))
        yield BlocksEnd()

    async def story() -> None:
        links: Any = SimpleNamespace(fetch_blocks=serve, send=lambda *_: None)
        files = files_of(tmp_path / "node", came, links=links)
        spec = TaskSpec((b"true",), SCRATCH, files=TaskFiles(id_, 3000, 3))
        files.offered(StageFiles(KEY, "h/1", UID, 1, "h", spec))
        async with asyncio.timeout(PATIENCE_S):
            while not came:  # noqa: ASYNC110 -- an inbox tells nobody
                await asyncio.sleep(0.01)
        assert files.is_ready(KEY)
        await files.close()

    asyncio.run(story())
    (told,) = came
    assert (told.key, told.code) == (KEY, "")
    assert [(scratch / f"f{number}").read_bytes() for number in range(3)] == list(map(store.read, digests))
    assert len(decoded) == 1, "once for the fetch and the directory"
