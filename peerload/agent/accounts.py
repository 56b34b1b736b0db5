"""Accounts of this machine, and the work that the agent does for the user of a task: checks of directories, and output files.

In system mode the launcher, which is root, checks and writes as the user; the agent of one user does both itself. A thread
checks directories of this node, since a dead network mount hangs. Other nodes are asked over the peer link when a task is
submitted, so that its user learns immediately which of them cannot run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import hashlib
import os
import pwd
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.output.spool import open_output
from peerload.agent.runtime import done_within, in_own_thread
from peerload.launcher.protocol import DirectoryCheck, FileAppend, FileCheck
from peerload.launcher.system import write_as_user
from peerload.launcher.system.write_as_user import GONE, FileChanged, Unwritable
from peerload.model.bounded import BoundedDict
from peerload.model.errors import BadRequest, PeerloadError, SlowDown, SnapshotWanted
from peerload.model.events import DirectoryFound
from peerload.model.messages import DirectoryRequest
from peerload.model.task import SCRATCH, SINGLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.runtime import AgentInfo, Inbox
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.model.messages import DirectoryTold
    from peerload.model.task import SubmitOptions, TaskRecord, TaskSpec


KEPT_S = 10.0
"""Time for which an answer of the account database is cached: it may be remote, and the loop waits for it."""
ACCOUNTS_KEPT_MAX = 1024
SYSTEM_UIDS_BELOW = 1000
"""Accounts below belong to the system and its services, not to people."""
CHECK_S_MAX = 2.0
"""Timeout of a check, after which the file system counts as stalled."""
SEEN_S = 2.0
"""Lifetime of an existing directory in the cache, so that a burst of tasks needs one check."""
KEPT_MAX = 256
LOOKS_MAX = 32
"""Maximum number of concurrent checks. A check that hangs in a dead mount keeps its thread. Meanwhile, requests for further
directories are refused, but no other work has to wait, and neither has the end of the agent."""
NODES_ASKED_MAX = 64
"""Maximum number of nodes that are asked about the directory of one submission."""
ANSWER_S_MAX = 0.5
"""Timeout of their answers; a later answer is used for the next submission."""
ANSWER_ELSEWHERE_S_MAX = 5.0
"""Timeout of the answers about a task that this node can never run: they decide whether its directory is sent along."""
HERE_S = 60.0
"""Time for which a node that has the directory is not asked again."""
MISSING_S = 2.0
"""Time for which a node that lacks the directory, or has not answered, is not asked again."""
ANSWERS_KEPT_MAX = 4096
POLICY = "policy: "
"""Prefix of the launcher's answers that this node does not run tasks of a user."""
BUSY = "busy: "
LATE = "it was not done within "
ANSWER_KEPT_S = 2.0
"""Lifetime of an answer, so that a burst of tasks needs one query."""
USER_ANSWERS_KEPT_MAX = 4096
FILE_CHECK_S_MAX = 2.0
"""Time limit for a check of the directory of an output file, after which the file is refused."""
FILE_CHECKS_MAX = 32
_LETTERS = re.compile(rb"%(.?)", re.DOTALL)
_KNOWN = b"jAaxN%"
_SAYS = "%j is the number of the task, %A of its array, %a of its member, %x its name, %N the node it ran on, %% a %"


class Account(NamedTuple):
    """A user account. name: "" if the database has none for this uid; groups: their numbers, the primary one
    included."""

    uid: int
    name: str
    groups: frozenset[int]


class Accounts:
    """Looks accounts up only by number, since the operating system vouches only for numbers; for one thread alone.

    The groups are those that the database lists now, not those of a process. A user who was removed from a group loses access
    here within KEPT_S, even with processes that still run, and one who was added need not log in again.
    """

    def __init__(self) -> None:
        self._kept: BoundedDict[int, tuple[float, Account]] = BoundedDict(ACCOUNTS_KEPT_MAX)

    def of(self, uid: int) -> Account:
        now_s = time.monotonic()
        kept = self._kept.get(uid)
        if kept is not None and now_s - kept[0] < KEPT_S:
            return kept[1]
        account = _looked_up(uid)
        self._kept[uid] = now_s, account
        return account

    def named(self, name: str) -> Account | None:
        try:
            found = pwd.getpwnam(name)
        except (KeyError, ValueError, UnicodeError):  # ValueError: a NUL byte in it
            return None
        account = self.of(found.pw_uid)
        return account if account.name == name == found.pw_name else None


