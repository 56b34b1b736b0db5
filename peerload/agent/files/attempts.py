"""Files of attempts: put in place before the start, collected after the end, and brought home.

STATE/files/attempts/<key> notes the files of an attempt on this node, since the agent may restart between any two steps.
An attempt whose note does not mark its working directory as complete never started. Where the agent serves all users
of a machine, a process of the launcher does all work with files as the user, and exchanges blocks with the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgpack
import msgspec
from msgspec import Meta

from peerload.agent.accounts import BUSY, POLICY, TaskUser, mount_point
from peerload.agent.files.transfer import FileCache, FileCaches
from peerload.agent.launcher.client import LauncherError
from peerload.agent.runtime import SHORT_OF, in_own_thread
from peerload.agent.store.disk_space import NO_ROOM
from peerload.files import work
from peerload.files.as_user import FRAME_BYTES_MAX, HEADER_BYTES, READ_BLOCKS_MAX
from peerload.files.manifest import decode_root
from peerload.files.store import Damaged, NoRoom
from peerload.files.tree import PART_PREFIX
from peerload.launcher.protocol import FileCheck, FilesJob
from peerload.model.bounded import BoundedDict
from peerload.model.errors import BadRequest, PeerloadError, SlowDown, StagingFailed
from peerload.model.events import FilesStaged, OutputArrived, OutputComing
from peerload.model.messages import BlocksEnd, Staging
from peerload.model.task import SCRATCH, Digest, Exit, Staged, TaskFiles, owner_key, without_files
from peerload.model.text import printable
from peerload.security.private_files import sync
from peerload.text.format import counted, size_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
    from pathlib import Path

    from peerload.agent.files.transfer import Fetch, FileCacheSettings, OutputBlocks
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.runtime import Inbox
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.core.work import HomeTask
    from peerload.files.manifest import Root
    from peerload.files.store import BlockStore
    from peerload.model.actions import FetchOutput, KeepOutput, SpawnTask, StageFiles
    from peerload.model.messages import Blocks, BlocksRequest
    from peerload.model.task import SubmitOptions, TaskSpec


SILENCE_S_MAX = 600.0
"""Silence after which a process is abandoned: its user may have stopped it, or its file system hangs."""
START_S_MAX, REASON_S_MAX = 60.0, 10.0
"""Time limits for the start of a process, and for the launcher's report of why one has ended."""
WORK_S_MAX = 86_400.0
TRIES_MAX, RETRY_S = 10, 3.0
"""Number and interval of further tries for a process that was lost: the launcher may be restarting. If there is no capacity
for one now, tries continue until there is."""
READ_BYTES_MAX = 4 << 20
WORDS_MAX = 2000
MESSAGE_BYTES_MAX = 8 << 20


class ReadBlocks(msgspec.Struct, frozen=True, array_like=True, tag="read", forbid_unknown_fields=True):
    """Request for the first of these blocks, up to this many bytes → a list of them, or nil."""

    digests: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=READ_BLOCKS_MAX)]
    bytes_max: Annotated[int, Meta(ge=0, le=1 << 62)]


class PutBlocks(msgspec.Struct, frozen=True, array_like=True, tag="put", forbid_unknown_fields=True):
    """Request to store these blocks → true, or nil."""

    blocks: tuple[Annotated[bytes, Meta(max_length=1 << 20)], ...]


class WorkDone(msgspec.Struct, frozen=True, array_like=True, tag="done", forbid_unknown_fields=True):
    """Report that the work is done."""

    result: msgspec.Raw


RESULTS: dict[str, Any] = {
    "make": None,
    "collect": bytes,
    "place": tuple[list[str], dict[str, Digest]],
    "prepare": None,
    "measure": tuple[Annotated[int, Meta(ge=0)], bytes],
}
"""Kinds of the results of `work.WORK`."""


class WorkFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed", forbid_unknown_fields=True):
    """Report that the work failed: a block is missing, the operating system reported an error, or another reason."""

    errno: Annotated[int, Meta(ge=0, le=4096)]
    what: str
    why: str
    hint: str


INVALID = msgspec.MsgspecError, ValueError, RecursionError
"""Errors of decoding wrong bytes: ValueError for text that is not UTF-8, RecursionError for lists nested too deeply."""
_DECODER = msgspec.msgpack.Decoder(ReadBlocks | PutBlocks | WorkDone | WorkFailed)


def decode(raw: bytes) -> ReadBlocks | PutBlocks | WorkDone | WorkFailed:
    """A message of a process that works as a user. Raises StagingFailed."""
    try:
        found: ReadBlocks | PutBlocks | WorkDone | WorkFailed = _DECODER.decode(raw)
    except INVALID as error:
        raise StagingFailed("cannot work with the files of the task", why=str(error)) from None
    return found


class WorkLost(PeerloadError):
    """A process that works as a user could not be started, or was lost."""


class WorkBusy(WorkLost):
    """The maximum number of processes already work as this user."""


