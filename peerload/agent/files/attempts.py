"""Files of attempts: put in place before the start, collected after the end, and brought home.

STATE/files/attempts/<key> notes what an attempt on this node has: the agent may be started anew between any two steps.
A note that says nothing of a complete working directory is of an attempt that never started.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.event_loop import in_own_thread
from peerload.agent.files.transfer import Fetch, FileTransfer
from peerload.files import manifest as manifests
from peerload.files import tree
from peerload.files.beneath import DIRECTORY
from peerload.files.place import Homecoming, make_tree
from peerload.files.store import BlockStore, Damaged, NoRoom
from peerload.model.errors import BadRequest, PeerloadError, StagingFailed
from peerload.model.events import FilesStaged, OutputArrived
from peerload.model.messages import Staging
from peerload.model.task import SCRATCH, Exit, Staged, TaskFiles, without_files
from peerload.text.format import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from peerload.agent.inbox import Inbox
    from peerload.agent.node_info import AgentInfo
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.event_log import EventLog
    from peerload.core.node import Node
    from peerload.model.actions import FetchOutput, KeepOutput, SpawnTask, StageFiles
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskSpec

log = logging.getLogger("peerload.files")

TELL_EVERY_S = 1.0
"""A home is told this often that files are on their way; it waits five times as long for the next word."""
STAGING_S_MAX = 86_400.0
"""Bound on the time in which the files of one attempt have to be in place."""
REPAIRS_MAX = 3
"""Times that damaged files in the cache are fetched again for one attempt: first block, manifest, files."""
CONFLICTS_NAMED_MAX = 5
"""Outputs kept beside others that an event names."""
TASKS_REMEMBERED_MAX = 1024
"""Tasks of which it is remembered which outputs they have placed, in case another attempt places them again."""


class AttemptNote(msgspec.Struct):
    """The note about an attempt. is_ready: its working directory is complete. directory, submitted_at: where its outputs come
    home to, and when it was submitted; of a task of another home b"" and 0. result: of an ended one, once it is collected;
    unplaced: why an output is missing; returned: what came home, for its event."""

    task: str
    files: TaskFiles
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
        state: Path,
        limit_bytes: int,
        disk: DiskSpace,
        spool: Spool,
        links: PeerLinks,
        inbox: Inbox,
        info: AgentInfo,
        node: Node,
        event_log: EventLog,
    ) -> None:
        is_system = info.config.mode == "system"
        self.store = BlockStore(state / "files", limit_bytes, disk.low_bytes)
        self.transfer = FileTransfer(self.store, links, self._make_room, info.counters, serves=not is_system)
        self._spool = spool
        self._links = links
        self._inbox = inbox
        self._node = node
        self._event_log = event_log
        self._is_system = is_system
        self._directory = state / "files" / "attempts"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._notes: dict[str, AttemptNote] = {}
        self._staging: dict[str, asyncio.Task[None]] = {}
        self._removing: asyncio.Task[None] | None = None
        self._is_more_dropped = False
        self._placed: collections.OrderedDict[bytes, dict[str, bytes]] = collections.OrderedDict()
        self._placing = threading.Lock()
        self._pinned: frozenset[bytes] = frozenset()
        for path in self._directory.iterdir():
            try:
                self._notes[path.name] = msgspec.msgpack.decode(path.read_bytes(), type=AttemptNote)
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("cannot read a note about files: path=%s error=%s", path, error)
                path.unlink(missing_ok=True)

    # -- submissions ---------------------------------------------------------------------------------------------------

    async def check(self, spec: TaskSpec, terms: SubmitOptions) -> None:
        """Check the files of a submission: they are all here, and on disk. Raises BadRequest."""
        if not spec.is_staged:
            return
        if self._is_system:
            raise BadRequest(
                "files do not travel with tasks of the system's service yet",
                why="this agent serves all users of the machine",
                hint="an agent of your own:  peerload up        a shared directory needs no  --in, --out, --snapshot",
            )
        if spec.files is not None and (not terms.files_home.startswith(b"/") or spec.directory != SCRATCH):
            why = "files_home is an absolute path, and directory is -"
            raise BadRequest("a task with files has a fresh working directory, and a home for its outputs", why=why)
        if spec.lock is not None and spec.placement.builder != spec.lock.kind:
            raise BadRequest("a task with an environment needs a node that builds it", why="builder of its placement")
        for part in (spec.files, spec.lock):
            if part is not None and not await self.transfer.in_thread(self._is_complete, part.manifest):
                raise BadRequest("the files of the task are not kept here (any more)", hint="submit it again")
        await self.transfer.in_slow_thread(self.store.sync)

    def _is_complete(self, manifest: bytes) -> bool:
        return self.store.has(manifest) or not self.store.missing_of(manifest)

    async def keep(self, blocks: Sequence[bytes]) -> None:
        """Keep blocks that a client sends. Raises StagingFailed, OSError."""
        size = sum(map(len, blocks))
        if self.store.needs_room(size):
            self._pin()
            await self.transfer.in_thread(self._make_room, size)
        await self.transfer.in_thread(self.store.put, blocks)

    async def is_complete(self, manifest: bytes) -> bool:
        """True if a manifest and all its blocks are here. Raises StagingFailed for one that is not valid."""
        return await self.transfer.in_thread(self._is_complete, manifest)

    async def bring_manifest(self, manifest: bytes, node: str) -> None:
        """Fetch a manifest and its blocks from this node, unless they are here. Raises PeerloadError, OSError."""
        if not await self.is_complete(manifest):
            work = self.transfer.fetch(manifest, [node]).work
            assert work is not None
            await asyncio.shield(work)

    # -- room ----------------------------------------------------------------------------------------------------------

    def _pin(self) -> None:
        """Note which manifests are in use. From the loop's thread."""
        specs = [task.spec for task in self._node.home.tasks.values() if task.spec.is_staged]
        mine = {part.manifest for spec in specs for part in (spec.files, spec.lock) if part is not None}
        for note in self._notes.values():
            mine.add(note.files.manifest)
            if note.result is not None and note.result.outputs:
                mine.add(note.result.outputs)
        self._pinned = frozenset(mine | self.transfer.under_way)

    def _make_room(self, size_bytes: int) -> None:
        self.store.collect(self._pinned, size_bytes)

    async def collect_garbage(self) -> int:
        """Remove everything that no task needs → the number of bytes."""
        self._pin()
        return await self.transfer.in_slow_thread(self.store.collect, self._pinned, everything=True)

    async def usage(self) -> dict[str, object]:
        """The contents of the cache, for clients."""
        self._pin()
        found = await self.transfer.in_thread(self.store.usage)
        return {
            "size_bytes": found.size_bytes,
            "limit_bytes": found.limit_bytes,
            "blocks": found.blocks,
            "snapshots": [
                {"id": id_.hex(), "bytes": size, "files": count, "used_at": used_at, "in_use": id_ in self._pinned}
                for id_, size, count, used_at in found.manifests
            ],
        }

    # -- before the start ----------------------------------------------------------------------------------------------

    def is_ready(self, key: str) -> bool:
        """True if the working directory of an attempt is complete."""
        note = self._notes.get(key)
        return note is not None and note.is_ready

    def has(self, key: str) -> bool:
        """True if an attempt has files, so that its outputs are to be collected."""
        return key in self._notes

    def offered(self, action: StageFiles) -> None:
        """Bring the files of an offered attempt here, then tell the core."""
        self._begin(action.key, self._stage_offered(action))

    async def _stage_offered(self, action: StageFiles) -> None:
        code = why = ""
        try:
            if self._is_system:
                code, why = "cannot", "its agent serves all users of the machine, and files do not travel to it yet"
            elif action.spec.files is not None:
                note = AttemptNote(action.task, action.spec.files)
                await self._stage(action.key, note, [*action.sources, action.home], (action.uid, action.attempt))
        except NoRoom as error:
            code, why = "cache", str(error)
        except StagingFailed as error:
            code, why = "staging", str(error)
        except (PeerloadError, OSError, TimeoutError) as error:
            code = "disk" if isinstance(error, OSError) and not isinstance(error, ConnectionError) else "busy"
            why = str(error) or "its files did not come in time"
        if code:
            log.info("files not staged: task=%s code=%s error=%s", action.task, code, why)
        self._inbox.put(FilesStaged(action.key, code, why))

    async def stage_own(self, action: SpawnTask) -> None:
        """Put the files of a task of this home in place. Raises PeerloadError, OSError; CancelledError if it is ended."""
        task = self._node.home.by_id.get(action.task)
        assert action.spec.files is not None
        note = AttemptNote(action.task, action.spec.files)
        if task is not None:
            note.directory, note.submitted_at = task.terms.files_home, task.record.submitted_at
        work = self._begin(action.key, self._stage(action.key, note, [], None))
        await work

    def _begin(self, key: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._staging[key] = task
        task.add_done_callback(lambda _: self._staging.pop(key, None))
        return task

    async def _stage(
        self, key: str, note: AttemptNote, sources: Sequence[str], offer: tuple[bytes, int] | None
    ) -> None:
        """sources: nodes to fetch from, the home of the attempt last; none if that is this node."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(STAGING_S_MAX):
                self._note(key, note)
                repairs_left = REPAIRS_MAX if sources else 0
                while True:
                    try:
                        await self._fetch_and_make(key, note, sources, offer)
                        break
                    except Damaged:  # in the cache here: others have it
                        if not repairs_left:
                            raise
                        repairs_left -= 1
                        await self.transfer.in_slow_thread(self.store.drop_damaged, note.files.manifest)
        except BaseException:
            self.forget(key)
            raise
        note.in_s = time.monotonic() - began_s
        note.is_ready = True
        self._note(key, note)
        came = (
            f"{size_text(note.in_bytes)} fetched, {size_text(note.files.size_bytes)} in place after {note.in_s:.1f} s"
        )
        self._event_log.record("files", "staged", task=note.task, reason=came)

    async def _fetch_and_make(
        self, key: str, note: AttemptNote, sources: Sequence[str], offer: tuple[bytes, int] | None
    ) -> None:
        making: asyncio.Future[None] | None = None
        try:
            if sources and not await self.transfer.in_thread(self._is_complete, note.files.manifest):
                self._pin()
                fetch = self.transfer.fetch(note.files.manifest, sources)
                is_first, fetch.is_counted = not fetch.is_counted, True
                assert fetch.work is not None
                step = fetch.begun if is_first else fetch.work
                while not fetch.work.done() and not (step is making and step.done()):
                    self._tell(note, sources, offer, fetch.done_bytes)
                    await asyncio.wait({fetch.work, step}, timeout=TELL_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                    if step is fetch.begun and step.done() and not step.cancelled():
                        # one thread for each fetch that has its turn: each file is written as soon as its blocks are here
                        step = making = in_own_thread(functools.partial(self._make, key, note, fetch))
                if fetch.work.done():
                    fetch.work.result()
                note.in_bytes += fetch.done_bytes if is_first else 0
            if making is None:
                making = asyncio.ensure_future(self.transfer.in_slow_thread(self._make, key, note))
            while not (await asyncio.wait({making}, timeout=TELL_EVERY_S))[0]:
                self._tell(note, sources, offer, note.files.size_bytes)
            making.result()
        finally:
            if making is not None:
                making.cancel()

    def _tell(
        self, note: AttemptNote, sources: Sequence[str], offer: tuple[bytes, int] | None, done_bytes: int
    ) -> None:
        """Tell the home of an offered attempt that its files are on their way."""
        if offer is not None:
            self._links.send(sources[-1], Staging(note.task, *offer, done_bytes, note.files.size_bytes))

    def _make(self, key: str, note: AttemptNote, fetch: Fetch | None = None) -> None:
        if self._spool.drop_scratch(key):
            self._spool.remove_dropped()
        directory = self._spool.make_scratch(key)
        before = manifests.decode(note.files.manifest, self.store.read)

        def read(digests: Sequence[bytes], bytes_max: int) -> list[bytes]:
            here = digests if fetch is None else fetch.here(digests)
            if self._notes.get(key) is not note:
                raise StagingFailed("the files are not wanted any more")
            return self.store.read_some(here, bytes_max)

        make_tree(directory, before, note.files.outputs, read)

    def ended_early(self, key: str) -> bool:
        """Stop the staging of an attempt. False if none is under way."""
        work = self._staging.get(key)
        if work is None:
            return False
        work.cancel()
        return True

    # -- after the end -------------------------------------------------------------------------------------------------

    async def settled(self, key: str, exit_: Exit) -> Exit:
        """Collect the outputs of an ended attempt, and place them if this is its home → its exit, which is no success if one
        is missing."""
        note = self._notes.get(key)
        if note is None:
            return exit_
        exit_ = await self.transfer.in_slow_thread(self._settled, key, note, exit_)
        if note.returned:
            self._event_log.record("files", "returned", task=note.task, reason=note.returned)
        return exit_

    def _settled(self, key: str, note: AttemptNote, exit_: Exit) -> Exit:
        began_s = time.monotonic()
        if note.result is None:
            note.result, note.unplaced = self._collected(key, note, is_success=exit_.exit_code == 0)
            try:
                self._note(key, note)
            except OSError as error:  # they are collected again by the next agent
                log.warning("cannot note the outputs of a task: task=%s error=%s", note.task, error)
        staged, unplaced = note.result, note.unplaced
        if not unplaced and staged.outputs and note.directory:
            uid = bytes.fromhex(key.partition("-")[0])
            unplaced, conflicts, note.returned = self._place(
                uid, note.task, note.files, note.directory, note.submitted_at, staged.outputs, began_s
            )
            staged = msgspec.structs.replace(staged, conflicts=conflicts)
        exit_ = msgspec.structs.replace(exit_, staged=staged)
        return without_files(exit_, unplaced) if unplaced else exit_

    def _collected(self, key: str, note: AttemptNote, *, is_success: bool) -> tuple[Staged, str]:
        staged = Staged(note.in_bytes, note.in_s)
        if not note.files.outputs and not note.files.returns_changes:
            return staged, ""
        try:
            before = manifests.decode(note.files.manifest, self.store.read)
            base = os.open(self._spool.make_scratch(key), DIRECTORY | os.O_CLOEXEC)
            try:
                after = tree.changed(
                    base,
                    before,
                    note.files.outputs,
                    lambda block: self.store.put([block])[0],
                    needs_all=is_success,
                )
            finally:
                os.close(base)
            if not after.files and not after.links:
                return staged, ""
            id_, blocks = manifests.encode(after)
            self.store.put(blocks)
            self.store.missing_of(id_)
            self.store.sync()
        except (PeerloadError, OSError) as error:
            return staged, f"its outputs cannot be collected: {error}" if is_success else ""
        return (
            msgspec.structs.replace(staged, outputs=id_, out_bytes=after.size_bytes, out_count=len(after.files)),
            "",
        )

    async def bring_home(self, node: str, action: KeepOutput | FetchOutput) -> tuple[str, OutputArrived]:
        """Fetch the outputs of an attempt from its node, and place them → an error that may pass, or ""; and the event that
        says so."""
        event, began_s = OutputArrived(action.uid, action.attempt), time.monotonic()
        task = self._node.home.tasks.get(action.uid)
        if task is None or task.spec.files is None:
            return "", event
        try:
            if not await self.transfer.in_thread(self._is_complete, action.files):
                self._pin()
                work = self.transfer.fetch(action.files, [node], is_output=True).work
                assert work is not None
                await asyncio.shield(work)
            record = task.record
            unplaced, conflicts, returned = await self.transfer.in_slow_thread(
                self._place,
                action.uid,
                action.task,
                task.spec.files,
                task.terms.files_home,
                record.submitted_at,
                action.files,
                began_s,
            )
            self._event_log.record("files", "returned", task=action.task, reason=returned or unplaced)
        except (NoRoom, OSError) as error:
            return f"its output files cannot be kept: {error}", event
        except StagingFailed as error:
            return "", msgspec.structs.replace(event, unplaced=str(error))
        except PeerloadError as error:
            return str(error), event
        return "", msgspec.structs.replace(event, unplaced=unplaced, conflicts=conflicts)

    def _place(
        self,
        uid: bytes,
        task: str,
        files: TaskFiles,
        directory: bytes,
        submitted_at: float,
        outputs: bytes,
        began_s: float,
    ) -> tuple[str, int, str]:
        """→ why an output is not in its place, the number of those that are kept beside another, and what came home, in
        words."""
        own = self._placed.setdefault(uid, {})
        self._placed.move_to_end(uid)
        while len(self._placed) > TASKS_REMEMBERED_MAX:
            self._placed.popitem(last=False)
        try:
            before = manifests.decode(files.manifest, self.store.read)
        except StagingFailed:  # it is not kept any more: then nothing at home counts as unchanged
            before = manifests.Manifest()
        coming = Homecoming(directory, before, own, since=submitted_at, mark=task)
        try:
            manifest = manifests.decode(outputs, self.store.read)
            with self._placing:  # of two tasks with the same output the second finds that of the first
                coming.place(manifest, self.store.read_some)
        except (PeerloadError, OSError) as error:
            return str(error), len(coming.conflicts), ""
        came = f"{counted(len(manifest.files), 'file')} of {size_text(manifest.size_bytes)} in {time.monotonic() - began_s:.1f} s"
        for path in coming.conflicts:
            log.info("output kept beside a file that was changed: task=%s path=%s", task, path)
        if coming.conflicts:
            more = len(coming.conflicts) - CONFLICTS_NAMED_MAX
            named = ", ".join(coming.conflicts[:CONFLICTS_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
            came += f"; kept beside what was changed meanwhile: {named}"
        return "", len(coming.conflicts), came

    # -- the end -------------------------------------------------------------------------------------------------------

    def forget(self, key: str) -> None:
        """Nothing of this attempt is needed any more; its working directory goes."""
        if (work := self._staging.get(key)) is not None and work is not asyncio.current_task():
            work.cancel()
        if self._notes.pop(key, None) is not None:
            (self._directory / key).unlink(missing_ok=True)
        if self._spool.drop_scratch(key):
            self._remove_dropped()

    def _remove_dropped(self) -> None:
        """Remove the working directories that are not needed any more, in a thread: there may be many files in them."""
        self._is_more_dropped = True
        if self._removing is None or self._removing.done():
            self._removing = asyncio.get_running_loop().create_task(self._remove())

    async def _remove(self) -> None:
        while self._is_more_dropped:
            self._is_more_dropped = False
            await self.transfer.in_slow_thread(self._spool.remove_dropped)

    def keep_only(self, knows: Callable[[str], bool]) -> None:
        """Forget what earlier agents have left of other attempts."""
        for key in [key for key in self._notes if not knows(key)]:
            self.forget(key)
        self._remove_dropped()

    def _note(self, key: str, note: AttemptNote) -> None:
        """Keep a note. Raises OSError."""
        self._notes[key] = note
        path = self._directory / key
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.msgpack.encode(note))
        part.replace(path)

    async def close(self) -> None:
        """Stop all; the store is closed."""
        works = [*self._staging.values(), *filter(None, [self._removing])]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        await self.transfer.close()
        self.store.close()