def group_number(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError, UnicodeError):
        return None


def group_members(group: str) -> frozenset[str]:
    try:
        return frozenset(grp.getgrnam(group).gr_mem)
    except (KeyError, ValueError, UnicodeError):
        return frozenset()


def _looked_up(uid: int) -> Account:
    try:
        found = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return Account(uid, "", frozenset())
    return Account(uid, found.pw_name, frozenset(os.getgrouplist(found.pw_name, found.pw_gid)))


# -- directories -------------------------------------------------------------------------------------------------------


class FileSystemStalled(SlowDown):
    """A file system did not answer whether a directory exists."""


class DirectoryCache:
    """Checks directories, at most one check at a time for each, and caches existing ones for a moment."""

    def __init__(self, inbox: Inbox) -> None:
        """inbox: gets `DirectoryFound` for a directory that turns out to exist after its check has timed out."""
        self._inbox = inbox
        self._late: set[bytes] = set()
        self._seen: dict[bytes, float] = {}
        self._identities: BoundedDict[bytes, str] = BoundedDict(KEPT_MAX)
        self._looks: dict[bytes, asyncio.Future[str | None]] = {}

    def seen_lately(self, directory: bytes) -> bool:
        """True if the directory existed a moment ago; SCRATCH always does."""
        seen_s = self._seen.get(directory)
        return directory == SCRATCH or (seen_s is not None and time.monotonic() - seen_s < SEEN_S)

    async def look(self, directory: bytes) -> bool:
        """Check whether the directory exists here and may be entered. Raises SlowDown, which says nothing about the
        directory, if too many checks are running or no thread can be made; FileSystemStalled if the file
        system does not answer."""
        if directory == SCRATCH:
            return True
        found = self._looks.get(directory)
        if found is None:
            if len(self._looks) >= LOOKS_MAX:
                raise SlowDown("too many checks of working directories at once", why=f"{LOOKS_MAX} are running")
            found = self._start(directory)
        if not await done_within(found, CHECK_S_MAX):  # others may wait for the same check
            self._late.add(directory)
            raise stalled(directory)
        return found.result() is not None

    def identity_of(self, directory: bytes) -> str:
        """Identity at the last check, which distinguishes it from directories of that name elsewhere; "" = unknown."""
        return self._identities.get(directory, "")

    def _start(self, directory: bytes) -> asyncio.Future[str | None]:
        try:
            found = in_own_thread(lambda: identity_of(directory) if _may_enter(directory) else None)
        except BlockingIOError:
            why = "the limit of processes is reached"
            raise SlowDown("cannot check working directories: no thread can be started", why=why) from None
        self._looks[directory] = found
        found.add_done_callback(lambda found: self._looked(directory, found.result()))
        return found

    def _looked(self, directory: bytes, identity: str | None) -> None:
        del self._looks[directory]
        if identity is not None:
            self._identities[directory] = identity
            if len(self._seen) >= KEPT_MAX:
                self._seen.clear()
            self._seen[directory] = time.monotonic()
        if directory in self._late:
            self._late.discard(directory)
            if identity is not None:
                self._inbox.put(DirectoryFound(directory))


def stalled(directory: bytes) -> FileSystemStalled:
    return FileSystemStalled(
        "cannot check the working directory now",
        why=f"the file system of {directory.decode(errors='replace')} does not answer",
    )


