"""Services as the user of a task: checks of directories, and files that are written. In system mode the launcher,
which is root, does both; the agent of one user does them itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.accounts import output_files
from peerload.agent.accounts.directory_cache import FileSystemStalled, stalled
from peerload.agent.event_loop import in_own_thread
from peerload.launcher.protocol import DirectoryCheck, FileAppend, FileCheck
from peerload.launcher.system.write_as_user import GONE, FileChanged
from peerload.model.errors import BadRequest, PeerloadError, SlowDown
from peerload.model.task import SCRATCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.accounts.directory_cache import DirectoryCache
    from peerload.agent.accounts.output_files import Segment
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.node_info import NodeInfo
    from peerload.agent.security_events import SecurityEvents
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskSpec

POLICY = "policy: "
"""Prefix of the launcher's answers that this node does not run tasks of a user."""
BUSY = "busy: "
LATE = "it was not done within "
ANSWER_KEPT_S = 2.0
"""Lifetime of an answer, so that a burst of tasks asks once."""
USER_ANSWERS_KEPT_MAX = 4096


class TaskUser(NamedTuple):
    """A task's user: the home, what that calls its submitter, and the uid of that there; -1 where it is not known."""

    home: str
    user: str
    uid: int = -1


class UserServices:
    """One per agent."""

    def __init__(
        self, info: NodeInfo, launcher: LauncherLink, directories: DirectoryCache, security: SecurityEvents
    ) -> None:
        self._info = info
        self._launcher = launcher
        self._directories = directories
        self._security = security
        self.is_system = info.config.mode == "system"
        self._checks = output_files.WritableChecks()
        self._told: dict[tuple[TaskUser, bytes], tuple[float, str]] = {}

    def submitter(self, spec: TaskSpec, terms: SubmitOptions) -> TaskUser:
        """The user of a task of this home."""
        return TaskUser(self._info.config.node, spec.user, terms.owner)

    def seen_lately(self, whose: TaskUser, directory: bytes) -> bool:
        """True if `objection` had none a moment ago."""
        if not self.is_system:
            return self._directories.seen_lately(directory)
        found = self._told.get((whose, directory))
        return found is not None and not found[1] and time.monotonic() - found[0] < ANSWER_KEPT_S

    async def objection(self, whose: TaskUser, directory: bytes) -> tuple[str, bool]:
        """The reason why this node runs no tasks of that user ("" = it does), and whether the directory is there for
        it. Raises SlowDown if neither is known now; FileSystemStalled if the file system of the directory does not
        answer."""
        if not self.is_system:
            return "", await self._directories.look(directory)
        found = self._told.get((whose, directory))
        if found is None or time.monotonic() - found[0] >= ANSWER_KEPT_S:
            why = await self._launcher.ask(DirectoryCheck(directory, *whose))
            if why.startswith(BUSY):
                raise SlowDown("the working directory cannot be looked at now", why=why.removeprefix(BUSY))
            if len(self._told) >= USER_ANSWERS_KEPT_MAX:
                self._told.clear()
            found = self._told[whose, directory] = time.monotonic(), why
            if why.startswith(POLICY) and whose.home != self._info.config.node:
                self._security.report("X1", f"{whose.user}@{whose.home}", why.removeprefix(POLICY))
        why = found[1]
        if why.startswith(LATE):
            raise stalled(directory)
        if why.startswith(POLICY):
            return why.removeprefix(POLICY), directory == SCRATCH
        return "", not why

    async def admitted(self, spec: TaskSpec, terms: SubmitOptions) -> bool:
        """True if the directory of a submitted task is there for its user, or was a moment ago. False also if this node
        does not run tasks of that user, or the file system does not answer: other nodes may run the task."""
        submitter = self.submitter(spec, terms)
        try:
            return self.seen_lately(submitter, spec.directory) or (await self.objection(submitter, spec.directory))[1]
        except FileSystemStalled:
            return False

    async def check_files(self, spec: TaskSpec, terms: SubmitOptions) -> None:
        """Raises BadRequest if the files that the output is wanted in cannot be written by who submits the task."""
        wanted = output_files.patterns(terms)
        if not wanted:
            return
        if not self.is_system:
            await self._checks.look(terms)
            return
        why = await self._launcher.ask(FileCheck(wanted, *self.submitter(spec, terms)))
        if why.startswith(BUSY):
            raise SlowDown("the files cannot be looked at now", why=why.removeprefix(BUSY))
        if why:
            shown = wanted[0].decode("utf-8", "backslashreplace")
            raise BadRequest(f"{shown} cannot be written", why=why.removeprefix(POLICY))

    async def append(
        self, spec: TaskSpec, terms: SubmitOptions, path: bytes, segments: Sequence[Segment], at: int, *, ends: bool
    ) -> None:
        """Put parts of captured files into a file of the submitter's, from the place ``at`` on (launcher_results.append). Raises
        Changed, OSError, PeerloadError."""
        if not self.is_system:
            await in_own_thread(lambda: output_files.append(path, segments, spec.umask, at, ends=ends))
            return
        parts = [(str(source), first, end) for source, first, end in segments]
        request = FileAppend(path, parts, spec.umask, at, ends, *self.submitter(spec, terms))
        why = await self._launcher.ask(request)
        if why == GONE:
            raise FileChanged(why)
        if why:
            raise PeerloadError(why.removeprefix(POLICY).removeprefix(BUSY))
