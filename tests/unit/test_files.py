"""Files that travel: the manifest, the tree on disk, the store, and what is placed where."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import os
import random
import re
import shutil
import socket
import sqlite3
import stat
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.files.transfer import FileCaches, FileCacheSettings, OutputBlocks
from peerload.client.submission import prepare
from peerload.files import manifest, snapshot, tree, work
from peerload.files.manifest import BLOCK_BYTES, FileEntry, Manifest
from peerload.files.store import BlockStore, NoRoom
from peerload.files.tree import DirfdCache, open_beneath
from peerload.files.work import OutputMerge, make_tree
from peerload.model.errors import StagingFailed, StoreError
from tests.each import each
from tests.support import wait_until
from tests.wording import Says

LIMIT_BYTES = 64 << 20


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "store", LIMIT_BYTES)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


class Agent:
    """Answers a client's requests `files` from a store, and counts the blocks that came."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.came = 0

    def __call__(self, **fields: Any) -> dict[str, Any]:
        self.came += len(self.store.put(fields.get("blocks", [])))
        if "manifest" in fields:
            complete = self.store.has(fields["manifest"]) or not self.store.missing_of(fields["manifest"])
            return {"complete": complete}
        return {"missing": self.store.missing(fields.get("have", []))}


def frozen(home: Path, agent: Agent, *paths: str) -> snapshot.Snapshot:
    directory = os.fsencode(home)
    return snapshot.take(directory, snapshot.look(directory, paths, everything=not paths), agent)


def made(where: Path, taken: snapshot.Snapshot, store: BlockStore) -> Path:
    where.mkdir()
    make_tree(where, manifest.decode(taken.id, store.read), (), store.read_some)
    return where


def test_what_an_earlier_try_has_left_is_replaced(home: Path, tmp_path: Path, store: BlockStore) -> None:
    (home / "src").mkdir()
    (home / "src/a").write_text("one")
    taken = frozen(home, Agent(store)).id
    work_directory, environment = tmp_path / "work", tmp_path / "environment"
    for left in (work_directory, environment):
        (left / "lock/deep").mkdir(parents=True)
        (left / "link").symlink_to(home)
    work.make(bytes(work_directory), store, taken, ())
    work.prepare(bytes(environment), store, taken, {})
    assert {path.name for path in work_directory.iterdir()} == {"src"}
    assert {path.name for path in environment.iterdir()} == {"client", "lock"}
    assert (environment / "lock/src/a").read_text() == (home / "src/a").read_text() == "one"


# -- there and back -------------------------------------------------------------------------------------------------------


def test_a_tree_arrives_as_it_was(home: Path, tmp_path: Path, store: BlockStore) -> None:
    (home / "sub/empty").mkdir(parents=True)
    (home / "sub/large").write_bytes(os.urandom(2 * BLOCK_BYTES + 5))
    (home / "tool").write_text("#!/bin/sh\n")
    (home / "tool").chmod(0o755)
    (home / "link").symlink_to("sub/large")
    (home / "none").touch()
    os.utime(home / "tool", ns=(10**18, 10**18 + 7))
    there = made(tmp_path / "there", frozen(home, Agent(store)), store)
    assert (there / "sub/large").read_bytes() == (home / "sub/large").read_bytes()
    assert (there / "sub/empty").is_dir()
    assert (there / "none").read_bytes() == b""
    assert (there / "link").readlink() == Path("sub/large")
    status = (there / "tool").stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o755, 10**18 + 7)


def test_what_was_sent_once_is_neither_sent_nor_read_again(home: Path, store: BlockStore) -> None:
    for number in range(20):
        (home / f"f{number}").write_text(str(number))
        os.utime(home / f"f{number}", (1, 1))
    agent = Agent(store)
    first = frozen(home, agent)
    came = agent.came
    assert frozen(home, agent) == (first.id, first.manifest, 0)
    assert agent.came == came
    (home / "f3").write_text("changed")
    second = frozen(home, agent)
    assert second.id != first.id
    assert agent.came - came == 1 + 2  # the file, and the two blocks of the manifest


def test_batches_are_asked_about_with_the_one_before(
    home: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "BATCH_BLOCKS", 2)
    for number in range(7):
        (home / f"f{number}").write_text(str(number))
    store.put([b"2", b"3", b"5"])
    requests: list[tuple[int, int]] = []
    agent = Agent(store)

    def ask(**fields: Any) -> dict[str, Any]:
        if "blocks" in fields:
            requests.append((len(fields["blocks"]), len(fields["have"])))
        return agent(**fields)

    taken = snapshot.take(os.fsencode(home), snapshot.look(os.fsencode(home), (), everything=True), ask)
    assert requests == [(0, 2), (2, 2), (0, 2), (1, 1), (1, 0), (0, 2), (2, 0)]  # the last two: of the manifest
    assert store.missing_of(taken.id) == []
    assert agent.came == 4 + 2
    assert taken.sent_bytes == 4 + sum(map(len, manifest.encode(taken.manifest)[1]))


