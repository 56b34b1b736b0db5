"""Environments of tasks: each lock is built once on this node, before the task starts, and kept.

STATE/environments/<name>/built describes a complete environment: its size and lock, its directory, the key of its builder, and the
variable with its path for tasks. The directory is STATE/environments/<name> itself. Where the agent serves all users, each has
separate environments, in scratch directories of the launcher, which keeps them until the builder's exit is forgotten.
STATE/environments/uses/<attempt> names the environment of an attempt. The builder is a process of the launcher, beside the tasks.
If it outlives its agent, the next agent ends it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.accounts import BUSY, POLICY
from peerload.environments import builders
from peerload.launcher.protocol import FileCheck
from peerload.model.actions import SpawnTask
from peerload.model.bounded import BoundedDict
from peerload.model.errors import PeerloadError, StagingFailed
from peerload.model.events import FilesStaged, TaskEnded, TaskLost
from peerload.model.messages import Staging
from peerload.model.task import SCRATCH, Exit, TaskSpec, how_it_ended, variables_of

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from collections.abc import Set as AbstractSet

    from peerload.agent.accounts import TaskUser
    from peerload.agent.files.attempts import AttemptFiles
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.runtime import Inbox
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.environments.builders import Plan
    from peerload.model.actions import StageFiles
    from peerload.model.config import AgentConfig
    from peerload.model.events import Event
    from peerload.model.task import EnvironmentLock

log = logging.getLogger("peerload.files")

PREFIX = "build-"
SIGKILL = 9
KILLED_WITHIN_S = 10.0
FAILED_S = 60.0
"""Minimum time before a failed lock is built again."""
PLAN_S = 60.0
"""Interval of searches for interpreters and builders on this node."""
PLANS_MAX = 256
LAST_BYTES = 4000
LAST_LINES, LAST_CHARACTERS = 4, 320
"""Maximum length of a builder's output in the reason."""
TELL_EVERY_S = 1.0
DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"


def last_lines(output: bytes) -> str:
    """The last whole lines of a builder's output. Warnings are left out if there are other lines: if pip cannot reach
    its index, it prints one long warning for each try before the error."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.lower().startswith("warning")] or lines
    last = lines[-LAST_LINES:]
    while len(last) > 1 and len("; ".join(last)) > LAST_CHARACTERS:
        del last[0]
    return "; ".join(last)[:LAST_CHARACTERS]


class BuildFailed(StagingFailed):
    """The environment of a task cannot be built on this node."""

    code = "environment"


class _Built(NamedTuple):
    """A complete environment, as described in its file `built`."""

    size_bytes: int
    lock: str
    place: str
    builder: str
    variable: str


def _read(path: Path) -> _Built:
    """Read the description of an environment. Raises FileNotFoundError."""
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    first, place, builder, variable, *_ = [*lines, "", "", "", ""]
    size, _, lock = first.encode("utf-8", "surrogateescape").decode("utf-8", "replace").partition(" ")
    return _Built(int(size) if size.isdecimal() else 0, lock, place, builder, variable)


def _mark_of(owner: str) -> str:
    """The suffix of the names of a user's environments in system mode."""
    return "-" + hashlib.sha256(owner.encode()).hexdigest()[:16]


class _Build:
    """A build in progress, and the number of attempts that wait for it."""

    def __init__(self, work: asyncio.Task[None]) -> None:
        self.work = work
        self.waiting = 0