class UserWork:
    """Runner of work as users. directory: place of the sockets, which only the agent may enter."""

    def __init__(self, launcher: LauncherLink, directory: Path) -> None:
        self._launcher = launcher
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in directory.iterdir():
            path.unlink()

    async def run(
        self,
        cache: FileCache,
        task_user: TaskUser,
        key: str,
        directory: bytes,
        name: str,
        values: Sequence[object],
        *,
        makes: bool = False,
        outputs: OutputBlocks | None = None,
    ) -> Any:  # noqa: ANN401 -- as the work has it
        """Do a part of `files/work.py` in a directory as the user of a task → its result. Raises StagingFailed, WorkLost,
        OSError. makes: it fills the disk with copies of blocks; outputs: destination of the blocks that it sends, None: the
        cache within its limit."""
        tries_left = TRIES_MAX
        async with cache.turns:
            while True:
                try:
                    order = [name, *values]
                    result = await self._run(cache, task_user, key, directory, order, makes=makes, outputs=outputs)
                    return _converted(result, name)
                except WorkLost as error:
                    tries_left -= not isinstance(error, WorkBusy)
                    if not tries_left:
                        raise
                    await asyncio.sleep(RETRY_S)

    async def _run(
        self,
        cache: FileCache,
        task_user: TaskUser,
        key: str,
        directory: bytes,
        values: list[object],
        *,
        makes: bool,
        outputs: OutputBlocks | None,
    ) -> Any:  # noqa: ANN401 -- as above
        name = secrets.token_hex(8)
        path = self._directory / name
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.setblocking(False)
            above = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, above)
            listener.bind(f"/proc/self/fd/{above}/{name}")  # the path may be too long for a socket
            opened.callback(path.unlink, missing_ok=True)
            listener.listen(1)
            loop = asyncio.get_running_loop()
            job = FilesJob(str(path), key, directory, makes, *task_user)
            reply = asyncio.ensure_future(self._launcher.ask(job, WORK_S_MAX))
            opened.callback(reply.cancel)
            accepted = asyncio.ensure_future(loop.sock_accept(listener))
            opened.callback(accepted.cancel)
            await asyncio.wait({reply, accepted}, timeout=START_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            if accepted.done():
                reader, writer = await asyncio.open_unix_connection(sock=accepted.result()[0], limit=MESSAGE_BYTES_MAX)
                try:
                    return await self._serve(cache, reader, writer, values, makes=makes, outputs=outputs)
                except (ConnectionError, asyncio.IncompleteReadError):
                    pass  # the launcher reports the reason
                except TimeoutError:
                    why = f"its user's directory has not answered for {SILENCE_S_MAX:g} s"
                    raise StagingFailed("cannot reach the files of the task", why=why) from None
                finally:
                    writer.close()
            try:
                async with asyncio.timeout(REASON_S_MAX):
                    why = await asyncio.shield(reply)
            except (LauncherError, TimeoutError) as error:
                raise WorkLost("cannot start the process that stages files", why=str(error)) from None
            if why.startswith(BUSY):
                raise WorkBusy("cannot start the process that stages files now", why=why.removeprefix(BUSY))
            if not why or why.startswith("it was ended"):
                raise WorkLost("the process that stages files was lost", why=why)
            raise StagingFailed("cannot reach the files of the task as its user", why=why.removeprefix(POLICY))

    async def _serve(
        self,
        cache: FileCache,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outgoing: object,
        *,
        makes: bool,
        outputs: OutputBlocks | None,
    ) -> Any:  # noqa: ANN401 -- as above
        """Exchange blocks until the work is done → its result."""
        failure: Exception | None = None
        while True:
            raw = msgpack.packb(outgoing)
            writer.write(len(raw).to_bytes(HEADER_BYTES, "big") + raw)
            async with asyncio.timeout(SILENCE_S_MAX):
                await writer.drain()
                size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
                if size > FRAME_BYTES_MAX:
                    raise StagingFailed("cannot work with the files of the task", why=f"a message of {size} bytes")
                body = await reader.readexactly(size)
            message = decode(body)
            if isinstance(message, WorkDone):
                return message.result
            if isinstance(message, WorkFailed):
                raise failure if failure is not None and not message.what else _failure_of(message)
            try:
                if makes:
                    await cache.transfer.in_thread(cache.check_disk, READ_BYTES_MAX)
                outgoing = await self._answer(cache, message, outputs)
            except (PeerloadError, OSError) as error:
                failure, outgoing = error, None

    async def _answer(self, cache: FileCache, message: ReadBlocks | PutBlocks, outputs: OutputBlocks | None) -> object:
        """Send or store blocks. Raises StagingFailed, OSError."""
        if isinstance(message, ReadBlocks):
            most = min(message.bytes_max, READ_BYTES_MAX)
            return await cache.transfer.in_thread(cache.store.read_some, message.digests, most)
        if outputs is None:
            await cache.keep(message.blocks)
        else:
            await cache.transfer.in_thread(outputs.put, message.blocks)
            cache.transfer.trim_later()
        return True


def _converted(result: msgspec.Raw, name: str) -> object:
    """The result of a part of `files/work.py`. Raises StagingFailed if its type is wrong: the user controls the process."""
    try:
        return msgspec.msgpack.decode(result, type=RESULTS[name])
    except INVALID as error:
        raise StagingFailed("cannot work with the files of the task", why=str(error)) from None


def _failure_of(message: WorkFailed) -> Exception:
    what, why, hint = (printable(text[:WORDS_MAX]) for text in (message.what, message.why, message.hint))
    return OSError(message.errno, what) if message.errno else StagingFailed(what, why=why, hint=hint)


log = logging.getLogger("peerload.files")

TELL_EVERY_S = 1.0
"""Interval, in s, of the progress messages to a home while files are transferred. The home waits five times as long for the
next one."""
STAGING_S_MAX = 86_400.0
"""Time limit for the staging of one attempt."""
REPAIRS_MAX = 3
"""Number of times that damaged files in the cache are fetched again for one attempt: first block, manifest, files."""
PLACED_WITHIN_S = 60.0
"""Time after which outputs that are not in place yet are reported: the directory may be on a dead mount."""
CONFLICTS_LOGGED_MAX = 1000
PLACED_MAX = 1000
"""Maximum number of remembered outputs of a task in system mode; for a task with more, none is remembered."""
CONFLICTS_NAMED_MAX = 5
"""Maximum number of outputs kept beside changed files that an event names."""
TASKS_REMEMBERED_MAX = 1024
"""Maximum number of unfinished tasks whose placed outputs are remembered, in case another attempt places them again."""


class AttemptNote(msgspec.Struct):
    """The note about an attempt. user: the owner of the task. is_ready: its working directory is complete; run: the launcher run
    that has it, where that serves all users. directory, submitted_at: destination of its outputs at home, and time of submission;
    b"" and 0 for a task of another home. result: collected outputs of an ended attempt; unplaced: reason why an output is
    missing; returned: description of the placed outputs, for its event."""

    task: str
    files: TaskFiles
    user: TaskUser
    run: str = ""
    directory: bytes = b""
    submitted_at: float = 0.0
    is_ready: bool = False
    in_bytes: int = 0
    in_s: float = 0.0
    result: Staged | None = None
    unplaced: str = ""
    returned: str = ""


class AttemptFiles:
    """The files of one agent's attempts, by execution key."""

    def __init__(
        self,
        settings: FileCacheSettings,
        spool: Spool,
        launcher: LauncherLink,
        links: PeerLinks,
        inbox: Inbox,
        node: Node,
        event_log: EventLog,
    ) -> None:
        self._own_name, directory = node.state.node, settings.directory
        self._is_system = settings.has_users
        self.caches = FileCaches(settings, links, self._in_use)
        self.caches.keeps_all = True  # until the tasks of this home are known
        self._launcher = launcher
        self._user_work = UserWork(launcher, directory / "work") if self._is_system else None
        self._spool = spool
        self._links = links
        self._inbox = inbox
        self._node = node
        self._event_log = event_log
        self._directory = directory / "attempts"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._notes: dict[str, AttemptNote] = {}
        self._staging: dict[str, asyncio.Task[None]] = {}
        self._removing: asyncio.Task[None] | None = None
        self._is_more_dropped = False
        self._being_queued: list[list[bytes]] = []
        """Manifests of submissions that are on their way to the core."""
        self._put_to_core: list[tuple[int, list[bytes]]] = []
        """Manifests of submissions, each with the count of consumed events from which the core knows it."""
        self._placing: list[bytes] = []
        """Manifests of outputs that are being placed."""
        self._placed: BoundedDict[bytes, dict[str, bytes]] = BoundedDict(TASKS_REMEMBERED_MAX)
        for path in self._directory.iterdir():
            try:
                self._notes[path.name] = msgspec.msgpack.decode(path.read_bytes(), type=AttemptNote)
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("cannot read a note about files: path=%s error=%s", path, error)
                path.unlink(missing_ok=True)

    # -- submissions ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self, spec: TaskSpec) -> Iterator[None]:
        """Keep the files of a submission until the core knows its task, or has refused it."""
        manifests = [part.manifest for part in (spec.files, spec.lock) if part is not None]
        self._being_queued.append(manifests)
        self.caches.pin_also(*manifests)
        try:
            yield
        finally:
            self._being_queued.remove(manifests)
            self._still_unknown().append((self._inbox.put_count, manifests))

    async def check(self, spec: TaskSpec, terms: SubmitOptions) -> None:
        """Check that all files of a submission with files are here and on disk. Raises BadRequest."""
        if spec.files is not None and (not terms.files_home.startswith(b"/") or spec.directory != SCRATCH):
            why = "files_home is an absolute path, and directory is -"
            raise BadRequest(
                "a task with staged files needs a fresh working directory and a directory for its outputs", why=why
            )
        if spec.lock is not None and spec.placement.builder != spec.lock.kind:
            raise BadRequest("a task with an environment needs a node that builds it", why="builder of its placement")
        cache = self.caches.of(owner_key(terms.owner, spec.user))
        parts = [part for part in (spec.files, spec.lock) if part is not None]
        for part in parts:
            if not await cache.transfer.in_thread(cache.is_complete, part.manifest):
                raise BadRequest("the files of the task are not kept here (any more)", hint="submit it again")
        await cache.transfer.in_slow_thread(cache.store.sync)
        if self._is_system and spec.files is not None and (spec.files.outputs or spec.files.returns_changes):
            pattern = terms.files_home.replace(b"%", b"%%") + b"/" + PART_PREFIX.encode()
            why = await self._launcher.ask(FileCheck([pattern], self._own_name, spec.user, terms.owner))
            if why.startswith(BUSY):
                raise SlowDown("cannot check the working directory now", why=why.removeprefix(BUSY))
            if why:
                shown = terms.files_home.decode("utf-8", "backslashreplace")
                raise BadRequest(f"outputs cannot be written to {shown}", why=why.removeprefix(POLICY))

    async def bring_manifest(self, manifest: bytes, action: StageFiles | SpawnTask) -> None:
        """Fetch a manifest of an attempt and its blocks from its home, unless they are here. Raises PeerloadError, OSError."""
        cache = self._cache(self.user_of(action))
        if not await cache.transfer.in_thread(cache.is_complete, manifest):
            fetch = cache.transfer.fetch(manifest, [action.home], _uid_in(action.key)).work
            assert fetch is not None
            await asyncio.shield(fetch)

    def user_of(self, action: StageFiles | SpawnTask) -> TaskUser:
        own = self._node.home.by_id.get(action.task) if action.home == self._own_name else None
        return TaskUser(action.home, action.spec.user, -1 if own is None else own.terms.owner)

    def owner_of(self, user: TaskUser) -> str:
        """The owner key of a task's user on this node."""
        return f"{user.home}:{user.user}" if user.home != self._own_name else owner_key(user.uid, user.user)

    def _cache(self, user: TaskUser) -> FileCache:
        """The cache of a task's user. Raises NoRoom."""
        return self.caches.of(self.owner_of(user))

    async def serve(self, node: str, request: BlocksRequest) -> AsyncIterator[Blocks | BlocksEnd]:
        """The blocks that a member requests: in system mode, those of the user of a task that both nodes share, or those of a
        manifest by its id, which the home of a task sends to the nodes that it offers the task to."""
        cache = self.caches.of("") if not self._is_system else self._cache_for(node, request.task)
        if cache is None and request.manifest:
            look = functools.partial(self.caches.with_blocks, request.manifest, request.digests)
            cache = await self.caches.in_slow_thread(look)
        if cache is None:
            yield BlocksEnd("they belong to no task that both nodes share")
            return
        async for piece in cache.transfer.serve(node, request):
            yield piece

    def _cache_for(self, node: str, uid: bytes) -> FileCache | None:
        task = self._node.home.tasks.get(uid)
        if task is not None and node in (task.offered_to, task.record.node):
            return self._cache(self._submitter(task))
        prefix = uid.hex() + "-"
        users = [note.user for key, note in self._notes.items() if key.startswith(prefix) and note.user.home == node]
        return self._cache(users[0]) if uid and users else None

    def _submitter(self, task: HomeTask) -> TaskUser:
        return TaskUser(self._own_name, task.spec.user, task.terms.owner)

    # -- room ----------------------------------------------------------------------------------------------------------

    def _in_use(self) -> set[bytes]:
        """The manifests that tasks and attempts need."""
        home = self._node.home
        works = itertools.chain(home.tasks.values(), *home.untouched.values())
        specs = [work.spec for work in works if work.spec.is_staged]
        mine = {part.manifest for spec in specs for part in (spec.files, spec.lock) if part is not None}
        for note in self._notes.values():
            mine.update(_manifests_of(note))
        return mine.union(self._placing, *self._being_queued, *(manifests for _, manifests in self._still_unknown()))

    def _still_unknown(self) -> list[tuple[int, list[bytes]]]:
        taken = self._inbox.taken_count
        self._put_to_core = [one for one in self._put_to_core if one[0] > taken]
        return self._put_to_core

    async def collect_garbage(self, caches: Sequence[FileCache]) -> int:
        """Remove everything from these caches that no task needs → the number of bytes."""
        self.caches.pin()
        return sum(
            [
                await cache.transfer.in_slow_thread(cache.store.collect, self.caches.in_use, everything=True)
                for cache in caches
            ]
        )

    async def usage(self, caches: Sequence[FileCache]) -> dict[str, object]:
        self.caches.pin()
        found = [await cache.transfer.in_thread(cache.store.usage) for cache in caches]
        in_use = self.caches.in_use()
        return {
            "size_bytes": sum(one.size_bytes for one in found),
            "limit_bytes": found[0].limit_bytes if len(found) == 1 else self.caches.limit_bytes,
            "blocks": sum(one.blocks for one in found),
            "snapshots": [
                {"id": id_.hex(), "bytes": size, "files": count, "used_at": used_at, "in_use": id_ in in_use}
                for one in found
                for id_, size, count, used_at in one.manifests
            ],
        }

    # -- before the start ----------------------------------------------------------------------------------------------

    def is_ready(self, key: str) -> bool:
        """True if the working directory of an attempt is complete."""
        note = self._notes.get(key)
        return note is not None and note.is_ready and note.run == self._run

    @property
    def _run(self) -> str:
        """The run of the launcher that has the working directories; "" where the agent has them."""
        return self._launcher.run if self._is_system else ""

    def task_of(self, key: str) -> str:
        """The task of an attempt that has files; "" if it is no longer known."""
        note = self._notes.get(key)
        return note.task if note is not None else ""

    def has(self, key: str) -> bool:
        """True if an attempt has files, so that its outputs have to be collected."""
        return key in self._notes

    def offered(self, action: StageFiles) -> None:
        """Fetch the files of an offered attempt, then notify the core."""
        self._begin(action.key, self._stage_offered(action))

    async def _stage_offered(self, action: StageFiles) -> None:
        code = why = ""
        try:
            if action.spec.files is not None:
                note = AttemptNote(action.task, action.spec.files, self.user_of(action))
                await self._stage(action.key, note, (*action.sources, action.home), action.attempt)
        except NoRoom as error:
            code, why = "cache", str(error)
        except StagingFailed as error:
            code, why = "staging", str(error)
        except (PeerloadError, OSError, TimeoutError) as error:
            code = "disk" if isinstance(error, OSError) and not isinstance(error, ConnectionError) else "busy"
            why = str(error) or "its files did not come in time"
        except Exception as error:  # the home waits for an answer
            log.exception("staging failed by a bug: task=%s", action.task)
            code, why = "busy", f"a bug in peerload on this node: {error!r}"  # another node may succeed
        if code:
            log.info("files not staged: task=%s code=%s error=%s", action.task, code, why)
        self._inbox.put(FilesStaged(action.key, code, why))

    async def stage_own(self, action: SpawnTask) -> None:
        """Put the files of a task of this home in place. Raises PeerloadError, OSError; CancelledError if the attempt is ended."""
        task = self._node.home.by_id.get(action.task)
        assert action.spec.files is not None
        note = AttemptNote(action.task, action.spec.files, self.user_of(action))
        if task is not None:
            note.directory, note.submitted_at = task.terms.files_home, task.record.submitted_at
        await self._begin(action.key, self._stage(action.key, note, (), 0))

    def _begin(self, key: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._staging[key] = task
        task.add_done_callback(lambda _: self._staging.pop(key, None))
        return task

    async def _stage(self, key: str, note: AttemptNote, sources: Sequence[str], attempt: int) -> None:
        """Fetch and place the files of an attempt. sources: nodes to fetch from, the home of the attempt last; empty if this node
        is the home."""
        cache = self._cache(note.user)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(STAGING_S_MAX):
                self._note(key, note)
                repairs_left = REPAIRS_MAX if sources else 0
                while True:
                    try:
                        making = await self._fetch(key, cache, note, sources, attempt)
                        await self._make(key, cache, note, sources, attempt, making)
                        break
                    except Damaged:  # the cache here is damaged, other nodes have the block
                        if not repairs_left:
                            raise
                        repairs_left -= 1
                        await cache.transfer.in_slow_thread(cache.store.drop_damaged, note.files.manifest)
                note.in_s = time.monotonic() - began_s
                note.is_ready, note.run = True, self._run
                self._note(key, note)
                # After a power cut an exit record without its note would be a success without outputs.
                for path in (self._directory / key, self._directory):
                    await cache.transfer.in_thread(sync, path)
        except BaseException:
            self.forget(key)
            raise
        summary = (
            f"{size_text(note.in_bytes)} fetched, {size_text(note.files.size_bytes)} in place after {note.in_s:.1f} s"
        )
        self._event_log.record("files", "staged", task=note.task, reason=summary)

    async def _fetch(
        self, key: str, cache: FileCache, note: AttemptNote, sources: Sequence[str], attempt: int
    ) -> asyncio.Future[None] | None:
        """Fetch the files of an attempt → the creation of the working directory, if that has begun meanwhile: a thread for each
        active fetch writes each file as soon as its blocks are here."""
        if not sources or await cache.transfer.in_thread(cache.is_complete, note.files.manifest):
            return None
        uid = _uid_in(key)
        self.caches.pin()
        fetch = cache.transfer.fetch(note.files.manifest, sources, uid)
        is_first, fetch.is_counted = not fetch.is_counted, True
        assert fetch.work is not None
        making: asyncio.Future[None] | None = None
        step = fetch.begun if is_first and self._user_work is None else fetch.work
        try:
            while not fetch.work.done() and not (step is making and step.done()):
                self._report_staging(uid, note, sources, attempt, fetch.done_bytes)
                await asyncio.wait({fetch.work, step}, timeout=TELL_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if step is fetch.begun and step.done() and not step.cancelled():
                    blocks = _WhileWanted(cache, lambda: self._notes.get(key) is note, fetch)
                    directory = os.fsencode(self._spool.make_scratch(key))
                    make = functools.partial(work.make_anew, directory, blocks, fetch.decoded[0], note.files.outputs)
                    step = making = in_own_thread(make)
                    making.add_done_callback(lambda _: fetch.read_over())
            if fetch.work.done():
                fetch.work.result()
        except BaseException:
            if making is not None:
                making.cancel()
            raise
        finally:
            fetch.tasks.remove(uid)
        note.in_bytes += fetch.done_bytes if is_first else 0
        return making

    def _report_staging(
        self, uid: bytes, note: AttemptNote, sources: Sequence[str], attempt: int, done_bytes: int
    ) -> None:
        """Report the progress of staging to the home of an offered attempt."""
        if sources:
            self._links.send(sources[-1], Staging(note.task, uid, attempt, done_bytes, note.files.size_bytes))

    async def _make(
        self,
        key: str,
        cache: FileCache,
        note: AttemptNote,
        sources: Sequence[str],
        attempt: int,
        making: asyncio.Future[None] | None,
    ) -> None:
        """Make the working directory of an attempt. making: its creation, if that has already begun."""
        uid, blocks = _uid_in(key), _WhileWanted(cache, lambda: self._notes.get(key) is note)
        making = making or asyncio.create_task(
            self.do("make", note.user, key, SCRATCH, note.files.manifest, note.files.outputs, blocks=blocks)
        )
        try:
            while not (await asyncio.wait({making}, timeout=TELL_EVERY_S))[0]:
                self._report_staging(uid, note, sources, attempt, note.files.size_bytes)
        finally:
            making.cancel()
        making.result()

    async def do(
        self,
        name: str,
        user: TaskUser,
        key: str,
        directory: bytes,
        *values: object,
        blocks: work.BlockAccess | None = None,
        outputs: OutputBlocks | None = None,
    ) -> Any:  # noqa: ANN401 -- as the work has it
        """Do a part of `files/work.py` in a directory, or in the scratch directory of an attempt. outputs: destination of the
        blocks that it sends. Raises StagingFailed, WorkLost, OSError."""
        cache, is_new = self._cache(user), name in {"make", "prepare"}
        if self._user_work is not None:
            return await self._user_work.run(cache, user, key, directory, name, values, makes=is_new, outputs=outputs)
        if directory == SCRATCH:
            directory = os.fsencode(self._spool.make_scratch(key))
        part = functools.partial(work.WORK[name], directory, outputs or blocks or cache.store, *values)
        if name == "place":  # it may hang in a dead mount
            return await in_own_thread(part)
        return await cache.transfer.in_slow_thread(part)

    def ended_early(self, key: str) -> bool:
        """Stop the staging of an attempt. → False if it is not being staged."""
        work = self._staging.get(key)
        if work is None:
            return False
        work.cancel()
        return True

    # -- after the end -------------------------------------------------------------------------------------------------

    async def settled(self, key: str, exit_: Exit) -> Exit:
        """Collect the outputs of an ended attempt, and place them if this is its home → its exit, a failure if an output is missing.
        For an attempt that is retried nothing is placed: it would be in the way of the next one. Raises NoRoom while a disk here has
        no room, OSError if this agent is short of descriptors or memory; then it can be called again."""
        note = self._notes.get(key)
        if note is None or self._is_retried(key, note, exit_):
            return exit_
        began_s = time.monotonic()
        if note.result is None:
            note.result, note.unplaced = await self._collected(key, note, is_success=exit_.exit_code == 0)
            try:
                self._note(key, note)
            except OSError as error:  # the next agent collects them again
                log.warning("cannot note the outputs of a task: task=%s error=%s", note.task, error)
        staged, unplaced, returned = note.result, note.unplaced, ""
        is_last = not unplaced or not self._is_retried(key, note, without_files(exit_, unplaced))
        if staged.outputs and note.directory and is_last:
            uid = _uid_in(key)
            try:
                why, conflicts, returned = await self._place(
                    uid, note.task, note.user, note.files, note.directory, note.submitted_at, staged.outputs, began_s
                )
            except NoRoom:
                raise
            except (WorkLost, OSError) as error:
                _raise_if_it_may_pass(error)
                why, conflicts = _words(error), 0
            unplaced = unplaced or why
            staged = msgspec.structs.replace(staged, conflicts=conflicts)
        if returned:
            self._event_log.record("files", "returned", task=note.task, reason=returned)
        exit_ = msgspec.structs.replace(exit_, staged=staged)
        return without_files(exit_, unplaced) if unplaced else exit_

    def _is_retried(self, key: str, note: AttemptNote, exit_: Exit) -> bool:
        """True if an attempt of this home has failed and the task will run again."""
        task = self._node.home.by_id.get(note.task) if note.user.home == self._own_name else None
        return task is not None and task.key == key and self._node.handoff.retries.repeats(task, exit_)

    async def _collected(self, key: str, note: AttemptNote, *, is_success: bool) -> tuple[Staged, str]:
        staged, unplaced = Staged(note.in_bytes, note.in_s), ""
        if not note.files.outputs and not note.files.returns_changes:
            return staged, ""
        collect = functools.partial(
            self.do, "collect", note.user, key, SCRATCH, note.files.manifest, note.files.outputs
        )
        try:
            cache = self._cache(note.user)
            with cache.for_outputs() as outputs:
                try:
                    id_ = await collect(is_success, outputs=outputs)
                except NoRoom:
                    raise
                except StagingFailed as error:
                    if not is_success:
                        raise
                    unplaced = f"its outputs cannot be collected: {error}"
                    id_ = await collect(False, outputs=outputs)  # the existing outputs are still brought home
                if not id_:
                    return staged, unplaced
                root = await cache.transfer.in_slow_thread(_kept, cache.store, id_)
                self.caches.pin_also(id_)
        except NoRoom:
            raise
        except (PeerloadError, OSError) as error:
            _raise_if_it_may_pass(error)
            return staged, (unplaced or f"its outputs cannot be collected: {_words(error)}") if is_success else ""
        except Exception as error:  # otherwise this agent would end, and each one that is started after it
            log.exception("outputs not collected, by a bug: task=%s", note.task)
            return staged, f"its outputs cannot be collected: a bug in peerload: {error!r}" if is_success else ""
        return msgspec.structs.replace(staged, outputs=id_, out_bytes=root.size_bytes, out_count=root.files), unplaced

    async def bring_home(self, node: str, action: KeepOutput | FetchOutput) -> tuple[str, OutputArrived]:
        """Fetch the outputs of an attempt from its node, and place them → an error that may pass, or ""; and the event that
        reports this."""
        event, began_s, event_says = OutputArrived(action.uid, action.attempt), time.monotonic(), ""
        task, kept = self._node.home.tasks.get(action.uid), contextlib.ExitStack()
        if task is None or task.spec.files is None:
            return "", event
        try:
            user = self._submitter(task)
            cache = self._cache(user)
            kept.callback(self._placing.remove, action.files)
            self._placing.append(action.files)
            if not await cache.transfer.in_thread(cache.is_complete, action.files):
                self.caches.pin()
                fetch = cache.transfer.fetch(action.files, [node], action.uid, is_output=True)
                assert fetch.work is not None
                while not (await asyncio.wait({fetch.work}, timeout=TELL_EVERY_S))[0]:
                    if fetch.size_bytes and not event_says:
                        event_says = f"{size_text(fetch.size_bytes)} on the way from {node}"
                        self._event_log.record("files", "returning", task=action.task, reason=event_says)
                    self._inbox.put(OutputComing(action.uid, action.attempt, fetch.done_bytes))
                fetch.work.result()
            terms, at = task.terms, task.record.submitted_at
            unplaced, conflicts, returned = await self._place(
                action.uid, action.task, user, task.spec.files, terms.files_home, at, action.files, began_s
            )
            self._event_log.record("files", "returned", task=action.task, reason=returned or unplaced)
            kept.close()
            await self._give_back(cache)
        except (NoRoom, OSError) as error:
            return f"its output files cannot be kept: {_words(error)}", event
        except StagingFailed as error:
            return "", msgspec.structs.replace(event, unplaced=str(error))
        except PeerloadError as error:
            return str(error), event
        finally:
            kept.close()
        return "", msgspec.structs.replace(event, unplaced=unplaced, conflicts=conflicts)

    async def _place(
        self,
        uid: bytes,
        task: str,
        user: TaskUser,
        files: TaskFiles,
        directory: bytes,
        submitted_at: float,
        outputs: bytes,
        began_s: float,
    ) -> tuple[str, int, str]:
        """Place the outputs of an attempt → the reason why one could not be placed, the number of those kept beside changed
        files, and a summary as text."""
        for over in self._placed.keys() - self._node.home.tasks.keys():
            del self._placed[over]
        own = self._placed[uid] = self._placed.get(uid, {})
        cache, mark = self._cache(user), task
        shown = printable(directory.decode("utf-8", "backslashreplace"))
        reason = f"its output files are not all in {shown} after {PLACED_WITHIN_S:.0f} s: can it be reached?"
        tell = functools.partial(self._event_log.record, "files", "waiting", task=task, reason=reason)
        slow = asyncio.get_running_loop().call_later(PLACED_WITHIN_S, tell)
        self._placing.append(outputs)
        self.caches.pin_also(outputs)
        try:
            async with cache.placing[mount_point(directory)]:
                asked = files.outputs, files.returns_changes
                values = files.manifest, outputs, *asked, own, submitted_at, mark
                conflicts, placed = await self.do("place", user, f"place-{uid.hex()}", directory, *values)
            if not self._is_system or len(placed) <= PLACED_MAX:
                own.update(placed)
            root = decode_root(await cache.transfer.in_thread(cache.store.read, outputs))
        except (NoRoom, WorkLost):
            raise
        except StagingFailed as error:
            return str(error), 0, ""
        finally:
            slow.cancel()
            self._placing.remove(outputs)
        summary = f"{counted(root.files, 'file')} of {size_text(root.size_bytes)} in {time.monotonic() - began_s:.1f} s"
        conflicts = list(map(printable, conflicts))
        for path in conflicts[:CONFLICTS_LOGGED_MAX]:
            log.info("output kept beside a file that was changed: task=%s path=%s", task, path)
        if conflicts:
            more = len(conflicts) - CONFLICTS_NAMED_MAX
            named = ", ".join(conflicts[:CONFLICTS_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
            summary += f"; kept beside files that were changed meanwhile: {named}"
        return "", len(conflicts), summary

    # -- the end -------------------------------------------------------------------------------------------------------

    def forget(self, key: str) -> None:
        """Drop everything about this attempt, including its working directory."""
        if (work := self._staging.get(key)) is not None and work is not asyncio.current_task():
            work.cancel()
        if self._notes.pop(key, None) is not None:
            (self._directory / key).unlink(missing_ok=True)
            if self._is_system:
                self._launcher.forget(key)
        if self._spool.drop_scratch(key):
            self._remove_dropped()

    def _remove_dropped(self) -> None:
        """Remove the working directories that are no longer needed, in a thread, since they may contain many files."""
        self._is_more_dropped = True
        if self._removing is None or self._removing.done():
            self._removing = asyncio.get_running_loop().create_task(self._remove())

    async def _remove(self) -> None:
        while self._is_more_dropped:
            self._is_more_dropped = False
            await self.caches.in_slow_thread(self._spool.remove_dropped)
            for cache in self.caches.all():
                await self._give_back(cache)

    async def _give_back(self, cache: FileCache) -> None:
        """Reduce a cache to its limit, which outputs may have exceeded, as far as tasks do not need its blocks."""
        if not self.caches.keeps_all and cache.store.size_bytes > cache.store.limit_bytes:
            self.caches.pin()
            await cache.transfer.in_slow_thread(cache.store.collect, self.caches.in_use)

    def keep_only_known(self) -> None:
        """Remove the files that earlier agents left for attempts unknown to this node; from now on its tasks are known."""
        self.caches.keeps_all = False
        for key in [key for key in self._notes if not self._node.knows(key)]:
            self.forget(key)
        self._remove_dropped()

    def _note(self, key: str, note: AttemptNote) -> None:
        """Store a note. Raises OSError."""
        self._notes[key] = note
        self.caches.pin_also(*_manifests_of(note))
        path = self._directory / key
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.msgpack.encode(note))
        part.replace(path)

    async def close(self) -> None:
        """Stop all work; the store is already closed."""
        under_way = [*self._staging.values(), *filter(None, [self._removing])]
        for one in under_way:
            one.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self.caches.close()


def _manifests_of(note: AttemptNote) -> list[bytes]:
    outputs = note.result.outputs if note.result is not None else b""
    return [note.files.manifest, outputs] if outputs else [note.files.manifest]


def _raise_if_it_may_pass(error: Exception) -> None:
    """Raise an error again if it may pass: NoRoom for a full disk, OSError for a lack of descriptors or memory."""
    if isinstance(error, OSError) and error.errno in SHORT_OF:
        raise error
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        raise NoRoom(_words(error)) from None


def _words(error: Exception) -> str:
    """An error without its number, for messages."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _uid_in(key: str) -> bytes:
    return bytes.fromhex(key.partition("-")[0])


class _WhileWanted:
    """The blocks of a cache, as long as they are needed and the disk has room for a copy of them."""

    def __init__(self, cache: FileCache, is_wanted: Callable[[], bool], fetch: Fetch | None = None) -> None:
        """fetch: the transfer of the blocks that are not here yet."""
        self._is_wanted, self._fetch, self._check_disk = is_wanted, fetch, cache.check_disk
        if fetch is not None:
            fetch.is_read = True
        self.read, self.put, self._read_some = cache.store.read, cache.store.put, cache.store.read_some

    def read_some(self, digests: Sequence[bytes], bytes_max: int) -> Sequence[bytes | memoryview]:
        here = self._fetch.here(digests) if self._fetch is not None else digests
        if not self._is_wanted():
            raise StagingFailed("the task no longer needs the files")
        self._check_disk(READ_BYTES_MAX)
        recent = self._fetch.take_recent(here) if self._fetch is not None else ()
        found = recent or self._read_some(here, bytes_max)
        if self._fetch is not None:
            self._fetch.needs_next(digests[len(found) :])
        return found


def _kept(store: BlockStore, manifest: bytes) -> Root:
    """Make sure that outputs are here and on disk → the root of their manifest. Raises StagingFailed, OSError."""
    if store.missing_of(manifest):
        raise StagingFailed("some blocks of the files have not arrived")
    store.sync()
    return decode_root(store.read(manifest))