@each("at", [0, 1, 2, 3])
def test_what_the_agent_refuses_ends_the_sending(
    home: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(snapshot, "BATCH_BLOCKS", 2)
    for number in range(9):
        (home / f"f{number}").write_text(str(number))
    agent, asked = Agent(store), []

    def ask(**fields: Any) -> dict[str, Any]:
        asked.append(fields)
        if len(asked) > at:
            raise StagingFailed("the file cache is full")
        return agent(**fields)

    found = snapshot.look(os.fsencode(home), (), everything=True)
    with pytest.raises(StagingFailed, match="full"):
        snapshot.take(os.fsencode(home), found, ask)
    assert len(asked) == at + 1


def test_the_digests_of_a_few_directories_are_remembered(
    home: Path, tmp_path: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "KNOWN_MAX", 2)
    known = tmp_path / "cache/peerload/files"
    for number in range(4):
        directory = home / str(number)
        directory.mkdir()
        (directory / "file").write_text("x")
        before = set(known.iterdir()) if number else set()
        frozen(directory, Agent(store))
        (new,) = set(known.iterdir()) - before
        os.utime(new, (number, number))
    assert sorted(path.stat().st_mtime for path in known.iterdir()) == [2, 3]


def test_blocks_that_the_agent_has_lost_are_sent_again(home: Path, tmp_path: Path, store: BlockStore) -> None:
    (home / "a").write_text("text")
    os.utime(home / "a", (1, 1))
    first = frozen(home, Agent(store))
    anew = BlockStore(tmp_path / "anew", LIMIT_BYTES)
    assert frozen(home, Agent(anew)).id == first.id
    assert anew.missing_of(first.id) == []


def test_a_large_file_that_has_changed_in_its_middle_costs_the_blocks_there(
    home: Path, tmp_path: Path, store: BlockStore
) -> None:
    before = random.Random(1).randbytes(20 << 20)
    (home / "large").write_bytes(before)
    agent = Agent(store)
    first = frozen(home, agent)
    (entry,) = first.manifest.files
    assert entry.sizes
    came = agent.came
    (home / "large").write_bytes(before[: 9 << 20] + b"one line more" + before[9 << 20 :])
    second = frozen(home, agent)
    assert agent.came - came <= 3 + 2  # of the file, and of the manifest
    there = made(tmp_path / "there", second, store)
    assert (there / "large").read_bytes() == (home / "large").read_bytes()

    output = manifest.FileEntry("large", 0o644, 1, 1, tuple(store.put([b"x"])))
    merge = OutputMerge(os.fsencode(home), first.manifest, {}, since=0.0, mark="h/1")
    merge.place(Manifest((output,)), store.read_some)
    assert merge.conflicts == ["large"]  # it is not as at submit
    (home / "large").write_bytes(before)
    merge.place(Manifest((output,)), store.read_some)
    assert (home / "large").read_bytes() == b"x"


def test_ignore_files_count_for_a_snapshot_and_deeper_ones_before_others(home: Path) -> None:
    for name in ("a.o", "a.c", "keep.o", "build/x", "sub/b.o", "sub/b.log", ".git/config", "data/big"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(name)
    (home / ".gitignore").write_text("*.o\n!keep.o\nbuild/\n")
    (home / "sub/.gitignore").write_text("!b.o\n*.log\n")
    (home / ".peerloadignore").write_text("/data\n")
    found = snapshot.look(os.fsencode(home), [], everything=True)
    assert [item.path for item in found] == [
        ".gitignore",
        ".peerloadignore",
        "a.c",
        "keep.o",
        "sub/.gitignore",
        "sub/b.o",
    ]
    named = snapshot.look(os.fsencode(home), ["a.o", "build"], everything=False)
    assert [item.path for item in named] == ["a.o", "build/x"]


# -- bad input ------------------------------------------------------------------------------------------------------------


def bad_fifo(home: Path) -> None:
    os.mkfifo(home / "bad")


def bad_socket(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(home / "bad"))


def bad_link(home: Path) -> None:
    (home / "bad").symlink_to("/etc/passwd")


def bad_link_up(home: Path) -> None:
    (home / "bad").symlink_to("sub/../../other")


def bad_link_text(home: Path) -> None:
    (home / "bad").symlink_to(os.fsdecode(b"a\xff"))


def bad_name(home: Path) -> None:
    (home / "bad\nname").touch()


def bad_bytes(home: Path) -> None:
    Path(os.fsdecode(os.fsencode(home) + b"/bad\xff")).touch()


def bad_device(home: Path) -> None:
    (home / "bad").symlink_to("/dev/zero")


def bad_node(home: Path) -> None:
    try:
        os.mknod(home / "bad", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


def bad_size(home: Path) -> None:
    with (home / "bad").open("wb") as file:
        file.truncate(tree.BYTES_MAX + 1)


@pytest.mark.parametrize(
    "make",
    [bad_fifo, bad_socket, bad_link, bad_link_up, bad_link_text, bad_name, bad_bytes, bad_device, bad_node, bad_size],
)
def test_what_cannot_travel_is_refused_by_name_and_left_where_it_is_no_output(
    home: Path, store: BlockStore, make: Any
) -> None:
    make(home)
    with pytest.raises(StagingFailed) as refused:
        snapshot.look(os.fsencode(home), [], everything=True)
    assert "bad" in f"{refused.value.what} {refused.value.why}"
    (home / "result").write_text("r")
    nothing = snapshot.Snapshot(b"", Manifest(), 0)
    assert [entry.path for entry in changed(home, nothing, store, "result").files] == ["result"]
    with pytest.raises(StagingFailed):
        changed(home, nothing, store, "*")


@each(
    ("name", "shown", "why"),
    [
        (b"a\nb", "a\\x0ab cannot be staged", "control characters"),
        (b"q\xff", "q\\xff cannot be staged", "not UTF-8"),
    ],
)
def test_a_name_that_cannot_travel_is_shown_as_text_with_a_hint_that_helps(
    home: Path, name: bytes, shown: str, why: str
) -> None:
    (home / os.fsdecode(name)).write_text("x")
    refusals = []
    with pytest.raises(StagingFailed) as refused:
        snapshot.look(os.fsencode(home), [os.fsdecode(name)], everything=False)
    refusals.append(refused.value)
    assert refused.value.what == shown
    for inputs, outputs in (([os.fsdecode(name)], []), ([], [os.fsdecode(name)])):
        with pytest.raises(StagingFailed) as refused:
            prepare({"directory": os.fsencode(home)}, {}, inputs, outputs, snapshot=False)
        refusals.append(refused.value)
    assert all(why in refusal.why and "another name" in refusal.hint for refusal in refusals)


@pytest.mark.parametrize(
    ("glob", "is_refused"),
    [
        ("link/*", True),
        ("link", True),
        ("deep/link/new/*.csv", True),
        ("file/x", True),
        ("file", False),
        ("new/deep/*", False),
        ("deep/*", False),
        ("dangling", False),
        ("*", False),
    ],
)
def test_a_place_that_outputs_cannot_have_is_refused_before_the_task_runs(
    home: Path, tmp_path: Path, glob: str, is_refused: bool
) -> None:
    (home / "deep").mkdir()
    (home / "file").touch()
    for link in (home / "link", home / "deep/link"):
        link.symlink_to(tmp_path)
    (home / "dangling").symlink_to("nowhere")
    spec = {"directory": os.fsencode(home), "environment": b"\x80"}
    if is_refused:
        with pytest.raises(StagingFailed, match="cannot be written to"):
            prepare(spec, {}, [], [glob], snapshot=False)
    else:
        prepare(spec, {}, [], [glob], snapshot=False)


def test_all_outputs_are_meant_by_a_dot_and_nothing_by_an_empty_path(home: Path) -> None:
    spec: dict[str, Any] = {"directory": os.fsencode(home), "environment": b"\x80"}
    for inputs, outputs in (([""], []), ([], [""])):
        with pytest.raises(StagingFailed):
            prepare(dict(spec), {}, inputs, outputs, snapshot=False)
    prepare(spec, {}, [], ["."], snapshot=False)
    assert tree.matcher(spec["files"]["outputs"]).match("new/file")


def test_of_a_directory_with_many_files_those_that_a_glob_means_are_kept_in_mind(
    home: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        (home / f"temporary{number}").write_text(str(number))
    (home / "result").write_text("r")
    monkeypatch.setattr(tree, "ENTRIES_MAX", 10)
    nothing = snapshot.Snapshot(b"", Manifest(), 0)
    assert [entry.path for entry in changed(home, nothing, store, "result").files] == ["result"]
    with pytest.raises(StagingFailed, match="too many"):
        snapshot.look(os.fsencode(home), [], everything=True)


def test_outputs_come_home_to_a_directory_that_was_removed(home: Path, store: BlockStore) -> None:
    (home / "out").write_text("result")
    taken = frozen(home, Agent(store))
    shutil.rmtree(home)
    merge = OutputMerge(os.fsencode(home / "gone"), Manifest(), {}, since=0.0, mark="h/1")
    merge.place(taken.manifest, store.read_some)
    assert (home / "gone/out").read_text() == "result"


def test_small_outputs_are_kept_together(home: Path, tmp_path: Path, store: BlockStore) -> None:
    id_, own = manifest.encode(Manifest())
    store.put(own)
    for number in range(work.BATCH_BLOCKS + 10):
        (home / f"out{number}").write_text(str(number))
    (home / "large").write_bytes(os.urandom(300_000))
    before = len(list((tmp_path / "store").rglob("blocks/*/*")))
    outputs = work.collect(os.fsencode(home), store, id_, ("*",), True)
    packs = len(list((tmp_path / "store").rglob("blocks/*/*"))) - before
    assert packs == 4  # two batches, the large one, the manifest
    assert store.missing_of(outputs) == []


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("real")], ids=["fifo", "directory", "link"]
)
def test_an_ignore_file_that_is_none_is_refused_by_name(home: Path, make: Any) -> None:
    (home / "sub").mkdir()
    (home / "sub/real").write_text("*.o\n")
    make(home / "sub/.gitignore")
    with pytest.raises(StagingFailed, match=re.escape("sub/.gitignore")):
        snapshot.look(os.fsencode(home), [], everything=True)


def test_directories_that_lie_too_deep_are_refused_or_left_out(home: Path, store: BlockStore) -> None:
    (home / "x").write_text("x")
    home.joinpath(*"d" * 300).mkdir(parents=True)
    with pytest.raises(StagingFailed, match=str(manifest.DEPTH_MAX)):
        snapshot.look(os.fsencode(home), [], everything=True)
    nothing = snapshot.Snapshot(b"", Manifest(), 0)
    for glob in ("**", "d"):
        with pytest.raises(StagingFailed, match=str(manifest.DEPTH_MAX)):
            changed(home, nothing, store, "x*", glob)
    for globs, needs_all in ((("x*",), True), (("**",), False)):
        assert [entry.path for entry in changed(home, nothing, store, *globs, needs_all=needs_all).files] == ["x"]


def test_too_many_files_are_refused_before_all_of_them_were_looked_at() -> None:
    there = iter(range(10**6))
    with pytest.raises(StagingFailed, match=Says.FILES_MAX()):
        tree.bounded(tree.Found(str(number), None) for number in there)
    assert next(there) == manifest.FILES_MAX + 1


def test_outputs_that_are_too_many_fail_the_task_and_are_not_read(
    home: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        (home / f"out{number}").write_text(str(number))
    monkeypatch.setattr(tree.bounded, "__defaults__", (10,))
    monkeypatch.setattr(tree, "read_file", None)
    base = os.open(home, os.O_RDONLY)
    try:
        with pytest.raises(StagingFailed, match="10 files"):
            tree.changed(base, Manifest(), (), lambda block: block, needs_all=True)
    finally:
        os.close(base)
    assert store.usage().blocks == 0


def test_a_sparse_file_is_sparse_there_and_its_holes_are_not_read(
    home: Path, tmp_path: Path, store: BlockStore
) -> None:
    size = 1000 * BLOCK_BYTES + 5
    with (home / "sparse").open("wb") as file:
        file.seek(700 * BLOCK_BYTES + 3)
        file.write(b"middle")
        file.truncate(size)
    with (home / "hole").open("wb") as file:
        file.truncate(3 * BLOCK_BYTES)
    agent = Agent(store)
    there = made(tmp_path / "there", frozen(home, agent), store)
    assert agent.came <= 6  # one block of zeros, that in the middle, the last, and the manifest
    status = (there / "sparse").stat()
    assert (status.st_size, (there / "hole").stat().st_size) == (size, 3 * BLOCK_BYTES)
    assert status.st_blocks * 512 < 10 * BLOCK_BYTES
    with (there / "sparse").open("rb") as file:
        file.seek(700 * BLOCK_BYTES + 3)
        assert file.read(6) == b"middle"


def test_links_that_lead_in_a_circle_travel_as_they_are(home: Path, tmp_path: Path, store: BlockStore) -> None:
    (home / "sub").mkdir()
    targets = {"a": "b", "b": "a", "itself": "itself", "sub/up": "..", "sub/here": "."}
    for path, target in targets.items():
        (home / path).symlink_to(target)
    there = made(tmp_path / "there", frozen(home, Agent(store)), store)
    assert {str(path.relative_to(there)): str(path.readlink()) for path in there.rglob("*") if path.is_symlink()} == (
        targets
    )
    for way in ("sub/up/sub", "itself/x"):
        with pytest.raises(StagingFailed, match="its path contains a symbolic link"):
            snapshot.look(os.fsencode(home), [way], everything=False)
    (there / "circle").symlink_to("circle")
    nothing = snapshot.Snapshot(b"", Manifest(), 0)
    assert dict(changed(there, nothing, store).links) == targets | {"circle": "circle"}


def test_a_manifest_of_zeros_that_are_none_is_refused(tmp_path: Path, store: BlockStore) -> None:
    bad = Manifest((FileEntry("a", 0o600, 5, 0, (manifest.ZEROS,)), FileEntry("b", 0o600, 5, 0, (manifest.ZEROS,))))
    (tmp_path / "there").mkdir()
    with pytest.raises(StagingFailed, match="another size"):
        make_tree(tmp_path / "there", bad, (), store.read_some)


def test_hard_links_travel_as_files_of_their_own_and_their_content_once(
    home: Path, tmp_path: Path, store: BlockStore
) -> None:
    (home / "a").write_bytes(os.urandom(1000))
    os.link(home / "a", home / "b")
    agent = Agent(store)
    there = made(tmp_path / "there", frozen(home, agent), store)
    assert agent.came == 1 + 2  # and the manifest
    (there / "a").write_text("changed")
    assert (there / "b").read_bytes() == (home / "b").read_bytes()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../up", "a/../b", "a//b", "", "a/.", "\udcff", "a\x1bb", "x" * 256, "/".join("y" * 600)]
)
def test_a_manifest_with_such_a_name_is_refused(path: str) -> None:
    id_, blocks = manifest.encode(Manifest(links=((path, "a"),)) if "\udcff" not in path else Manifest())
    if "\udcff" in path:
        assert manifest.objection(path)
        return
    kept = {manifest.digest_of(block): block for block in blocks}
    with pytest.raises(StagingFailed):
        manifest.decode(id_, kept.__getitem__)


@pytest.mark.parametrize(
    "bad",
    [
        Manifest((FileEntry("a", 0o4755, 0, 0, ()),)),
        Manifest((FileEntry("a", 0o644, -1, 0, ()),)),
        Manifest((FileEntry("a", 0o644, 5, 0, ()),)),
        Manifest((FileEntry("a", 0o644, 5, 0, (b"short",)),)),
        Manifest((FileEntry("a", 0o644, 5, 0, (b"d" * 32,), (6,)),)),
        Manifest((FileEntry("a", 0o644, 5, 0, (b"d" * 32,) * 2, (6, -1)),)),
        Manifest((FileEntry("a", 0o644, 2 * BLOCK_BYTES, 0, (b"d" * 32,), (2 * BLOCK_BYTES,)),)),
        Manifest((FileEntry("a", 0o644, 0, 0, ()), FileEntry("a", 0o644, 0, 0, ()))),
        Manifest(links=(("a", "/etc"),)),
        Manifest(links=(("a/b", "../../x"),)),
        Manifest(links=(("here", "."), ("a", "here/../x"))),
        Manifest(links=(("a", ""),)),
        Manifest(directories=(("a", 0o4755),)),
        Manifest(directories=(("a", 0o500),)),
        Manifest(links=(("a", "b\0"),)),
        Manifest((FileEntry("a", float("inf"), 0, 0, ()),)),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_manifest_is_refused(bad: Manifest) -> None:
    id_, blocks = manifest.encode(bad)
    kept = {manifest.digest_of(block): block for block in blocks}
    with pytest.raises(StagingFailed):
        manifest.decode(id_, kept.__getitem__)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x94\x01\x00\x00\x90", b"?" * 40])
def test_a_root_of_other_bytes_is_refused(raw: bytes) -> None:
    with pytest.raises(StagingFailed):
        manifest.decode_root(raw)


def test_a_file_that_changes_all_the_time_is_refused_and_one_that_is_gone_left_out(
    home: Path, store: BlockStore
) -> None:
    (home / "log").write_text("1")
    (home / "gone").write_text("2")
    found = snapshot.look(os.fsencode(home), [], everything=True)
    (home / "gone").unlink()
    assert [entry.path for entry in snapshot.take(os.fsencode(home), found, Agent(store)).manifest.files] == ["log"]
    base = os.open(home, os.O_RDONLY)

    def grows(block: bytes) -> bytes:
        with (home / "log").open("a") as file:
            file.write("more")
        return manifest.digest_of(block)

    with pytest.raises(StagingFailed, match="log"):
        tree.read_file(DirfdCache(base, makes=False), "log", grows)
    os.close(base)


def test_without_openat2_files_are_opened_as_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top/sub/deep").mkdir(parents=True)
    (tmp_path / "top/sub/file").write_text("x")
    for link, target in (("out", tmp_path), ("in", "sub"), ("file", "sub/file"), ("sub/up", "..")):
        (tmp_path / "top" / link).symlink_to(target)
    base = os.open(tmp_path / "top", tree.DIRECTORY)

    def opened(path: str, flags: int) -> object:
        try:
            fd = open_beneath(base, path, flags)
        except OSError as error:
            return error.errno
        try:
            return os.fstat(fd).st_ino
        finally:
            os.close(fd)

    paths = [".", "sub", "sub/deep", "sub/file", "sub/file/x", "none", "none/x", "out", "out/top", "in", "in/file"]
    paths += ["file", "sub/up", "sub/up/sub", "..", "sub/../sub", "/etc"]
    cases = [(path, flags) for path in paths for flags in (os.O_RDONLY, tree.DIRECTORY, os.O_PATH | os.O_NOFOLLOW)]
    with_it = [opened(*case) for case in cases]

    def no_openat2(*_: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1

    monkeypatch.setattr(tree, "_libc", SimpleNamespace(syscall=no_openat2))
    without = [opened(*case) for case in cases]
    os.close(base)
    told = [(*case, *one) for case, *one in zip(cases, with_it, without, strict=True)]
    assert [one for one in told if one[-2] != one[-1] and one[0] != "sub/../sub"] == []


def test_a_link_put_in_the_place_of_a_directory_leads_nowhere(home: Path, tmp_path: Path, store: BlockStore) -> None:
    (home / "sub").mkdir()
    (home / "sub/a").write_text("mine")
    found = snapshot.look(os.fsencode(home), [], everything=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/a").write_text("secret")
    (home / "sub/a").unlink()
    (home / "sub").rmdir()
    (home / "sub").symlink_to(tmp_path / "secret")
    with pytest.raises(StagingFailed, match="sub/a"):
        snapshot.take(os.fsencode(home), found, Agent(store))
    (home / "sub").unlink()
    (home / "sub").mkdir()
    (home / "sub/a").symlink_to(tmp_path / "secret/a")
    with pytest.raises(StagingFailed, match="sub/a"):
        snapshot.take(os.fsencode(home), found, Agent(store))
    (home / "sub/a").unlink()
    (home / "sub").rmdir()
    (home / "sub").symlink_to(tmp_path / "secret")
    base = os.open(home, os.O_RDONLY)
    for path in ("../secret/a", "sub/a", str(tmp_path / "secret/a")):
        with pytest.raises(OSError, match=r"."):
            open_beneath(base, path, os.O_RDONLY)
    os.close(base)


# -- the store ------------------------------------------------------------------------------------------------------------


def test_damage_is_found_when_a_block_is_read_and_the_block_is_wanted_again(tmp_path: Path, store: BlockStore) -> None:
    (digest,) = store.put([os.urandom(BLOCK_BYTES)])
    (file,) = [path for path in (tmp_path / "store/blocks").rglob("*") if path.is_file()]
    file.write_bytes(b"other")
    with pytest.raises(StagingFailed, match="damaged"):
        store.read(digest)
    assert store.missing([digest]) == [digest]


def test_what_was_verified_a_moment_ago_is_not_verified_again_unless_its_file_was_touched(
    tmp_path: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counting(data: bytes) -> bytes:
        hashed.append(len(data))
        return manifest.digest_of(data)

    monkeypatch.setattr("peerload.files.store.digest_of", counting)
    (digest,) = store.put([b"x" * 1000])
    store.read(digest)
    assert len(hashed) == 1
    (file,) = [path for path in (tmp_path / "store/blocks").rglob("*") if path.is_file()]
    ctime_ns = file.stat().st_ctime_ns

    def is_touched() -> bool:
        file.chmod(0o600)
        return file.stat().st_ctime_ns != ctime_ns

    wait_until(is_touched)
    store.read(digest)
    assert len(hashed) == 2


def test_a_block_of_another_content_than_announced_is_not_kept(store: BlockStore) -> None:
    with pytest.raises(StagingFailed):
        store.put([b"wrong"], [manifest.digest_of(b"right")])
    assert store.usage().blocks == 0


def test_a_store_survives_a_restart_and_an_unreadable_index_is_begun_anew(tmp_path: Path, store: BlockStore) -> None:
    digests = store.put([b"small", os.urandom(BLOCK_BYTES)])
    store.close()
    again = BlockStore(tmp_path / "store", LIMIT_BYTES)
    assert again.missing(digests) == []
    again.close()
    (tmp_path / "store/index.db").write_bytes(b"no database at all" * 1000)
    anew = BlockStore(tmp_path / "store", LIMIT_BYTES)
    assert anew.missing(digests) == digests
    assert not [path for path in (tmp_path / "store/blocks").rglob("*") if path.is_file()], (
        "nothing is kept that no index has"
    )
    anew.close()


def test_an_index_that_cannot_be_used_while_the_agent_runs_is_an_error_that_is_named(store: BlockStore) -> None:
    (digest,) = store.put([b"small"])
    store.close()
    for use in (store.usage, lambda: store.read(digest), lambda: store.missing([digest]), lambda: store.has(digest)):
        with pytest.raises(StagingFailed):
            use()


def test_blocks_count_as_synced_when_they_are(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []

    def refused(_: int) -> None:
        synced.append(True)
        raise OSError(errno.EIO, "")

    store.put([b"small"])
    monkeypatch.setattr("peerload.files.store.sync_file_system", refused)
    for _ in range(2):
        with pytest.raises(OSError, match=str(errno.EIO)):
            store.sync()
    monkeypatch.setattr("peerload.files.store.sync_file_system", lambda _: synced.append(True))
    store.sync()
    store.sync()
    assert len(synced) == 3


def test_blocks_that_are_written_during_a_sync_or_before_a_restart_are_synced_by_the_next(
    tmp_path: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("peerload.files.store.sync_file_system", lambda _: synced.append(store.usage().blocks))
    name = store._name

    def named_after_sync(*pack: Any) -> None:
        store.sync()  # of another submission
        name(*pack)

    monkeypatch.setattr(store, "_name", named_after_sync)
    store.put([b"small"])
    store.sync()
    assert synced == [0, 1]
    store.close()
    store = BlockStore(tmp_path / "store", LIMIT_BYTES)
    store.sync()
    assert synced == [0, 1, 1]


def test_a_full_store_gives_up_what_is_not_pinned_the_least_recently_used_first(tmp_path: Path, home: Path) -> None:
    store = BlockStore(tmp_path / "small", 10 * BLOCK_BYTES)
    taken = []
    for number in range(3):
        (home / "file").write_bytes(bytes([number]) * 100 + os.urandom(2 * BLOCK_BYTES))
        taken.append(frozen(home, Agent(store)).id)
        assert store.missing_of(taken[-1]) == []
    assert store.has(taken[0])  # used now, so that the second is the oldest
    store.collect(lambda: {taken[2]}, 4 * BLOCK_BYTES)
    assert [store.has(id_) for id_ in taken] == [True, False, True]
    store.collect(lambda: {taken[2]}, everything=True)
    assert [store.has(id_) for id_ in taken] == [False, False, True]
    assert store.missing_of(taken[2]) == []
    size = store.usage().size_bytes
    with pytest.raises(NoRoom):
        store.put([os.urandom(BLOCK_BYTES) for _ in range(8)])
    assert (store.usage().size_bytes, store.missing_of(taken[2])) == (size, [])


def test_a_disk_with_little_room_takes_no_more_and_loses_nothing(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "store", LIMIT_BYTES, free_bytes_min=1 << 60)
    with pytest.raises(NoRoom):
        store.put([b"block"])
    assert store.usage().blocks == 0
    assert not [path for path in (tmp_path / "store/blocks").rglob("*") if path.is_file()]


def test_a_disk_that_has_become_full_takes_new_files_at_the_cost_of_unused_ones(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockStore, "_free_bytes", lambda self: 5 * BLOCK_BYTES - self.size_bytes)
    settings = FileCacheSettings(tmp_path / "files", LIMIT_BYTES, 0, has_users=False, counters=Counter())
    caches = FileCaches(settings, None, set)  # type: ignore[arg-type]
    cache, taken = caches.of(""), []
    for _ in range(2):
        (home / "file").write_bytes(os.urandom(2 * BLOCK_BYTES))
        taken.append(frozen(home, Agent(cache.store)).id)
        assert cache.store.missing_of(taken[-1]) == []
    caches.pin_also(taken[1])
    cache.check_disk(2 * BLOCK_BYTES)
    assert [cache.store.has(id_) for id_ in taken] == [False, True]
    asyncio.run(cache.keep([os.urandom(2 * BLOCK_BYTES)]))
    with pytest.raises(NoRoom, match="disk"):
        cache.check_disk(2 * BLOCK_BYTES)


def test_a_pack_goes_with_its_last_block_and_has_a_hole_before(tmp_path: Path, home: Path) -> None:
    store = BlockStore(tmp_path / "store", LIMIT_BYTES)
    shared, alone = os.urandom(BLOCK_BYTES), os.urandom(BLOCK_BYTES)
    (home / "a").write_bytes(shared)
    (home / "b").write_bytes(alone)
    both = frozen(home, Agent(store)).id
    (home / "b").unlink()
    one = frozen(home, Agent(store)).id
    assert store.missing_of(both) == store.missing_of(one) == []

    def held() -> int:
        return sum(path.stat().st_blocks * 512 for path in (tmp_path / "store/blocks").rglob("*") if path.is_file())

    before = held()
    store.collect(lambda: {one}, everything=True)
    assert store.read(manifest.digest_of(shared)) == shared
    assert held() <= before - BLOCK_BYTES
    store.collect(lambda: (), everything=True)
    assert held() == 0


def test_packs_that_no_database_names_go_at_the_start(tmp_path: Path, store: BlockStore) -> None:
    store.put([b"named"])
    store.close()
    (tmp_path / "store/blocks/07").mkdir(exist_ok=True)
    (tmp_path / "store/blocks/07/7").write_bytes(b"of an agent that ended meanwhile")
    again = BlockStore(tmp_path / "store", LIMIT_BYTES)
    assert len([path for path in (tmp_path / "store/blocks").rglob("*") if path.is_file()]) == 1
    again.put([b"next"])
    assert again.read(manifest.digest_of(b"named")) == b"named"


# -- outputs --------------------------------------------------------------------------------------------------------------


def changed(there: Path, taken: snapshot.Snapshot, store: BlockStore, *globs: str, needs_all: bool = True) -> Manifest:
    base = os.open(there, os.O_RDONLY)
    try:
        return tree.changed(base, taken.manifest, globs, lambda block: store.put([block])[0], needs_all=needs_all)
    finally:
        os.close(base)


def test_new_and_changed_files_alone_come_back(home: Path, tmp_path: Path, store: BlockStore) -> None:
    (home / "same").write_text("same")
    (home / "a").write_text("a")
    (home / ".peerloadignore").write_text("*.tmp\n")
    taken = frozen(home, Agent(store))
    there = made(tmp_path / "there", taken, store)
    (there / "a").write_text("changed")
    (there / "out").mkdir()
    (there / "out/new").write_text("new")
    (there / "x.tmp").write_text("not wanted")
    assert [entry.path for entry in changed(there, taken, store).files] == ["a", "out/new"]
    assert [entry.path for entry in changed(there, taken, store, "out/*").files] == ["out/new"]
    assert [entry.path for entry in changed(there, taken, store, "out").files] == ["out/new"]
    for glob in ("missing", "missing/*", "a?"):
        with pytest.raises(StagingFailed, match=re.escape(glob)):
            changed(there, taken, store, "same", glob)
        assert changed(there, taken, store, glob, needs_all=False) == Manifest()
    (there / "empty").mkdir()
    assert changed(there, taken, store, "sam?", "empty") == Manifest(directories=(("empty", 0o755),))
    (there / "out/bad").symlink_to("/etc/passwd")
    with pytest.raises(StagingFailed, match="out/bad"):
        changed(there, taken, store)
    os.mkfifo(there / "out/.peerloadignore")
    os.mkfifo(there / "out/pipe")
    (there / "out/n\nl").touch()
    left = changed(there, taken, store, needs_all=False)
    assert ([entry.path for entry in left.files], left.links) == (["a", "out/new"], ())


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("out/*", "out/a", True),
        ("out/*", "out/a/b", True),
        ("out/*", "outer/a", False),
        ("*.csv", "a.csv", True),
        ("*.csv", "sub/a.csv", False),
        ("**/*.csv", "a.csv", True),
        ("**/*.csv", "x/y/a.csv", True),
        ("r[0-9].txt", "r1.txt", True),
        ("r[!0-9].txt", "r1.txt", False),
        ("r[!0-9]x", "r/x", False),
        ("r[9-0]", "r[9-0]", True),
        ("r[\\]", "r\\", True),
        ("r[^a]", "r^", True),
        ("r[!]", "r!", True),
        ("a.b", "aXb", False),
        ("out/", "out/x", True),
        ("*a*b", "xaab", True),
        ("*a*b/*c*", "ab/ab/xcx/d", False),
        ("*a/**/*b*c", "ba/x/ab/bbc/d", True),
        ("a**b/c", "axb/xb/c", True),
        ("*a" * 60 + "*b", "a" * 255, False),
        ("**/*a" * 30 + "**b", "a/" * 500, False),
    ],
)
def test_globs(glob: str, path: str, matches: bool) -> None:
    assert bool(tree.matcher([glob]).match(path)) is matches


@each(
    ("globs", "directory", "reach"),
    [
        (("result.csv",), "locked", False),
        (("out/*.png",), "out", True),
        (("out/*.png",), "out/deep", False),
        (("out",), "out/deep", True),
        (("*/x",), "any", True),
        (("**/x", "a"), "any/where", True),
        (("a/**",), "b", False),
    ],
)
def test_globs_reach_into_the_directories_that_they_may_mean_something_in(
    globs: tuple[str, ...], directory: str, reach: bool
) -> None:
    assert tree.matcher(globs).reach(directory) is reach


def kept_empty(store: BlockStore) -> bytes:
    """The id of the manifest of no files, which is in the store."""
    id_, own = manifest.encode(Manifest())
    store.put(own)
    assert store.missing_of(id_) == []
    return id_


def test_a_directory_that_cannot_be_read_costs_only_outputs_that_may_be_in_it(
    home: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "locked").mkdir()
    (home / "result.csv").write_text("1")
    before = kept_empty(store)
    open_beneath = tree.open_beneath

    def opened(directory: int, path: str, flags: int) -> int:
        if path == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open_beneath(directory, path, flags)

    monkeypatch.setattr(tree, "open_beneath", opened)

    def collected(*globs: str, needs_all: bool) -> list[str]:
        id_ = work.collect(os.fsencode(home), store, before, globs, needs_all)
        return [entry.path for entry in manifest.decode(id_, store.read).files]

    assert collected("result.csv", needs_all=True) == ["result.csv"]
    for globs in ((), ("result.csv", "**/x")):
        with pytest.raises(StagingFailed, match="locked"):
            collected(*globs, needs_all=True)
        assert collected(*globs, needs_all=False) == ["result.csv"]


def test_outputs_that_come_in_are_not_removed_although_they_were_here_before(tmp_path: Path, home: Path) -> None:
    store = BlockStore(tmp_path / "store", 10 * BLOCK_BYTES)
    before = kept_empty(store)
    (home / "a").write_bytes(os.urandom(2 * BLOCK_BYTES))
    first = work.collect(os.fsencode(home), store, before, (), True)
    assert store.missing_of(first) == []
    for is_everything in (False, True):
        (home / "b").write_bytes(os.urandom(9 * BLOCK_BYTES))
        with store.coming() as coming:

            def make_room(size_bytes: int, is_everything: bool = is_everything) -> None:
                store.collect(lambda: {before}, size_bytes, everything=is_everything)

            blocks = OutputBlocks(store, make_room, coming)
            outputs = work.collect(os.fsencode(home), blocks, before, (), True)
            make_room(9 * BLOCK_BYTES)
            assert store.missing_of(outputs) == []
        store.collect(lambda: {before}, everything=True)
        assert store.missing_of(outputs) == [outputs]


def test_a_collection_that_finds_no_room_leaves_no_file_open(tmp_path: Path, home: Path) -> None:
    store = BlockStore(tmp_path / "store", LIMIT_BYTES)
    before = kept_empty(store)
    (home / "out").mkdir()
    (home / "out/x").write_bytes(os.urandom(2 * BLOCK_BYTES))
    store._free_bytes_min = 1 << 60
    opened = set(Path("/proc/self/fd").iterdir())
    for _ in range(20):
        with pytest.raises(NoRoom):
            work.collect(os.fsencode(home), store, before, (), True)
    assert len(set(Path("/proc/self/fd").iterdir()) - opened) < 10


@pytest.mark.rule("F3")
@each(
    ("globs", "returns_changes", "path", "is_placed"),
    [
        (("result.csv",), False, "result.csv", True),
        (("result.csv",), False, ".bashrc", False),
        (("out",), False, "out/.ssh/x", True),
        (("out",), True, "other", False),
        ((), True, "src/x", True),
        ((), True, ".git", True),
        ((), True, "src/.git/hooks/x", False),
        ((), True, ".peerload-part-7", False),
        ((), False, "src/x", False),
    ],
)
def test_outputs_that_were_not_asked_for_are_not_placed(
    home: Path, store: BlockStore, globs: tuple[str, ...], returns_changes: bool, path: str, is_placed: bool
) -> None:
    before = kept_empty(store)
    there = home / path
    there.unlink(missing_ok=True)
    outputs, own = manifest.encode(Manifest((FileEntry(path, 0o600, 4, 0, tuple(store.put([b"evil"]))),)))
    store.put(own)

    def place() -> list[str]:
        return work.place(os.fsencode(home), store, before, outputs, globs, returns_changes, {}, 0.0, "n1/7")[0]

    if is_placed:
        assert place() == []
        assert there.read_bytes() == b"evil"
        there.unlink()
    else:
        with pytest.raises(StagingFailed, match=re.escape(path)):
            place()
        assert not there.exists()


def output_merge(home: Path, before: Manifest, own: dict[str, bytes], since: float = 100.0) -> OutputMerge:
    return OutputMerge(os.fsencode(home), before, own, since=since, mark="n1/7")


def test_outputs_replace_what_is_as_it_was_and_stand_beside_what_was_changed(home: Path, store: BlockStore) -> None:
    for name in ("same", "edited", "old", "fresh"):
        (home / name).write_text(name)
    os.utime(home / "old", (50, 50))
    before = frozen(home, Agent(store), "same", "edited").manifest
    (home / "edited").write_text("by the user")
    entries = [
        FileEntry(name, 0o600, 6, 0, tuple(store.put([b"output"])))
        for name in ("edited", "fresh", "old", "same", "sub/n")
    ]
    own: dict[str, bytes] = {}
    merge = output_merge(home, before, own)
    merge.place(Manifest(tuple(entries)), store.read_some)
    assert merge.conflicts == ["edited", "fresh"]
    texts = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}
    assert texts == {
        "edited": "by the user",
        "edited.peerload-7": "output",
        "fresh": "fresh",
        "fresh.peerload-7": "output",
        "old": "output",
        "same": "output",
        "sub/n": "output",
    }
    for _ in range(2):
        merge.place(Manifest(directories=(("sub", 0o755), ("sub/empty", 0o755))), store.read_some)
    assert list((home / "sub/empty").iterdir()) == []
    again = output_merge(home, before, own)
    later = entries[-1]._replace(blocks=tuple(store.put([b"second"])))
    again.place(Manifest((later,)), store.read_some)  # another attempt of the same task
    assert (again.conflicts, (home / "sub/n").read_text()) == ([], "second")


def test_an_output_that_cannot_be_placed_keeps_no_other_from_its_place(home: Path, store: BlockStore) -> None:
    (home / "a").write_text("no directory")
    blocks = tuple(store.put([b"output"]))
    outputs = Manifest(
        tuple(FileEntry(path, 0o600, 6, 0, blocks) for path in ("a/x", "b")),
        (("a/l", "x"), ("l", "b")),
        (("a/e", 0o755), ("e", 0o755)),
    )
    with pytest.raises(StagingFailed, match="a/e"):
        output_merge(home, Manifest(), {}).place(outputs, store.read_some)
    assert {path.name for path in home.iterdir()} == {"a", "b", "l", "e"}
    assert (home / "b").read_bytes() == b"output"


def test_permissions_that_a_task_has_changed_come_home(home: Path, store: BlockStore) -> None:
    for name in ("script", "touched", "fresh"):
        (home / name).write_text("output")
        (home / name).chmod(0o644)
    before = frozen(home, Agent(store), "script", "touched").manifest
    os.utime(home / "touched", (150, 150))
    blocks = tuple(store.put([b"output"]))
    merge = output_merge(home, before, {})
    merge.place(
        Manifest(tuple(FileEntry(name, 0o755, 6, 0, blocks) for name in ("fresh", "script", "touched"))),
        store.read_some,
    )
    modes = {path.name: path.stat().st_mode & 0o777 for path in home.iterdir()}
    assert modes == {"script": 0o755, "touched": 0o755, "fresh": 0o644}


def test_permissions_of_directories_travel_both_ways(home: Path, tmp_path: Path, store: BlockStore) -> None:
    def modes(top: Path) -> dict[str, int]:
        return {str(path.relative_to(top)): path.stat().st_mode & 0o777 for path in top.rglob("*") if path.is_dir()}

    for name in ("secret/inner", "open", "mine/new"):
        (home / name).mkdir(parents=True)
        (home / name / "file").touch()
    (home / "secret").chmod(0o700)
    (home / "secret/inner").chmod(0o500)
    taken = frozen(home, Agent(store))
    there = made(tmp_path / "there", taken, store)
    assert modes(there) == {**modes(home), "secret/inner": 0o700}
    assert changed(there, taken, store) == Manifest()
    for name, mode in (("out/deep", 0o750), ("out", 0o700), ("secret/own", 0o775)):
        (there / name).mkdir(parents=True, exist_ok=True)
        (there / name / "result").touch()
        (there / name).chmod(mode)
    (there / "open").chmod(0o711)  # at home it stays as it is
    output_merge(home, taken.manifest, {}).place(changed(there, taken, store), store.read_some)
    assert modes(home) == {**modes(there), "secret/inner": 0o500, "open": 0o755}


def test_a_link_that_is_as_it_was_is_replaced(home: Path, store: BlockStore) -> None:
    for name in ("latest", "edited"):
        (home / name).symlink_to("run1")
    before = frozen(home, Agent(store)).manifest
    (home / "edited").unlink()
    (home / "edited").symlink_to("run0")
    own: dict[str, bytes] = {}
    for run in ("run2", "run3"):  # two attempts of one task
        merge = output_merge(home, before, own)
        merge.place(Manifest(links=(("edited", run), ("latest", run))), store.read_some)
        assert merge.conflicts == ["edited"]
        links = {path.name: str(path.readlink()) for path in home.iterdir()}
        assert links == {"latest": run, "edited": "run0", "edited.peerload-7": run}


def test_holes_of_a_sparse_file_at_home_are_not_read_to_compare_it(
    home: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (home / "sparse").open("wb") as file:
        file.truncate(1000 * BLOCK_BYTES)
        file.write(b"begin")
    before = frozen(home, Agent(store), "sparse").manifest
    os.utime(home / "sparse", (150, 150))  # touched, not changed
    read: list[int] = []

    def counted(data: bytes) -> bytes:
        read.append(len(data))
        return manifest.digest_of(data)

    monkeypatch.setattr(work, "digest_of", counted)
    output = before.files[0]._replace(blocks=(manifest.ZEROS,) * 1000)
    merge = output_merge(home, before, {})
    merge.place(Manifest((output,)), store.read_some)
    with (home / "sparse").open("rb") as placed:
        assert (merge.conflicts, placed.read(5)) == ([], bytes(5))
    assert len(read) < 10


@pytest.mark.parametrize("name", ["x" * 255, "ö" * 127])
def test_an_output_with_a_long_name_is_kept_beside_another(home: Path, store: BlockStore, name: str) -> None:
    (home / name).write_text("by the user")
    merge = output_merge(home, Manifest(), {})
    merge.place(Manifest((FileEntry(name, 0o600, 6, 0, tuple(store.put([b"output"]))),)), store.read_some)
    (beside,) = home.glob("*.peerload-7")
    assert (merge.conflicts, beside.read_bytes(), name.startswith(beside.stem)) == ([name], b"output", True)


def test_of_two_tasks_with_one_output_the_second_keeps_its_own_beside(home: Path, store: BlockStore) -> None:
    for number in (7, 8):
        entry = FileEntry("out/a", 0o600, 1, 0, tuple(store.put([str(number).encode()])))
        merge = OutputMerge(os.fsencode(home), Manifest(), {}, since=100.0, mark=f"n1/{number}")
        merge.place(Manifest((entry,)), store.read_some)
        assert merge.conflicts == ([] if number == 7 else ["out/a"])
    assert {path.name: path.read_text() for path in (home / "out").iterdir()} == {"a": "7", "a.peerload-8": "8"}


def test_outputs_go_nowhere_but_beneath_their_home(home: Path, tmp_path: Path, store: BlockStore) -> None:
    (tmp_path / "outside").mkdir()
    (home / "out").symlink_to(tmp_path / "outside")
    entry = FileEntry("out/a", 0o600, 6, 0, tuple(store.put([b"output"])))
    with pytest.raises(StagingFailed, match="out/a"):
        output_merge(home, Manifest(), {}).place(Manifest((entry,)), store.read_some)
    (home / "b").symlink_to(tmp_path / "outside/b")
    merge = output_merge(home, Manifest(), {})
    merge.place(Manifest((entry._replace(path="b"),)), store.read_some)
    assert merge.conflicts == ["b"]
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_file_gets_its_name_when_it_is_complete(home: Path, store: BlockStore) -> None:
    entry = FileEntry("a", 0o600, BLOCK_BYTES + 6, 0, (*store.put([os.urandom(BLOCK_BYTES)]), bytes(32)))
    with pytest.raises(StagingFailed):
        output_merge(home, Manifest(), {}).place(Manifest((entry,)), store.read_some)
    assert list(home.iterdir()) == []


def test_an_index_that_cannot_be_opened_now_is_not_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0))
    with contextlib.closing(BlockStore(tmp_path / "store", 1 << 20)) as store:
        digests = store.put([b"of a queued task"])
    path = tmp_path / "store/index.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"index\.db"):
            BlockStore(tmp_path / "store", 1 << 20)
    with contextlib.closing(BlockStore(tmp_path / "store", 1 << 20)) as store:
        assert store.missing(digests) == []