class DirectoryQueries:
    """Asks other nodes whether they would run tasks in a directory, and remembers the queries for a moment.

    The core stores the answers (`Membership`).
    """

    def __init__(self, links: PeerLinks, *, freezes: bool = False) -> None:
        """links: carry queries and answers. freezes: a directory that differs on other nodes has to be sent with the task."""
        self._links = links
        self._freezes = freezes
        self._fresh_until_s: BoundedDict[tuple[str, bytes, str], float] = BoundedDict(ANSWERS_KEPT_MAX)
        self._awaited: dict[tuple[str, bytes, str], list[asyncio.Future[None]]] = {}
        """Futures of the submissions that wait for an answer, by node, directory and user."""
        self._answers: BoundedDict[tuple[str, bytes, str], DirectoryTold] = BoundedDict(ANSWERS_KEPT_MAX)

    async def ask(self, nodes: Sequence[str], directory: bytes, user: str, *, decides: bool = False) -> None:
        """Query the nodes whose answer has expired. Returns when all have answered, at the latest after ANSWER_S_MAX, or
        ANSWER_ELSEWHERE_S_MAX if the answers decide whether the directory is sent along (``decides``)."""
        if directory == SCRATCH:
            return
        now_s = time.monotonic()
        keys = [(node, directory, user) for node in nodes[:NODES_ASKED_MAX]]
        for key in keys:
            if self._fresh_until_s.get(key, 0.0) <= now_s:
                self._awaited.setdefault(key, [])
                self._keep(key, MISSING_S)
                self._links.send(key[0], DirectoryRequest(directory, user))
        loop = asyncio.get_running_loop()
        if waits_for := {key: loop.create_future() for key in keys if key in self._awaited}:
            for key, future in waits_for.items():
                self._awaited[key].append(future)
            ask_again_after_s = 0.0  # the client has disconnected: the next one asks again
            try:
                await asyncio.wait(waits_for.values(), timeout=ANSWER_ELSEWHERE_S_MAX if decides else ANSWER_S_MAX)
                ask_again_after_s = MISSING_S
            finally:
                for key, future in waits_for.items():
                    if not future.done():
                        self._stop_waiting(key, future)
                        self._keep(key, ask_again_after_s)

    def answer(self, node: str, answer: DirectoryTold) -> None:
        self._links.send(node, answer)

    def answer_received(self, node: str, answer: DirectoryTold) -> bool:
        """Process the answer of a node. → False if it was not asked recently."""
        key = (node, answer.directory, answer.user)
        if key not in self._fresh_until_s:
            return False
        self._keep(key, MISSING_S if answer.code else HERE_S)
        self._answers[key] = answer
        for future in self._awaited.pop(key, ()):
            future.set_result(None)
        return True

    def _stop_waiting(self, key: tuple[str, bytes, str], future: asyncio.Future[None]) -> None:
        self._awaited[key].remove(future)
        if not self._awaited[key]:
            del self._awaited[key]

    def check_same(self, nodes: Sequence[str], spec: TaskSpec, identity: str) -> None:
        """Check the working directory of a task that could run on these nodes. identity: of the directory here. Raises
        SnapshotWanted if a differing directory has to be sent along, and one of the nodes has reported a difference."""
        for node in nodes[:NODES_ASKED_MAX] if self._freezes and spec.directory != SCRATCH else ():
            answer = self._answers.get((node, spec.directory, spec.user))
            if answer is not None and (answer.code == "directory" or ("" != answer.identity != identity != "")):
                why = f"{node} does not have {spec.directory.decode(errors='replace')} of this machine"
                raise SnapshotWanted(
                    "the task needs a snapshot of its working directory", why=why, hint="send it along:  --snapshot"
                )

    def _keep(self, key: tuple[str, bytes, str], seconds: float) -> None:
        self._fresh_until_s[key] = time.monotonic() + seconds


def _may_enter(directory: bytes) -> bool:
    # Not Path.is_dir: that raises where the path is too long or a directory above it may not be searched.
    return os.path.isdir(directory) and os.access(directory, os.X_OK)  # noqa: PTH112


# -- the user of a task ------------------------------------------------------------------------------------------------


class TaskUser(NamedTuple):
    """A task's user: the home, and name and uid of the submitter there; -1 for an unknown uid."""

    home: str
    user: str
    uid: int = -1