class Environments:
    """The environments of one agent, by the key of their plan."""

    PREFIX = PREFIX

    def __init__(
        self,
        config: AgentConfig,
        files: AttemptFiles,
        launcher: LauncherLink,
        spool: Spool,
        links: PeerLinks,
        inbox: Inbox,
        event_log: EventLog,
    ) -> None:
        self._config = config
        self._files = files
        self._launcher = launcher
        self._spool = spool
        self._links = links
        self._inbox = inbox
        self._event_log = event_log
        self._root = Path(config.state) / "environments"
        self._noted = self._root / "uses"
        self._is_system = config.mode == "system"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._uses: dict[str, str] = {}
        self._builds: dict[str, _Build] = {}
        self._staging: dict[str, asyncio.Task[None]] = {}
        self._plans: BoundedDict[EnvironmentLock, tuple[float, asyncio.Future[Plan | str]]] = BoundedDict(PLANS_MAX)
        self._ends: dict[str, asyncio.Future[Exit]] = {}
        self._failed: BoundedDict[str, tuple[float, str]] = BoundedDict(PLANS_MAX)
        self._lock = threading.Lock()
        """Prevents that a thread removes an environment while the loop begins to use it."""
        self._noted.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._noted.iterdir():
            self._uses[path.name] = path.read_text(encoding="ascii", errors="replace")

    # -- before the start ----------------------------------------------------------------------------------------------

    def is_ready(self, action: SpawnTask) -> bool:
        """True if an attempt needs no environment, or its environment is ready."""
        return action.spec.lock is None or (action.key in self._uses and self._is_built(self._uses[action.key]))

    def prepares(self, key: str) -> bool:
        return key in self._staging

    def offered(self, action: StageFiles) -> None:
        """Prepare environment and files of an offered attempt, then notify the core."""
        if action.spec.lock is None:
            self._files.offered(action)
        else:
            self._begin(action.key, self._stage_offered(action))

    async def _stage_offered(self, action: StageFiles) -> None:
        work = asyncio.ensure_future(self._prepare(action))
        try:
            while not work.done():
                self._links.send(action.home, Staging(action.task, action.uid, action.attempt, builds=True))
                await asyncio.wait({work}, timeout=TELL_EVERY_S)
            work.result()
        except (PeerloadError, OSError, TimeoutError) as error:
            code = error.code if isinstance(error, BuildFailed) else "busy"
            log.info("environment not built: task=%s code=%s error=%s", action.task, code, error)
            self._inbox.put(FilesStaged(action.key, code, str(error)))
        except Exception as error:  # the home waits for an answer
            log.exception("environment not built, by a bug: task=%s", action.task)
            self._inbox.put(FilesStaged(action.key, "busy", f"a bug in peerload on this node: {error!r}"))
        else:
            if action.spec.files is None:
                self._inbox.put(FilesStaged(action.key))
            else:
                self._files.offered(action)
        finally:
            work.cancel()

    async def stage_own(self, action: SpawnTask) -> None:
        """Put environment and files of a task of this home in place. Raises PeerloadError, OSError; CancelledError if the
        attempt is ended."""
        if not self.is_ready(action):
            await self._begin(action.key, self._prepare(action))
        if action.spec.files is not None and not self._files.is_ready(action.key):
            await self._files.stage_own(action)

    def ended_early(self, key: str) -> bool:
        """Stop the wait of an attempt for its environment. → False if it does not wait."""
        work = self._staging.get(key)
        return work is not None and work.cancel()

    def _begin(self, key: str, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._staging[key] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._staging.pop(key, None))
        return task

    async def _prepare(self, action: StageFiles | SpawnTask) -> None:
        lock = action.spec.lock
        assert lock is not None
        plan, user = await self._plan(lock), self._files.user_of(action)
        if isinstance(plan, str):
            raise BuildFailed(plan)
        if self._is_system:
            await self._check_account(user)
            plan = plan._replace(key=plan.key + _mark_of(self._files.owner_of(user)))
        try:
            with self._lock:
                self._use(action.key, plan.key)
                if self._is_built(plan.key):
                    os.utime(self._built(plan.key))
                    return
            await self._files.bring_manifest(lock.manifest, action)
            build = self._builds.get(plan.key) or self._start(plan, action)
            build.waiting += 1
            try:
                await asyncio.shield(build.work)
            finally:
                build.waiting -= 1
                if not build.waiting and not build.work.done():
                    build.work.cancel()
                    del self._builds[plan.key]  # a later attempt starts another build
        except BaseException:
            self._unuse(action.key)
            raise

    async def _check_account(self, user: TaskUser) -> None:
        """Check that a user has an account here, which has to own the environment. Raises BuildFailed for a guest."""
        why = await self._launcher.ask(FileCheck([b"/tmp/%j"], *user))
        if why.startswith(BUSY):
            raise PeerloadError("the account of the task's user is not known now", why=why.removeprefix(BUSY))
        if why.startswith(POLICY):
            why = f'{why.removeprefix(POLICY)}; map the user to an account there:  users = "same-name" in its settings'
            raise BuildFailed("no environment is built for a user without an account", why=why)

    async def _plan(self, lock: EnvironmentLock) -> Plan | str:
        """The plan of this node for a lock, or the reason why there is none; the same search serves all calls within PLAN_S."""
        known = self._plans.get(lock)
        if known is None or time.monotonic() - known[0] > PLAN_S:
            look = asyncio.ensure_future(asyncio.to_thread(builders.plan_of, lock))
            known = self._plans[lock] = time.monotonic(), look
        return await asyncio.shield(known[1])

    def _start(self, plan: Plan, action: StageFiles | SpawnTask) -> _Build:
        failed_s, why = self._failed.get(plan.key, (0.0, ""))
        if why and time.monotonic() - failed_s < FAILED_S:
            raise BuildFailed(why)
        build = self._builds[plan.key] = _Build(asyncio.get_running_loop().create_task(self._build(plan, action)))
        build.work.add_done_callback(lambda _: self._ended(plan.key, build))
        return build

    def _ended(self, key: str, build: _Build) -> None:
        if self._builds.get(key) is build:
            del self._builds[key]

    # -- the builder ---------------------------------------------------------------------------------------------------

    async def _build(self, plan: Plan, action: StageFiles | SpawnTask) -> None:
        lock = action.spec.lock
        assert lock is not None
        began_s = time.monotonic()
        self._event_log.record("environment", "building", task=action.task, reason=lock.name)
        directory, user = self._root / plan.key, self._files.user_of(action)
        place = SCRATCH if self._is_system else os.fsencode(directory)
        key = f"{PREFIX}{plan.key}-{secrets.token_hex(4)}"
        measured = 0, b""
        try:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
            await self._files.do("prepare", user, key, place, lock.manifest, _modules())
            exit_, late = await self._run(key, plan, place, user, action)
            output = self._spool.read_tail(key, 2, LAST_BYTES) or self._spool.read_tail(key, 1, LAST_BYTES)
            if not late and not exit_.exit_code:
                measured = await self._files.do("measure", user, key, place)
        finally:
            if not measured[1] or not self._is_system:
                self._launcher.forget(key)
            self._spool.drop(key)
        took_s = time.monotonic() - began_s
        if late or exit_.exit_code:
            last = last_lines(output)
            why = f"{lock.name} cannot be built ({late or how_it_ended(exit_)})" + (f": {last}" if last else "")
            self._failed[plan.key] = time.monotonic(), why
            self._event_log.record("environment", "failed", task=action.task, reason=why)
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise BuildFailed(why)
        size, where = measured[0], measured[1].decode("utf-8", "surrogateescape")
        await asyncio.to_thread(os.sync)  # so that an environment marked as built is complete even after a power cut
        marked = directory / "built.new"
        text = f"{size} {lock.name}\n{where}\n{key}\n{'CONDA_PREFIX' if plan.is_conda else 'VIRTUAL_ENV'}"
        marked.write_text(text, encoding="utf-8", errors="surrogateescape")
        marked.replace(self._built(plan.key))
        self._failed.pop(plan.key, None)
        self._files.caches.pin()
        what = f"{lock.name}: {size / (1 << 20):.1f} MiB in {took_s:.1f} s"
        self._event_log.record("environment", "built", task=action.task, reason=what)
        await asyncio.to_thread(self.collect)

    async def _run(
        self, key: str, plan: Plan, directory: bytes, user: TaskUser, action: StageFiles | SpawnTask
    ) -> tuple[Exit, str]:
        """Run the builder → its exit, and the reason why it was killed, "" if it was not."""
        limit_s = self._config.files.build_s_max
        spec = TaskSpec(plan.argv, directory, action.spec.environment, user=action.spec.user)
        own = variables_of(action.spec.environment)
        extra = {b"PYTHONPATH": b"", b"PYTHONHOME": b"", b"PATH": own.get(b"PATH", DEFAULT_PATH)}
        if not self._is_system and not await asyncio.to_thread(os.path.isdir, own.get(b"HOME", b"")):
            extra[b"HOME"] = directory
        end = self._ends[key] = asyncio.get_running_loop().create_future()
        stdout, stderr = self._spool.paths(key)
        run = SpawnTask(key, action.task, 1, action.home, spec)
        try:
            self._launcher.spawn(run, stdout, stderr, extra, owner=user.uid)
            try:
                async with asyncio.timeout(limit_s):
                    return await asyncio.shield(end), ""
            except TimeoutError:
                self._launcher.signal(key, SIGKILL)
            async with asyncio.timeout(KILLED_WITHIN_S):
                return await end, f"it was ended after {limit_s:g} s"
        except asyncio.CancelledError:
            self._launcher.signal(key, SIGKILL)
            raise
        finally:
            del self._ends[key]

    def event_received(self, event: Event) -> None:
        key = getattr(event, "key", "")
        end = self._ends.get(key)
        if isinstance(event, TaskEnded | TaskLost) and end is None:
            self._launcher.forget(key)
            self._spool.drop(key)
        elif isinstance(event, TaskEnded) and end is not None and not end.done():
            end.set_result(event.exit)
        elif isinstance(event, TaskLost) and end is not None and not end.done():
            end.set_exception(PeerloadError("the builder was lost", why=event.reason))

    def listed(self, running: AbstractSet[str], ended: Mapping[str, Exit]) -> None:
        """End the builders of an earlier agent."""
        for key in self._ends.keys() - running:
            self.event_received(TaskEnded(key, ended[key]) if key in ended else TaskLost(key, "the launcher was lost"))
        orphans = (running | ended.keys()) - self._ends.keys()
        for path in self._root.glob("*/built") if self._is_system else ():
            builder = _read(path).builder
            if builder in ended:
                orphans.discard(builder)
            else:  # the directory is removed with it
                path.unlink()
        for key in orphans:
            self._launcher.signal(key, SIGKILL)
            self._launcher.forget(key)
            self._spool.drop(key)

    # -- what is kept --------------------------------------------------------------------------------------------------

    def variables(self, key: str, own: Mapping[bytes, bytes]) -> dict[str, str]:
        """The variables of an attempt with an environment; {} without one. own: the task's own variables."""
        used = self._uses.get(key)
        if used is None:
            return {}
        built = _read(self._built(used))
        place = f"{built.place}/env"
        found = {built.variable: place}
        found |= {"PYTHONHOME": ""} if b"PYTHONHOME" in own else {}
        return found | {"PATH": f"{place}/bin:{os.fsdecode(own.get(b'PATH', DEFAULT_PATH))}"}

    def _built(self, key: str) -> Path:
        return self._root / key / "built"

    def _is_built(self, key: str) -> bool:
        return self._built(key).exists()

    def _use(self, attempt: str, key: str) -> None:
        self._uses[attempt] = key
        (self._noted / attempt).write_text(key, encoding="ascii")

    def forget(self, attempt: str) -> None:
        self.ended_early(attempt)
        self._unuse(attempt)

    def _unuse(self, attempt: str) -> None:
        if self._uses.pop(attempt, None) is not None:
            (self._noted / attempt).unlink(missing_ok=True)

    def keep_only(self, node: Node) -> None:
        """Forget attempts that this node no longer knows, and remove builds that an earlier agent has not finished."""
        self._loop = asyncio.get_running_loop()
        for attempt in [attempt for attempt in self._uses if not node.knows(attempt)]:
            self.forget(attempt)
        for path in self._root.iterdir():
            if path != self._noted and not (path / "built").exists():
                shutil.rmtree(path, ignore_errors=True)

    def usage(self, owner: str | None = None) -> list[dict[str, object]]:
        """The existing environments, most recently used first. owner: only those of this user."""
        found: list[dict[str, object]] = []
        for path in self._root.glob("*" if owner is None or not self._is_system else "*" + _mark_of(owner)):
            try:
                built = _read(path / "built")
                used_at, key = (path / "built").stat().st_mtime, path.name
            except FileNotFoundError:  # it has just been removed
                continue
            in_use = key in self._uses.values() or key in self._builds
            found.append(
                {
                    "id": key,
                    "name": built.lock,
                    "bytes": built.size_bytes,
                    "used_at": used_at,
                    "in_use": in_use,
                }
            )
        return sorted(found, key=lambda one: -float(str(one["used_at"])))

    def collect(self, owner: str | None = None, *, everything: bool = False) -> int:
        """Remove environments that no attempt uses, least recently used first, until they and the files that tasks need are
        within the limit of the cache (everything: all of them) → the number of removed bytes. For a thread."""
        kept = self.usage(owner)
        files = self._files.caches
        size = sum(int(str(one["bytes"])) for one in kept)
        if not everything and files.size_bytes + size > files.limit_bytes:
            files.make_room(size)  # fetching files again is cheaper than building an environment
        total = files.size_bytes + size
        removed = 0
        for one in reversed(kept):
            key = str(one["id"])
            with self._lock:
                goes = key not in self._uses.values() and (everything or total - removed > files.limit_bytes)
                builder = _read(self._built(key)).builder if goes else ""
                gone = self._root / key
                if goes:  # renamed first, so that the next task of this lock can build it again immediately
                    self._built(key).unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        gone = gone.rename(f"{gone}.{secrets.token_hex(4)}")
            if goes:
                removed += int(str(one["bytes"]))
                shutil.rmtree(gone, ignore_errors=True)
                if self._is_system and self._loop is not None:
                    self._loop.call_soon_threadsafe(self._launcher.forget, builder)
        return removed

    async def close(self) -> None:
        """Stop waiting, and end the builders."""
        work = [*self._staging.values(), *(build.work for build in self._builds.values())]
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)


def _modules() -> dict[str, str]:
    """The modules of this node that functions of `peerload.Executor` need → their paths."""
    places = [
        Path(str(found.origin)).parent for found in map(importlib.util.find_spec, ("peerload", "cloudpickle")) if found
    ]
    return {place.name: str(place) for place in places}