class UserServices:
    """Access to the files of users: checks of their directories and files, and appending to their files. In system mode the
    launcher does it as the user. One object per agent."""

    def __init__(
        self, info: AgentInfo, launcher: LauncherLink, directories: DirectoryCache, security: SecurityEvents
    ) -> None:
        self._info = info
        self._launcher = launcher
        self._directories = directories
        self._security = security
        self.is_system = info.config.mode == "system"
        self._checks = WritableChecks()
        self._answers: dict[tuple[TaskUser, bytes], tuple[float, str]] = {}

    def submitter(self, spec: TaskSpec, terms: SubmitOptions) -> TaskUser:
        return TaskUser(self._info.config.node, spec.user, terms.owner)

    def seen_lately(self, task_user: TaskUser, directory: bytes) -> bool:
        if not self.is_system:
            return self._directories.seen_lately(directory)
        found = self._answers.get((task_user, directory))
        return found is not None and not found[1] and time.monotonic() - found[0] < ANSWER_KEPT_S

    async def objection(self, task_user: TaskUser, directory: bytes) -> tuple[str, bool]:
        """The reason why this node runs no tasks of this user ("" = it does), and True if the directory exists for this
        user. Raises SlowDown if neither is known now; FileSystemStalled if the file system of the directory does not
        answer."""
        if not self.is_system:
            return "", await self._directories.look(directory)
        found = self._answers.get((task_user, directory))
        if found is None or time.monotonic() - found[0] >= ANSWER_KEPT_S:
            why = await self._launcher.ask(DirectoryCheck(directory, *task_user))
            if why.startswith(BUSY):
                raise SlowDown("cannot check the working directory now", why=why.removeprefix(BUSY))
            if len(self._answers) >= USER_ANSWERS_KEPT_MAX:
                self._answers.clear()
            found = self._answers[task_user, directory] = time.monotonic(), why
            if why.startswith(POLICY) and task_user.home != self._info.config.node:
                self._security.report("X1", f"{task_user.user}@{task_user.home}", why.removeprefix(POLICY))
        why = found[1]
        if why.startswith(LATE):
            raise stalled(directory)
        if why.startswith(POLICY):
            return why.removeprefix(POLICY), directory == SCRATCH
        return "", not why

    def identity_of(self, directory: bytes) -> str:
        """The identity of a checked directory of this node; "" = unknown."""
        return self._directories.identity_of(directory)

    async def admitted(self, spec: TaskSpec, terms: SubmitOptions) -> bool:
        """True if the directory of a submitted task exists for its user, or did a moment ago. Also False if this node
        does not run tasks of this user, or the file system does not answer: other nodes may run the task."""
        submitter = self.submitter(spec, terms)
        try:
            return self.seen_lately(submitter, spec.directory) or (await self.objection(submitter, spec.directory))[1]
        except FileSystemStalled:
            return False

    async def check_files(self, spec: TaskSpec, terms: SubmitOptions) -> None:
        """Check that the submitter can write the output files. Raises BadRequest."""
        wanted = output_patterns(terms)
        if not wanted:
            return
        if not self.is_system:
            await self._checks.look(terms)
            return
        why = await self._launcher.ask(FileCheck(wanted, *self.submitter(spec, terms)))
        if why.startswith(BUSY):
            raise SlowDown("cannot check the output files now", why=why.removeprefix(BUSY))
        if why:
            shown = wanted[0].decode("utf-8", "backslashreplace")
            raise BadRequest(f"{shown} cannot be written", why=why.removeprefix(POLICY))

    async def append(
        self, spec: TaskSpec, terms: SubmitOptions, path: bytes, segments: Sequence[Segment], at: int, *, ends: bool
    ) -> None:
        """Write parts of captured files into a file of the submitter, from the offset ``at`` on (`append_output`). Raises
        FileChanged, OSError, PeerloadError."""
        if not self.is_system:
            await in_own_thread(lambda: append_output(path, segments, spec.umask, at, ends=ends))
            return
        parts = [(str(source), first, end) for source, first, end in segments]
        request = FileAppend(path, parts, spec.umask, at, ends, *self.submitter(spec, terms))
        why = await self._launcher.ask(request)
        if why == GONE:
            raise FileChanged(why)
        if why:
            raise PeerloadError(why.removeprefix(POLICY).removeprefix(BUSY))


Segment = tuple["Path", int, int]
"""A part of a captured file: the file, first byte and end."""


# -- output files: `submit -o FILE -e FILE` ----------------------------------------------------------------------------
# They grow while the task runs (`completion_jobs.py`). A link is followed, as with a shell's ``>``. Old content is cut off, and
# permissions are kept.


def output_path(pattern: bytes, counter: int, member: int, name: str, node: str) -> bytes:
    """The path that a pattern stands for. A ``/`` in task or node names becomes ``_``, so that the directory stays the same."""
    array = str(counter)
    values = {
        b"j": array if member == SINGLE else f"{array}.{member}",
        b"A": array,
        b"a": "" if member == SINGLE else str(member),
        b"x": name.replace("/", "_").replace("\0", "_"),
        b"N": node.replace("/", "_"),
        b"%": "%",
    }
    return _LETTERS.sub(lambda found: os.fsencode(values.get(found[1], "")), pattern)


def output_patterns(terms: SubmitOptions) -> list[bytes]:
    return list(dict.fromkeys(filter(None, (terms.output_file, terms.error_file))))


def check_output_patterns(terms: SubmitOptions, members: int) -> None:
    """Check the names of output files. Raises BadRequest for an invalid one. members: number of tasks in the array, 0 = no
    array."""
    for pattern in output_patterns(terms):
        shown = pattern.decode("utf-8", "backslashreplace")
        directory, slash, name = pattern.rpartition(b"/")
        if not pattern.startswith(b"/") or b"\0" in pattern:
            raise BadRequest(f"the file {shown} is not an absolute path")
        letters = _LETTERS.findall(pattern)
        if unknown := [letter for letter in letters if not letter or letter not in _KNOWN]:
            what = (b"%" + unknown[0]).decode("utf-8", "backslashreplace")
            raise BadRequest(f"{what} in {shown} is not a placeholder", why=_SAYS)
        if set(_LETTERS.findall(directory)) - {b"%"}:
            raise BadRequest(
                f"the directory of {shown} has a placeholder", why="only the name of the file may have placeholders"
            )
        if slash and name in (b"", b".", b".."):
            raise BadRequest(f"{shown} is a directory", hint=f"name a file in it:  {shown.rstrip('/.')}/out-%j")
        if members > 1 and not {b"a", b"j"} & set(letters):
            raise BadRequest(
                f"all {members} members would write to {shown} and overwrite each other",
                hint="put %a into its name: the number of the member",
            )
        if not members and b"a" in letters:
            raise BadRequest(
                f"%a in {shown} is the number of an array member, and this task is in no array",
                hint="%j  is its number",
            )


# -- checks -------------------------------------------------------------------------------------------------------------


class WritableChecks:
    """Checks that files can be written, a limited number at a time."""

    def __init__(self) -> None:
        self._under_way = 0

    async def look(self, terms: SubmitOptions) -> None:
        """Raises BadRequest if the directory of a file does not exist or must not be written to, or an existing path without
        a placeholder is no regular file; SlowDown if too many checks are running."""
        wanted = output_patterns(terms)
        if not wanted:
            return
        if self._under_way >= FILE_CHECKS_MAX:
            raise SlowDown("too many checks of output files at once", why=f"{FILE_CHECKS_MAX} are running")
        try:
            check = in_own_thread(lambda: _check(wanted))
        except BlockingIOError as error:
            raise SlowDown("cannot check output files", why=str(error.strerror)) from None
        self._under_way += 1
        try:
            if not await done_within(check, FILE_CHECK_S_MAX):
                shown = wanted[0].decode("utf-8", "backslashreplace")
                raise BadRequest(f"{shown} cannot be written", why="its directory does not answer")
            check.result()
        finally:
            check.cancel()
            self._under_way -= 1


def _check(wanted: Sequence[bytes]) -> None:
    for pattern in wanted:
        path = pattern.replace(b"%%", b"%")
        try:
            write_as_user.check(os.path.realpath(path))
        except Unwritable as error:
            shown, directory = pattern.decode("utf-8", "backslashreplace"), os.path.dirname(path)  # noqa: PTH120 -- bytes
            hint = "" if os.path.isdir(directory) else f"mkdir -p {directory.decode('utf-8', 'backslashreplace')}"  # noqa: PTH112
            raise BadRequest(f"{shown} cannot be written", why=str(error), hint=hint) from None


# -- writing -----------------------------------------------------------------------------------------------------------


def append_output(path: bytes, segments: Sequence[Segment], umask: int, at: int, *, ends: bool) -> None:
    """Write these parts of captured files into the file ``path``, as `write_as_user.append` does, but follow links. Raises
    FileChanged, OSError, PeerloadError."""
    with contextlib.ExitStack() as opened:
        parts: list[tuple[int, int, int]] = []
        for source, first, end in segments:
            captured = open_output(source)
            opened.callback(os.close, captured)
            parts.append((captured, first, end))
        try:
            write_as_user.append(os.path.realpath(path), parts, umask, at, ends=ends)
        except FileChanged:
            raise
        except Unwritable as error:
            raise PeerloadError(str(error)) from None


def output_targets(
    terms: SubmitOptions, record: TaskRecord, spec: TaskSpec, place: tuple[int, int]
) -> dict[bytes, list[int]]:
    """The files of a task, and the streams that go to each, stdout first."""
    found: dict[bytes, list[int]] = {}
    for stream, pattern in ((1, terms.output_file), (2, terms.error_file)):
        if pattern:
            path = output_path(pattern, *place, spec.name, record.node or record.last_node)
            found.setdefault(path, []).append(stream)
    return found


NETWORK_TYPES = frozenset(
    [
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "davfs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.moosefs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
    ]
)
"""File systems whose source means the same files on every machine. 9p and virtiofs do not: each host assigns names."""
_LOCAL = re.compile(rb"[\w.-]*@?(localhost|127\.|\[?::1)")
_ESCAPE = re.compile(rb"\\([0-7]{3})")


def identity_of(directory: bytes) -> str:
    """A digest that is equal on two nodes if the directory is the same; "" if unknown. May block in a dead mount."""
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return identity_in(table, boot, os.path.realpath(directory))
    except OSError:
        return ""


def identity_in(table: bytes, boot: bytes, path: bytes) -> str:
    """Identity of a file, as `identity_of`, for a path without links. table: /proc/self/mountinfo; boot: id of
    this boot of the machine."""
    found: tuple[int, bytes, list[bytes], bytes] | None = None
    for line in table.splitlines():
        mount, _, source = line.partition(b" - ")
        fields, kind = mount.split(b" "), source.split(b" ")
        if len(fields) < 5 or len(kind) < 2:  # noqa: PLR2004 -- proc(5)
            continue
        point = _plain(fields[4]).rstrip(b"/")
        inside = path == point or path.startswith(point + b"/")
        if inside and (
            found is None or len(point) >= found[0]
        ):  # of two mounts at one place, the later one hides the other
            found = len(point), fields[2], kind, _plain(fields[3]).rstrip(b"/") + path[len(point) :].rstrip(b"/")
    if found is None:
        return ""
    _, device, (kind_of, name, *_), below = found
    if kind_of.decode("latin-1") in NETWORK_TYPES and not _LOCAL.match(name):
        place = [b"network", _plain(name).rstrip(b"/") + below]
    else:
        place = [b"local", boot.strip(), device, below]
    return hashlib.sha256(b"\0".join(place)).hexdigest()[:32]


def mount_point(path: bytes) -> bytes:
    """The mount point of an absolute path, determined only by its text, so that a dead mount does not hang the call: work in one
    mount must not block another."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
        points = {_plain(fields[4]) for fields in map(bytes.split, lines) if len(fields) > 4}  # noqa: PLR2004 -- proc(5)
        while len(path) > 1 and path not in points:
            path = os.path.dirname(path)  # noqa: PTH120 -- bytes
        return path
    return b"/"


def _plain(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda octal: bytes([int(octal[1], 8)]), field)
